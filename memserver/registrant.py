"""Decides what this server asks of the coordinator (to register, to renew, to register again, or to ask the next
coordinator) and what follows from the answers. It makes no calls: registration_thread.py does, and a simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

from memserver.engine import Engine, SegmentForm
from memserver.replication import Replication, boot_seconds
from memserver.segments import FOR_GOOD, Segments
from memserver.stamps import Stamps
from memserver.store_messages import inventory_message, stamp_message, stamp_of
from memserver.usage_by_client import Names
from smb.config.backoff import Backoff, own_random
from smb.config.limits import RENEWALS_PER_LEASE
from smb.config.parse import format_address, parse_address, parse_addresses
from smb.daemon.failpoint import failpoint
from smb.drop_reasons import Ground
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, PermissionDeniedError
from smb.rpc import control_pb2 as pb
from smb.rpc.peers import patience
from smb.rpc.trailers import ANSWERED, STANDBY, trailers_of

if TYPE_CHECKING:
    from memserver.relays import Relays

ANSWER_S = 3.0
FIRST_ANSWER_S = 1.0  # at a port for memory servers that has not answered yet
RETRY_FIRST_S = 0.1  # short, so that a restarted coordinator sees its servers at once
RETRY_MAX_S = 1.0
PATIENCE_S = 2.0  # how long a coordinator that stands by may keep a call; a lease granted then is still long enough
LEASE_USED = 0.95  # of a lease, counted from before the request: the rest allows for differences between clocks

_ELSEWHERE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

_log = logging.getLogger("memserver")
_FATAL: dict[grpc.StatusCode, type[Error]] = {
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call to make now, at the coordinator's address: the method, its request and gRPC's options."""

    method: str
    request: Message
    options: Mapping[str, Any]


# Yields calls, receives each reply or error, and returns after how many seconds the next turn is due.
Turn = Generator[Call, Any, float]


@dataclass(frozen=True, slots=True)
class Identity:
    """What this run of the server registers about itself. Addresses are host:port as clients can reach them."""

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
    host_name: str = ""


class MissingNames:
    """Names to ask the coordinator for. They are for metrics, so nothing depends on them."""

    def __init__(self, engine: Engine, buffers: Names, clients: Names) -> None:
        self._engine = engine
        self._buffers = buffers
        self._clients = clients

    def ask(self, request: pb.RenewServerRequest) -> None:
        """Add the ids whose names are missing to a renewal."""
        request.unnamed_segments.extend(self._buffers.unknown(self._engine.figures.segment_shares()))
        request.unnamed_sessions.extend(self._clients.unknown(self._engine.figures.session_shares()))

    def learn(self, reply: pb.RenewServerReply) -> None:
        """Store the names in the coordinator's reply."""
        self._buffers.learn(reply.segment_names)
        self._clients.learn(reply.session_names)


class Registrant:
    """Keeps this server registered, turn by turn. Used by one thread at a time."""

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
        """`load` is called at each renewal. `on_outcome` is called once: with None once registered, or with the reason
        why this can never succeed. `on_keys`, with credentials, is called after each answer of the coordinator.
        `boot_s`: the clock of the lease. `draw` returns numbers from 0 to 1, which spread the pauses between tries.
        """
        self._addresses = parse_addresses(coordinator)
        self._at = 0  # the index of the address that leads, as far as is known
        self._turns = 0  # failed turns since the last answer
        self._servers_port = 0  # the coordinator's port for memory servers; 0: not known, or not used
        self._servers_port_answers = False
        self._out_of_reach: set[tuple[str, int]] = set()  # such ports that never answered
        self._leaders_term = ""  # the leader's term, as reported by a coordinator that stands by
        self._identity = identity
        self._segments = segments
        self._load = load
        self._missing_names = missing_names
        self.leases_lost = 0  # times that the coordinator did not know this server any more
        self._on_outcome = on_outcome
        self._on_keys = on_keys
        self._sessions_seen = pb.SessionsSeen()
        self._decided = False
        self._registered = False
        self._list_was_old = False  # a segment in the list was dropped before the coordinator answered
        self._draw = draw
        self._backoff: Backoff | None = None  # None: no turn has failed since the last answer
        self.connected = False  # whether the coordinator answered the last call
        self.stops = False  # this server is about to leave, and does not wait for a leader
        self._complained: grpc.StatusCode | None = None  # the logged failure: an outage is logged once
        self._replication = replication
        self._stamps = stamps
        self._relays = relays
        self._boot_s = boot_s

    @property
    def coordinator(self) -> str:
        """The address to which calls go now."""
        address = self._addresses[self._at]
        return format_address(parse_address(address)[0], self._servers_port) if self._servers_port else address

    def turn(self) -> Turn:
        """Register or renew. Another turn follows in any case: without it the server would be lost to the cluster, and
        no log would say why.
        """
        try:
            lease_ms = yield from (self._renew() if self._registered and not self._list_was_old else self._register())
        except grpc.RpcError as error:
            if self._registered and error.code() == grpc.StatusCode.NOT_FOUND:
                self._registered = False
                self.leases_lost += 1
                return 0.0
            self._note_leader(error)
            if ANSWERED in trailers_of(error) and STANDBY not in trailers_of(error):
                # It leads, and refuses for now. Those that stand by would only keep the call until another one leads.
                self._servers_port_answers, self._turns = self._servers_port != 0, 0
            elif self._leave_servers_port(error.code()) or (error.code() in _ELSEWHERE and self._ask_the_next()):
                return 0.0
            self._failed(error)
        except Exception:  # noqa: BLE001
            _log.exception("registration failed because of a bug; trying again")
        else:
            self._registered, self._backoff = True, None
            self._succeeded()
            return lease_ms / 1000 / RENEWALS_PER_LEASE
        self._backoff = self._backoff or Backoff(RETRY_FIRST_S, RETRY_MAX_S, draw=self._draw)
        return self._backoff.next_s()

    def leaving(self) -> pb.LeaveServerRequest:
        """Return the last message to the coordinator. From here on other servers may take over what is held here."""
        if self._replication is not None:
            self._replication.serve_until(0.0)
        return pb.LeaveServerRequest(name=self._identity.name, instance_id=self._identity.instance_id)

    def _take_servers_port(self, port: int) -> None:
        """Use the port for memory servers that an answer names, unless it is out of reach from here."""
        self._servers_port_answers = port != 0 and port == self._servers_port
        self._servers_port = 0 if (self._addresses[self._at], port) in self._out_of_reach else port

    def _leave_servers_port(self, code: grpc.StatusCode) -> bool:
        """After a failed call, go back to the port for all, if the call was not made there. A port that has answered
        is kept while it is only slow. One that never did is not tried again: it may be closed by a firewall.
        """
        slow = self._servers_port_answers and code is grpc.StatusCode.DEADLINE_EXCEEDED
        if not self._servers_port or code not in _ELSEWHERE or slow:
            return False
        if not self._servers_port_answers:
            self._out_of_reach.add((self._addresses[self._at], self._servers_port))
            _log.warning(
                "the coordinator's port for memory servers, %s, cannot be reached; calls of clients may hold up this "
                "server's renewals: open the port, or name another one (smb coordinator --servers)",
                self.coordinator,
            )
        self._servers_port, self._servers_port_answers = 0, False
        return True

    def _ask_the_next(self) -> bool:
        """Go on to the next address. Returns False once all addresses were asked without an answer."""
        if len(self._addresses) == 1:
            return False
        self._servers_port, self._servers_port_answers = 0, False  # of the coordinator that was asked
        self._at = (self._at + 1) % len(self._addresses)
        self._turns += 1
        return self._turns % len(self._addresses) != 0

    def _note_leader(self, error: grpc.RpcError) -> None:
        """Remember the leader that a coordinator which stands by names; a slow leader is simply asked again."""
        trailers = trailers_of(error)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._leaders_term = ""
        elif STANDBY in trailers:
            self._leaders_term = trailers[STANDBY]

    def _patience(self) -> dict[str, Any]:
        """Return a call's options: after all addresses failed, a coordinator that stands by may keep the call."""
        term = self._leaders_term if self._turns >= len(self._addresses) and not self.stops else ""
        # Behind a firewall nothing answers: then the lease must still last for a call to the port for all.
        answer_s = FIRST_ANSWER_S if self._servers_port and not self._servers_port_answers else ANSWER_S
        return {"timeout": answer_s + (PATIENCE_S if term else 0.0), "metadata": patience(PATIENCE_S, term)}

    def _register(self) -> Generator[Call, Any, int]:
        me, (held, ids) = self._identity, self._segments.list_for_coordinator()
        inventory = self._segments.inventory()
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
            host_name=me.host_name,
        )
        failpoint("memserver.register.sending")
        asked_s = self._boot_s()
        reply = yield Call("RegisterServer", request, self._patience())
        failpoint("memserver.register.answered")
        self._segments.registered(reply.stamp.term)
        self._take_servers_port(reply.servers_port)
        self._take_keys(reply)
        self._segments.quarantine(reply.quarantine_segment_ids)
        for segment_id in reply.taken_up_segment_ids:
            self._segments.quarantined.take_up(segment_id)
            _log.info("segment %016x is not quarantined any more: a buffer has it", segment_id)
        self._drop(reply, held)
        # If the coordinator lists a segment that was dropped since the list was made, the next turn reports it again.
        self._list_was_old = not {*ids} - {*reply.drop_segment_ids} <= {*self._segments.ids()}
        if self._stamps is not None and reply.HasField("stamp"):
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
                    # Records that were restored since may have had it made in an epoch later than the next one.
                    self._segments.give_up(held[segment_id], max(epoch + 1, held[segment_id].epoch))
                gone = self._segments.drop(segment_id, epoch or FOR_GOOD, ground)
                failpoint("memserver.register.dropped")
                if gone:
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
        self._take_servers_port(reply.servers_port)
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
        """Take roles before the lease, because the lease covers the roles in the same answer."""
        if self._replication is not None:
            registers = isinstance(reply, pb.RegisterServerReply)
            self._replication.take(reply.replicas, from_other_records=registers)
            self._replication.note_records(reply.replicas)
            self._replication.serve_until(asked_s + LEASE_USED * reply.lease_ms / 1000)

    def _take_keys(self, reply: pb.RegisterServerReply | pb.RenewServerReply) -> None:
        if self._on_keys is not None and reply.HasField("access"):
            self._on_keys(reply.access)

    def _end(self, ended: pb.EndedSessions) -> None:
        self._segments.sessions.end(ended.session_ids)
        self._segments.sessions.know_all(not ended.forgotten)
        # Only after they have ended here, because the coordinator does not repeat sessions that we confirm.
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
