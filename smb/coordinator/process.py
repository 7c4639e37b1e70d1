"""The coordinator's life: start, serve until told to stop, stop."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from prometheus_client import CollectorRegistry

from smb.cluster import reachable
from smb.config.parse import format_address, parse_address
from smb.config.quotas import Quota
from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.dashboard.history import Watch
from smb.coordinator.dashboard.overview import Overview
from smb.coordinator.dashboard.server import Dashboard
from smb.coordinator.events import Event, Instant, Ticked
from smb.coordinator.health import Health
from smb.coordinator.idle_names import IDLE_S, IDLE_S_MAX, IDLE_S_MIN, IdleNames
from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.metrics import CallMetrics, HealthMetrics, LeaseMetrics, StateMetrics, targets
from smb.coordinator.rpc_interceptor import Answers
from smb.coordinator.service import CoordinatorService, new_id
from smb.coordinator.session_end_notifier import SessionEndNotifier
from smb.coordinator.state import SESSION_LEASE_S, State
from smb.coordinator.store import StoreError, open_store
from smb.coordinator.token_issuer import LIFETIME_S, Tokens
from smb.daemon.process import (
    GRPC_SERVER_OPTIONS,
    Answer,
    Pages,
    check_listen,
    end_with_owner,
    notify,
    watchdog_interval_s,
    write_ready_file,
)
from smb.errors import InvalidArgumentError, UnavailableError
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import add_CoordinatorServicer_to_server
from smb.security.credentials import Credentials, Current, add_port, check_exposure
from smb.security.expiry import ExpiryMetrics
from smb.security.page_access import admission
from smb.security.roles import AioGuard

TICK_S = 0.5  # a lease is seen to have run out at most this late
TRIM_S = 10.0  # how often freed memory goes back to the system
STOP_GRACE_S = 1.0  # for calls under way
SESSION_LEASE_S_MIN, SESSION_LEASE_S_MAX = 1.0, 86_400.0  # below, a client on a busy host loses it; above, it is none

_PATHS = b"There is / (the page for people), /api/state, /metrics, /targets, /healthz, /livez and /readyz.\n"
_log = logging.getLogger("coordinator")


@dataclass(frozen=True, slots=True)
class Options:
    """What `smb coordinator` was told."""

    listen: str
    state: str
    metrics: str
    ready_file: Path | None = None
    session_lease_s: float = SESSION_LEASE_S
    stripe_bytes: int = 0
    checksum: bool = False
    credentials: Credentials | None = None
    insecure: bool = False
    metrics_token_file: Path | None = None
    token_lifetime_s: float = LIFETIME_S
    idle_names_s: float | None = None  # IDLE_S, or the lease where that is longer
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # by namespace


def run(options: Options) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; main thread only. Raises smb.errors.Error where it cannot start."""
    asyncio.run(_serve(options))


async def _serve(options: Options) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as leaving:
        await _start(options, leaving)
        await stop.wait()
        _log.info("stopping")
        notify("STOPPING=1")


async def _start(options: Options, leaving: AsyncExitStack) -> None:
    """Start all parts in the order in which they need each other; `leaving` stops them in the reverse one."""
    end_with_owner()
    check_exposure("a coordinator", parse_address(options.listen)[0], options.credentials, options.insecure)
    host, port = check_listen(options.listen)
    lease_s = options.session_lease_s
    if not SESSION_LEASE_S_MIN <= lease_s <= SESSION_LEASE_S_MAX:
        raise InvalidArgumentError(
            f"--session-lease {lease_s:g}: use {SESSION_LEASE_S_MIN:g} to {SESSION_LEASE_S_MAX:g} seconds"
        )
    idle_s = max(IDLE_S, lease_s) if options.idle_names_s is None else options.idle_names_s
    if not IDLE_S_MIN <= idle_s <= IDLE_S_MAX:
        raise InvalidArgumentError(f"--idle-names {idle_s:g}: use {IDLE_S_MIN:g} to {IDLE_S_MAX:g} seconds")
    if idle_s < lease_s:
        raise InvalidArgumentError(
            f"--idle-names {idle_s:g}: use at least --session-lease, {lease_s:g} seconds: "
            f"a client that is away for less comes back to its locks and barriers"
        )
    store = open_store(options.state)
    leaving.push_async_callback(store.close)
    tokens = None if options.credentials is None else await Tokens.open(store, options.token_lifetime_s)
    begun = time.monotonic()
    commit_log = await CommitLog.open(
        store, new_id(), session_lease_s=lease_s, stripe_bytes=options.stripe_bytes, quotas=options.quotas
    )
    recovery_s = time.monotonic() - begun
    servers = MemoryServers(options.credentials)
    leaving.push_async_callback(servers.close)
    endings = SessionEndNotifier(commit_log, servers)
    leaving.push_async_callback(endings.close)
    registry = CollectorRegistry()
    call_metrics = CallMetrics(registry)
    registry.register(StateMetrics(lambda: (commit_log.state, commit_log.now()), recovery_s))
    leases = LeaseMetrics(registry)
    guards = [] if options.credentials is None else [AioGuard()]
    watch = Watch(commit_log.now())

    def answered(method: str, code: grpc.StatusCode, seconds: float) -> None:
        call_metrics.count(method, code, seconds)
        if code is grpc.StatusCode.INTERNAL:
            watch.failed(method, commit_log.now())

    server = grpc.aio.server(interceptors=[Answers(answered), *guards], options=GRPC_SERVER_OPTIONS)
    address = format_address(host, _bind(server, options.listen, format_address(host, port), options.credentials))
    health = Health(commit_log, store, address)
    watch.look_at_store = lambda: (health.store_error, health.state_free_bytes())
    registry.register(HealthMetrics(health))
    if options.credentials is not None:
        registry.register(ExpiryMetrics(Current(options.credentials).now))

    def saw(event: Event, before: State, committed: Committed, now: Instant) -> None:
        leases.saw(event, before, committed, now)
        watch.saw(event, before, committed, now)

    commit_log.on_commit = saw
    overview = Overview(lambda: (commit_log.state, commit_log.now()), watch, _shown_to_others(address, host))
    shared = pb.SharedSettings(checksum=options.checksum)
    service = CoordinatorService(commit_log, servers, endings, watch, overview, shared, tokens)
    leaving.push_async_callback(service.finish)
    add_CoordinatorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    dashboard = Dashboard(overview)

    def route(path: str, query: str) -> Answer | None:
        if path == "/targets":
            return Answer(
                "200 OK", "application/json", targets(commit_log.state, _shown_to_others(pages.address, host))
            )
        return dashboard(path, query) or Answer("404 Not Found", "text/plain", _PATHS)

    admit = admission(options.metrics, options.metrics_token_file, insecure=options.insecure, names=(host,))
    pages = Pages(options.metrics, registry, health.show, route, admit)
    leaving.callback(pages.close)
    await server.start()
    leaving.push_async_callback(server.stop, STOP_GRACE_S)
    leaving.callback(commit_log.stop_waiting)
    idle_names = IdleNames(commit_log, servers, service.drop, idle_s)
    for beginning in (_tick(commit_log, endings, health), _trim(), idle_names.run()):
        leaving.push_async_callback(_cancel, asyncio.create_task(beginning))

    _log.info("serving at %s, page and metrics at http://%s/, state in %s", address, pages.address, options.state)
    if options.ready_file is not None:
        write_ready_file(options.ready_file, address=address, metrics=pages.address, name="coordinator")
        leaving.callback(options.ready_file.unlink, missing_ok=True)
    notify("READY=1", f"STATUS=serving at {address}")
    interval_s = watchdog_interval_s()
    if interval_s is not None:
        leaving.push_async_callback(_cancel, asyncio.create_task(_feed_watchdog(interval_s, health)))


def _shown_to_others(address: str, host: str) -> str:
    """Return where others find what listens at the address: 0.0.0.0 is nobody's address."""
    shown, port = parse_address(address)
    return format_address(reachable(shown or host), port)


def _bind(server: grpc.aio.Server, asked: str, address: str, credentials: Credentials | None) -> int:
    port = add_port(server, address, credentials)
    if port == 0:
        raise UnavailableError(
            f"cannot listen on {asked}: it was taken this very moment; choose another address or port 0"
        )
    return port


async def _tick(commit_log: CommitLog, endings: SessionEndNotifier, health: Health) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        with suppress(StoreError):  # the commit log has said it, once; the next tick tries again
            endings.tell(await commit_log.commit(Ticked()))
        health.ticked()


async def _trim() -> None:
    """Give back what large requests took: glibc keeps it, and a burst of them would be the process's size for good."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # another C library
        return
    while True:
        await asyncio.sleep(TRIM_S)
        await asyncio.to_thread(trim, 0)


async def _feed_watchdog(interval_s: float, health: Health) -> None:
    """Tell the watchdog that the event loop goes round, and its ticks with it."""
    while True:
        await asyncio.sleep(interval_s)
        if health.alive:
            notify("WATCHDOG=1")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
