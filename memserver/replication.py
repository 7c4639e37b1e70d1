"""Segments with two copies (docs/decisions/0025): this server's roles, and connections to the backups of its primaries.

The engine forwards and waits; here roles are taken from the coordinator's answers, backups are connected to, and the
coordinator is told where that does not work. One thread, at work only while there are such segments.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from memserver.engine import Engine, ReplicaStatus
from smb.config.parse import parse_address
from smb.errors import Error, NotFoundError
from smb.rpc import control_pb2 as pb

PRIMARY, BACKUP = 1, 2
LOOK_S = 0.05
BROKEN_MS = 100  # a connection that is just being made is not broken yet
TELL_S = 0.3  # while something is broken the coordinator is told that often
DIAL_S = 0.5
SILENT_MS = 2000  # a backup's host that acknowledges nothing for so long is taken for unreachable
TOLD_MAX = 4096

_log = logging.getLogger("memserver")


class Replication:
    """`close` it. Methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Condition()
        self._parts: dict[int, pb.Replica] = {}
        self._broken: list[pb.BrokenPair] = []
        self._stopping = False
        self._serving_until_s = 0.0
        self.on_broken: Callable[[], None] = lambda: None  # the coordinator is to be told now
        self._thread: threading.Thread | None = None

    def begin(self, part: pb.Replica) -> None:
        """Take a segment that was just made for one with two copies."""
        self._engine.replicate(part.segment_id)
        self.take((part,))

    def take(self, parts: Iterable[pb.Replica]) -> None:
        """Take the coordinator's roles of our parts. Parts not in `parts` keep theirs."""
        for part in parts:
            with suppress(NotFoundError):  # not here, or not yet
                self._engine.set_replica(part.segment_id, part.epoch, part.role, paired=bool(part.peer))
                with self._lock:
                    before = self._parts.get(part.segment_id)
                    if before is None or before.epoch <= part.epoch:
                        if before is not None and before.epoch < part.epoch:
                            _log.info("segment %016x: role %d at epoch %d", part.segment_id, part.role, part.epoch)
                        self._parts[part.segment_id] = part
                    self._start()

    def has(self, segment_id: int) -> bool:
        """Whether it is one of them."""
        with self._lock:
            return segment_id in self._parts

    def forget(self, segment_id: int) -> None:
        """It was dropped."""
        with self._lock:
            self._parts.pop(segment_id, None)

    def serve_until(self, boot_s: float) -> None:
        """See Engine."""
        self._serving_until_s = boot_s
        self._engine.serve_until(boot_s)

    def broken(self) -> list[pb.BrokenPair]:
        """Return what does not work now, for the coordinator."""
        with self._lock:
            return self._broken[:TOLD_MAX]

    def close(self) -> None:
        """Stop looking after them."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        """With the lock."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name="replication", daemon=True)
            self._thread.start()
        self._lock.notify_all()

    def _run(self) -> None:
        told_at = 0.0
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._stopping or self._parts)
                if self._stopping:
                    return
                parts = dict(self._parts)
            broken = self._look(parts)
            with self._lock:
                self._broken = broken
            if broken and time.monotonic() - told_at >= TELL_S:
                told_at = time.monotonic()
                self.on_broken()
            with self._lock:
                self._lock.wait_for(lambda: self._stopping, LOOK_S)

    def _look(self, parts: dict[int, pb.Replica]) -> list[pb.BrokenPair]:
        broken = []
        unreachable: set[str] = set()  # in this round: one try for each server
        lease_out = time.clock_gettime(time.CLOCK_BOOTTIME) >= self._serving_until_s
        for status in self._engine.replicas():
            part = parts.get(status.segment_id)
            if part is None or part.epoch != status.epoch or not part.peer:
                continue
            if status.role == PRIMARY and not status.dialled and part.data_address not in unreachable:
                self._dial(part, status, unreachable)
            if status.broken_ms >= BROKEN_MS:
                broken.append(pb.BrokenPair(segment_id=part.segment_id, epoch=part.epoch, for_ms=status.broken_ms))
                if status.role == PRIMARY and lease_out:
                    # Neither the backup nor the coordinator says that it is ours: clients may know better.
                    self._engine.suspend(status.segment_id)
        return broken

    def _dial(self, part: pb.Replica, status: ReplicaStatus, unreachable: set[str]) -> None:
        try:
            connection = socket.create_connection(parse_address(part.data_address), DIAL_S)
        except (OSError, Error) as error:
            unreachable.add(part.data_address)
            _log.debug("the backup on %s can't be reached: %s", part.peer, error)
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
        connection.setblocking(False)
        try:
            self._engine.feed(status.segment_id, status.epoch, connection.detach(), part.instance_id)
        except Error as error:
            _log.debug("%s", error)
