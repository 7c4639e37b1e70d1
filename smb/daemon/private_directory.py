"""Whose a memory directory is: a memory server uses one in which nobody but its own user can make, rename or remove.

In a directory that others may write to they could plant files in the place of memory, and take names. So such a
directory is refused, and so is another user's. The default is /dev/shm/smb-UID, which the server makes. Every directory
of that name is made if it is missing: then an operator whose directory is refused has one next to it.
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
    "remove it, or make a directory of this user's own that has a name which nobody can guess (mktemp -d -p {}), and "
    "name that by --memory-dir"
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
    """Whether the directory is called as this user's own is, so that the server makes it."""
    return path.name == Path(private_memory()).name


def take_memory_directory(path: Path) -> Path:
    """Return the memory directory without links on the way to it. Makes one of this user's name, with mode 0700.

    Raises InvalidArgumentError if it is not there, UnavailableError if it is not this user's alone; the sentence names
    a directory that is.
    """
    own = is_private_name(path)
    link: Path | None = None
    try:
        around, link = followed(path.parent)
        if own and link is None:
            with suppress(OSError):  # it is there already, or what is in the way is told of below
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
        if own and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:  # made under an umask that takes rights of ours
            Path(f"/proc/self/fd/{fd}").chmod(0o700)
    finally:
        os.close(fd)
    for each in whole.parents:
        if why := _may_be_replaced(each.stat()):
            _log.warning("others can put another directory in the place of %s, as %s %s", path, each, why)
            break
    return whole


def _may_be_replaced(found: os.stat_result) -> str:
    """Return why others may rename what this user has in a directory; "" if they may not."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if others_write(found) and not found.st_mode & stat.S_ISVTX:
        return f"can be written to by others and is not sticky ({stat.filemode(found.st_mode)})"
    return ""


def _no_directory(path: Path) -> str:
    said = f"--memory-dir {path} is no directory"
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
        f"--memory-dir {path} {what} a link that user {link.lstat().st_uid} made. It is not used, as he may change it"
    )
    if is_it and is_private_name(path):
        return f"{said}: {_ANOTHER.format(path.parent)}"
    return f"{said}: use --memory-dir {private_memory()}, which the server makes with mode 0700"


def _refusal(path: Path, fault: str, found: os.stat_result) -> str:
    said = f"--memory-dir {path} {fault}. It is not used, as others could put files there in the place of memory"
    close = ""
    if found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX:
        close = f"if it is for this server alone, take that right from the others (chmod go-w {path}); else "
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
