"""Directories that are somebody's for as long as a process holds their lock, and anybody's to remove afterwards.

Invariant: the file LOCK_NAME has that name only once it is locked, and is the last of its directory to go. So a
directory whose lock is there and free was made by processes that are all dead. Every other one is left alone: without
a lock it is just being made, or was made by an earlier release. A lock says nothing about another machine that shares
the file system, so the file names the boot. Process ids are never asked: they count within a PID namespace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path

from smb.config.boot import boot_id

LOCK_NAME = "held"
_log = logging.getLogger("smb")


class HeldDirectory:
    """A directory that was just made, and is ours. `fd` may be passed on: it stays held until each holder has ended."""

    def __init__(self, path: Path) -> None:
        """Take its lock. On a file system without locks it gets none, and nobody but us will remove it."""
        self.path = path
        self.fd: int | None = None
        staged = path / f"{LOCK_NAME}.new"
        try:
            fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(fd, boot_id().encode())
                staged.rename(path / LOCK_NAME)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            _log.warning("%s can't be locked (%s): if this process is killed, remove it by hand", path, error.strerror)
        else:
            self.fd = fd

    def remove(self) -> None:
        """Remove the directory with all that is in it, as far as that can be done, and let its lock go."""
        _remove(self.path)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def sweep(root: Path, pattern: str) -> None:
    """Remove the directories of `root` with such names whose holders, of this user, are all dead."""
    for path in root.glob(pattern):
        with contextlib.suppress(OSError):  # no lock, held, another user's, or gone meanwhile
            _remove_if_left(path)


def is_held(path: Path) -> bool:
    """Whether it is a directory that a process of this machine holds, in whichever PID namespace."""
    try:
        fd = _open(path)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _open(path: Path) -> int:
    return os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _remove_if_left(path: Path) -> None:
    # In a directory for everybody's files one of our own cannot be changed for a link to another meanwhile.
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = boot_id()
        # Another sweep may have removed it since we opened it.
        if ours and os.read(fd, 64).decode(errors="replace") == ours and os.path.samestat(os.fstat(fd), _lock_of(path)):
            _remove(path)
    finally:
        os.close(fd)


def _lock_of(path: Path) -> os.stat_result:
    return (path / LOCK_NAME).lstat()


def _remove(path: Path) -> None:
    """Remove it, its lock last: a removal that is cut short is gone on with by a later sweep."""
    try:
        for inside in path.iterdir():
            if inside.name == LOCK_NAME:
                continue
            if inside.is_dir() and not inside.is_symlink():
                shutil.rmtree(inside, ignore_errors=True)
            else:
                inside.unlink(missing_ok=True)
        if [inside.name for inside in path.iterdir()] in ([LOCK_NAME], []):
            (path / LOCK_NAME).unlink(missing_ok=True)
            path.rmdir()
    except OSError as error:
        if error.errno != errno.ENOENT:
            _log.warning("%s can't be removed: %s", path, error)
