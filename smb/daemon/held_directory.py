"""Directories that belong to a process while it holds their lock, and that any process may remove afterwards.

Invariant: the file LOCK_NAME gets that name only after it is locked, and is removed last. So if a directory's lock
exists and is free, all processes that held the directory are dead. All other directories are left alone: without a
lock, a directory is just being made, or was made by an earlier release. A lock says nothing about another machine that
shares the file system, so the file contains the boot id. Process ids are never used, since they are valid only within
a PID namespace.
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
    """A new directory of ours. If `fd` is passed on, the directory stays held until all holders have ended."""

    def __init__(self, path: Path) -> None:
        """Take the directory's lock. On a file system without locks only this process will remove the directory."""
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
            _log.warning("%s cannot be locked (%s): if this process is killed, remove it by hand", path, error.strerror)
        else:
            self.fd = fd

    def remove(self) -> None:
        """Remove the directory with its contents, as far as possible, and release its lock."""
        _remove(self.path)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def sweep(root: Path, pattern: str) -> None:
    """Remove the directories in `root` with such names whose holders, of this user, are all dead."""
    for path in root.glob(pattern):
        with contextlib.suppress(OSError):  # without a lock, held, another user's, or gone meanwhile
            _remove_if_left(path)


def is_held(path: Path) -> bool:
    """Whether a process of this machine, in any PID namespace, holds the directory."""
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
    # In a directory for all users' files, no other user can replace our directory by a link meanwhile.
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
    """Remove the directory, its lock last, so that a later sweep continues an interrupted removal."""
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
            _log.warning("%s cannot be removed: %s; remove it by hand", path, error)
