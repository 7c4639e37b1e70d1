"""RDMA for the daemon: a queue pair for each session that asks for one, its keys, and the thread that moves messages.

Each session has its own protection domain. The domain registers the journal slots of the session's connection, where
the session writes payloads and reads answers. For each segment that the session opened, it registers the data
(read-only unless the session may write) and the chunks' states (read-only). Work for the server's CPU comes as a
message: the record goes to the engine's loop over a socketpair, and its answer returns the same way. One-sided reads
and writes of a card are not visible here.

Keys end before their memory is released: with the session, with its connection (for the slots), with the segment. With
access control they also end when the token for which they were given has expired. The end of the daemon ends all keys.

Threads: gRPC's threads make and end connections, under `_lock`; the progress thread owns the queues; one thread ends
keys in time, and starts with the first key that expires.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from memserver.engine import CHUNK_BYTES_MAX, Engine, HeldSegment, NotReadyError, Slots
from memserver.threads import begin
from smb.errors import InvalidArgumentError, OutOfMemoryError, UnavailableError
from smb.rpc import control_pb2 as pb
from smb.transport.verbs.progress_thread import ProgressThread
from smb.transport.verbs.queue_pair import (
    FRAME_BYTES,
    MESSAGE_BYTES,
    BrokenQueueError,
    Device,
    Domain,
    End,
    NoDeviceError,
    QueuePair,
    Region,
    Settings,
)

SLOTS = 8  # of 1 MiB per session: enough to have some in transfer while others are added
# A connection pins its 8 MiB of slots in the journal's memory, which counts in no capacity: at most 2 GiB, half of the
# journal's.
CONNECTIONS_MAX = 256
_OUT_BYTES = MESSAGE_BYTES // FRAME_BYTES * FRAME_BYTES

_log = logging.getLogger("memserver")


@dataclass(frozen=True, slots=True)
class ReachableMemory:
    """Memory that a session may reach, with its key."""

    address: int
    key: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    data: ReachableMemory
    states: ReachableMemory
    sequence_at: int
    chunk_bytes: int
    dtype: int
    writable: bool


class _Peer:
    """A session's connection. It is a progress.Relay."""

    def __init__(self, engine: Engine, domain: Domain) -> None:
        """Raises OutOfMemoryError, UnavailableError, NoDeviceError."""
        self.closed = False
        self._hung_up = False
        self._in = bytearray()  # messages for the engine, while its socket is full
        self._out = bytearray()
        self._regions: list[Region] = []
        self._slots: Slots = engine.take_slots(SLOTS)
        try:
            for address in self._slots.addresses:
                self._regions.append(domain.register(address, CHUNK_BYTES_MAX, read=True, write=True))
            self.queue = QueuePair(domain)
            try:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            except BaseException:
                self.queue.close()
                raise
        except BaseException:
            self._release()
            raise
        self._socket.setblocking(False)
        self.queue.on_message = self._take_message
        try:
            engine.adopt_reference(theirs.detach(), self._slots)
        except BaseException:
            self.close()
            raise

    def slots(self) -> list[ReachableMemory]:
        """Return the slots into which the client puts payloads."""
        return [ReachableMemory(region.address, region.remote_key, region.nbytes) for region in self._regions]

    def queue_fd(self) -> int:
        return self.queue.fd

    def socket_fd(self) -> int:
        return self._socket.fileno()

    def hang_up(self) -> None:
        """See Relay. The engine has closed the connection; its last messages are still sent."""
        self._hung_up = True

    def wants_socket(self) -> bool:
        return len(self._out) < MESSAGE_BYTES

    def arm(self) -> None:
        self.queue.arm()

    def take_event(self) -> None:
        self.queue.take_event()

    def short(self) -> bool:
        """See Relay. A connection shares no memory of others."""
        return False

    def awaits(self) -> bool:
        """See Relay. A client owes no answer: one that is gone loses its session."""
        return False

    def probe(self) -> None:
        self.queue.probe()

    def turn(self) -> bool:
        if self.closed:
            return False
        moved = self.queue.poll() > 0
        if self.queue.failed:
            _log.info("an RDMA connection ended: %s", self.queue.failed)
            self.close()
            return False
        self._forward()
        moved |= self._receive()
        while len(self._out) >= FRAME_BYTES and self.queue.may_send():
            message = self._out[: min(_OUT_BYTES, len(self._out) // FRAME_BYTES * FRAME_BYTES)]
            self.queue.send(message)
            del self._out[: len(message)]
        if self._hung_up and not moved and len(self._out) < FRAME_BYTES:
            self.close()
        return moved

    def _take_message(self, message: bytes) -> None:
        self._in += message  # bounded: the client has as many receives as we posted, and one answer for each
        if len(self._in) > 64 * MESSAGE_BYTES * 4:
            self.queue.failed = "the client sent more messages than it may"

    def _forward(self) -> None:
        while self._in and not self._hung_up:
            try:
                sent = self._socket.send(self._in)
            except BlockingIOError:
                return
            except OSError:
                self._hung_up = True
                return
            del self._in[:sent]

    def _receive(self) -> bool:
        if not self.wants_socket():
            return False
        try:
            data = self._socket.recv(_OUT_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._out += data
        self._hung_up |= not data
        return bool(data)

    def close(self) -> None:
        """See Relay. Order: the card's queue, then the keys of the slots, then the slots."""
        if self.closed:
            return
        self.closed = True
        self.queue.close()
        self._socket.close()
        self._release()

    def _release(self) -> None:
        for region in self._regions:
            region.close()
        self._regions = []
        self._slots.close()


@dataclass(slots=True)
class _Segment:
    held: HeldSegment
    data: Region
    states: Region
    writable: bool
    until: float  # time.monotonic

    def close(self) -> None:
        self.data.close()
        self.states.close()
        self.held.close()


@dataclass(slots=True)
class _Session:
    domain: Domain
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards all fields below
    peer: _Peer | None = None
    segments: dict[int, _Segment] = field(default_factory=dict)
    ended: bool = False


def settings_of(variables: Mapping[str, str]) -> Settings:
    """Return the settings in the variables SMB_VERBS_... Raises InvalidArgumentError."""
    return Settings.of(variables)


class RdmaTarget:
    """All sessions with RDMA. Methods may be called from any thread and block for some milliseconds."""

    def __init__(
        self, engine: Engine, instance_id: int, settings: Settings | None, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        """`settings` None: RDMA is switched off. A missing device raises nothing: see `why_not`."""
        self.instance_id = instance_id
        self._connections_max = connections_max
        self._look = threading.Event()  # wakes the thread that ends keys
        self._ending: threading.Thread | None = None
        self._stopping = False
        self._engine = engine
        self._lock = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        self._progress: ProgressThread | None = None
        self._device: Device | None = None
        self.why_not = "RDMA is switched off at this server (--verbs off)"
        if settings is None:
            return
        try:
            self._device = Device(settings)
        except NoDeviceError as error:
            self.why_not = str(error)
            _log.debug("no RDMA: %s", error)
        else:
            self.why_not = ""
            _log.info("RDMA by %s", self._device)

    def connect(self, session_id: int, client: End | pb.VerbsEnd) -> tuple[End, list[ReachableMemory]]:
        """Connect the session to the client's end. An earlier connection of the session is ended.

        Raises UnavailableError if there is no device or it refuses, InvalidArgumentError, OutOfMemoryError.
        """
        if self._device is None:
            raise UnavailableError(f"this memory server has no RDMA: {self.why_not}")
        theirs = End(client.number, client.gid, client.lid, client.packet_sequence, client.mtu, client.reads).check()
        session = self._session(session_id)
        with session.lock:
            self._end_peer(session)
            if session.ended:
                raise UnavailableError("the session has ended; connect again")
            if self.connections() >= self._connections_max:
                raise OutOfMemoryError(
                    f"this memory server has {self._connections_max} RDMA connections already, and no more slots for "
                    f"payloads: each takes {SLOTS * CHUNK_BYTES_MAX >> 20} MiB of locked memory; use TCP instead"
                )
            try:
                moving = self._moving()  # before the peer, so that a failure leaves no peer behind
                peer = _Peer(self._engine, session.domain)
            except (NoDeviceError, OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                raise UnavailableError(str(error)) from error
            try:
                peer.queue.connect(theirs)
                end, slots = peer.queue.end(), peer.slots()
            except BrokenQueueError as error:
                peer.close()
                raise UnavailableError(str(error)) from error
            session.peer = peer
            moving.add(peer)
        return end, slots

    def open_segment(
        self, session_id: int, segment_id: int, epoch: int, writable: bool, until: float = math.inf
    ) -> Opened:
        """Register a segment for the session. A repetition returns the same keys, valid until the later of both times
        (time.monotonic).

        Raises NotFoundError, InvalidArgumentError (wrong epoch), TransportError, NotReadyError (the session has no
        connection here, as after a restart).
        """
        if until != math.inf:
            self._have_keys_end()
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            raise NotReadyError(f"session {session_id:016x} has no RDMA connection here; connect first")
        with session.lock:
            if session.ended:
                raise InvalidArgumentError(f"session {session_id:016x} has ended; connect again")
            known = session.segments.get(segment_id)
            if known is not None and known.writable != writable:
                session.segments.pop(segment_id).close()
                known = None
            if known is None:
                known = self._register(session.domain, segment_id, epoch, writable)
                session.segments[segment_id] = known
            known.until = max(known.until, until)
        self._look.set()
        form, held = known.held.form, known.held
        if form.epoch != epoch:
            raise InvalidArgumentError(f"segment {segment_id:016x} has epoch {form.epoch}, not {epoch}")
        return Opened(
            ReachableMemory(held.address, known.data.remote_key, form.nbytes),
            ReachableMemory(held.states_address, known.states.remote_key, held.states_bytes),
            held.sequence_at,
            form.chunk_bytes,
            form.dtype,
            writable,
        )

    def _register(self, domain: Domain, segment_id: int, epoch: int, writable: bool) -> _Segment:
        held = self._engine.hold_segment(segment_id)
        try:
            if held.form.epoch != epoch:
                raise InvalidArgumentError(f"segment {segment_id:016x} has epoch {held.form.epoch}, not {epoch}")
            data = domain.register(held.address, held.form.nbytes, read=True, write=writable)
            try:
                states = domain.register(held.states_address, held.states_bytes, read=True)
            except BaseException:
                data.close()
                raise
        except BaseException:
            held.close()
            raise
        return _Segment(held, data, states, writable, -math.inf)

    def close_connection(self, session_id: int) -> None:
        """End the session's connection. After the return no more of its messages arrive."""
        with self._lock:
            session = self._sessions.get(session_id)
        if session is not None:
            with session.lock:
                self._end_peer(session)

    def end_session(self, session_id: int) -> None:
        """End the session's connection and all of its keys, for good."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
        if session is not None:
            self._end(session)

    def forget_segment(self, segment_id: int) -> None:
        """End all keys of a deleted segment, so that its memory can be released."""
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            with session.lock:
                known = session.segments.pop(segment_id, None)
                if known is not None:
                    known.close()

    def connections(self) -> int:
        """Return the number of connections."""
        with self._lock:
            return sum(1 for s in self._sessions.values() if s.peer is not None and not s.peer.closed)

    def close(self) -> None:
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), {}
            self._device = None
            self._stopping = True
            ending = self._ending
        for session in sessions:
            self._end(session)
        self._look.set()
        if ending is not None:
            ending.join()
        if self._progress is not None:
            self._progress.close()

    def _have_keys_end(self) -> None:
        """Start the thread that ends keys with their tokens. Raises UnavailableError: without it no keys are given."""
        with self._lock:
            if self._ending is None and not self._stopping:
                self._ending = begin(self._end_expired, "rdma-keys")
                if self._ending is None:
                    raise UnavailableError("this memory server cannot start the thread that ends RDMA keys in time")

    def _end_expired(self) -> None:
        while not self._stopping:
            soonest, now = math.inf, time.monotonic()
            with self._lock:
                sessions = list(self._sessions.values())
            for session in sessions:
                with session.lock:
                    for segment_id, segment in list(session.segments.items()):
                        if segment.until <= now:
                            session.segments.pop(segment_id).close()
                        else:
                            soonest = min(soonest, segment.until)
            self._look.wait(None if soonest == math.inf else max(0.0, soonest - time.monotonic()))
            self._look.clear()

    def _session(self, session_id: int) -> _Session:
        with self._lock:
            if self._device is None:
                raise UnavailableError("this memory server is stopping")
            session = self._sessions.get(session_id)
            if session is None:
                session = self._sessions[session_id] = _Session(Domain(self._device))
            return session

    def _moving(self) -> ProgressThread:
        with self._lock:
            if self._progress is None:
                self._progress = ProgressThread("rdma")
            return self._progress

    def _end(self, session: _Session) -> None:
        with session.lock:
            session.ended = True
            self._end_peer(session)
            for segment in session.segments.values():
                segment.close()
            session.segments.clear()
            session.domain.close()

    def _end_peer(self, session: _Session) -> None:
        peer, session.peer = session.peer, None
        if peer is not None and self._progress is not None:
            self._progress.close_relay(peer)
