"""RDMA: one queue pair to each server for data; waiting requests use a TCP link.

The control service of a memory server makes its end of the queue pair and gives the keys. A HELLO across the queue pair
shows that both ends reach each other. The link is a lane like any other (csrc/client/link.h). If the queue pair breaks,
the lane continues over a new one. If none can be made, it continues over TCP until the TCP connection breaks.

Nothing of RDMA is imported, opened or started before the first segment is reached by it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from smb.engine import EngineClient, EngineError, Lane, Link, Status
from smb.errors import Error, NotFoundError, TransportError, UnavailableError
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import MemoryServerStub
from smb.security.credentials import Credentials, Current, channel, server_name
from smb.transport.base import NO_RDMA_HERE, Deadline, NoAnswerError, NoPathError, SegmentLocation, SegmentPath
from smb.transport.connector import ServerAddress
from smb.transport.reconnect import Links, refused
from smb.transport.verbs.progress_thread import ProgressThread
from smb.transport.verbs.queue_pair import Device, Domain, End, NoDeviceError, QueuePair, Settings
from smb.transport.verbs.registration import ClientMemory
from smb.transport.verbs.requester import Carrier, RemoteSlot, Right

_HELLO_MS = 4000  # a queue pair gives up after 0.5 s or, on some cards, 4 s
_TRIES = 2  # attempts to make a new queue pair, before the lane continues over TCP
_REFUSED_S = 60.0  # a server that could not be reached is not tried again for this long

_log = logging.getLogger("smb")


class _NotConnectedError(NoAnswerError):
    """The server runs, but has no connection of this session."""


@dataclass(slots=True)
class _Server:
    """One memory server, as this client uses it over RDMA. `lock` is held while the server is asked for keys."""

    name: str
    channel_address: str = ""
    credentials: Credentials | None = None  # the channel's
    channel: Any = None
    stub: Any = None
    carrier: Carrier | None = None
    rights: dict[int, Right] = field(default_factory=dict)  # the carrier's rights, by segment
    opened: dict[int, int] = field(default_factory=dict)  # segments whose keys were requested, with their epochs
    reached: dict[int, None] = field(default_factory=dict)  # segments in use on this server, the newest last
    refusal: str = ""
    refused_until: float = 0.0
    failures: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Parts:
    """Resources to close, even if the user never closes the client."""

    def __init__(self) -> None:
        self.closed = False  # nothing is made any more
        self.lock = threading.Lock()
        self.memory: ClientMemory | None = None
        self.progress: ProgressThread | None = None
        self.channels: list[Any] = []  # to control services

    def close(self) -> None:
        """Close everything. What other threads are making at the time is closed as well; their waits are
        interrupted.
        """
        with self.lock:
            self.closed = True
            channels, self.channels = self.channels, []
        for one in channels:
            one.close()
        progress, self.progress = self.progress, None
        memory, self.memory = self.memory, None
        if progress is not None:
            progress.close()
        if memory is not None:
            memory.close()


class Verbs:
    name = "verbs"

    def __init__(
        self,
        client: EngineClient,
        links: Links,
        session_id: int,
        settings: Settings,
        credentials: Credentials | None = None,
    ) -> None:
        self._client = client
        self._links = links
        self._session_id = session_id
        self._settings = settings
        self._current = Current(credentials) if credentials is not None else None
        self._servers: dict[str, _Server] = {}
        self._device: Device | None = None
        self._why_not = ""
        self._parts = _Parts()
        self._lock = self._parts.lock
        # Runs at the process's exit, too, before Python takes the parts of pyverbs apart in an arbitrary order.
        weakref.finalize(self, self._parts.close)
        links.dial(Lane.VERBS_DATA, self)
        links.tokens.follow(self._renewed)

    # ---- Transport

    def reach(self, location: SegmentLocation, epoch: int, deadline: Deadline) -> SegmentPath:
        device = self._open_device()
        server = self._server(location.server)
        if server.refused_until > time.monotonic():
            raise NoPathError(server.refusal)
        if not location.control_address:
            raise NoPathError(f"the coordinator does not know the control address of {location.server}")
        link = self._link(location, deadline)
        if not self._over_tcp(server):
            self._open_segment(server, location, epoch, deadline)
        return SegmentPath(self.name, f"by {device}", (link,))

    def gated(self, location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
        """See Transport. The same link: fenced requests pass the server's gate."""
        self._open_device()
        server = self._server(location.server)
        if server.refused_until > time.monotonic():
            raise NoPathError(server.refusal)
        return (self._link(location, deadline),)

    def waits(self, location: SegmentLocation, deadline: Deadline) -> Link:
        """See Transport. Uses TCP: waiting does not need speed."""
        try:
            return self._links.reach(location, Lane.TCP_WAITS, deadline)
        except EngineError as error:
            raise refused(location, error) from error

    def close(self) -> None:
        self._parts.close()

    # ---- for the client

    def memory(self) -> ClientMemory:
        """Return the client's registered memory. Raises NoPathError if RDMA cannot be used."""
        device = self._open_device()
        with self._lock:
            if self._parts.closed:
                raise NoPathError("the client is closed")
            if self._parts.memory is None:
                try:
                    self._parts.memory = ClientMemory(Domain(device))
                except TransportError as error:
                    raise NoPathError(str(error)) from error
            return self._parts.memory

    def note(self, array: Any) -> None:
        """Register an array that is about to be transferred, if that pays off."""
        memory = self._parts.memory
        if memory is not None:
            memory.note(array)

    def carriers(self) -> list[Carrier]:
        """Return the open connections, for tests and measurements."""
        with self._lock:
            return [s.carrier for s in self._servers.values() if s.carrier is not None and not s.carrier.closed]

    # ---- link_entries.Dialer

    def dial(self, server: str, where: ServerAddress, lane: int, timeout_ms: int) -> tuple[Link, int]:
        return self._carry(
            self._server(server), where, timeout_ms, lambda fd, ms: self._client.connect_reference(fd, lane, ms)
        )

    def redial(
        self, link: Link, server: str, where: ServerAddress, accept_instance: int, timeout_ms: int
    ) -> int | None:
        """Give the link another queue pair; None if it should continue over TCP."""
        known = self._server(server)
        if known.failures < _TRIES:
            try:

                def resume(fd: int, ms: int) -> tuple[None, int]:
                    return None, link.resume_reference(fd, accept_instance, ms)

                _, instance_id = self._carry(known, where, max(timeout_ms, _HELLO_MS), resume)
            except NoPathError as error:
                known.failures += not isinstance(error, NoAnswerError)
                raise UnavailableError(f"{server}: {error}") from error
            known.failures = 0
            self._open_again(known, where)
            return instance_id
        known.failures = 0
        # Data that the old queue pair sent must not arrive after the lane uses TCP.
        self._tell_closed(known, where.control_address)
        _log.warning("memory server %s can no longer be reached over RDMA; going on over TCP", server)
        return None

    # ---- inside

    def _open_device(self) -> Device:
        with self._lock:
            if self._device is None and not self._why_not:
                if self._client.checksums:
                    self._why_not = (
                        "checksum=True was passed, which RDMA does not support (it has checksums of its own)"
                    )
                else:
                    try:
                        self._device = Device(self._settings)
                    except NoDeviceError as error:
                        self._why_not = str(error)
            if self._device is None:
                raise NoPathError(f"{NO_RDMA_HERE}: {self._why_not}")
            return self._device

    def _server(self, name: str) -> _Server:
        with self._lock:
            return self._servers.setdefault(name, _Server(name))

    def _link(self, location: SegmentLocation, deadline: Deadline) -> Link:
        server = self._server(location.server)
        with self._lock:
            server.reached.pop(location.id, None)
            server.reached[location.id] = None
        try:
            return self._links.reach(location, Lane.VERBS_DATA, deadline)
        except NoAnswerError:
            raise
        except NoPathError as error:
            server.refusal, server.refused_until = str(error), time.monotonic() + _REFUSED_S
            raise
        except UnavailableError as error:
            raise NoAnswerError(str(error)) from error

    def _carry(
        self, server: _Server, where: ServerAddress, timeout_ms: int, greet: Callable[[int, int], tuple[Any, int]]
    ) -> tuple[Any, int]:
        """Make a queue pair and a carrier on it; `greet` gets the engine's end of the socket."""
        memory = self.memory()
        queue = self._make_queue(memory)
        try:
            request = _connect_request(self._session_id, queue)
            reply = self._ask(server, where.control_address, "ConnectVerbs", request, self._reached(server))
            peer = reply.server
            queue.connect(End(peer.number, peer.gid, peer.lid, peer.packet_sequence, peer.mtu, peer.reads).check())
            slots = [RemoteSlot(slot.address, slot.key, slot.nbytes) for slot in reply.slots]
            server.rights = {}  # keys of the other connection may belong to another run
            carrier = Carrier(queue, slots, server.rights, memory)
        except BaseException as error:
            queue.close()
            if not isinstance(error, Error) or isinstance(error, NoPathError):
                raise
            raise NoPathError(str(error)) from error
        try:
            progress = self._moving()
            progress.add(carrier)
        except NoPathError:
            carrier.close()
            raise
        server.carrier = carrier
        try:
            return greet(carrier.engine_end.detach(), max(timeout_ms, _HELLO_MS))
        except EngineError as error:
            self._tell_closed(server, where.control_address)
            if carrier.why:
                raise NoPathError(f"memory server {server.name} cannot be reached over RDMA: {carrier.why}") from error
            if error.status in (Status.TIMEOUT, Status.DISCONNECTED):
                raise NoPathError(f"memory server {server.name} did not answer over RDMA: {error}") from error
            raise
        except BaseException:  # e.g. Ctrl-C: the engine's end may stay open, and no other code would close this end
            progress.close_relay(carrier)
            self._tell_closed(server, where.control_address)
            raise

    def _tell_closed(self, server: _Server, address: str) -> None:
        request = pb.CloseVerbsRequest(session_id=self._session_id)
        with contextlib.suppress(Error):
            self._ask(server, address, "CloseVerbs", request, self._reached(server))

    def _reached(self, server: _Server) -> list[int]:
        """Return the segments on this server whose tokens the session may have, newest first."""
        with self._lock:
            return list(reversed(server.reached))

    def _renewed(self, segment_id: int) -> None:
        """Renew the keys of a segment whose token was renewed or dropped: keys live as long as the token they were
        given for.
        """
        with self._lock:
            servers = [server for server in self._servers.values() if segment_id in server.opened]
        for server in servers:
            rights, deadline = server.rights, Deadline(_HELLO_MS / 1000)
            if segment_id not in rights or self._over_tcp(server):
                continue
            try:
                epoch = server.opened[segment_id]
                rights[segment_id] = self._ask_right(server, server.channel_address, segment_id, epoch, deadline)
            except (Error, KeyError) as error:  # from here on the server's gate decides
                rights.pop(segment_id, None)
                _log.debug("keys for segment %016x were not renewed: %s", segment_id, error)

    def _make_queue(self, memory: ClientMemory) -> QueuePair:
        try:
            return QueuePair(memory.domain)
        except TransportError as error:
            raise NoPathError(str(error)) from error

    def _moving(self) -> ProgressThread:
        with self._lock:
            if self._parts.closed:
                raise NoPathError("the client is closed")
            if self._parts.progress is None:
                self._parts.progress = ProgressThread("smb-rdma")
            return self._parts.progress

    def _over_tcp(self, server: _Server) -> bool:
        return server.carrier is None or server.carrier.closed

    def _open_segment(self, server: _Server, location: SegmentLocation, epoch: int, deadline: Deadline) -> None:
        if location.id in server.rights:
            return
        with server.lock:
            carrier = server.carrier
            try:
                server.rights[location.id] = self._ask_right(
                    server, location.control_address, location.id, epoch, deadline
                )
            except _NotConnectedError:
                # The server was restarted while nothing was in flight. The queue pair cannot know that, and would never
                # be made anew.
                if carrier is not None:
                    self._moving().close_relay(carrier)
                raise
            server.opened[location.id] = epoch

    def _open_again(self, server: _Server, where: ServerAddress) -> None:
        """Request the rights again after a new connection. Until a segment is opened, and if that fails, its calls go
        through the server's gate.
        """
        rights = server.rights
        for segment_id, epoch in list(server.opened.items()):
            deadline = Deadline(_HELLO_MS / 1000)
            try:
                rights[segment_id] = self._ask_right(server, where.control_address, segment_id, epoch, deadline)
            except NotFoundError:
                server.opened.pop(segment_id, None)
            except Error as error:
                _log.info("%s", error)
                return

    def _ask_right(self, server: _Server, address: str, segment_id: int, epoch: int, deadline: Deadline) -> Right:
        request = pb.OpenSegmentVerbsRequest(
            session_id=self._session_id, segment_id=segment_id, epoch=epoch, writable=True
        )
        opened = self._ask(server, address, "OpenSegmentVerbs", request, [segment_id], deadline)
        return Right(
            epoch, opened.dtype, opened.data.nbytes, opened.data.address, opened.data.key, opened.writable,
            opened.chunk_bytes, opened.states.address, opened.states.key, opened.sequence_at,
        )  # fmt: skip

    def _stub(self, server: _Server, address: str) -> tuple[Any, bytes]:
        """Return the stub, and the server's certificate in PEM (empty if it has none)."""
        with self._lock:
            if self._parts.closed:
                raise NoPathError("the client is closed")
            credentials = self._current.now() if self._current is not None else None
            if server.channel_address != address or server.credentials is not credentials:
                if server.channel is not None:
                    server.channel.close()
                    self._parts.channels.remove(server.channel)
                server.channel = channel(address, server_name(server.name), credentials)
                server.credentials = credentials
                self._parts.channels.append(server.channel)
                server.stub = MemoryServerStub(server.channel)  # type: ignore[no-untyped-call]
                server.channel_address = address
            return server.stub, credentials.certificate if credentials is not None else b""

    def _ask(
        self,
        server: _Server,
        address: str,
        method: str,
        request: Any,
        proved: Sequence[int],
        deadline: Deadline | None = None,
    ) -> Any:
        """`proved`: the call presents the token of the first of these segments whose token the session has."""
        if not address:
            raise NoPathError(f"the coordinator does not know the control address of {server.name}")
        timeout = min(_HELLO_MS / 1000, deadline.left()) if deadline is not None else _HELLO_MS / 1000
        try:
            stub, shown = self._stub(server, address)
            proofs = (self._links.tokens.proof(segment_id, self._session_id, shown) for segment_id in proved)
            proof = next((proof for proof in proofs if proof is not None), None)
            if proof is not None:
                request.token.CopyFrom(proof)
            return getattr(stub, method)(request, timeout=timeout)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            text = f"memory server {server.name} at {address}: {details}"
            if code is grpc.StatusCode.NOT_FOUND:
                raise NotFoundError(text) from None
            if code is grpc.StatusCode.UNIMPLEMENTED:
                raise NoPathError(f"memory server {server.name} does not support RDMA") from None
            # The server was restarted and does not know this session yet, or the queue pair's successor; or it is slow.
            if code is grpc.StatusCode.FAILED_PRECONDITION:
                raise _NotConnectedError(text) from None
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise NoAnswerError(text) from None
            if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
                raise NoAnswerError(text) from None
            raise NoPathError(text) from None
        except ValueError as error:  # raised by a closed channel
            raise NoPathError("the client is closed") from error


def _connect_request(session_id: int, queue: QueuePair) -> pb.ConnectVerbsRequest:
    end = queue.end()
    return pb.ConnectVerbsRequest(
        session_id=session_id,
        client=pb.VerbsEnd(
            number=end.number, gid=end.gid, lid=end.lid, packet_sequence=end.packet_sequence, mtu=end.mtu,
            reads=end.reads,
        ),
    )  # fmt: skip
