"""Where a daemon keeps its files: names, the lock on a name, and what the file system must be like."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from pathlib import Path

from smb.config.parse import format_bytes
from smb.daemon.host_memory import MEMORY_FILE_SYSTEMS, file_system_of
from smb.errors import AlreadyExistsError, InvalidArgumentError, UnavailableError

SOCKET_PATH_BYTES_MAX = 107  # sun_path of Linux has 108 bytes, the last of them 0
_log = logging.getLogger("memserver")


class Place:
    """The files of one server name in one directory, ours as long as we hold the lock file. `close` it."""

    def __init__(self, directory: Path, name: str) -> None:
        """Take the name. Raises AlreadyExistsError if another daemon has it, UnavailableError if nothing can be
        written.
        """
        self.directory = directory
        self.name = name
        self.socket_path = directory / f"smb.{name}.sock"
        if len(os.fsencode(self.socket_path)) > SOCKET_PATH_BYTES_MAX:
            raise InvalidArgumentError(
                f"the Unix socket's path {self.socket_path} is longer than the system's {SOCKET_PATH_BYTES_MAX} bytes; "
                f"use a shorter --memory-dir or --name"
            )
        self.journal_path = directory / f"smb.{name}.journal"
        self.stamps_path = directory / f"smb.{name}.stamps"
        self._segment = re.compile(rf"smb\.{re.escape(name)}\.([0-9a-f]{{16}})\.segment(\.new)?")
        self._lock_path = directory / f"smb.{name}.lock"
        self._lock_fd = self._lock()

    def segment_path(self, segment_id: int) -> Path:
        """Return where the segment's file lies."""
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
        """Return the segments that are marked as quarantined. A mark without a segment goes: its daemon was killed."""
        mark = re.compile(rf"smb\.{re.escape(self.name)}\.([0-9a-f]{{16}})\.quarantined")
        found = {int(match[1], 16) for path in self.directory.iterdir() if (match := mark.fullmatch(path.name))}
        orphans = {each for each in found if not self.segment_path(each).exists()}
        for each in orphans:
            self.quarantine(each, ends=True)
        return found - orphans

    def quarantine(self, segment_id: int, *, ends: bool = False) -> None:
        """Mark a segment as quarantined, or take the mark away."""
        mark = self.directory / f"smb.{self.name}.{segment_id:016x}.quarantined"
        if ends:
            mark.unlink(missing_ok=True)
        else:
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))

    def check_capacity(self, capacity_bytes: int) -> None:
        """Raise InvalidArgumentError if the file system can never hold the capacity; warn where it is no memory."""
        kind = file_system_of(self.directory)
        if kind not in MEMORY_FILE_SYSTEMS:
            _log.warning("%s is on %s, not on memory (tmpfs or hugetlbfs): segments will be slow", self.directory, kind)
        space = os.statvfs(self.directory)
        total_bytes = space.f_blocks * space.f_frsize
        # ramfs has no size.
        if total_bytes and capacity_bytes > total_bytes:
            raise InvalidArgumentError(
                f"--capacity {format_bytes(capacity_bytes)} is more than {self.directory} has in all "
                f"({format_bytes(total_bytes)}); offer less, or make that file system larger"
            )

    def counts_as_memory(self) -> bool:
        """Whether the segments' pages count against a memory limit: those of tmpfs do, large pages and disks do not."""
        return file_system_of(self.directory) in ("tmpfs", "ramfs")

    def close(self) -> None:
        """Give the name back, and take the journal away if there is nothing left that it could be about."""
        try:
            if not any(self.segment_files()):
                self.journal_path.unlink(missing_ok=True)
                self.stamps_path.unlink(missing_ok=True)
            self._lock_path.unlink(missing_ok=True)
        except FileNotFoundError:
            _log.warning("%s was removed meanwhile, with all that was in it", self.directory)
        os.close(self._lock_fd)

    def _lock(self) -> int:
        while True:
            try:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise UnavailableError(f"cannot write into --memory-dir {self.directory}: {error.strerror}") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                raise AlreadyExistsError(
                    f'a memory server "{self.name}" runs already on {self.directory}; give this one another --name'
                ) from None
            if self._is_current(fd):
                return fd
            os.close(fd)  # its owner unlinked it between our open and our lock: others would not see ours

    def _is_current(self, fd: int) -> bool:
        try:
            return self._lock_path.stat().st_ino == os.fstat(fd).st_ino
        except FileNotFoundError:
            return False
