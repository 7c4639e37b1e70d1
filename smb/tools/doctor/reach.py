"""Checks of the path to a cluster: the coordinator and its clock, and each server over each transport.

Measures round trip and speed, for which it makes a small buffer on each server and deletes it again.
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

import smb
from smb.config.host_address import addresses_of
from smb.config.parse import parse_address, parse_addresses
from smb.config.transports import CHOICES
from smb.errors import Error, InvalidArgumentError, OutOfMemoryError, PermissionDeniedError, UnavailableError
from smb.security.credentials import find
from smb.security.expiry import NOW_DAYS, SOON_DAYS, days_left, ends_of
from smb.security.roles import namespaces_in
from smb.spi import session_of
from smb.tools.doctor.findings import Finding, advice, fine, problem
from smb.transport.base import NO_RDMA_HERE
from smb.transport.choose import TRY_AUTO

_PROBE_BYTES = 4 << 20
_ROUND_TRIPS = 200
_REPEATS = 8
_CLOCK_BAD_S = 2.0  # certificates are then not yet valid, or no longer; ages in `smb status` are wrong
_SLOW = 0.5  # fraction of the other servers' median
_IP_MTU = 14  # linux/in.h
_LISTENS_S = 1.0  # limit of a connection on this machine


def somebody_listens(address: str) -> bool:
    """Return True if a connection to the address succeeds."""
    try:
        socket.create_connection(parse_address(address), _LISTENS_S).close()
    except OSError:
        return False
    return True


def look_at_cluster(address: str, timeout: float = 5.0) -> Iterator[Finding]:
    """Yield the findings; each server takes about a second. Never raises smb.Error, which becomes a finding."""
    try:
        parse_addresses(address)
        yield from _certificates()
        started = time.monotonic()
        with smb.connect(address, timeout=timeout) as client:
            joined_s = time.monotonic() - started
            yield from _coordinator(client, address, joined_s)
            servers = client.servers()
            if not servers:
                yield problem(
                    "servers", "no memory server has registered", f"start one: smb-memserver --coordinator {address}"
                )
            speeds: dict[str, float] = {}
            for server in servers:
                yield from _server(address, client, server, timeout, speeds)
            yield from _slow(speeds)
    except InvalidArgumentError as error:
        yield problem("coordinator", str(error), "`smb config` shows where it is set")
    except Error as error:
        yield _failed(
            "coordinator", error, "check that it is running and that no firewall is in between; see docs/repair.md"
        )


def _coordinator(client: smb.Client, address: str, joined_s: float) -> Iterator[Finding]:
    trips, offsets = [], []
    for _ in range(5):
        began, before = time.time(), time.monotonic()
        clock = session_of(client).coordinator.clock(client.timeout)
        trips.append(time.monotonic() - before)
        offsets.append((clock - began - trips[-1] / 2, trips[-1]) if clock else (0.0, 0.0))
    trip_s = statistics.median(trips)
    found = f"{address}: joined in {joined_s * 1e3:.1f} ms, a call takes {trip_s * 1e3:.2f} ms{_mtu_towards(address)}"
    yield fine("coordinator", found, call_s=trip_s)
    offset_s, by_s = min(offsets, key=lambda pair: pair[1])
    direction = "ahead" if offset_s > 0 else "behind"
    found = f"the coordinator's is {abs(offset_s) * 1e3:.1f} ms {direction} (+- {by_s * 500:.1f} ms)"
    if by_s == 0.0:
        yield fine("clock", "the coordinator does not tell its own")
    elif abs(offset_s) > _CLOCK_BAD_S:
        change = "run chrony or systemd-timesyncd on both: certificates are checked by the clock"
        yield problem("clock", found, change, offset_s=offset_s)
    else:
        yield fine("clock", found, offset_s=offset_s)


def _namespaces() -> list[str]:
    """Return the namespaces to which this user's certificate is limited. The certificate is not checked here."""
    credentials = find()
    return namespaces_in(credentials.certificate) if credentials is not None else []


def _certificates() -> Iterator[Finding]:
    """Check the certificates that this user presents and trusts; every daemon reports its own in its metrics."""
    credentials = find()
    if credentials is None:
        return
    for whose, end in ends_of(credentials).items():
        path = credentials.certificate_path if whose == "own" else credentials.ca_path
        left = days_left(end)
        found = f"{path} is good for {left:.0f} days" if left >= 0 else f"{path} expired {-left:.0f} days ago"
        change = (
            "issue another one from the same authority, and put it there (docs/repair.md, SmbCertificateExpiresSoon)"
        )
        if left < NOW_DAYS:
            yield problem("certificate", found, change, days=left)
        elif left < SOON_DAYS:
            yield advice("certificate", found, change, days=left)
        else:
            yield fine("certificate", found, days=left)


def _mtu_towards(address: str) -> str:
    """Return the route's MTU to the first coordinator, as the kernel knows it; sends nothing."""
    try:
        first = parse_address(parse_addresses(address)[0])
        for family, where in addresses_of(*first, socket.SOCK_DGRAM):
            if family == socket.AF_INET:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(where)
                    return f", MTU {probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)}"
        return ""
    except OSError:
        return ""


def _server(
    address: str, client: smb.Client, server: smb.ServerInfo, timeout: float, speeds: dict[str, float]
) -> Iterator[Finding]:
    check = f"server {server.name}"
    if server.unheard:
        yield advice(check, "not measured: the coordinator has not heard of it since it was started", "try again soon")
        return
    if not server.alive:
        ago = f"{time.time() - server.last_seen:.0f} s ago"
        yield problem(check, f"gone, last seen {ago} at {server.address}", "start it again, or see its log")
        return
    inside = next((f"{namespace}/" for namespace in _namespaces()), "")
    name = f"{inside}smb-doctor/{socket.gethostname()[:64].lower()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        client.create(name, _PROBE_BYTES, "uint8", servers=[server.name])
    except PermissionDeniedError as error:
        yield advice(check, f"not measured: {error}", "use a certificate that may create buffers")
        return
    except OutOfMemoryError as error:
        yield advice(check, f"not measured: {error}", "delete buffers, or add a server")
        return
    except Error as error:
        change = f"let the coordinator reach the server's control port on {server.address.rpartition(':')[0]}"
        yield problem(check, str(error), change)
        return
    try:
        for transport in CHOICES[1:]:
            yield _measured(address, server, name, transport, timeout, speeds)
    finally:
        client.delete(name, missing_ok=True)


def _measured(
    address: str, server: smb.ServerInfo, name: str, transport: str, timeout: float, speeds: dict[str, float]
) -> Finding:
    check = f"server {server.name} over {transport}"
    try:
        with smb.connect(address, transport=transport, timeout=timeout) as client:
            buffer = client.open(name)
            data = np.zeros(_PROBE_BYTES, np.uint8)
            buffer.write(data)
            trip_s = statistics.median(_times(lambda: buffer.read(0, 1), _ROUND_TRIPS))
            write_s = min(_times(lambda: buffer.write(data), _REPEATS))
            read_s = min(_times(lambda: buffer.read(out=data), _REPEATS))
            used = buffer.transports
    except smb.TransportError as error:
        if transport == "tcp":
            return problem(check, str(error), "open the server's port in the firewall, or set its --advertise")
        why = str(error).partition(f" can't be reached over {transport}: ")[2].removesuffix(TRY_AUTO)
        if why.startswith(NO_RDMA_HERE):
            return fine(check, "no: this machine has no RDMA, as said above")
        return fine(check, f"no: {why or error}")
    except Error as error:
        if transport == "tcp" or not isinstance(error, (InvalidArgumentError, UnavailableError)):
            return _failed(check, error, "open the server's port in the firewall, or set its --advertise")
        return fine(check, f"no: {error}")
    if transport not in used:  # SMB_TRANSPORT overrides the requested one
        return advice(check, f"not measured: {', '.join(used)} was used", "unset SMB_TRANSPORT")
    if transport == "tcp":
        speeds[server.name] = _PROBE_BYTES / min(write_s, read_s)
    rates = [_PROBE_BYTES / seconds / 1e9 for seconds in (write_s, read_s)]
    path = f"{server.address}{_mtu_towards(server.address)}: " if transport == "tcp" else ""
    found = f"{path}round trip {trip_s * 1e6:.3g} us, write {rates[0]:.3g} GB/s, read {rates[1]:.3g} GB/s"
    return fine(check, found, round_trip_s=trip_s, write_bytes_per_s=rates[0] * 1e9, read_bytes_per_s=rates[1] * 1e9)


def _times(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def _slow(speeds: dict[str, float]) -> Iterator[Finding]:
    """Report slow servers: a striped call ends with its slowest server."""
    if len(speeds) < 3:
        return
    middle = statistics.median(speeds.values())
    for name, speed in speeds.items():
        if speed < _SLOW * middle:
            found = f"{speed / 1e9:.3g} GB/s over tcp, where half of the servers do {middle / 1e9:.3g} or more"
            change = f"look at its link and load; or give it --weight {speed / middle:.2g} beside 1 of the others"
            yield advice(f"server {name}", found, change)


def _failed(check: str, error: Error, change: str) -> Finding:
    """Return a problem. Messages of smb.errors end with advice; `change` is for those that do not."""
    text = str(error)
    what, semicolon, advised = text.rpartition("; ")
    return problem(check, what, advised) if semicolon else problem(check, text, change)
