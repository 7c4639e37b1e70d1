"""Calls to an etcd cluster: several addresses, TLS, a user's token; repeated at the next address until a deadline.

An attempt without an answer may have been carried out, or may be carried out later. A caller that repeats a request
must make sure that this does no harm; `RefusedError.repeated` says that an earlier attempt had no answer. All of it
runs in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from smb.config.backoff import Backoff, own_random
from smb.config.limits import TOKEN_FILE_BYTES_MAX
from smb.config.parse import parse_address
from smb.config.untrusted import open_kept, read_opened
from smb.coordinator.etcd import etcd_pb2 as pb
from smb.coordinator.options import ETCD
from smb.coordinator.outside import Connections, GrpcConnections
from smb.errors import Error, InvalidArgumentError
from smb.security.credentials import Credentials, Current, load_directory

USER_FILE = "user"
# An answer takes milliseconds, or a disk's flush. After this time another member is asked, as the first may be cut off.
ATTEMPT_S = 1.5
_PAUSE_FIRST_S, _PAUSE_MAX_S = 0.1, 0.5  # between tries after all members have failed
_FAULT_S = 0.3  # for a look at a member that did not answer; it is short because the caller has waited for long already

_log = logging.getLogger("coordinator")
Reply = TypeVar("Reply", bound=Message)

_METHODS: dict[type[Message], tuple[str, type[Message]]] = {
    pb.RangeRequest: ("/etcdserverpb.KV/Range", pb.RangeResponse),
    pb.TxnRequest: ("/etcdserverpb.KV/Txn", pb.TxnResponse),
    pb.LeaseGrantRequest: ("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse),
    pb.LeaseRevokeRequest: ("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse),
    pb.AuthenticateRequest: ("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse),
}
_KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
# Errors that do not concern the request itself: another member may answer, or this one later.
_PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
_BUSY = "too many requests"
_OLD_TOKEN = ("invalid auth token", "revision in header is old")


class SilentError(Error):
    """No member answered in time. The request may have been carried out, or may still be."""


class RefusedError(Error):
    """A member refused. `repeated`: an earlier attempt had no answer, and the refusal says nothing about that one."""

    def __init__(self, message: str, *, full: bool, repeated: bool) -> None:
        super().__init__(message)
        self.full = full  # etcd's quota of space is used up
        self.repeated = repeated


@dataclass(frozen=True, slots=True)
class EtcdLocation:
    """Where the records are: the members' addresses, and the prefix of all keys."""

    endpoints: tuple[str, ...]
    prefix: str

    def __str__(self) -> str:
        return f"{ETCD}{','.join(self.endpoints)}/{self.prefix}"

    @staticmethod
    def of(text: str) -> EtcdLocation:
        """Read "etcd://HOST:PORT,HOST:PORT/PREFIX". Raises InvalidArgumentError."""
        addresses, _, prefix = text.removeprefix(ETCD).partition("/")
        prefix = prefix.strip("/")
        shape = f"write {ETCD}HOST:PORT,HOST:PORT,HOST:PORT/PREFIX"
        if not prefix or not prefix.isprintable():
            raise InvalidArgumentError(f"--state {text}: the prefix of this cluster's keys is missing; {shape}")
        try:
            for address in addresses.split(","):
                parse_address(address)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"--state {text}: {error}; {shape}") from None
        return EtcdLocation(tuple(dict.fromkeys(addresses.split(","))), prefix)


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials for etcd: a certificate, a user's name and password, both, or nothing."""

    credentials: Credentials | None = None
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"<access to etcd{f' as {self.user}' if self.user else ''}>"

    @staticmethod
    def of(directory: Path | None) -> Access:
        """Read the files of a directory: `ca.pem`, `cert.pem`, `key.pem`, and, if etcd has roles, `user` with one line
        NAME:PASSWORD.

        Raises InvalidArgumentError.
        """
        if directory is None:
            return Access()
        file = directory / USER_FILE
        user = password = ""
        try:
            with os.fdopen(open_kept(file, "the password in "), "rb", buffering=0) as opened:
                line = read_opened(opened, file, TOKEN_FILE_BYTES_MAX).decode()
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise InvalidArgumentError(f"cannot read {file}: {why}") from None
        else:
            user, colon, password = line.strip().partition(":")
            if not colon or not user or not password or "\n" in password:
                raise InvalidArgumentError(f"{file} must have one line, NAME:PASSWORD")
        return Access(load_directory(directory), user, password)


def fault_of(address: str, credentials: Credentials) -> str:
    """Return the TLS fault between us and that member as the end of a sentence; empty: none was found. Blocks for some
    tenths of a second at most.
    """
    host, port = parse_address(address)
    try:
        context = credentials.context()
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, port), _FAULT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            if not secured.recv(1):
                return f"; it does not take our certificate {credentials.certificate_path}: it closes the connection"
    except ssl.SSLCertVerificationError as error:
        return f"; its certificate is not good: {error.verify_message}"
    except ssl.SSLError as error:
        return f"; it does not take our certificate {credentials.certificate_path}: {error.reason}"
    except OSError:
        pass  # a failure of the network, which gRPC reports itself
    return ""


class Etcd:
    """A client of an etcd cluster. Call `close` at the end."""

    def __init__(
        self,
        endpoints: Sequence[str],
        access: Access,
        connections: Connections | None = None,
        draw: Callable[[], float] = own_random.random,
        heard: Callable[[], object] = lambda: None,
    ) -> None:
        """`connections`: how members are reached; None: over the network. `draw` returns numbers from 0 to 1, which
        spread the pauses between tries. `heard` is called after each answer, also if it refuses the request.
        """
        self._draw = draw
        self._heard = heard
        self._endpoints = endpoints
        self._access = access
        self._token = ""
        self._at = 0  # the index of the member that answered last
        self._connect = (connections or GrpcConnections()).etcd_channel
        self._current = Current(access.credentials) if access.credentials is not None else None
        self._used = access.credentials
        self._channels = [self._connect(address, self._used) for address in endpoints]
        self._replaced: set[asyncio.Task[None]] = set()

    def __str__(self) -> str:
        return f"etcd at {','.join(self._endpoints)}"

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)
        await asyncio.gather(*self._replaced)

    async def range(self, request: pb.RangeRequest, timeout_s: float) -> pb.RangeResponse:
        """Read keys. The result has everything stored before the call, whichever member answers. Raises SilentError,
        RefusedError."""
        return await self._call(request, pb.RangeResponse, timeout_s)

    async def transact(self, request: pb.TxnRequest, timeout_s: float) -> tuple[pb.TxnResponse, bool]:
        """Return the answer, and whether an earlier attempt had no answer. Raises SilentError, RefusedError."""
        repeated: list[str] = []
        return await self._call(request, pb.TxnResponse, timeout_s, repeated), bool(repeated)

    async def grant(self, lease_s: int, timeout_s: float) -> pb.LeaseGrantResponse:
        """Make a lease of that duration. Raises SilentError, RefusedError."""
        return await self._call(pb.LeaseGrantRequest(TTL=lease_s), pb.LeaseGrantResponse, timeout_s)

    async def revoke(self, lease_id: int, timeout_s: float) -> None:
        """End a lease and delete the keys under it. Raises SilentError, RefusedError."""
        await self._call(pb.LeaseRevokeRequest(ID=lease_id), pb.LeaseRevokeResponse, timeout_s)

    async def keep_alive(self, lease_id: int, timeout_s: float) -> int:
        """Renew a lease and return its seconds; 0 if it has ended. Raises SilentError, RefusedError."""
        reply = await self._call(pb.LeaseKeepAliveRequest(ID=lease_id), pb.LeaseKeepAliveResponse, timeout_s)
        return int(reply.TTL)

    async def _call(
        self, request: Message, kind: type[Reply], timeout_s: float, repeated: list[str] | None = None
    ) -> Reply:
        """`repeated` receives, for each attempt that may have been carried out, why it had no answer."""
        now = asyncio.get_running_loop().time
        end = now() + timeout_s
        unanswered = [] if repeated is None else repeated
        failures, renewed = 0, False
        backoff: Backoff | None = None  # made when needed, because most calls need no pause
        while True:
            at = self._at
            left_s = end - now()
            try:
                if self._access.user and not self._token and not isinstance(request, pb.AuthenticateRequest):
                    await self._authenticate(left_s)
                answer = await self._attempt(at, request, kind, min(ATTEMPT_S, max(left_s, 0.01)))
                self._heard()
                return answer
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
                if any(text in details for text in _OLD_TOKEN) and not renewed:
                    self._token, renewed = "", True
                    continue
                if code not in _PASSING and _BUSY not in details:
                    self._heard()
                    raise RefusedError(
                        f"{self}: {details}", full="space exceeded" in details, repeated=bool(unanswered)
                    ) from None
                if "failed to connect" not in details.lower() and _BUSY not in details:
                    unanswered.append(details)
            failures += 1
            if self._at == at:  # unless another call has moved to the next member already
                self._at = (at + 1) % len(self._endpoints)
            if now() >= end:
                raise SilentError(f"{self} does not answer ({self._endpoints[at]}: {details}{await self._fault(at)})")
            if failures % len(self._endpoints) == 0:
                backoff = backoff or Backoff(_PAUSE_FIRST_S, _PAUSE_MAX_S, lambda: end - now(), self._draw)
                await asyncio.sleep(backoff.next_s())

    async def _attempt(self, at: int, request: Message, kind: type[Reply], timeout_s: float) -> Reply:
        metadata = (("token", self._token),) if self._token else ()
        channel = self._channel_of_now(at)
        if not isinstance(request, pb.LeaseKeepAliveRequest):
            method, reply = _METHODS[type(request)]
            call = channel.unary_unary(
                method, request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString
            )
            answer: Any = await call(request, timeout=timeout_s, metadata=metadata)
        else:  # the method is a stream, of which one request and one answer are used
            stream = channel.stream_stream(
                _KEEP_ALIVE,
                request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
                response_deserializer=pb.LeaseKeepAliveResponse.FromString,
            )(iter([request]), timeout=timeout_s, metadata=metadata)
            answer = pb.LeaseKeepAliveResponse()
            async for each in stream:
                answer = each
        assert isinstance(answer, kind)
        return answer

    async def _authenticate(self, left_s: float) -> None:
        request = pb.AuthenticateRequest(name=self._access.user, password=self._access.password)
        reply = await self._call(request, pb.AuthenticateResponse, max(left_s, 0.01))
        self._token = reply.token

    def _channel_of_now(self, at: int) -> grpc.aio.Channel:
        """Return the channel to a member, made with the current certificate. Calls in progress end on the old one."""
        found = self._current.now() if self._current is not None else None
        if found is not self._used:
            self._used = found
            for channel in self._channels:
                task = asyncio.create_task(channel.close(ATTEMPT_S))
                self._replaced.add(task)
                task.add_done_callback(self._replaced.discard)
            self._channels = [self._connect(address, found) for address in self._endpoints]
        return self._channels[at]

    async def _fault(self, at: int) -> str:
        """Return what a member has against our certificate, as the end of a sentence. With TLS 1.3 a member refuses the
        certificate after the handshake, and gRPC reports only a closed socket.
        """
        if self._used is None:
            return ""
        return await asyncio.to_thread(fault_of, self._endpoints[at], self._used)
