"""The segments in quarantine: this server keeps them although no record of the coordinator accounts for them."""

from __future__ import annotations

import logging
import threading

from memserver.engine import Engine
from memserver.memory_dir import MemoryDirectory

_log = logging.getLogger("memserver")


class Quarantine:
    """Uses the lock of the segments. The marks lie beside the segments' files, and so last over restarts."""

    def __init__(self, engine: Engine, memory_dir: MemoryDirectory, lock: threading.Condition) -> None:
        self._engine = engine
        self._memory_dir = memory_dir
        self._lock = lock
        self._ids = memory_dir.quarantined()

    def __contains__(self, segment_id: int) -> bool:
        return segment_id in self._ids

    def begin(self, segment_id: int) -> None:
        """Keep a segment that is here until it is taken up, or dropped for a reason."""
        with self._lock:
            if segment_id not in self._ids:
                self._memory_dir.quarantine(segment_id)
                self._ids.add(segment_id)
                _log.warning("segment %016x is quarantined: the coordinator's records do not have it", segment_id)

    def take_up(self, segment_id: int) -> None:
        """End a segment's quarantine, because a buffer has it or it is gone."""
        with self._lock:
            if segment_id in self._ids:
                self._memory_dir.quarantine(segment_id, ends=True)
                self._ids.discard(segment_id)

    def role_taken(self, segment_id: int, epoch: int) -> None:
        """End the quarantine of a segment that the records place here in that epoch, unless its file has a later
        one."""
        if segment_id in self._ids:
            held = self._engine.holds(segment_id)
            if held is not None and held.epoch == epoch:
                self.take_up(segment_id)
