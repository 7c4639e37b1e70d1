"""Permissions on the control plane: one table with a rule for each RPC, and the interceptor that applies it.

A caller's certificate identifies it by URIs among its alternative names: `smb:role/ROLE`, `smb:name/NAME`, and any
number of `smb:namespace/NAME`, which limit it to buffers whose names begin with one of them. The engine verifies the
certificate and reads role and name, as for data connections: see Callers. An RPC without a rule is refused to all
callers. A certificate without a role, or with a role that this release does not know, is refused everywhere.

Without credentials there is no interceptor, and each process that reaches the port may call everything.
smb.security.credentials.check_exposure keeps such ports on loopback, unless the daemon is `--insecure`.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from smb.engine import ROLES
from smb.errors import UNKNOWN, PermissionDeniedError
from smb.security.credentials import Current, tls_of

_log = logging.getLogger("access")

ROLE_URI, NAME_URI, NAMESPACE_URI = "smb:role/", "smb:name/", "smb:namespace/"


class Role(str, Enum):
    """The purpose of a certificate."""

    CLIENT = "client"  # reads and changes buffers, only in its namespaces if it has any
    READER = "reader"  # reads buffers
    SERVER = "server"  # is the memory server of its name
    OPERATOR = "operator"  # may do what clients may, in all namespaces, and administer the cluster
    COORDINATOR = "coordinator"  # tells memory servers which segments to make and drop


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of an RPC. `namespaces` is None if it is not limited to namespaces. `name` may be empty, except for a
    memory server."""

    role: Role | None
    name: str = ""
    namespaces: frozenset[str] | None = None

    @property
    def key(self) -> str:
        """A short text that is equal for certificates with equal contents; empty without credentials."""
        if self == ANYBODY:
            return ""
        said = repr((self.role, self.name, sorted(self.namespaces or ()), self.namespaces is None))
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    def __str__(self) -> str:
        shown = f"a certificate of role {self.role.value}" if self.role else "a certificate without a role"
        return f'{shown}, "{self.name}"' if self.name else shown

    def may_see(self, buffer: str) -> bool:
        """Whether the buffer's name is in the caller's namespaces."""
        return self.namespaces is None or namespace_of(buffer) in self.namespaces


# The caller if there are no credentials.
ANYBODY = Caller(Role.OPERATOR, "anybody")


def namespace_of(buffer: str) -> str:
    """Return the first part of a name with several parts; empty for a name with one part, which has no namespace."""
    first, slash, _ = buffer.partition("/")
    return first if slash else ""


@dataclass(frozen=True, slots=True)
class Permission:
    """Who may call an RPC. `names`: the request's fields with buffer names, which must be in the caller's namespaces.
    `own`: the request's field `name` must be the caller's own name.
    """

    roles: frozenset[Role]
    names: tuple[str, ...] = ()
    own: bool = False


_USERS = frozenset({Role.CLIENT, Role.READER, Role.OPERATOR})
_WRITERS = frozenset({Role.CLIENT, Role.OPERATOR})
# Relays of mirrors show their memory server's certificate; smb/coordinator/relay_access.py says what they may reach.
_RELAYS = frozenset({Role.SERVER})
_SERVER = Permission(frozenset({Role.SERVER}), own=True)
_COORDINATOR = Permission(frozenset({Role.COORDINATOR}))

# tests/security fails if an RPC of control.proto is missing here.
RULES: Mapping[str, Permission] = {
    "/smb.v1.Coordinator/OpenSession": Permission(_USERS | _RELAYS),
    "/smb.v1.Coordinator/RenewSession": Permission(_USERS | _RELAYS),
    "/smb.v1.Coordinator/CloseSession": Permission(_USERS | _RELAYS),
    "/smb.v1.Coordinator/RegisterServer": _SERVER,
    "/smb.v1.Coordinator/RenewServer": _SERVER,
    "/smb.v1.Coordinator/LeaveServer": _SERVER,
    "/smb.v1.Coordinator/CreateBuffer": Permission(_WRITERS | _RELAYS, names=("name", "like", "mirror_of")),
    "/smb.v1.Coordinator/OpenBuffer": Permission(_USERS | _RELAYS, names=("name",)),
    "/smb.v1.Coordinator/ListBuffers": Permission(_USERS),  # the answer has only buffers in the caller's namespaces
    "/smb.v1.Coordinator/DeleteBuffer": Permission(_WRITERS | _RELAYS, names=("name",)),
    "/smb.v1.Coordinator/RenameBuffer": Permission(_WRITERS, names=("name", "new_name", "displaced_name")),
    "/smb.v1.Coordinator/ListServers": Permission(_USERS),
    "/smb.v1.Coordinator/DrainServer": Permission(frozenset({Role.OPERATOR})),
    "/smb.v1.Coordinator/Maintain": Permission(frozenset({Role.OPERATOR})),
    "/smb.v1.Coordinator/ForgetSegments": Permission(frozenset({Role.OPERATOR})),
    "/smb.v1.Coordinator/Rebalance": Permission(frozenset({Role.OPERATOR})),
    "/smb.v1.Coordinator/Overview": Permission(_USERS),  # refused later to callers limited to namespaces
    "/smb.v1.Coordinator/KickClients": Permission(frozenset({Role.OPERATOR})),
    "/smb.v1.Coordinator/LockHolder": Permission(_WRITERS, names=("name",)),
    "/smb.v1.Coordinator/Leader": Permission(_USERS | _RELAYS),
    "/smb.v1.MemoryServer/CreateSegment": _COORDINATOR,
    "/smb.v1.MemoryServer/DeleteSegment": _COORDINATOR,
    "/smb.v1.MemoryServer/EndSessions": _COORDINATOR,
    "/smb.v1.MemoryServer/TakeRoles": _COORDINATOR,
    "/smb.v1.MemoryServer/RetireSegments": _COORDINATOR,
    "/smb.v1.MemoryServer/Inventory": _COORDINATOR,
    # These also need the proof of a token, which names session, segment and rights: memserver/control.py.
    "/smb.v1.MemoryServer/ConnectVerbs": Permission(_USERS | _RELAYS),
    "/smb.v1.MemoryServer/OpenSegmentVerbs": Permission(_USERS | _RELAYS),
    "/smb.v1.MemoryServer/CloseVerbs": Permission(_USERS | _RELAYS),
}

JUDGED_FOR_S = 5.0  # how long a judgement of a certificate counts

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def caller() -> Caller:
    """Return the caller of the RPC that runs in this task."""
    return _caller.get()


def namespaces_in(pem: bytes) -> list[str]:
    """Return the namespaces in our own certificate, sorted. For display only, as nothing is verified."""
    begin, end = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
    der = binascii.a2b_base64(pem.partition(begin)[2].partition(end)[0])
    prefix = NAMESPACE_URI.encode()
    found = []
    # A URI among the alternative names is encoded as tag, length, text.
    for match in re.finditer(rb"\x86([\x00-\x7f])" + re.escape(prefix), der, re.DOTALL):
        text = der[match.start() + 2 :][: match[1][0]]
        found.append(text.removeprefix(prefix).decode("ascii", "replace"))
    return sorted(found)


AuthContext: TypeAlias = "Mapping[str, Sequence[bytes]]"  # gRPC's description of a connection


def certificate_of(context: Any) -> bytes:
    """Return the certificate that the caller showed, in PEM; empty without one."""
    return _certificate(cast(AuthContext, context.auth_context()))


def _certificate(auth_context: AuthContext) -> bytes:
    return bytes(next(iter(auth_context.get("x509_pem_cert", ())), b""))


class Callers:
    """Identifies the callers of a port by the engine's verification of their certificates. gRPC has verified them by
    its own rules, once per connection. Here each is verified again every few seconds, so that an expired certificate,
    or one whose authority is no longer trusted, is refused on open connections too. For any thread.
    """

    _KEPT_MAX = 8192

    def __init__(self, current: Current) -> None:
        self._current = current
        self._known: dict[tuple[bytes, ...], tuple[float, Caller]] = {}

    def of(self, auth_context: AuthContext) -> Caller:
        """Return the caller. Raises PermissionDeniedError."""
        shown = (_certificate(auth_context), *auth_context.get("x509_pem_cert_chain", ()))
        now = time.monotonic()
        known = self._known.get(shown)
        if known is not None and known[0] > now:
            return known[1]
        try:
            role, name = tls_of(self._current.now()).judge(b"\n".join(shown), ROLES)
        except PermissionDeniedError as error:
            raise PermissionDeniedError(f"the caller's certificate is refused: {error}") from None
        prefix = NAMESPACE_URI.encode()
        limits = [uri.removeprefix(prefix) for uri in auth_context.get("peer_uri", ()) if uri.startswith(prefix)]
        namespaces = frozenset(limit.decode(errors="replace") for limit in limits)
        who = Caller(Role(role), name, namespaces or None)
        if len(self._known) >= self._KEPT_MAX:
            self._known.clear()
        self._known[shown] = now + JUDGED_FOR_S, who
        return who


def permit(method: str, request: Any, who: Caller) -> None:
    """Check that a rule admits the caller to the method. Raises PermissionDeniedError otherwise."""
    rule = RULES.get(method)
    short = method.rpartition("/")[2]
    if rule is None:
        raise PermissionDeniedError(f"{short}: no certificate may call this, because this release has no rule for it")
    if who.role not in rule.roles:
        raise PermissionDeniedError(
            f"{short}: {who} may not; it takes the role {' or '.join(sorted(role.value for role in rule.roles))}"
        )
    if rule.own and (not who.name or request.name != who.name):
        raise PermissionDeniedError(f'{short} as "{request.name}": {who} may use only its own name')
    for field in rule.names:
        name = getattr(request, field)
        if name and not who.may_see(name):
            allowed = ", ".join(f"{namespace}/..." for namespace in sorted(who.namespaces or ()))
            raise PermissionDeniedError(f'{short} of "{name}": {who} is limited to {allowed}')


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Call: TypeAlias = Callable[[Any, Any], Any]


class RoleInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Applies the rules before each call of a threaded server."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler behind its rule. An unknown method has no handler, and gRPC refuses it."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method

        def ask(request: Any, context: grpc.ServicerContext) -> Any:
            call = _call_of(handler)
            try:
                permit(method, request, self._callers.of(cast(AuthContext, context.auth_context())))
            except PermissionDeniedError as error:
                _log.warning("refused: %s", error)
                context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            return call(request, context)

        return None if handler is None else behind(handler, ask)


class _EndsWithCertificate:
    """Cancels the task of a call that is still waiting when its caller's certificate does not count any more."""

    def __init__(self, callers: Callers, auth_context: AuthContext) -> None:
        """Begin to watch the task that runs now."""
        self.refusal: PermissionDeniedError | None = None
        self._callers, self._auth_context = callers, auth_context
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self._next = self._loop.call_later(JUDGED_FOR_S, self._look)

    def _look(self) -> None:
        try:
            self._callers.of(self._auth_context)
        except PermissionDeniedError as error:
            self.refusal = PermissionDeniedError(str(error), outcome=UNKNOWN)
            if self._task is not None:
                self._task.cancel()
        else:
            self._next = self._loop.call_later(JUDGED_FOR_S, self._look)

    def end(self) -> None:
        self._next.cancel()


class AioGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The same for an asyncio server. Raises PermissionDeniedError to the interceptor around it, and makes the caller
    known to the call. A call that waits ends when its caller's certificate does.
    """

    def __init__(self, callers: Callers, only: frozenset[Role] | None = None) -> None:
        """`only`: refuse all other roles, for a port of these roles alone."""
        self._callers = callers
        self._only = only

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the method's handler behind its rule. An unknown method has no handler, and gRPC refuses it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method

        async def ask(request: Any, context: Any) -> Any:
            call = _call_of(handler)
            auth_context = context.auth_context()
            who = self._callers.of(auth_context)
            if self._only is not None and who.role not in self._only:
                roles = " and ".join(sorted(role.value for role in self._only))
                raise PermissionDeniedError(f"this port is for the roles {roles} alone, not for {who}")
            permit(method, request, who)
            _caller.set(who)
            watch = _EndsWithCertificate(self._callers, auth_context)
            try:
                return await call(request, context)
            except asyncio.CancelledError:
                if watch.refusal is None:
                    raise
                raise watch.refusal from None
            finally:
                watch.end()

        return handler if handler is None else behind(handler, ask)


def _call_of(handler: Handler | None) -> Call:
    """Return the handler's call. Streaming calls have no rules, so nobody may make them."""
    call = getattr(handler, "unary_unary", None)
    if call is None:
        raise PermissionDeniedError("streaming calls are refused, because no rule allows them")
    return cast(Call, call)


def behind(handler: Handler, ask: Call) -> Handler:
    """Return a handler that answers by `ask`, with the messages of `handler`."""
    return grpc.unary_unary_rpc_method_handler(
        ask, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
