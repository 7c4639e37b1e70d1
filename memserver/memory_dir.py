"""The directory in which a daemon keeps its files: their names, the lock on a name, and checks of the file system.

Other users may not write in that directory (smb/daemon/private_directory.py). Still, no file is trusted for its name
alone: a file that this process's user did not make, or that others may change, is removed if it cannot contain
anything of value, and otherwise refused. The engine, which maps the memory, checks segment files itself
(csrc/memory/owned.h).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
from pathlib import Path

from smb.config.parse import format_bytes
from smb.config.settings import private_memory
from smb.config.untrusted import others_write
from smb.daemon.host_memory import MEMORY_FILE_SYSTEMS, file_system_of
from smb.daemon.own_files import fault_at, fault_of
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, UnavailableError

SOCKET_PATH_BYTES_MAX = 107  # sun_path of Linux has 108 bytes, and the last one is 0
_log = logging.getLogger("memserver")


class MemoryDirectory:
    """The files of one server name in one directory, owned while we hold the lock file. Call `close` at the end."""

    def __init__(self, directory: Path, name: str, *, serves: bool = True) -> None:
        """Take the name. Raises AlreadyExistsError if another daemon has it, and UnavailableError if the directory is
        not writable or has another user's file under one of our names. `serves` False: no files are made there, so such
        files are ignored, and a lock of another user is not taken for a server of this user.
        """
        self.directory = directory
        self.name = name
        self._serves = serves
        self.socket_path = directory / f"smb.{name}.sock"
        self._socket_beside = directory / f"smb.{name}.soc~"  # until it listens (csrc/server/listener.c)
        if serves and len(os.fsencode(self.socket_path)) > SOCKET_PATH_BYTES_MAX:
            raise InvalidArgumentError(
                f"the Unix socket's path {self.socket_path} is longer than the system's {SOCKET_PATH_BYTES_MAX} bytes; "
                f"use a shorter --memory-dir or --name"
            )
        self.journal_path = directory / f"smb.{name}.journal"
        self.stamps_path = directory / f"smb.{name}.stamps"
        self._segment = re.compile(rf"smb\.{re.escape(name)}\.([0-9a-f]{{16}})\.segment(\.new)?")
        self._lock_path = directory / f"smb.{name}.lock"
        self._lock_fd = self._lock()
        try:
            if serves:
                self._clear()
        except Error:
            self._lock_path.unlink(missing_ok=True)
            self._unlock()
            raise

    def refusal(self, path: Path, fault: str) -> str:
        """Return the message about a file that is not trusted."""
        said = (
            f"{path} {fault or 'was replaced meanwhile'}: it is not used. If it is yours, have this user put a copy "
            f"in its place (with cp: a process that has the file itself open could go on changing it); else remove it"
        )
        if not others_write(self.directory.stat()):
            return said
        own = private_memory(str(self.directory))
        return f"{said}, or use a directory in which no other user writes: mkdir -m 700 {own}, and --memory-dir {own}"

    def make_way(self, path: Path, *, must: bool) -> bool:
        """Remove the file at that path, whoever owns it. Returns whether it is gone.

        Raises UnavailableError if it is not and it `must` be.
        """
        fault = fault_at(path)
        try:
            path.unlink()
        except FileNotFoundError:
            return True
        except OSError as error:
            said = f"this server cannot remove {path}: {error.strerror}"
            if fault:
                said = f"{self.refusal(path, fault)}; {said}"
            if must:
                raise UnavailableError(said) from None
            _log.error("%s", said)
            return False
        return True

    def _clear(self) -> None:
        """Remove files under names that a server makes anew. Files that it reads must belong to its own user."""
        for path, is_kind in ((self.journal_path, stat.S_ISREG), (self.stamps_path, stat.S_ISLNK)):
            if fault := fault_at(path, is_kind):
                raise UnavailableError(self.refusal(path, fault))
        for path in (self._socket_beside, self.stamps_path.with_suffix(".stamps_new"), self._new(self.journal_path)):
            self.make_way(path, must=True)
        # The socket of an earlier run stays until the new one takes its place. Clients without another path wait while
        # a socket is there; without a socket they are told that the server is not on this host.
        if fault_at(self.socket_path, stat.S_ISSOCK):
            self.make_way(self.socket_path, must=True)

    @staticmethod
    def _new(path: Path) -> Path:
        return path.with_name(path.name + ".new")

    def segment_path(self, segment_id: int) -> Path:
        """Return the path of the segment's file."""
        return self.directory / f"smb.{self.name}.{segment_id:016x}.segment"

    def segment_files(self) -> tuple[list[Path], list[Path]]:
        """Return the segments' files of this name: the complete ones, and those that an earlier run did not finish."""
        complete: list[Path] = []
        unfinished: list[Path] = []
        for path in sorted(self.directory.iterdir()):
            match = self._segment.fullmatch(path.name)
            if match:
                (unfinished if match[2] else complete).append(path)
        return complete, unfinished

    def quarantined(self) -> set[int]:
        """Return the quarantined segments. Marks without a segment are removed: their daemon was killed in between."""
        mark = re.compile(rf"smb\.{re.escape(self.name)}\.([0-9a-f]{{16}})\.quarantined")
        marks = {path: int(match[1], 16) for path in self.directory.iterdir() if (match := mark.fullmatch(path.name))}
        for path in list(marks):
            if fault := fault_at(path):
                _log.error("%s", self.refusal(path, fault))
                del marks[path]
        found = set(marks.values())
        orphans = {each for each in found if not self.segment_path(each).exists()}
        for each in orphans:
            self.quarantine(each, ends=True)
        return found - orphans

    def quarantine(self, segment_id: int, *, ends: bool = False) -> None:
        """Mark a segment as quarantined, or take the mark away."""
        mark = self.directory / f"smb.{self.name}.{segment_id:016x}.quarantined"
        # A mark that cannot be removed is another user's, and is not trusted after a restart either.
        if self.make_way(mark, must=False) and not ends:
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def check_capacity(self, capacity_bytes: int) -> None:
        """Raise InvalidArgumentError if the file system is smaller than the capacity; warn if it is not in memory."""
        kind = file_system_of(self.directory)
        if kind not in MEMORY_FILE_SYSTEMS:
            _log.warning("%s is on %s, not in memory (tmpfs or hugetlbfs): segments will be slow", self.directory, kind)
        space = os.statvfs(self.directory)
        total_bytes = space.f_blocks * space.f_frsize
        # ramfs reports no size.
        if total_bytes and capacity_bytes > total_bytes:
            raise InvalidArgumentError(
                f"--capacity {format_bytes(capacity_bytes)} is more than {self.directory} has in all "
                f"({format_bytes(total_bytes)}); offer less, or make that file system larger"
            )

    def counts_as_memory(self) -> bool:
        """Whether the segments' pages count against a memory limit: pages of tmpfs do, huge pages and disks do not."""
        return file_system_of(self.directory) in ("tmpfs", "ramfs")

    def close(self) -> None:
        """Release the name, and remove the journal if no segment is left."""
        try:
            if self._serves and not any(self.segment_files()):
                for path in (self.journal_path, self.stamps_path, self.socket_path):
                    path.unlink(missing_ok=True)
            if self._lock_fd is not None:  # otherwise the lock is another user's, who may hold it
                self._lock_path.unlink(missing_ok=True)
        except FileNotFoundError:
            _log.warning("%s was removed meanwhile, with all files in it", self.directory)
        except PermissionError as error:
            _log.warning("%s belongs to another user by now, and is not removed", error.filename)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    def _lock(self) -> int | None:
        while True:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                fd = os.open(self._lock_path, flags, 0o600)
            except OSError as error:
                if self._is_foreign_lock():
                    if self.make_way(self._lock_path, must=self._serves):
                        continue
                    return None
                raise UnavailableError(f"cannot write into --memory-dir {self.directory}: {error.strerror}") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                found = os.fstat(fd)
                if found.st_uid != os.geteuid() and not self._serves:  # not the lock of a server of this user
                    os.close(fd)
                    return None
                fault = fault_of(found)
                os.close(fd)
                raise AlreadyExistsError(
                    f'a memory server "{self.name}" runs already on {self.directory}; give this one another --name'
                    + (f". {self.refusal(self._lock_path, fault)}" if fault else "")
                ) from None
            if fault_of(os.fstat(fd)):  # and no process holds it
                if not self.make_way(self._lock_path, must=self._serves):
                    return fd
                os.close(fd)
                continue
            if self._is_current(fd):
                return fd
            os.close(fd)  # the file was unlinked between our open and our lock, so others would not see our lock

    def _is_foreign_lock(self) -> bool:
        with contextlib.suppress(OSError):  # the directory is gone, or not accessible to this user
            return bool(fault_at(self._lock_path))
        return False

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(self._lock_path.lstat(), os.fstat(fd))
        except FileNotFoundError:
            return False
