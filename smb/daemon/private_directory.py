"""Checks a memory directory: only the memory server's own user may make, rename or remove files in it.

In a directory that others may write to, they could plant files in the place of memory, and take names. So such a
directory is refused, and so is another user's. The default is /dev/shm/smb-UID, which the server makes. A missing
directory of that name is made in any place, so that an operator whose directory is refused gets one next to it.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from smb.config.settings import private_memory
from smb.config.untrusted import followed, others_write
from smb.errors import InvalidArgumentError, UnavailableError

_ANOTHER = (
    "remove it, or make a directory of this user's own with a name that nobody can guess (mktemp -d -p {}), and "
    "give that as --memory-dir"
)
_log = logging.getLogger("smb")


def directory_fault(found: os.stat_result) -> str:
    """Return why a directory is not used, in words that follow its name; "" if it is this user's alone."""
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and this server runs as user {os.geteuid()}"
    if others_write(found):
        return f"can be written to by others than its owner ({stat.filemode(found.st_mode)})"
    return ""


def is_private_name(path: Path) -> bool:
    """Whether the directory has the name of this user's own directory, so that the server makes it."""
    return path.name == Path(private_memory()).name


def take_memory_directory(path: Path) -> Path:
    """Return the memory directory, with all links resolved. Makes it, with mode 0700, if it has this user's name.

    Raises InvalidArgumentError if it does not exist, UnavailableError if it is not this user's alone. The message names
    a directory that can be used.
    """
    own = is_private_name(path)
    link: Path | None = None
    try:
        around, link = followed(path.parent)
        if own and link is None:
            with suppress(OSError):  # it exists already, or the obstacle is reported below
                (around / path.name).mkdir(mode=0o700)
        whole, link = followed(path)
        fd = os.open(whole, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        if link is not None:
            raise UnavailableError(_refusal_of_link(path, link)) from None
        raise InvalidArgumentError(_no_directory(path)) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISDIR(found.st_mode):
            raise InvalidArgumentError(_no_directory(path))
        if link is not None:
            raise UnavailableError(_refusal_of_link(path, link))
        if fault := directory_fault(found):
            raise UnavailableError(_refusal(path, fault, found))
        if own and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:  # made under an umask that removes our own permissions
            Path(f"/proc/self/fd/{fd}").chmod(0o700)
    finally:
        os.close(fd)
    for each in whole.parents:
        if why := _may_be_replaced(each.stat()):
            _log.warning("others can put another directory in the place of %s, because %s %s", path, each, why)
            break
    return whole


def _may_be_replaced(found: os.stat_result) -> str:
    """Return why others may rename this user's files in a directory; "" if they may not."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if others_write(found) and not found.st_mode & stat.S_ISVTX:
        return f"can be written to by others and is not sticky ({stat.filemode(found.st_mode)})"
    return ""


def _no_directory(path: Path) -> str:
    said = f"--memory-dir {path} is not a directory"
    try:
        there = path.lstat()
    except OSError:
        return said
    said += f", but {stat.filemode(there.st_mode)} of user {there.st_uid}"
    return f"{said}: {_ANOTHER.format(path.parent)}" if is_private_name(path) else said


def _refusal_of_link(path: Path, link: Path) -> str:
    is_it = link.name == path.name and link.parent == Path(os.path.realpath(path.parent))
    what = "is" if is_it else f"leads through {link},"
    said = (
        f"--memory-dir {path} {what} a link that user {link.lstat().st_uid} made. It is not used, because that user "
        f"may change it"
    )
    if is_it and is_private_name(path):
        return f"{said}: {_ANOTHER.format(path.parent)}"
    return f"{said}: use --memory-dir {private_memory()}, which the server makes with mode 0700"


def _refusal(path: Path, fault: str, found: os.stat_result) -> str:
    said = f"--memory-dir {path} {fault}. It is not used, because others could put files there in the place of memory"
    close = ""
    if found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX:
        close = f"if it is for this server alone, take that permission from the others (chmod go-w {path}); else "
    if is_private_name(path):
        return f"{said}: {close}{_ANOTHER.format(path.parent)}"
    if found.st_uid not in (0, os.geteuid()) or not os.access(path, os.W_OK | os.X_OK):
        kept = f". Move there what its earlier runs left in {path} (smb.NAME.*)" if others_write(found) else ""
        return f"{said}: use --memory-dir {private_memory()}, which the server makes with mode 0700{kept}"
    private = private_memory(str(path).rstrip("/"))
    return (
        f"{said}: {close}use --memory-dir {private}, which the server makes with mode 0700. What its earlier runs "
        f"left in {path} is moved there"
    )
