"""Whether there is memory for a segment: in the server's capacity, the process's memory limit and the file system."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from memserver.engine import Engine
from memserver.memory_dir import MemoryDirectory
from smb.config.parse import format_bytes
from smb.daemon.host_memory import HEADROOM_BYTES, MemoryLimit
from smb.errors import OutOfMemoryError


class SegmentRoom:
    """Counts the segments that are being made. `limit` None: there is none, or the directory's pages do not count
    against it.
    """

    def __init__(
        self, engine: Engine, memory_dir: MemoryDirectory, capacity_bytes: int, limit: MemoryLimit | None
    ) -> None:
        self._engine = engine
        self._memory_dir = memory_dir
        self._capacity_bytes = capacity_bytes
        self._limit = limit
        self._lock = threading.Lock()
        self._making_bytes = 0

    @contextmanager
    def making(self, file_bytes: int) -> Iterator[None]:
        """Check the limit, and count the segment while the block makes it. Raises OutOfMemoryError, which says how much
        room there is, also where the engine found none.
        """
        with self._lock:
            self._making_bytes += file_bytes
        try:
            self._check_limit(file_bytes)
            try:
                yield
            except OutOfMemoryError:
                raise OutOfMemoryError(self._no_room(file_bytes)) from None
        finally:
            with self._lock:
                self._making_bytes -= file_bytes

    def _check_limit(self, file_bytes: int) -> None:
        """Raise OutOfMemoryError before the kernel would kill this process for exceeding its memory limit."""
        room = self._limit.room_bytes() if self._limit is not None else None
        if room is None or self._limit is None:
            return
        # A segment that is being made counts as a whole, though part of it may be in `room` already: this is the safe
        # side.
        left = room - HEADROOM_BYTES - (self._making_bytes - file_bytes)
        if file_bytes > left:
            asked, free, whole = map(format_bytes, (file_bytes, max(left, 0), self._limit.nbytes or 0))
            raise OutOfMemoryError(
                f"{asked} were asked for, and {free} are left below the memory limit of its process, {whole}"
            )

    def _no_room(self, file_bytes: int) -> str:
        free_bytes = self._capacity_bytes - self._engine.used_bytes()
        asked, free, whole = map(format_bytes, (file_bytes, max(free_bytes, 0), self._capacity_bytes))
        if file_bytes > free_bytes:
            return f"{asked} were asked for, and {free} of {whole} are free"
        return (
            f"{asked} were asked for, and {free} of {whole} are free, but the file system of "
            f"{self._memory_dir.directory} is full"
        )
