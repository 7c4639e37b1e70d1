"""Checks whether a file or directory belongs to this user. Files that another user put under a name are not trusted.

Memory directories have stricter rules (private_directory.py). The rules here are for disks, where directories of a
Unix group and volumes of containers have to work.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from smb.config.untrusted import followed, is_open_volume, others_write
from smb.errors import UnavailableError

_log = logging.getLogger("smb")


def fault_of(
    found: os.stat_result,
    is_kind: Callable[[int], bool] = stat.S_ISREG,
    closed_to: int = stat.S_IWGRP | stat.S_IWOTH,
) -> str:
    """Return why what was found is not trusted, in words that follow its name; "" if it is this user's alone.

    It must have none of the permission bits in `closed_to`.
    """
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and this server runs as user {os.geteuid()}"
    if not is_kind(found.st_mode):
        return f"is of another kind ({stat.filemode(found.st_mode)}) than the file that a server has under that name"
    if found.st_nlink > 1:
        return f"has {found.st_nlink} names (hard links)"
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & closed_to:
        return f"may be changed by others than its owner ({stat.filemode(found.st_mode)})"
    return ""


def fault_at(path: Path, is_kind: Callable[[int], bool] = stat.S_ISREG) -> str:
    """As `fault_of`, for the file at that path itself, not for the target of a symbolic link; "" if there is none."""
    try:
        return fault_of(path.lstat(), is_kind)
    except FileNotFoundError:
        return ""


def take_directory(path: Path, option: str) -> None:
    """Make the directory with mode 0700, or check the existing one. `option` is the option that named it.

    Raises UnavailableError if it belongs to another user than this one or root, if everybody may write in it, or if
    another user's link leads to it; OSError if it cannot be made. A directory that a Unix group may write is only
    reported in the log, since umask 002 and the volumes of Kubernetes cause that. The same holds for a volume that root
    has mounted and everybody may write.
    """
    whole = path.absolute()
    there = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
    _refuse_links(path, there, option)
    _make(whole)
    found = whole.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise _refusal(path, option, f"belongs to user {found.st_uid}, and this is user {os.geteuid()}")
    mode = stat.filemode(found.st_mode)
    if found.st_mode & stat.S_IWOTH and not is_open_volume(whole, found):
        raise _refusal(path, option, f"can be written to by everybody ({mode})")
    if others_write(found):
        _log.warning("%s %s can be written to by others (%s), who can remove the files in it", option, path, mode)


def _refuse_links(path: Path, there: Path, option: str) -> None:
    try:
        link = followed(there)[1]
    except OSError:  # the link leads nowhere
        link = there if there.is_symlink() and there.lstat().st_uid not in (0, os.geteuid()) else None
    if link is not None:
        raise _refusal(path, option, f"is reached by {link}, a link that user {link.lstat().st_uid} made")


def _make(path: Path) -> None:
    for each in reversed([each for each in path.parents if not each.exists()]):
        each.mkdir(mode=0o755, exist_ok=True)  # whatever the umask is: others must not be able to replace our directory
    try:
        path.mkdir(mode=0o700)
    except OSError:
        if not path.is_dir():
            raise
        return
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid == os.geteuid():  # and no other user has put another one in its place
            Path(f"/proc/self/fd/{fd}").chmod(0o700)  # the umask may have removed our own permissions
    finally:
        os.close(fd)


def _refusal(path: Path, option: str, fault: str) -> UnavailableError:
    return UnavailableError(
        f"{option} {path} {fault}. It is not used, because others could replace its files: give a directory of this "
        f"user's own in which nobody else writes, or a new one below it, which is made so"
    )


def open_own(path: Path, flags: int) -> int:
    """Return the descriptor of a regular file of this user's own, made with mode 0600 if `flags` have O_CREAT.

    Follows no link and waits for no pipe. Raises UnavailableError with the reason if it is not trusted or cannot be
    opened.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fault = fault_at(path)
        raise UnavailableError(f"cannot open {path}: {error.strerror}" + (f"; it {fault}" if fault else "")) from None
    if fault := fault_of(os.fstat(fd), closed_to=0):
        os.close(fd)
        raise UnavailableError(f"{path} {fault}: it is not used; remove it")
    return fd


def keep_to_ourselves(path: Path) -> None:
    """Give a file of this user's own mode 0600; do nothing if it does not exist. A Unix group may have got permissions:
    Kubernetes gives them to all files of a volume at each start.

    Raises UnavailableError if it is not this user's own regular file, or if everybody may change it.
    """
    try:
        # Not opened for reading: closing such a descriptor would release all locks of this process on the file.
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if fault := fault_of(os.fstat(fd), closed_to=stat.S_IWOTH):
            raise UnavailableError(f"{path} {fault}: it is not used. Remove it, or have this user put a copy there")
        Path(f"/proc/self/fd/{fd}").chmod(0o600)
    finally:
        os.close(fd)
