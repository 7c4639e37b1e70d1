"""The client's side of the control plane: finds the leading coordinator, and turns gRPC status codes into smb errors.

A call is repeated in four cases: it was not sent; the coordinator that answers stands by; it has too many calls in
progress; or its answer was lost and the call may be carried out twice without harm. With several addresses the next one
is asked, until the call's timeout. A single coordinator is waited for while it restarts.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

import grpc

from smb import errors
from smb.config import cancellation, tracing
from smb.config.backoff import Backoff
from smb.config.parse import parse_address, parse_addresses
from smb.config.request_ids import REQUEST, metadata_of, new_id
from smb.rpc import control_pb2 as pb
from smb.rpc.client_tokens import ClientTokens
from smb.rpc.coordinator_tries import CoordinatorTries, FailedTry, Said, Then
from smb.rpc.peers import LeaderMovedError, Peers
from smb.rpc.sessions_port import SessionsPort
from smb.rpc.trailers import ANSWERED, BUSY, OUTCOME, STANDBY, trailers_of
from smb.security.credentials import COORDINATOR_NAME, Credentials, belief
from smb.security.verified_channels import was_not_sent


class SessionEndedError(errors.UnavailableError):
    """The session's lease ran out, or it was closed. It cannot be renewed: open a new one with smb.connect."""


# How the text begins with which the coordinator refuses a session that an operator has ended.
KICKED = "an operator ended the session"

# The pairs in control.proto's head.
_CLASSES: dict[grpc.StatusCode, type[errors.Error]] = {
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OutOfMemoryError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.TimeoutError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgumentError,
    grpc.StatusCode.FAILED_PRECONDITION: SessionEndedError,
}
_APPEARED = re.compile(r'(?<=" )appeared within \S+ s(?=;)')
_OUTCOMES: dict[str, errors.CallOutcome] = {errors.UNKNOWN: errors.UNKNOWN, errors.APPLIED: errors.APPLIED}
_CHANGES = (pb.CreateBufferRequest, pb.DeleteBufferRequest, pb.RenameBufferRequest)

# Codes of a call whose coordinator went away before its answer.
_CUT_OFF = {grpc.StatusCode.UNAVAILABLE: Said.CUT_OFF, grpc.StatusCode.CANCELLED: Said.NO_PLACE}

_AGAIN_FIRST_S, _AGAIN_MAX_S = 0.05, 0.5  # pauses between two rounds over all addresses
_BUSY_FIRST_S, _BUSY_MAX_S = 0.1, 2.0  # pauses before a busy coordinator is asked again: very many may ask it
_PATIENCE_S = 5.0  # how long a coordinator may keep a call: very many may wait, so each asks seldom
_LAST_S = 0.05  # the least time for an attempt at the end of the timeout
_PROBE_S = 1.0
_OWN_PORT_PART = 0.5  # of a timeout, for the port for sessions; the rest is for the port for all
_RENEW_S = 3.0
_LOOKS_PER_LIFE = 4  # looks for due tokens per life of a token, so that those of buffers opened meanwhile are found
_ANSWERS_NOW = "it answers now"
_NO_COORDINATOR = "a program that is not a coordinator listens there; is it a memory server's port?"


def _is_repeatable(request: Any) -> bool:
    """Whether the call may be carried out twice without harm. A delete by name may not: the second time another buffer
    may have that name.
    """
    if isinstance(request, pb.DeleteBufferRequest):
        return bool(request.id and request.missing_ok)
    if isinstance(request, pb.RenameBufferRequest):  # without another name it stores attributes of a file
        return bool(request.id and request.name == request.new_name)
    return True


def _why_not(address: str, credentials: Credentials | None) -> str:
    """Return why no coordinator could be reached, as found on a connection of our own: without TLS, then with it."""
    if credentials is None:
        try:
            with socket.create_connection(parse_address(address), _PROBE_S) as opened:
                return _NO_COORDINATOR if not _speaks_tls(opened) else "it wants credentials: set SMB_CREDENTIALS=DIR"
        except OSError as error:
            return error.strerror or str(error)
    found = belief(address, COORDINATOR_NAME, credentials)
    found.look(_PROBE_S)
    if found.why.startswith("it does not speak TLS"):
        return f"{_NO_COORDINATOR} Or it is a coordinator without credentials, and this client has them"
    return found.why or _ANSWERS_NOW


def _speaks_tls(opened: socket.socket) -> bool:
    """Try a TLS handshake without a certificate of our own. Sends no data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(opened).close()
    except OSError:
        return False
    return True


class Coordinator:
    """The coordinator at "host:port", or at one of "host:port,host:port". Each method blocks up to its timeout
    (seconds) and raises smb errors.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self.address = address
        self._addresses = parse_addresses(address)
        self._peers = Peers(self._addresses, credentials)
        self._session_id, self._session_secret = 0, b""
        self._client_name = f"{socket.gethostname()}:{os.getpid()}"
        self._answered = False  # once True, a coordinator is known to be at the address, and is waited for
        self.tokens = ClientTokens(self._open_again)
        self._sessions_port = SessionsPort(credentials)

    def close(self) -> None:
        """Close all channels; calls in progress fail."""
        self._sessions_port.close()
        self._peers.close()

    def look(self, timeout: float) -> list[tuple[str, pb.LeaderReply | None]]:
        """Return what the coordinator at each address says about the leader; None: it does not answer."""
        return self._peers.look(timeout)

    def open_session(self, client_name: str, timeout: float) -> tuple[int, float, pb.SharedSettings]:
        """Return (session id, lease in seconds, the cluster's defaults for clients)."""
        self._client_name = client_name
        reply: pb.OpenSessionReply = self._call("OpenSession", pb.OpenSessionRequest(client_name=client_name), timeout)
        self._session_id, self._session_secret = reply.session_id, reply.session_secret
        self._sessions_port.learn(self._peers.now.address, reply.sessions_port)
        if reply.token_lifetime_ms:
            self.tokens.look_every_s = reply.token_lifetime_ms / 1000 / _LOOKS_PER_LIFE
        return reply.session_id, reply.lease_ms / 1000, reply.shared

    def renew_session(
        self,
        session_id: int,
        client_name: str,
        timeout: float,
        reports: Sequence[pb.TrainingReport] = (),
        states: Sequence[pb.StateReport] = (),
    ) -> float:
        """Return the lease in seconds. From here on a replaced certificate is used. Raises SessionEndedError if the
        session has ended.
        """
        self._peers.take_new_certificate()
        request = pb.RenewSessionRequest(
            session_id=session_id,
            client_name=client_name,
            session_secret=self._session_secret,
            trainings=reports,
            states=states,
        )
        reply: pb.RenewSessionReply = self._call_of_session("RenewSession", request, timeout)
        return reply.lease_ms / 1000

    def close_session(self, session_id: int, timeout: float, reports: Sequence[pb.TrainingReport] = ()) -> None:
        """End the session at once, instead of letting its lease run out."""
        request = pb.CloseSessionRequest(session_id=session_id, session_secret=self._session_secret, trainings=reports)
        self._call_of_session("CloseSession", request, timeout)

    def create_buffer(self, request: pb.CreateBufferRequest, timeout: float) -> pb.Buffer:
        if not request.exist_ok:
            request.attempt_id = secrets.randbits(64) or 1
        return self._opened("CreateBuffer", request, timeout)

    def open_buffer(
        self, name: str, wait: float, timeout: float, known_id: int = 0, kind: pb.Kind = pb.BUFFER
    ) -> pb.Buffer:
        """Wait up to `wait` seconds for the name to appear. With `known_id`: the buffer with that id, even if
        renamed."""
        left = wait
        while True:
            turn_s = cancellation.turn_s(left)
            now_s = left if turn_s is None else turn_s
            request = pb.OpenBufferRequest(name=name, timeout_ms=round(now_s * 1000), id=known_id, kind=kind)
            try:
                return self._opened("OpenBuffer", request, now_s + timeout)
            except errors.NotFoundError as error:
                cancellation.check()
                if turn_s is None:  # it names what was left when it was asked last
                    text = _APPEARED.sub(f"appeared within {wait:g} s", str(error))
                    if text == str(error):
                        raise
                    raise errors.NotFoundError(text) from None
                left -= turn_s

    def place(self, kind: pb.Kind, name: str, timeout: float, replicas: int = 1) -> pb.Buffer:
        """Return the location of the lock or barrier of that name; the first request makes it, with its copies."""
        request = pb.CreateBufferRequest(name=name, kind=kind, exist_ok=True)
        if replicas > 1:  # set only if needed, because an older coordinator refuses the field
            request.replicas = replicas
        return self.create_buffer(request, timeout)

    def list_buffers(self, timeout: float) -> list[pb.Buffer]:
        """Return all buffers, by name. They come in pages, each of its own moment; `timeout` is for all of them."""
        until, found, more = time.monotonic() + timeout, list[pb.Buffer](), True
        while more:
            request = pb.ListBuffersRequest(after=found[-1].name if found else "")
            reply: pb.ListBuffersReply = self._call("ListBuffers", request, max(0.0, until - time.monotonic()))
            found.extend(reply.buffers)
            more = reply.more
        return found

    def look_up(self, names: Sequence[str], folder: str, timeout: float) -> list[pb.Buffer] | None:
        """Return those of these buffers that exist, and one buffer in the folder; None from an older coordinator."""
        request = pb.ListBuffersRequest(names=names, folder=folder)
        reply: pb.ListBuffersReply = self._call("ListBuffers", request, timeout)
        return list(reply.buffers) if reply.looked_up else None

    def delete_buffer(self, name: str, missing_ok: bool, timeout: float, known_id: int = 0) -> None:
        request = pb.DeleteBufferRequest(name=name, missing_ok=missing_ok, id=known_id)
        self._call("DeleteBuffer", request, timeout)

    def rename_buffer(self, request: pb.RenameBufferRequest, timeout: float) -> bool:
        """Rename, and return True if the request's attributes were stored: an older coordinator ignores them."""
        reply: pb.RenameBufferReply = self._call("RenameBuffer", request, timeout)
        return reply.attributes_stored

    def list_servers(self, timeout: float) -> list[pb.Server]:
        """Return all servers that ever registered, including dead ones."""
        reply: pb.ListServersReply = self._call("ListServers", pb.ListServersRequest(), timeout)
        return list(reply.servers)

    def forget_segments(self, name: str, segment_ids: Sequence[int], timeout: float) -> pb.ForgetSegmentsReply:
        """Free segments that a server keeps in quarantine: those named, or all if none is named."""
        request = pb.ForgetSegmentsRequest(name=name, segment_ids=segment_ids, all=not segment_ids)
        reply: pb.ForgetSegmentsReply = self._call("ForgetSegments", request, timeout)
        return reply

    def drain_server(self, name: str, timeout: float, *, undo: bool = False) -> pb.DrainServerReply:
        reply: pb.DrainServerReply = self._call("DrainServer", pb.DrainServerRequest(name=name, undo=undo), timeout)
        return reply

    def maintain(self, name: str, seconds: float, timeout: float, *, end: bool = False) -> float:
        """Hold re-copying for planned work on a server (empty: on all), or end that. Return its end in seconds since
        1970.
        """
        request = pb.MaintainRequest(name=name, all=not name, for_ms=round(1000 * seconds), end=end)
        reply: pb.MaintainReply = self._call("Maintain", request, timeout)
        return reply.until

    def rebalance(self, timeout: float, *, dry_run: bool, single_copies: bool = False) -> pb.RebalanceReply:
        """Return the moves that are made from now on, or with `dry_run` would be made. See control.proto."""
        request = pb.RebalanceRequest(dry_run=dry_run, single_copies=single_copies)
        reply: pb.RebalanceReply = self._call("Rebalance", request, timeout)
        return reply

    def overview(self, timeout: float, *, buffer: str = "", training: str = "") -> str:
        """Return the dashboard's JSON: an overview, or the details of one buffer or training."""
        request = pb.OverviewRequest(buffer=buffer, training=training)
        reply: pb.OverviewReply = self._call("Overview", request, timeout)
        return reply.json

    def clients(self, timeout: float) -> list[dict[str, Any]]:
        """Return all clients, as the page shows them. They come in pages, each of its own moment; `timeout` is for all
        of them.
        """
        until, found, after = time.monotonic() + timeout, list[dict[str, Any]](), ""
        while True:
            request = pb.OverviewRequest(clients=True, after=after)
            reply: pb.OverviewReply = self._call("Overview", request, max(0.0, until - time.monotonic()))
            page = json.loads(reply.json)
            found += page["clients"]
            if not page["more"]:
                return found
            after = found[-1]["key"]

    def kick_clients(self, name: str, timeout: float) -> pb.KickClientsReply:
        """End all sessions of a client. Raises NotFoundError if none has that name."""
        reply: pb.KickClientsReply = self._call("KickClients", pb.KickClientsRequest(name=name), timeout)
        return reply

    def lock_holder(self, name: str, session_id: int, timeout: float) -> str:
        """Return the name of the client whose session a server has named as holding a lock, or a version, of that
        name; "" if unknown.
        """
        request = pb.LockHolderRequest(name=name, session_id=session_id)
        reply: pb.LockHolderReply = self._call("LockHolder", request, timeout)
        return reply.client_name

    def clock(self, timeout: float) -> float:
        """Return the coordinator's time in seconds since 1970; 0 from a release that does not report it."""
        reply: pb.ListServersReply = self._call("ListServers", pb.ListServersRequest(), timeout)
        return float(reply.now)

    def _open_again(self, kind: pb.Kind, name: str, known_id: int) -> pb.Buffer:
        request = pb.OpenBufferRequest(name=name, kind=kind, id=known_id)
        return self._opened("OpenBuffer", request, _RENEW_S)

    def _opened(self, method: str, request: pb.CreateBufferRequest | pb.OpenBufferRequest, timeout: float) -> pb.Buffer:
        if self._session_secret:  # the cluster has credentials, so the answer must bring tokens
            request.session_id, request.session_secret = self._session_id, self._session_secret
        renews = isinstance(request, pb.OpenBufferRequest) and request.id and not request.timeout_ms
        buffer: pb.Buffer = (self._call_of_session if renews else self._call)(method, request, timeout)
        self.tokens.learn(buffer)
        return buffer

    def _call_of_session(self, method: str, request: Any, timeout: float) -> Any:
        """Make a call at the port for sessions. Without one, or without its answer, make it at the port for all."""
        begun, request_id = time.monotonic(), new_id()
        about = metadata_of(request_id, self._client_name, tracing.parent())
        try:
            reply = self._sessions_port.ask(method, request, timeout * _OWN_PORT_PART, about)
        except grpc.RpcError as error:
            raise self._error(error, timeout, False, request_id) from None
        if reply is not None:
            return reply
        reply = self._call(method, request, max(_LAST_S, begun + timeout - time.monotonic()))
        if isinstance(reply, pb.RenewSessionReply):  # another coordinator may lead now, with another port
            self._sessions_port.learn(self._peers.now.address, reply.sessions_port)
        return reply

    def _call(self, method: str, request: Any, timeout: float) -> Any:
        request_id = new_id()  # the same for each attempt
        if not tracing.on():
            return self._made(method, request, timeout, request_id)
        about = {"rpc.method": method, "smb.request_id": request_id, "smb.coordinator": self.address}
        with tracing.span(f"smb.coordinator {method}", about):
            return self._made(method, request, timeout, request_id)

    def _made(self, method: str, request: Any, timeout: float, request_id: str) -> Any:
        begun = time.monotonic()
        tries = CoordinatorTries(
            begun, timeout, several=len(self._peers) > 1, known=self._answered, repeatable=_is_repeatable(request)
        )
        term = ""  # of the leader that a standby has named; with it the next round may be kept waiting
        backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S, lambda: begun + timeout - time.monotonic())
        busy_backoff = Backoff(_BUSY_FIRST_S, _BUSY_MAX_S, lambda: begun + timeout - time.monotonic())
        waits_ms = request.timeout_ms if isinstance(request, pb.OpenBufferRequest) else 0
        about = metadata_of(request_id, self._client_name, tracing.parent())
        while True:
            if waits_ms:  # the time to wait for the name, of which a part is over
                request.timeout_ms = max(0, waits_ms - int(1000 * (time.monotonic() - begun)))
            peer = self._peers.now
            left_s = max(_LAST_S, begun + timeout - time.monotonic())
            # Not grpc.channel_ready_future: the thread that watches for it may find the channel closed, and then
            # prints a traceback.
            try:
                answer = self._peers.ask(peer, method, request, left_s, min(_PATIENCE_S, left_s / 2), term, about)
                self._answered = True
                return answer
            except LeaderMovedError:
                failed = FailedTry(Said.DEPOSED, peer.address, self._lost(isinstance(request, _CHANGES)))
            # gRPC's own tracebacks, chained, would be 30 more lines without more information.
            except grpc.RpcError as error:
                failed = self._failed(error, peer.address, timeout, isinstance(request, _CHANGES), request_id)
            except ValueError as error:  # raised by grpc for a call on a closed channel
                raise errors.UnavailableError("the client is closed; call smb.connect again") from error
            now = time.monotonic()
            self._answered = self._answered or failed.said is Said.BUSY
            then = tries.after(failed, now)
            if then is Then.LOOK:
                then = tries.looked(connects=self._why_not() == _ANSWERS_NOW, now_s=now)
            match then:
                case Then.SAME:
                    time.sleep(busy_backoff.next_s())
                case Then.NEXT:
                    if self._peers.go_on(peer):
                        term = tries.named
                        time.sleep(backoff.next_s())
                case _:
                    try:
                        raise tries.error(lambda: self._nobody(self._why_not())) from None
                    finally:
                        del failed, tries  # otherwise these and this frame would keep each other and a buffer alive

    def _failed(self, error: Any, address: str, timeout: float, changes: bool, request_id: str) -> FailedTry:
        """Return how a try has failed that raised this grpc.RpcError."""
        trailers, code = trailers_of(error), error.code()
        said = Said.OTHER
        if BUSY in trailers:
            said = Said.BUSY
        elif STANDBY in trailers:
            said = Said.STANDBY
        elif ANSWERED in trailers:  # before was_not_sent: the leader's answer may say the same of a memory server
            said = Said.REFUSED
        elif was_not_sent(error):
            return FailedTry(Said.NOT_SENT, address, None)
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            said = Said.NO_TIME
        elif code in _CUT_OFF and not self._peers.closed:
            said = _CUT_OFF[code]
        not_applied = trailers.get(OUTCOME) == errors.NOT_APPLIED
        failure = self._error(error, timeout, changes, request_id)
        return FailedTry(said, address, failure, trailers.get(STANDBY, ""), not_applied)

    def _lost(self, changes: bool) -> errors.UnavailableError:
        return errors.UnavailableError(
            "the coordinator that was asked does not lead any more, and another one does; the outcome is unknown",
            outcome=errors.UNKNOWN if changes else errors.NOT_APPLIED,
        )

    def _why_not(self) -> str:
        found = [_why_not(address, self._peers.credentials) for address in self._addresses]
        return ", ".join(dict.fromkeys(found))

    def _nobody(self, why: str) -> errors.UnavailableError:
        return errors.UnavailableError(
            f"no coordinator answers at {self.address} ({why}); check that it runs (smb coordinator, or smb up), or "
            f'name another: smb.connect("HOST:PORT"), --coordinator HOST:PORT or SMB_COORDINATOR'
        )

    def _error(self, error: Any, timeout: float, changes: bool, request_id: str) -> errors.Error:
        code, details = error.code(), error.details() or ""
        trailers = trailers_of(error)
        ours = ANSWERED in trailers
        stated = trailers.get(OUTCOME, "") if ours else errors.UNKNOWN
        failure = self._class_of(code, details, timeout, ours)
        if changes and code is not grpc.StatusCode.UNIMPLEMENTED:
            failure.outcome = _OUTCOMES.get(stated, failure.outcome)
        if REQUEST in trailers or (changes and not ours and not was_not_sent(error)):
            failure.args = (f"{failure} (request {trailers.get(REQUEST, request_id)})",)
        return failure

    def _class_of(self, code: grpc.StatusCode, details: str, timeout: float, ours: bool) -> errors.Error:
        if code is grpc.StatusCode.UNAVAILABLE and not ours:
            return self._nobody(details)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and not ours:
            return errors.TimeoutError(
                f"the coordinator at {self.address} did not answer within {timeout:g} s; check that it runs"
            )
        if code is grpc.StatusCode.CANCELLED:  # by a coordinator that stops or is overloaded, or the channel was closed
            if self._peers.closed:
                return errors.UnavailableError("the client was closed meanwhile; call smb.connect again")
            return errors.UnavailableError(
                f"the coordinator at {self.address} stopped before it answered, or has too many calls; try again"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return self._nobody(_NO_COORDINATOR)
        if code in _CLASSES:
            return _CLASSES[code](details)
        return errors.Error(f"the coordinator at {self.address} failed with {code.name}: {details}")
