"""The benchmark: every operation, size and transport beside its limit, on a cluster of its own or a running one."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import smb
from smb.config.parse import parse_address
from smb.config.settings import find
from smb.errors import Error, InvalidArgumentError
from smb.tools.bench.limits import Contenders, Limit, memory_limit, no_limit, socket_limit
from smb.tools.bench.measure import Measurement, summarize, time_interleaved

Array = NDArray[np.float32]
ITEM_BYTES = 4
_OURS = "smb"
_OPERATIONS = ("write", "read", "accumulate")


@dataclass(frozen=True)
class BenchConfig:
    """What to measure: sizes in bytes (multiples of 4), seconds for every line, number of memory servers.

    With coordinator None, a cluster of real daemons on loopback runs for the time of the benchmark. Raises
    InvalidArgumentError for sizes that are not whole float32 elements.
    """

    transports: tuple[str, ...] = ("shm", "tcp")
    sizes: tuple[int, ...] = (8, 4 << 10, 256 << 10, 4 << 20, 64 << 20)
    seconds: float = 0.4
    servers: int = 2
    coordinator: str | None = None

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size <= 0 or size % ITEM_BYTES:
                raise InvalidArgumentError(
                    f"sizes must be positive multiples of {ITEM_BYTES} bytes (one float32), not {size}"
                )
        if not self.sizes or not self.transports or self.seconds <= 0 or self.servers <= 0:
            raise InvalidArgumentError(
                "sizes and transports must not be empty, and seconds and servers must be positive"
            )


def run_bench(config: BenchConfig, on_line: Callable[[Measurement], None] | None = None) -> list[Measurement]:
    """Measure everything; on_line is called after each line. Blocks, about `seconds` times the number of lines.

    Raises Error if a buffer does not contain the bytes that were written or added: the speed of wrong results is
    worthless.
    """
    _check_override(config.transports)
    lines = []
    with _cluster(config) as address:
        for transport in config.transports:
            with smb.connect(address, transport=transport) as client, _limit(client, transport) as limit:
                for line in _measure_transport(client, config, limit):
                    lines.append(line)
                    if on_line is not None:
                        on_line(line)
    return lines


def _check_override(transports: tuple[str, ...]) -> None:
    """Raise InvalidArgumentError if SMB_TRANSPORT would replace the transports to measure in smb.connect."""
    forced = find("client.transport")
    if forced and any(transport != forced.text for transport in transports):
        raise InvalidArgumentError(
            f"{forced.where} ({forced.text}) overrides the transports to measure ({', '.join(transports)}); unset it"
        )


@contextmanager
def _cluster(config: BenchConfig) -> Iterator[str]:
    if config.coordinator is not None:
        yield config.coordinator
        return
    # Twice the largest buffer in all: placement is never the bottleneck, and headers find room.
    capacity = 2 * max(config.sizes) // config.servers + (32 << 20)
    with smb.LocalCluster(servers=config.servers, capacity=capacity) as cluster:
        yield cluster.address


@contextmanager
def _limit(client: smb.Client, transport: str) -> Iterator[Limit]:
    """Yield the limit to compare with: memory for shm, a bare socket for tcp on loopback.

    There is none for RDMA (perftest is a separate program), for other hosts and for a mix.
    """
    if transport == "auto":
        with _temporary_buffer(client, 1, "float32", servers=None) as probe:
            reached = set(probe.transports)
        transport = reached.pop() if len(reached) == 1 else "mixed"
    if transport == "shm":
        yield memory_limit
    elif transport == "tcp" and all(_is_loopback(server.address) for server in client.servers()):
        with socket_limit() as limit:
            yield limit
    else:
        yield no_limit


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(parse_address(address)[0]).is_loopback
    except ValueError:
        return False


@contextmanager
def _temporary_buffer(client: smb.Client, count: int, dtype: str, servers: int | None) -> Iterator[smb.Buffer]:
    buffer = client.create(f"bench/{secrets.token_hex(8)}", (count,), dtype, servers=servers)
    try:
        yield buffer
    finally:
        client.delete(buffer.name, missing_ok=True)


def _measure_transport(client: smb.Client, config: BenchConfig, limit: Limit) -> Iterator[Measurement]:
    for size in config.sizes:
        with _temporary_buffer(client, size // ITEM_BYTES, "float32", _server_count(config, size)) as buffer:
            for operation in _OPERATIONS:
                yield _measure_array(buffer, operation, limit, config.seconds)
    with _temporary_buffer(client, 1, "int64", servers=None) as counter:
        yield _measure_fetch_add(counter, limit, config.seconds)


def _server_count(config: BenchConfig, size: int) -> int | None:
    """Return all servers of the benchmark's own cluster if a buffer has a stripe for each. In other clusters placement
    decides.
    """
    stripe_bytes = 1 << 20
    return config.servers if config.coordinator is None and size >= stripe_bytes * config.servers else None


def _measure_array(buffer: smb.Buffer, operation: str, limit: Limit, seconds: float) -> Measurement:
    transport = _way(buffer)
    expected = _pattern(buffer.size)
    array = np.zeros_like(expected) if operation == "read" else expected.copy()
    buffer.write(expected) if operation == "read" else buffer.fill(0)
    ours: dict[str, Callable[[], object]] = {
        "write": lambda: buffer.write(array),
        "read": lambda: buffer.read(out=array),
        "accumulate": lambda: buffer.accumulate(array),
    }
    calls = _CountedCalls(ours[operation])
    # The limit's reads use another array: the values checked below must have come from the buffer.
    limit_array = np.ones_like(array) if operation == "read" else array
    with ExitStack() as stack:
        contenders: Contenders = {_OURS: calls, **limit(operation, limit_array, stack)}
        times = time_interleaved(contenders, seconds)
    got = array if operation == "read" else buffer.read()
    _check(got, expected * np.float32(calls.count) if operation == "accumulate" else expected, operation, transport)
    return summarize(transport, operation, array.nbytes, times, _OURS)


def _measure_fetch_add(counter: smb.Buffer, limit: Limit, seconds: float) -> Measurement:
    transport = _way(counter)
    counter.fill(0)
    calls = _CountedCalls(lambda: counter.fetch_add(0, 3))
    with ExitStack() as stack:
        two_floats = np.ones(2, dtype=np.float32)
        contenders: Contenders = {_OURS: calls, **limit("fetch_add", two_floats, stack)}
        times = time_interleaved(contenders, seconds)
    _check(counter.read(), np.array([3 * calls.count]), "fetch_add", transport)
    return summarize(transport, "fetch_add", 8, times, _OURS)


def _way(buffer: smb.Buffer) -> str:
    """Return the transports over which the buffer is actually reached: those that "auto" chose."""
    return "+".join(buffer.transports)


class _CountedCalls:
    """A call that counts how often it was made."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.count = 0
        self._call = call

    def __call__(self) -> None:
        self.count += 1
        self._call()


def _pattern(count: int) -> Array:
    """Return integers below 2^11, shape (count,), that depend on the position without a short period."""
    positions = np.arange(count, dtype=np.uint32)
    positions *= np.uint32(2654435761)  # Knuth's multiplicative hash
    return (positions >> np.uint32(21)).astype(np.float32)


def _check(got: NDArray[np.generic], expected: NDArray[np.generic], operation: str, transport: str) -> None:
    wrong = np.flatnonzero(got.ravel() != expected.ravel())
    if len(wrong):
        first = int(wrong[0])
        raise Error(
            f"{operation} over {transport}: {len(wrong)} of {expected.size} elements are wrong; element {first} is "
            f"{got.ravel()[first]}, expected {expected.ravel()[first]}"
        )
