"""Segments with two copies (docs/decisions/0025): this server's roles, and its primaries' connections to their backups.

The engine forwards and waits. This module takes roles from the coordinator's answers, connects to backups, and tells
the coordinator if that fails. It has one thread, which sleeps until the engine reports a change. While some connection
is broken, the thread looks every 50 ms, which is how often it tries to connect.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from memserver.copier import Copier
from memserver.engine import Engine
from memserver.engine_copies import ReplicaStatus
from memserver.threads import Begin, begin
from smb.config.parse import parse_address
from smb.engine import Status, Tls, status_name
from smb.errors import Error, InvalidArgumentError, NotFoundError
from smb.rpc import control_pb2 as pb
from smb.security.credentials import server_name

NONE, PRIMARY, BACKUP = 0, 1, 2
LOOK_S = 0.05  # between looks while a connection is broken
COPY_BROKEN_MS = 1000  # after this time a server goes on without a copy that is being made
BROKEN_MS = 100  # a connection that is just being made does not count as broken before this time
TELL_S = 0.3  # between reports to the coordinator while a connection is broken
DIAL_S = 0.5
SILENT_MS = 2000  # a backup's host that acknowledges nothing for this long counts as unreachable
REPORTED_MAX = 4096
COPIES_REPORTED_MAX = 256  # far more than the coordinator has one server make at a time

_NOT_TAKEN = frozenset(map(status_name, (Status.DENIED, Status.UNTRUSTED)))
# How a backup answers that is reached, and takes no changes of this segment.
_SEGMENT_REFUSED = frozenset(map(status_name, (Status.STALE_EPOCH, Status.NOT_FOUND, Status.INVALID)))

_log = logging.getLogger("memserver")


def boot_seconds() -> float:
    """Seconds on a clock that also runs while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def connect(address: str) -> int:
    """Return the descriptor of a socket that is connected to a backup. Raises OSError, smb.errors.Error."""
    connection = socket.create_connection(parse_address(address), DIAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
    connection.setblocking(False)
    return connection.detach()


@dataclass(frozen=True, slots=True)
class ServerOutside:
    """The clocks, threads and connections, which a simulator replaces."""

    now: Callable[[], float] = time.monotonic
    boot_s: Callable[[], float] = boot_seconds
    begin: Begin = begin
    connect: Callable[[str], int] = connect


@dataclass(frozen=True, slots=True)
class Taken:
    """The answers to the coordinator's questions: segments that cannot move, and segments whose copies can switch."""

    bound: list[int] = field(default_factory=list)
    switchable: list[int] = field(default_factory=list)


class Replication:
    """This server's roles and connections. Call `close` at the end. Methods may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        copy_rate: int = 0,
        shown: Callable[[], Tls | None] | None = None,
        on_role: Callable[[int, int], None] = lambda *_: None,
        outside: ServerOutside | None = None,
    ) -> None:
        """`copy_rate`: bytes per second for new copies; 0: unbounded. `shown`: returns the credentials that are shown
        to backups, inside TLS; None: there are none, or data goes without TLS. `on_role` is called when a segment gets
        a role in an epoch. `outside` None: this host's clocks and network.
        """
        self._outside = outside or ServerOutside()
        self._logged_at = -math.inf
        self._engine = engine
        self._shown = shown
        self._complained: dict[int, str] = {}  # by segment: what was last logged about its backup
        self._lock = threading.Lock()
        self._taking = threading.Lock()  # a copy begins once all members of its bundle have their roles
        self._parts: dict[int, pb.Replica] = {}
        self._broken: list[pb.BrokenPair] = []
        self._not_led: dict[int, int] = {}  # segments of which it cannot be the primary as told, up to these epochs
        self._known_since_s: dict[tuple[str, int], float] = {}  # runs of peers, with when a look first had them
        self._stopping = False
        self._serving_until_s = 0.0
        self._unrecorded: frozenset[int] = frozenset()  # segments with roles for which the lease does not count
        self.on_news: Callable[[], None] = lambda: None  # called when the coordinator must be told now
        self._on_role = on_role
        self.copier = Copier(engine, copy_rate, self._tell, self._outside.now, self._outside.begin)
        self._thread: threading.Thread | None = None

    def take(
        self,
        parts: Iterable[pb.Replica],
        during: AbstractContextManager[None] | None = None,
        *,
        from_other_records: bool = False,
    ) -> Taken:
        """Take over these roles from the coordinator; other segments keep theirs. Returns the answers to its questions.
        Raises NotFoundError or UnavailableError if it asks to confirm a role that this server does not have. `during`:
        entered before the first and left after the last one. `from_other_records`: than the roles before may come
        from. A role that was taken once may then be told again after a later one.
        """
        with self._taking, during or nullcontext():
            return self._take(parts, from_other_records)

    def _take(self, parts: Iterable[pb.Replica], from_other_records: bool) -> Taken:
        taken = Taken()
        led: dict[int, int] = {}  # epochs of roles as primary that may not have been taken, by segment
        try:
            for part in parts:
                self._take_one(part, taken, led, from_other_records)
        finally:
            if led := {number: epoch for number, epoch in led.items() if not self._leads(number, epoch)}:
                self._note_not_led(led)
        with self._lock:
            if self._parts:
                self._start()
            copying = [part for part in self._parts.values() if part.copying and part.role == PRIMARY]
            self.copier.want({part.segment_id: part.epoch for part in copying})
        return taken

    def _take_one(self, part: pb.Replica, taken: Taken, led: dict[int, int], from_other_records: bool) -> None:
        if part.let_move:
            if not self._engine.copies.let_move(part.segment_id):
                taken.bound.append(part.segment_id)
            return
        if part.confirm:
            if self._confirm(part) and part.switches:
                taken.switchable.append(part.segment_id)
            return
        try:
            self._engine.copies.set_replica(part.segment_id, part.epoch, part.role, part.peer, copying=part.copying)
        except NotFoundError:  # the segment is not here, or not yet
            return
        except InvalidArgumentError as error:
            _log.error("segment %016x, epoch %d: %s", part.segment_id, part.epoch, error)
            if part.role == PRIMARY:
                led[part.segment_id] = part.epoch
            return
        if part.role == NONE:
            _log.warning("segment %016x: another server is its primary now", part.segment_id)
            with self._lock:
                self._parts.pop(part.segment_id, None)
                self._not_led.pop(part.segment_id, None)
            return
        self._on_role(part.segment_id, part.epoch)
        with self._lock:
            before = self._parts.get(part.segment_id)
            if before is not None and before.epoch > part.epoch:
                return
            if before is not None and before.epoch < part.epoch:
                _log.info("segment %016x: role %d at epoch %d", part.segment_id, part.role, part.epoch)
            self._parts[part.segment_id] = part
            again = before is not None and (before.epoch, before.role) == (part.epoch, part.role)
            was_led = not self._not_led.pop(part.segment_id, 0)
            # A renewal tells all roles again: those that were taken are not looked at then.
            if part.role == PRIMARY and not (again and was_led and not from_other_records):
                led[part.segment_id] = part.epoch

    def note_records(self, parts: Iterable[pb.Replica]) -> None:
        """Take note of the roles that come with a lease: of all that this server has in the records. The lease is not
        for a primary whose bundle has another role there, or none: another server may have taken over, and the buffer
        been deleted since. Only its backup can confirm such a role. One that came while the answer was on its way is
        among these until the next answer.
        """
        roles = {(part.segment_id, part.epoch) for part in parts if part.role == PRIMARY}
        with self._taking:
            with self._lock:
                led = {(number, part.epoch) for number, part in self._parts.items() if part.role == PRIMARY}
            beside = {number for number, _ in led - roles}
            if not beside and not self._unrecorded:
                return
            statuses = [status for status in self._engine.copies.replicas() if status.role == PRIMARY]
            known = {status.bundle_id for status in statuses if (status.segment_id, status.epoch) in roles}
            unrecorded = frozenset(
                status.segment_id
                for status in statuses
                if status.segment_id in beside and status.bundle_id not in known
            )
            for number in self._unrecorded - unrecorded:
                self._engine.copies.note_unrecorded(number, False)
            for number in unrecorded:
                self._engine.copies.note_unrecorded(number, True)
            self._unrecorded = unrecorded

    def _leads(self, segment_id: int, epoch: int) -> bool:
        held = self._engine.holds(segment_id)
        return held is None or (held.epoch, held.role) == (epoch, PRIMARY)

    def _note_not_led(self, led: dict[int, int]) -> None:
        """Note of which of these segments, with the epochs of their roles, this server did not become the primary.
        Others of their bundles have a later role here, by records that were replaced since and had other segments. Or
        the role has ended here, as restored records wanted, and the backup that it has again may lack changes.
        """
        with self._lock:
            for status in self._engine.copies.replicas():
                led_epoch = led.get(status.segment_id)
                if led_epoch is None:
                    continue
                newest = max(status.epoch, led_epoch) if status.role == NONE else status.epoch
                last = newest + (status.role != PRIMARY)  # so that it is later than the one that was told
                if newest >= led_epoch and last > led_epoch:
                    self._not_led[status.segment_id] = last

    def _confirm(self, part: pb.Replica) -> bool:
        """Check the role, and return whether the two copies can switch their roles, as far as this server knows."""
        if part.switches and part.role == PRIMARY:
            return self._engine.copies.hand_over(part.segment_id, part.epoch)
        if part.yields:
            self._engine.copies.yield_role(part.segment_id, part.epoch)
        elif not any(
            (status.segment_id, status.epoch, status.role) == (part.segment_id, part.epoch, part.role)
            for status in self._engine.copies.replicas()
        ):
            raise NotFoundError(f"segment {part.segment_id:016x} has no role {part.role} here in epoch {part.epoch}")
        return True

    def has(self, segment_id: int) -> bool:
        with self._lock:
            return segment_id in self._parts

    def forget(self, segment_id: int) -> None:
        with self._lock:
            self._parts.pop(segment_id, None)
            self._complained.pop(segment_id, None)
            self._not_led.pop(segment_id, None)
        self.copier.forget(segment_id)

    def serve_until(self, boot_s: float) -> None:
        self._serving_until_s = boot_s
        self._engine.copies.serve_until(boot_s)

    def copies(self) -> list[pb.CopyProgress]:
        """Return the progress of this server's copies, for the coordinator."""
        return self.copier.progress()[:COPIES_REPORTED_MAX]

    def _tell(self) -> None:
        self.on_news()

    def broken(self) -> list[pb.BrokenPair]:
        """Return the connections that are broken now, and the roles that it cannot take, for the coordinator."""
        with self._lock:
            not_led = [pb.BrokenPair(segment_id=number, epoch=epoch) for number, epoch in self._not_led.items()]
            return (self._broken + not_led)[:REPORTED_MAX]

    def close(self) -> None:
        with self._lock:
            self._stopping = True
        self._engine.copies.wake_replicas()
        if self._thread is not None:
            self._thread.join()
        self.copier.close()

    def _start(self) -> None:
        """Start the thread if it does not run. The caller holds the lock."""
        if self._thread is None and not self._stopping:
            self._thread = self._outside.begin(self._run, "replication")
        self._engine.copies.wake_replicas()  # a peer may have a new address

    def _run(self) -> None:
        seen, works = 0, False
        while not self._stopping:
            seen = self._engine.copies.await_replicas(seen, None if works else LOOK_S)
            works = self.look()

    def look(self) -> bool:
        """Look at all connections once, and return whether all work. Called by one thread only."""
        with self._lock:
            if self._stopping:
                return True
            parts = dict(self._parts)
        broken, works = self._look(parts)
        with self._lock:
            self._broken = broken
        if broken and self._outside.now() - self._logged_at >= TELL_S:
            self._logged_at = self._outside.now()
            self.on_news()
        return works

    def _look(self, parts: dict[int, pb.Replica]) -> tuple[list[pb.BrokenPair], bool]:
        """Return the connections that have been broken for a while, and whether all work now."""
        broken, works = [], True
        unreachable: set[str] = set()  # in this round, so that each server is tried once
        dialled: set[int] = set()  # bundles, because all members share one connection
        lease_out = self._outside.boot_s() >= self._serving_until_s
        now = self._outside.now()
        self._known_since_s = {
            run: self._known_since_s.get(run, now) for run in ((part.peer, part.instance_id) for part in parts.values())
        }
        for status in self._engine.copies.replicas():
            part = parts.get(status.segment_id)
            if part is None or part.epoch != status.epoch or not part.peer:
                continue
            if status.role == PRIMARY and not status.paired:
                continue  # the copy was given up
            works = works and status.broken_ms == 0
            self._complain(part, status)
            dialled |= {status.bundle_id} if status.dialled else set()
            if status.role == PRIMARY and status.bundle_id not in dialled and part.data_address not in unreachable:
                dialled.add(status.bundle_id)
                self._dial(part, status, unreachable)
            lost = part.copying and status.broken_ms >= COPY_BROKEN_MS
            if lost and self.copier.give_up(part.segment_id, part.epoch):
                continue
            if status.broken_ms >= BROKEN_MS:
                # A peer that has restarted was not out of reach before this server was told of its new run.
                known_ms = int((now - self._known_since_s[part.peer, part.instance_id]) * 1000)
                broken.append(
                    pb.BrokenPair(
                        segment_id=part.segment_id,
                        epoch=part.epoch,
                        for_ms=min(status.broken_ms, known_ms),
                        instance_id=part.instance_id,
                        refused=status.refused in _SEGMENT_REFUSED and part.data_address not in unreachable,
                    )
                )
                if status.role == PRIMARY and lease_out:
                    # Neither the backup nor the coordinator confirms our role: clients may know the right server.
                    self._engine.copies.suspend(status.segment_id)
        return broken, works

    def _complain(self, part: pb.Replica, status: ReplicaStatus) -> None:
        """Log once that the backup refuses us, because that does not pass as a broken connection does."""
        why = status.refused if status.broken_ms and status.refused in _NOT_TAKEN else ""
        with self._lock:
            before = self._complained.get(part.segment_id, "")
            self._complained[part.segment_id] = why
        if why and why != before:
            _log.warning(
                "segment %016x: memory server %s at %s refuses changes of it from this server: %s",
                part.segment_id,
                part.peer,
                part.data_address,
                self._engine.copies.feed_fault(part.segment_id) or why,
            )

    def _dial(self, part: pb.Replica, status: ReplicaStatus, unreachable: set[str]) -> None:
        try:
            tls = self._shown() if self._shown is not None else None
            connection = self._outside.connect(part.data_address)
        except (OSError, Error) as error:
            unreachable.add(part.data_address)
            _log.debug("the backup on %s can't be reached: %s", part.peer, error)
            return
        try:
            self._engine.copies.feed(
                status.segment_id, status.epoch, connection, part.instance_id, tls, server_name(part.peer)
            )
        except Error as error:
            _log.debug("%s", error)
