"""The memory server's life: take the name, find what an earlier run left, serve, register, and undo all of it at the
end.

Threads: the main thread waits for signals, which the other threads block. The engine's loops serve data, gRPC's pool
makes and drops segments, one thread keeps the registration, and the pages have their own.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from memserver import tls
from memserver.control import ControlServer
from memserver.earlier_memory import take_in
from memserver.engine import LOOPS_MAX, Engine
from memserver.life import Life
from memserver.load import LastLook, load_of
from memserver.memory_dir import MemoryDirectory
from memserver.metrics import EngineMetrics
from memserver.rdma_target import RdmaTarget, settings_of
from memserver.recovery import recover
from memserver.registrant import Identity, MissingNames, Registrant
from memserver.registration_thread import Registration
from memserver.relays import RelayMetrics, Relays
from memserver.replication import Replication
from memserver.segments import Segments
from memserver.stamps import Stamps, StampsFile
from memserver.usage_by_client import Names
from smb.config.host_address import addresses_of, bindable
from smb.config.parse import check_weight, format_address, format_bytes, parse_address, parse_addresses
from smb.daemon.host_memory import MemoryLimit
from smb.daemon.private_directory import take_memory_directory
from smb.daemon.process import (
    Pages,
    check_listen,
    end_with_owner,
    keep_secrets,
    notify,
    raise_descriptors,
    watchdog_interval_s,
    write_ready_file,
)
from smb.daemon.stop_signals import stop_signals
from smb.errors import Error, InvalidArgumentError, UnavailableError
from smb.rpc import control_pb2 as pb
from smb.security.credentials import Credentials, Current, check_exposure
from smb.security.expiry import ExpiryMetrics
from smb.security.page_access import admission

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - asked for by the user

_log = logging.getLogger("memserver")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of `smb-memserver`."""

    coordinator: str
    listen: str
    capacity_bytes: int
    memory_dir: Path
    metrics: str
    name: str
    loops: int
    weight: float = 1.0
    zone: str = ""
    host_name: str = ""
    advertise: str = ""
    ready_file: Path | None = None
    verbs: Mapping[str, str] | None = None  # settings, SMB_VERBS_...; None: no RDMA
    credentials: Credentials | None = None
    insecure: bool = False
    metrics_token_file: Path | None = None
    data_tls: str = tls.AUTO
    copy_rate: int = 0  # bytes per second of new copies; 0: no bound
    control: str = ""  # empty: a free port where data is listened for


def default_name() -> str:
    """Return the host's name, as far as it can name a server."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "server"


def run(options: ServerOptions) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Blocks; main thread only. Raises smb.errors.Error if it cannot start."""
    _check(options)
    raise_descriptors()
    with _StopSignals() as stop_signals, ExitStack() as leaving:
        failures: list[Error] = []
        served = _start(options, leaving, failures)
        interval_s = watchdog_interval_s()
        if interval_s is not None:
            stop = threading.Event()
            leaving.callback(stop.set)
            threading.Thread(target=_feed_watchdog, args=(served, interval_s, stop), daemon=True).start()
        stop_signals.wait()
        if failures:
            raise failures[0]
        _log.info("stopping")
        notify("STOPPING=1")


class _StopSignals:
    """Turns stop signals into bytes in a socket, for the time of the context, so that none ends the process by itself.

    Threads that are started before wait() inherit a mask that blocks these signals. That is not enough: a library
    (numpy's arithmetic) starts threads when it is imported, which do not block them and get the signals that the main
    thread does not take. So there is also a handler, and Python writes into the socket whichever thread the signal hit.
    """

    def __enter__(self) -> _StopSignals:
        ends = stop_signals()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._handlers = {each: signal.signal(each, lambda _number, _frame: None) for each in ends}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        return self

    def wait(self) -> None:
        """Block until the first stop signal. A signal since the beginning of the context counts."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._woken.recv(1)

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for each, handler in self._handlers.items():
            # The process ends now. A signal that comes late, or again, must not change its exit code.
            usual = handler in (signal.SIG_DFL, signal.default_int_handler)
            signal.signal(each, signal.SIG_IGN if usual else handler)
        signal.set_wakeup_fd(self._wakeup)
        self._woken.close()
        self._wake.close()


def _start(options: ServerOptions, leaving: ExitStack, failures: list[Error]) -> Segments:
    """Start all parts in the order of their dependencies; `leaving` stops them in the reverse order."""
    end_with_owner()
    if options.credentials is not None:
        keep_secrets()
    host, port = parse_address(options.listen)
    numeric = _numeric(host)  # first, so that an unknown name is reported as such
    check_exposure("a memory server", host, options.credentials, options.insecure)
    memory_dir = MemoryDirectory(take_memory_directory(options.memory_dir), options.name)
    leaving.callback(memory_dir.close)
    take_in(memory_dir)
    memory_dir.check_capacity(options.capacity_bytes)
    limit = MemoryLimit() if memory_dir.counts_as_memory() else None
    if limit is not None:
        limit.check_capacity(options.capacity_bytes)
    instance_id = secrets.randbits(64) or 1
    engine = Engine(instance_id, options.loops, options.capacity_bytes)
    leaving.callback(engine.close)
    segments = Segments(engine, memory_dir, options.capacity_bytes, limit)
    life = recover(engine, memory_dir, segments, options.capacity_bytes)

    if options.credentials is not None:
        engine.guard()
    secured = tls.is_on(options.data_tls, options.credentials)
    current = Current(options.credentials) if options.credentials is not None else None
    data_tls = tls.DataTls(engine, current) if secured and current is not None else None
    if data_tls is not None:
        leaving.callback(data_tls.close)
    data_port = engine.listen_tcp(numeric, port)
    engine.listen_unix(memory_dir.socket_path)
    verbs = None if options.data_tls == tls.ON or options.verbs is None else settings_of(options.verbs)
    rdma = RdmaTarget(engine, instance_id, verbs)
    if options.data_tls == tls.ON:
        rdma.why_not = "its data uses TLS only (--data-tls on), and RDMA is not encrypted"
    leaving.callback(rdma.close)
    segments.sessions.on_end = rdma.end_session
    check_proof = engine.check_proof if options.credentials is not None else None
    asked_host, asked_port = check_listen(options.control) if options.control else (host, 0)
    control_host = _numeric(asked_host)
    check_exposure("a memory server", control_host, options.credentials, options.insecure)
    shown = data_tls.now if data_tls is not None else None
    replication = Replication(engine, options.copy_rate, shown, segments.quarantined.role_taken)
    leaving.callback(replication.close)

    def forget(segment_id: int) -> None:
        rdma.forget_segment(segment_id)
        replication.forget(segment_id)

    segments.on_drop = forget
    stamps = Stamps(StampsFile(memory_dir.stamps_path))
    control = ControlServer(
        control_host, asked_port, segments, rdma, replication, stamps, options.credentials, check_proof
    )
    leaving.callback(control.close)
    reachable, advertised_port = _advertised(options.advertise)
    reachable = reachable or (_address_towards(options.coordinator) if numeric in _ANY_ADDRESS else host)
    address = format_address(reachable, advertised_port or data_port)

    relays = Relays(options.coordinator, options.name, options.credentials)
    leaving.callback(relays.close)
    registry = CollectorRegistry()
    registry.register(RelayMetrics(relays))
    health = _Health(options, address, segments, life)
    buffers, clients = Names(), Names()
    registry.register(EngineMetrics(engine, segments, options.capacity_bytes, health.life, buffers, clients))
    if current is not None:
        registry.register(ExpiryMetrics(current.now))
    admit = admission(options.metrics, options.metrics_token_file, insecure=options.insecure, names=(reachable,))
    pages = Pages(options.metrics, registry, health.show, admit=admit)
    leaving.callback(pages.close)
    identity = Identity(
        name=options.name,
        instance_id=instance_id,
        data_address=address,
        control_address=format_address(
            reachable if control_host in (*_ANY_ADDRESS, numeric) else asked_host, control.port
        ),
        unix_path=str(memory_dir.socket_path),
        metrics_address=_shown_to_others(pages.address, reachable),
        capacity_bytes=options.capacity_bytes,
        weight=options.weight,
        data_tls=secured,
        zone=options.zone,
        host_name=options.host_name,
    )
    _log.info("serving at %s, %s of %s", address, format_bytes(options.capacity_bytes), options.memory_dir)

    def decided(failure: Error | None) -> None:
        try:
            if failure is not None:
                raise failure
            if options.ready_file is not None:
                write_ready_file(options.ready_file, address=address, metrics=pages.address, name=options.name)
        except Error as error:  # this runs in the registration's thread, while the main thread waits for a signal
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    if options.ready_file is not None:
        leaving.callback(options.ready_file.unlink, missing_ok=True)

    def take_keys(access: pb.AccessKeys) -> None:
        engine.set_keys({each.generation: each.key for each in access.keys}, access.now_ms)

    last = LastLook(clients, buffers)
    registrant = Registrant(
        options.coordinator,
        identity,
        segments,
        lambda: load_of(engine, memory_dir, last, limit),
        MissingNames(engine, buffers, clients),
        decided,
        take_keys,
        replication,
        relays,
        stamps,
    )
    health.registration = Registration(registrant, options.credentials, replication, relays)
    leaving.callback(health.registration.close)
    # Ready before it is registered: data is served even without a coordinator, and the supervisor must not give up.
    gc.freeze()  # modules stay for good, so neither the collector nor the process's end has to visit them
    notify("READY=1", f"STATUS=serving at {address}")
    return segments


def _feed_watchdog(served: Segments, interval_s: float, stop: threading.Event) -> None:
    """Tell the supervisor's watchdog at each interval that the engine answers."""
    while not stop.wait(interval_s):
        served.used_bytes()  # hangs if one of the engine's locks is never released
        notify("WATCHDOG=1")


class _Health:
    """The answer of /healthz. A server without its coordinator is healthy, because it goes on serving data."""

    def __init__(self, options: ServerOptions, address: str, segments: Segments, life: Life) -> None:
        self._options = options
        self._address = address
        self._segments = segments
        self._life = life
        self.registration: Registration | None = None

    def life(self) -> Life:
        """Return the metrics of this run as they are now."""
        self._life.connected = self.connected()
        self._life.leases_lost = self.registration.leases_lost if self.registration is not None else 0
        return self._life

    def connected(self) -> bool:
        """Whether the coordinator answered the last call."""
        return self.registration is not None and self.registration.connected()

    def show(self) -> Mapping[str, Any]:
        return {
            "ok": True,
            "role": "memory server",
            "name": self._options.name,
            "address": self._address,
            "pid": os.getpid(),
            "coordinator": self._options.coordinator,
            "coordinator_connected": self.connected(),
            "segments": len(self._segments.ids()),
            "used_bytes": self._segments.used_bytes(),
            "capacity_bytes": self._options.capacity_bytes,
        }


def _check(options: ServerOptions) -> None:
    if not _NAME.fullmatch(options.name):
        raise InvalidArgumentError(f'--name must be 1 to 64 characters of A-Z a-z 0-9 . _ -, not "{options.name}"')
    if options.capacity_bytes <= 0:
        raise InvalidArgumentError(f"--capacity must be more than 0, not {options.capacity_bytes}")
    if not 1 <= options.loops <= LOOPS_MAX:
        raise InvalidArgumentError(f"--loops must be from 1 to {LOOPS_MAX}, not {options.loops}")
    check_weight("--weight", options.weight)
    if options.verbs is not None:
        settings_of(options.verbs)
    tls.is_on(options.data_tls, options.credentials)
    if any(parse_address(address)[1] == 0 for address in parse_addresses(options.coordinator)):
        raise InvalidArgumentError(f"--coordinator {options.coordinator}: port 0 cannot be connected to; give its port")


def _shown_to_others(metrics: str, reachable: str) -> str:
    """Return the address under which others reach the pages; a wildcard address is replaced by `reachable`."""
    host, port = parse_address(metrics)
    return format_address(reachable, port) if host in _ANY_ADDRESS else metrics


def _advertised(advertise: str) -> tuple[str, int]:
    """Return --advertise as (host, port). Port 0: no port was given."""
    if advertise.startswith("[") or advertise.count(":") == 1:
        return parse_address(advertise)
    return advertise, 0


def _numeric(host: str) -> str:
    """Return the host as a numeric address to listen on; the engine resolves no names."""
    try:
        return bindable(host, 0)[1]
    except OSError as error:
        raise UnavailableError(f"--listen {host}: {error.strerror or error}") from None


def _address_towards(coordinator: str) -> str:
    """Return the local address on the route to the coordinator. Sends nothing: connecting a datagram socket only picks
    the route.
    """
    why = ""
    for address in parse_addresses(coordinator):  # some of the coordinators may be unresolvable now
        host, port = parse_address(address)
        try:
            found = addresses_of(host, port, socket.SOCK_DGRAM)
        except OSError as error:
            why = why or error.strerror or str(error)
            continue
        for family, where in found:
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(where)
                    return str(probe.getsockname()[0])
            except OSError as error:
                why = why or error.strerror or str(error)
    raise UnavailableError(
        f"cannot find the address by which clients reach this host ({why}); give it with --advertise"
    )
