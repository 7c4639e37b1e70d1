"""The coordinator's life: start, serve until a signal, stop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
from collections.abc import Iterable
from contextlib import AsyncExitStack
from functools import partial

import grpc.aio
from prometheus_client import CollectorRegistry

from smb.config.host_address import reachable
from smb.config.parse import format_address, parse_address
from smb.coordinator.call_places import CallPlaces
from smb.coordinator.call_rates import CallRates
from smb.coordinator.front import Front, FrontForSessions
from smb.coordinator.health import Health
from smb.coordinator.known_pages import pages_of, targets
from smb.coordinator.leader import Around, Leading, ShownLeader, cancel, end_if_failed
from smb.coordinator.limits import SERVERS_MAX
from smb.coordinator.metrics import CallMetrics, HealthMetrics, LeaseMetrics
from smb.coordinator.options import ETCD, CoordinatorOptions, OwnPorts
from smb.coordinator.rpc_answers import Answers
from smb.coordinator.store import open_store
from smb.daemon.process import (
    Answer,
    Pages,
    check_listen,
    end_with_owner,
    grpc_server_options,
    keep_secrets,
    notify,
    raise_descriptors,
    watchdog_interval_s,
    write_ready_file,
)
from smb.daemon.stop_signals import stop_signals
from smb.errors import UnavailableError
from smb.security.credentials import Credentials, Current, add_port
from smb.security.expiry import ExpiryMetrics
from smb.security.page_access import admission
from smb.security.roles import AioGuard, Callers, Role

TRIM_S = 10.0  # the interval at which freed memory is returned to the system
STOP_GRACE_S = 1.0  # for calls in progress
# At the port for memory servers: one for each, and as many that are ending or of operators.
SERVERS_CONNECTIONS_MAX = 2 * SERVERS_MAX
# Of one connection, in progress at the port for sessions; more wait at their client. Calls of all connections stand in
# one queue there, so this bounds what one connection can put before the renewals of others.
SESSION_CALLS_PER_CONNECTION_MAX = 1

_PATHS = b"There is / (the page for people), /api/state, /metrics, /targets, /healthz, /livez and /readyz.\n"
_log = logging.getLogger("coordinator")


def run(options: CoordinatorOptions) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Blocks; main thread only. Raises smb.errors.Error if it cannot start."""
    raise_descriptors()
    asyncio.run(_serve(options))


async def _serve(options: CoordinatorOptions) -> None:
    stop = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as leaving:
        await _start(options, leaving)
        await stop.wait()
        _log.info("stopping")
        notify("STOPPING=1")
    for number in stop_signals():  # one that comes late, or again, must not change the exit code
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


async def _start(options: CoordinatorOptions, leaving: AsyncExitStack) -> None:
    """Start all parts in the order of their dependencies; `leaving` stops them in the reverse order."""
    end_with_owner()
    if options.credentials is not None or options.etcd_credentials is not None:
        keep_secrets()
    options.check()
    host, port = check_listen(options.listen)
    store, contender_with = None, None
    if options.state.startswith(ETCD) or options.etcd_credentials is not None:
        from smb.coordinator.etcd.contender import contender_of

        contender_with = contender_of(options)
    if contender_with is None:
        store = open_store(options.state)
        leaving.push_async_callback(store.close)
    registry = CollectorRegistry()
    call_metrics = CallMetrics(registry)
    shown = ShownLeader()
    front = Front()

    rates = CallRates()

    def answered(method: str, code: grpc.StatusCode, seconds: float) -> None:
        call_metrics.count(method, code, seconds)
        rates.ended()
        if code is grpc.StatusCode.INTERNAL and shown.leading is not None:
            shown.leading.watch.failed(method, shown.leading.commit_log.now())

    def guards(rates: CallRates | None = None) -> list[AioGuard | CallPlaces]:
        found = options.credentials
        return [] if found is None else [AioGuard(Callers(Current(found))), CallPlaces(rates)]

    def bound(listening: grpc.aio.Server, asked: str | None) -> int:
        """Let it listen there, or at a free port of the host, and return the port."""
        at = asked or format_address(host, 0)
        return _bind(listening, at, format_address(*check_listen(at)), options.credentials)

    ports = 2 if options.credentials is None else 3
    server = grpc.aio.server(
        interceptors=[Answers(answered, front), *guards(rates)], options=grpc_server_options(ports=ports)
    )
    address = format_address(host, _bind(server, options.listen, format_address(host, port), options.credentials))
    front.address = _shown_to_others(address, host)
    server.add_generic_rpc_handlers((front,))
    # Calls of clients wait in gRPC's queue of their port, and if it overflows, any of them is refused. Renewals of
    # leases have a queue of their own: with 8000 calls of one reader in the common one, all servers counted as gone.
    # Operators are admitted there, too: they reach the coordinator by it while others flood the port for all.
    only = (
        []
        if options.credentials is None
        else [AioGuard(Callers(Current(options.credentials)), frozenset({Role.SERVER, Role.OPERATOR}))]
    )
    renewals = grpc.aio.server(
        interceptors=[Answers(answered, front), *only],
        options=grpc_server_options(SERVERS_CONNECTIONS_MAX, ports=ports),
    )
    servers_port, sessions_port = bound(renewals, options.servers), 0
    renewals.add_generic_rpc_handlers((front,))
    listening = [server, renewals]
    if options.credentials is not None:
        # Clients' sessions and tokens are renewed beside all other calls, too, for the same reason.
        sessions = grpc.aio.server(
            interceptors=[Answers(answered, front), *guards()],
            options=grpc_server_options(calls_per_connection_max=SESSION_CALLS_PER_CONNECTION_MAX, ports=ports),
        )
        sessions_port = bound(sessions, options.sessions)
        sessions.add_generic_rpc_handlers((FrontForSessions(front),))
        listening.append(sessions)
    health = Health(address)
    registry.register(HealthMetrics(health))
    if options.credentials is not None:
        registry.register(ExpiryMetrics(Current(options.credentials).now))

    def route(path: str, query: str) -> Answer | None:
        leading, known = shown.leading, shown.known
        if path == "/targets":
            servers = known.servers if leading is None else pages_of(leading.commit_log.state)
            if servers is not None:
                return Answer("200 OK", "application/json", targets(own_pages(), known, servers))
        if leading is not None:
            return leading.page(path, query) or Answer("404 Not Found", "text/plain", _PATHS)
        its_pages = known.coordinators.get(front.leader)
        there = f", whose page is http://{its_pages}/" if its_pages else ""
        text = f"This coordinator stands by. The leader: {front.leader or 'not known'}{there}\n"
        return Answer("503 Service Unavailable", "text/plain", text.encode())

    def own_pages() -> str:
        return _shown_to_others(pages.address, host)

    admit = admission(options.metrics, options.metrics_token_file, insecure=options.insecure, names=(host,))
    pages = Pages(options.metrics, registry, health.show, route, admit)
    leaving.callback(pages.close)
    own_ports = OwnPorts(servers_port, sessions_port)
    around = Around(options, front, health, registry, LeaseMetrics(registry), own_pages, ports=own_ports)
    if store is not None:
        shown.leading = await Leading.open(around, store, lambda: True, 1, leaving)
        await _start_all(listening)
        leaving.push_async_callback(_stop_all, listening)
        leaving.callback(shown.leading.commit_log.stop_waiting)
    elif contender_with is not None:
        contender = contender_with(around, shown)
        leaving.push_async_callback(contender.close)
        await _start_all(listening)
        contending = asyncio.create_task(contender.run())
        contending.add_done_callback(partial(end_if_failed, around.outside))
        leaving.push_async_callback(cancel, contending)
        leaving.push_async_callback(_stop_answering, listening, shown, front)
        await contender.leader_known.wait()
    leaving.push_async_callback(cancel, asyncio.create_task(_trim()))

    _log.info("serving at %s, page and metrics at http://%s/, state in %s", address, pages.address, options.state)
    if options.ready_file is not None:
        write_ready_file(options.ready_file, address=address, metrics=pages.address, name="coordinator")
        leaving.callback(options.ready_file.unlink, missing_ok=True)
    gc.freeze()  # modules stay for good, so neither the collector nor the process's end has to visit them
    notify("READY=1", f"STATUS=serving at {address}")
    interval_s = watchdog_interval_s()
    if interval_s is not None:
        leaving.push_async_callback(cancel, asyncio.create_task(_feed_watchdog(interval_s, health)))


async def _start_all(listening: Iterable[grpc.aio.Server]) -> None:
    for server in listening:
        await server.start()


async def _stop_all(listening: Iterable[grpc.aio.Server]) -> None:
    await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in listening))


async def _stop_answering(listening: Iterable[grpc.aio.Server], shown: ShownLeader, front: Front) -> None:
    front.stop_keeping()
    if shown.leading is not None:
        shown.leading.commit_log.stop_waiting()
    await _stop_all(listening)


def _shown_to_others(address: str, host: str) -> str:
    """Return the address under which others reach the listener; 0.0.0.0 is replaced by this host's name."""
    shown, port = parse_address(address)
    return format_address(reachable(shown or host), port)


def _bind(server: grpc.aio.Server, asked: str, address: str, credentials: Credentials | None) -> int:
    port = add_port(server, address, credentials)
    if port == 0:
        raise UnavailableError(
            f"cannot listen on {asked}: another process took the port just now; choose another address or port 0"
        )
    return port


async def _trim() -> None:
    """Return memory of large requests to the system; glibc would keep it, and a burst would set the size for good."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # another C library
        return
    while True:
        await asyncio.sleep(TRIM_S)
        await asyncio.to_thread(trim, 0)


async def _feed_watchdog(interval_s: float, health: Health) -> None:
    """Tell the watchdog at each interval that the event loop runs and ticks."""
    while True:
        await asyncio.sleep(interval_s)
        if health.alive:
            notify("WATCHDOG=1")
