"""Decides what this server asks of the coordinator, and what follows from its answers: to register, to renew, to
register again, at the next coordinator. It makes no calls itself: memserver/registration.py does, and a simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from memserver.engine import Engine, SegmentForm
from memserver.relays import Relays
from memserver.replication import Replication, boot_seconds
from memserver.segments import FOR_GOOD, Segments
from memserver.stamps import Stamps
from memserver.store_messages import inventory_message, stamp_message, stamp_of
from memserver.usage_by_client import Names
from smb.config.backoff import Backoff, own_random
from smb.config.limits import RENEWALS_PER_LEASE
from smb.config.parse import parse_addresses
from smb.daemon.failpoint import failpoint
from smb.drop_reasons import Ground
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, PermissionDeniedError
from smb.rpc import control_pb2 as pb
from smb.rpc.coordinator_client import STANDBY, trailers_of
from smb.rpc.peers import patience

ANSWER_S = 3.0
RETRY_FIRST_S = 0.1  # a restarted coordinator should see its servers at once
RETRY_MAX_S = 1.0
PATIENCE_S = 2.0  # until one that stands by leads: the rest of a lease that was asked for then is long enough
LEASE_USED = 0.95  # of a lease, counted from before it was asked for: clocks may differ by the rest

_ELSEWHERE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

_log = logging.getLogger("memserver")
_FATAL: dict[grpc.StatusCode, type[Error]] = {
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is to be made now, at the coordinator's address: the method, its request and gRPC's options."""

    method: str
    request: Message
    options: Mapping[str, Any]


# Yields calls, is sent each reply or thrown its error, and returns after how many seconds the next turn is due.
Turn = Generator[Call, Any, float]


@dataclass(frozen=True, slots=True)
class Identity:
    """The description that this run of the server registers. Addresses are host:port as clients can reach them."""

    name: str
    instance_id: int
    data_address: str
    control_address: str
    unix_path: str
    metrics_address: str
    capacity_bytes: int
    weight: float = 1.0
    data_tls: bool = False
    zone: str = ""


class MissingNames:
    """Names that the coordinator is asked for, and where they go. For metrics: nothing depends on them."""

    def __init__(self, engine: Engine, buffers: Names, clients: Names) -> None:
        self._engine = engine
        self._buffers = buffers
        self._clients = clients

    def ask(self, request: pb.RenewServerRequest) -> None:
        """Ask for those that are missing."""
        request.unnamed_segments.extend(self._buffers.unknown(self._engine.segment_shares()))
        request.unnamed_sessions.extend(self._clients.unknown(self._engine.session_shares()))

    def learn(self, reply: pb.RenewServerReply) -> None:
        """Take the coordinator's reply."""
        self._buffers.learn(reply.segment_names)
        self._clients.learn(reply.session_names)


class Registrant:
    """Keeps this server registered, one turn after the other. One thread at a time."""

    def __init__(
        self,
        coordinator: str,
        identity: Identity,
        segments: Segments,
        load: Callable[[], pb.ServerLoad],
        missing_names: MissingNames,
        on_outcome: Callable[[Error | None], None],
        on_keys: Callable[[pb.AccessKeys], None] | None = None,
        replication: Replication | None = None,
        relays: Relays | None = None,
        stamps: Stamps | None = None,
        boot_s: Callable[[], float] = boot_seconds,
        draw: Callable[[], float] = own_random.random,
    ) -> None:
        """`load` is asked at each renewal. `on_outcome` is called once: with None once registered, or with why that can
        never be; `on_keys`, with credentials, each time that the coordinator has answered. `boot_s`: the clock of the
        lease. `draw`: numbers from 0 to 1, which spread the pauses between tries.
        """
        self._addresses = parse_addresses(coordinator)
        self._at = 0  # which of them leads, as far as is known
        self._turns = 0  # that were taken in vain, since one answered
        self._leaders_term = ""  # as one that stands by has named it
        self._identity = identity
        self._segments = segments
        self._load = load
        self._missing_names = missing_names
        self.leases_lost = 0  # times that the coordinator did not know us any more
        self._on_outcome = on_outcome
        self._on_keys = on_keys
        self._sessions_seen = pb.SessionsSeen()
        self._decided = False
        self._registered = False
        self._list_was_old = False  # when the coordinator took it
        self._draw = draw
        self._backoff: Backoff | None = None  # since the last answer; None: no turn has failed since
        self.connected = False  # whether the coordinator answered the last time
        self.stops = False  # this server is about to leave, and waits for no leader
        self._complained: grpc.StatusCode | None = None  # one line for an outage of a kind, not one for every try
        self._replication = replication
        self._stamps = stamps
        self._relays = relays
        self._boot_s = boot_s

    @property
    def coordinator(self) -> str:
        """The address that calls go to now."""
        return self._addresses[self._at]

    def turn(self) -> Turn:
        """Register or renew. However that goes, another turn follows: without it the server is lost to everybody, and
        nobody would hear why.
        """
        try:
            lease_ms = yield from (self._renew() if self._registered and not self._list_was_old else self._register())
        except grpc.RpcError as error:
            if self._registered and error.code() == grpc.StatusCode.NOT_FOUND:
                self._registered = False
                self.leases_lost += 1
                return 0.0
            self._note_leader(error)
            if error.code() in _ELSEWHERE and self._ask_the_next():
                return 0.0
            self._failed(error)
        except Exception:  # noqa: BLE001
            _log.exception("registration: a fault of ours; it is tried again")
        else:
            self._registered, self._backoff = True, None
            self._succeeded()
            return lease_ms / 1000 / RENEWALS_PER_LEASE
        self._backoff = self._backoff or Backoff(RETRY_FIRST_S, RETRY_MAX_S, draw=self._draw)
        return self._backoff.next_s()

    def leaving(self) -> pb.LeaveServerRequest:
        """Return what is told to the coordinator at the end. From here on others may be given what is ours."""
        if self._replication is not None:
            self._replication.serve_until(0.0)
        return pb.LeaveServerRequest(name=self._identity.name, instance_id=self._identity.instance_id)

    def _ask_the_next(self) -> bool:
        """Go on to the next address; return whether there is one that was not asked since one answered."""
        if len(self._addresses) == 1:
            return False
        self._at = (self._at + 1) % len(self._addresses)
        self._turns += 1
        return self._turns % len(self._addresses) != 0

    def _note_leader(self, error: grpc.RpcError) -> None:
        """Of one that stands by; a leader that is slow is asked again, and nobody waits for another one."""
        trailers = trailers_of(error)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._leaders_term = ""
        elif STANDBY in trailers:
            self._leaders_term = trailers[STANDBY]

    def _patience(self) -> dict[str, Any]:
        """Return the options of a call: once all have been asked in vain, one that stands by may keep it."""
        term = self._leaders_term if self._turns >= len(self._addresses) and not self.stops else ""
        return {"timeout": ANSWER_S + (PATIENCE_S if term else 0.0), "metadata": patience(PATIENCE_S, term)}

    def _register(self) -> Generator[Call, Any, int]:
        me, held = self._identity, self._segments.held()
        ids, inventory = self._segments.ids(), self._segments.inventory()
        shown = [inventory_message(*inventory[each]) if each in inventory else pb.HeldSegment() for each in ids]
        request = pb.RegisterServerRequest(
            name=me.name,
            instance_id=me.instance_id,
            data_address=me.data_address,
            control_address=me.control_address,
            unix_path=me.unix_path,
            metrics_address=me.metrics_address,
            capacity_bytes=me.capacity_bytes,
            used_bytes=self._segments.used_bytes(),
            segment_ids=ids,
            segment_epochs=[each.epoch for each in shown],
            segment_flags=[each.flags for each in shown],
            stamps=[stamp_message(each) for each in self._stamps.reported()] if self._stamps is not None else (),
            sessions_seen=self._sessions_seen,
            weight=me.weight,
            data_tls=me.data_tls,
            zone=me.zone,
        )
        failpoint("memserver.register.sending")
        asked_s = self._boot_s()
        reply = yield Call("RegisterServer", request, self._patience())
        failpoint("memserver.register.answered")
        self._take_keys(reply)
        self._segments.quarantine(reply.quarantine_segment_ids)
        for segment_id in reply.taken_up_segment_ids:
            self._segments.take_up(segment_id)
            _log.info("segment %016x is not quarantined any more: a buffer has it", segment_id)
        self._drop(reply, held)
        # The coordinator lists a segment here that was dropped since the list was made: the next turn tells it again.
        self._list_was_old = not {*ids} - {*reply.drop_segment_ids} <= {*self._segments.ids()}
        if self._stamps is not None and reply.HasField("stamp"):
            if reply.stamp.term not in {each.term for each in self._stamps.reported()}:
                self._segments.forget_drops()
            self._stamps.replace(stamp_of(reply.stamp))
        self._end(reply.ended_sessions)
        self._take_roles(reply, asked_s)
        failpoint("memserver.register.done")
        _log.info('registered as "%s" at the coordinator %s', me.name, self.coordinator)
        return int(reply.lease_ms)

    def _drop(self, reply: pb.RegisterServerReply, held: Mapping[int, SegmentForm]) -> None:
        count = len(reply.drop_segment_ids)
        epochs = [*reply.drop_epochs, *[0] * (count - len(reply.drop_epochs))]
        grounds = [*map(Ground, reply.drop_grounds), *[Ground.UNKNOWN] * (count - len(reply.drop_grounds))]
        rooms = frozenset(reply.room_segment_ids) & held.keys()
        for segment_id, epoch, ground in zip(reply.drop_segment_ids, epochs, grounds, strict=True):
            try:
                if segment_id in rooms:
                    self._segments.give_up(held[segment_id], epoch + 1)
                self._segments.drop(segment_id, epoch or FOR_GOOD, ground)
                failpoint("memserver.register.dropped")
                _log.info("dropped segment %016x: %s", segment_id, ground.name.lower())
            except Error as error:
                _log.error("%s; it stays until the next registration", error)

    def _renew(self) -> Generator[Call, Any, int]:
        request = pb.RenewServerRequest(
            name=self._identity.name,
            instance_id=self._identity.instance_id,
            used_bytes=self._segments.used_bytes(),
            sessions_seen=self._sessions_seen,
            load=self._load(),
        )
        self._missing_names.ask(request)
        if self._replication is not None:
            request.broken.extend(self._replication.broken())
            request.copies.extend(self._replication.copies())
        if self._relays is not None:
            request.mirrors.extend(self._relays.reports())
        failpoint("memserver.renew.sending")
        asked_s = self._boot_s()
        reply = yield Call("RenewServer", request, self._patience())
        failpoint("memserver.renew.answered")
        self._take_keys(reply)
        if self._stamps is not None and reply.HasField("stamp"):
            self._stamps.learn(stamp_of(reply.stamp))
        self._segments.quarantine(reply.quarantine_segment_ids)
        self._missing_names.learn(reply)
        if self._relays is not None:
            self._relays.take(reply.mirrors)
        self._end(reply.ended_sessions)
        self._take_roles(reply, asked_s)
        return int(reply.lease_ms)

    def _take_roles(self, reply: pb.RegisterServerReply | pb.RenewServerReply, asked_s: float) -> None:
        """Roles first: the lease is for what this server has by the same answer."""
        if self._replication is not None:
            self._replication.take(reply.replicas)
            self._replication.serve_until(asked_s + LEASE_USED * reply.lease_ms / 1000)

    def _take_keys(self, reply: pb.RegisterServerReply | pb.RenewServerReply) -> None:
        if self._on_keys is not None and reply.HasField("access"):
            self._on_keys(reply.access)

    def _end(self, ended: pb.EndedSessions) -> None:
        self._segments.end_sessions(ended.session_ids)
        self._segments.know_ended(not ended.forgotten)
        # Not before they have ended here: the coordinator does not repeat what we confirm.
        self._sessions_seen = pb.SessionsSeen(incarnation=ended.incarnation, last_number=ended.last_number)

    def _succeeded(self) -> None:
        if self._complained:
            _log.info("the coordinator %s answers again", self.coordinator)
        self.connected, self._complained, self._turns, self._leaders_term = True, None, 0, ""
        self._decide(None)

    def _failed(self, error: grpc.RpcError) -> None:
        code = error.code()
        coordinator = f"the coordinator {','.join(self._addresses)}"
        if code == self._complained:
            pass
        elif code == grpc.StatusCode.UNAVAILABLE:
            _log.warning(
                "%s cannot be reached, or does not lead; serving on and trying again: %s", coordinator, error.details()
            )
        else:
            _log.error("%s refuses this server: %s", coordinator, error.details())
        self.connected, self._complained = False, code
        if code in _FATAL:
            self._decide(_FATAL[code](f"{coordinator} refuses this server: {error.details()}"))

    def _decide(self, outcome: Error | None) -> None:
        if not self._decided:
            self._decided = True
            self._on_outcome(outcome)
