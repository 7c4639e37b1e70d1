"""Copies segments to new backups (docs/decisions/0025), one part of one segment at a time, at a bounded rate.

The engine sends; this module decides when. It has one thread, which runs only while there is something to copy. A copy
that is whole or was given up stays in `progress` until the coordinator has given the segment other roles.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memserver.engine import Engine
from memserver.engine_copies import CopyStep
from memserver.threads import Begin, begin
from smb.errors import Error
from smb.rpc import control_pb2 as pb

PART_BYTES = 1 << 20  # upper bound of a part; at a low rate it is smaller, but at least a chunk
PAUSE_S = 0.001  # after the engine was busy; it has waited itself, except for a record or a chunk's lock
SLACK_S = 0.05  # at most the bytes of this time are sent at once, also after a pause

_log = logging.getLogger("memserver")


@dataclass
class _CopyUnderWay:
    epoch: int
    begun: float
    copied: int = 0
    total: int = 0
    state: CopyStep = CopyStep.MORE


class Copier:
    """Makes the copies. Call `close` at the end. Methods may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        rate: int,
        on_news: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        begin: Begin = begin,
    ) -> None:
        """`rate`: bytes per second; 0: unbounded. `on_news` is called when a copy is whole or was given up. `clock`
        returns seconds. `begin` starts the thread.
        """
        self._clock, self._begin = clock, begin
        self._turns: list[tuple[int, _CopyUnderWay]] = []  # the copies left in this round
        self._paid_until = 0.0  # the moment at which the rate has allowed all bytes sent so far
        self._engine = engine
        self._rate = rate
        self._part_bytes = max(min(PART_BYTES, int(rate * SLACK_S)), 1) if rate else PART_BYTES
        self._on_news = on_news
        self._lock = threading.Condition()
        self._copies: dict[int, _CopyUnderWay] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None

    def want(self, epochs: Mapping[int, int]) -> None:
        """Set all segments to copy, with the epoch of each."""
        with self._lock:
            for gone in self._copies.keys() - epochs.keys():
                del self._copies[gone]
            for segment_id, epoch in epochs.items():
                known = self._copies.get(segment_id)
                if known is None or known.epoch < epoch:
                    self._copies[segment_id] = _CopyUnderWay(epoch, self._clock())
            if self._copies and self._thread is None and not self._stopping:
                self._thread = self._begin(self._run, "copier")
            self._lock.notify_all()

    def forget(self, segment_id: int) -> None:
        with self._lock:
            self._copies.pop(segment_id, None)

    def give_up(self, segment_id: int, epoch: int) -> bool:
        """Give up the copy of that epoch, because its server cannot be reached. Returns False if this server cannot
        decide that: once a copy was reported as whole, only the coordinator can.
        """
        with self._lock:
            copy = self._copies.get(segment_id)
        if copy is None or copy.epoch != epoch:
            return False
        if not self._engine.copies.abandon_copy(segment_id, epoch):
            return copy.state is CopyStep.GONE
        _log.warning("segment %016x: its new copy is given up, because its server cannot be reached", segment_id)
        self._ended(copy, CopyStep.GONE)
        return True

    def progress(self) -> list[pb.CopyProgress]:
        """Return the progress of each copy."""
        now = self._clock()
        with self._lock:
            return [
                pb.CopyProgress(
                    segment_id=segment_id,
                    epoch=copy.epoch,
                    copied_bytes=copy.copied,
                    total_bytes=copy.total,
                    bytes_per_s=copy.copied / max(now - copy.begun, 1e-3),
                    whole=copy.state is CopyStep.WHOLE,
                    failed=copy.state is CopyStep.GONE,
                )
                for segment_id, copy in self._copies.items()
            ]

    def close(self) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _unfinished(self) -> list[tuple[int, _CopyUnderWay]]:
        """Return the copies in progress. The caller holds the lock."""
        return [item for item in self._copies.items() if item[1].state in (CopyStep.MORE, CopyStep.BUSY)]

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._stopping or self._unfinished())
                if self._stopping:
                    return
            pause_s = self.turn()
            if pause_s:
                self._sleep(pause_s)

    def turn(self) -> float | None:
        """Send a part of the next copy, and return for how many seconds to pause then; None: no copy is left. Called by
        one thread only.
        """
        if not self._turns:
            with self._lock:
                self._turns = self._unfinished()
        if not self._turns:
            return None
        segment_id, copy = self._turns.pop(0)
        sent = self._part(segment_id, copy)
        if sent and self._rate:
            self._paid_until = max(self._paid_until, self._clock() - SLACK_S) + sent / self._rate
            return max(self._paid_until - self._clock(), 0.0)
        return PAUSE_S if not sent and copy.state is CopyStep.BUSY else 0.0

    def _sleep(self, seconds: float) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._stopping, seconds)

    def _part(self, segment_id: int, copy: _CopyUnderWay) -> int:
        """Send a part, and return its bytes."""
        before = copy.copied
        try:
            state, copied, total = self._engine.copies.copy(segment_id, copy.epoch, self._part_bytes)
        except Error as error:
            _log.warning("segment %016x: its new copy is given up: %s", segment_id, error)
            state, copied, total = CopyStep.GONE, 0, 0
        if state is CopyStep.GONE:
            self._engine.copies.abandon_copy(segment_id, copy.epoch)  # the failure may have been in the engine
        if state in (CopyStep.WHOLE, CopyStep.GONE):
            self._ended(copy, state)
        else:
            copy.state = state
        if state is not CopyStep.GONE:
            copy.copied, copy.total = copied, total
        return max(copy.copied - before, 0)

    def _ended(self, copy: _CopyUnderWay, state: CopyStep) -> None:
        copy.state = state
        self._on_news()
