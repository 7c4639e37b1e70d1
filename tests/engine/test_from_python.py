"""The engine as Python has it: clients in several processes, servers in this one, each segment reached in any way."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from memserver.engine import Engine, SegmentForm
from smb.engine import (
    BufferHandle,
    EngineClient,
    EngineError,
    Lane,
    Link,
    Opcode,
    Outcome,
    Request,
    Segment,
    Status,
    memory_of,
    segment_bytes,
)
from tests.support.clients import spawn
from tests.support.daemons import wait_for
from tests.support.raw import HEADER, Dtype, Flag, Frame, Op

EPOCH = 4
CHUNK_BYTES = 65536
STRIPE_BYTES = 262144
SERVERS = 3
ELEMENTS = 300_001
TIMEOUT_MS = 20_000
WAYS = ("tcp", "unix", "shm", "mixed")
DTYPES = {Dtype.INT64: np.dtype(np.int64), Dtype.FLOAT32: np.dtype(np.float32)}


@dataclass(frozen=True)
class Place:
    """Where the servers are, as another process is told."""

    ports: tuple[int, ...]
    sockets: tuple[str, ...]
    dtype: int
    nbytes: int


class Reach:
    """One client and one buffer over all segments."""

    def __init__(self, place: Place, way: str, session: int) -> None:
        self.client = EngineClient(session)
        self.handle = BufferHandle(self.client, place.nbytes, STRIPE_BYTES, CHUNK_BYTES, SERVERS, place.dtype)
        self.links: list[Link] = []
        for index in range(SERVERS):
            chosen = WAYS[index % 3] if way == "mixed" else way
            if chosen == "tcp":
                link, _ = self.client.connect_tcp("127.0.0.1", place.ports[index], Lane.TCP_DATA, TIMEOUT_MS)
            else:
                link, _ = self.client.connect_unix(place.sockets[index], Lane.UNIX_ATTACH, TIMEOUT_MS)
            self.links.append(link)
            if chosen == "shm":
                self.handle.set_local(index, link.attach(index + 1, EPOCH, TIMEOUT_MS))
            else:
                self.handle.set_link(index, index + 1, EPOCH, link)

    def add(self, array: np.ndarray, offset: int = 0) -> None:
        at = offset * array.itemsize
        result = self.handle.transfer(
            Request(Opcode.ACCUMULATE, at, array.nbytes, memory_of(array), op=Op.SUM), TIMEOUT_MS
        )
        assert result == 0

    def read(self, dtype: np.dtype, count: int) -> np.ndarray:
        array = np.empty(count, dtype)
        assert self.handle.transfer(Request(Opcode.READ, 0, array.nbytes, sink=memory_of(array)), TIMEOUT_MS) == 0
        return array


@pytest.fixture
def memory() -> Iterator[Path]:
    path = Path("/dev/shm") / f"smb-engine-{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.fixture(params=DTYPES, ids=[str(dtype) for dtype in DTYPES.values()])
def place(request: pytest.FixtureRequest, memory: Path, tmp_path: Path) -> Iterator[Place]:
    """Three servers, one segment each."""
    dtype = request.param
    nbytes = ELEMENTS * DTYPES[dtype].itemsize
    engines = [Engine(100 + index, loops=1, capacity_bytes=64 << 20) for index in range(SERVERS)]
    for index, engine in enumerate(engines):
        size = segment_bytes(nbytes, STRIPE_BYTES, CHUNK_BYTES, SERVERS, index)
        engine.create_segment(memory / str(index), SegmentForm(index + 1, EPOCH, dtype, size, CHUNK_BYTES))
        engine.listen_unix(tmp_path / str(index))
    ports = tuple(engine.listen_tcp("127.0.0.1", 0) for engine in engines)
    sockets = tuple(str(tmp_path / str(index)) for index in range(SERVERS))
    yield Place(ports, sockets, dtype, nbytes)
    for engine in engines:
        engine.close()


def deltas(dtype: np.dtype) -> np.ndarray:
    """Whole numbers that depend on the position, so that a misplaced addition is seen."""
    return (np.arange(ELEMENTS) % 251 + 1).astype(dtype)


def range_of(worker: int, turn: int) -> tuple[int, int]:
    random = np.random.default_rng((worker, turn))
    start = int(random.integers(0, ELEMENTS))
    return start, int(random.integers(start + 1, ELEMENTS + 1))


def add_ranges(place: Place, way: str, worker: int, turns: int) -> None:
    """Run in a process of its own."""
    reach = Reach(place, way, worker + 1)
    values = deltas(DTYPES[Dtype(place.dtype)])
    for turn in range(turns):
        start, end = range_of(worker, turn)
        reach.add(values[start:end], start)


def test_sums_of_processes_are_exact(place: Place) -> None:
    """Four processes, by TCP, Unix socket, mapping and all of them, add to overlapping ranges on three servers."""
    turns = 12
    workers = [spawn(add_ranges, place, way, i, turns) for i, way in enumerate(WAYS)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
        worker.close()
    dtype = DTYPES[Dtype(place.dtype)]
    values = deltas(dtype)
    expected = np.zeros(ELEMENTS, dtype)
    for number in range(len(WAYS)):
        for turn in range(turns):
            start, end = range_of(number, turn)
            expected[start:end] += values[start:end]
    for way in WAYS:
        assert (Reach(place, way, 50).read(dtype, ELEMENTS) == expected).all()


def add_for_ever(place: Place, way: str) -> None:
    """Run in a process of its own, until it is killed."""
    reach = Reach(place, way, 60)
    values = deltas(DTYPES[Dtype(place.dtype)])
    while True:
        reach.add(values)


def test_killed_clients_stop_nobody(place: Place, memory: Path) -> None:
    """SIGKILL of clients in the middle of additions: each element is a whole number of deltas, and others go on."""
    dtype = DTYPES[Dtype(place.dtype)]
    values = deltas(dtype)
    survivor = Reach(place, "mixed", 61)
    files = sorted(path.name for path in memory.iterdir())
    for way in WAYS:
        before = survivor.read(dtype, ELEMENTS)[-1]
        worker = spawn(add_for_ever, place, way)
        wait_for(lambda before=before: survivor.read(dtype, ELEMENTS)[-1] >= before + 3 * values[-1], "additions")
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(20)
        worker.close()
        survivor.add(values)
        times = survivor.read(dtype, ELEMENTS) / values
        assert (times == np.floor(times)).all()
    assert sorted(path.name for path in memory.iterdir()) == files


class SilentServer:
    """Greets, then takes what comes and never answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.asked = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            hello = Frame.unpack(connection.recv(HEADER.size, socket.MSG_WAITALL))
            connection.sendall(replace(hello, flags=Flag.REPLY).pack())
            while connection.recv(4096):
                self.asked.set()

    def close(self) -> None:
        self._thread.join(20)
        self._listener.close()


@pytest.fixture
def silent() -> Iterator[tuple[SilentServer, EngineClient, BufferHandle]]:
    """A server that will never answer, and a buffer there."""
    server = SilentServer()
    client = EngineClient(1)
    handle = BufferHandle(client, 4096, 4096, 4096, 1, Dtype.UINT8)
    link, _ = client.connect_tcp("127.0.0.1", server.port, Lane.TCP_DATA, TIMEOUT_MS)
    handle.set_link(0, 1, 1, link)
    yield server, client, handle
    del link, handle, client
    server.close()


def test_waiting_holds_no_lock_of_python(silent: tuple[SilentServer, EngineClient, BufferHandle]) -> None:
    """While a call waits for its answer other Python threads run; it ends when its time is over."""
    server, client, handle = silent
    sink = np.zeros(16, np.uint8)
    outcomes: list[Outcome | int] = []
    start = time.monotonic()
    waiting = threading.Thread(
        target=lambda: outcomes.append(handle.transfer(Request(Opcode.READ, 0, 16, sink=memory_of(sink)), 400))
    )
    waiting.start()
    assert server.asked.wait(10)
    turns = 0
    while waiting.is_alive():
        turns += 1
        waiting.join(0.001)
    assert time.monotonic() - start >= 0.4
    assert turns > 10
    assert outcomes == [Outcome(Status.TIMEOUT, 0, 0, True)]
    client.close()
    later = handle.transfer(Request(Opcode.READ, 0, 16, sink=memory_of(sink)), TIMEOUT_MS)
    assert later == Outcome(Status.DISCONNECTED, 0, 0, False)


def test_close_ends_calls_in_progress(silent: tuple[SilentServer, EngineClient, BufferHandle]) -> None:
    """Closing the client from another thread ends a call long before its time, with the outcome called unknown."""
    server, client, handle = silent
    sink = np.zeros(16, np.uint8)
    outcomes: list[Outcome | int] = []
    waiting = threading.Thread(
        target=lambda: outcomes.append(handle.transfer(Request(Opcode.READ, 0, 16, sink=memory_of(sink)), 60_000))
    )
    waiting.start()
    assert server.asked.wait(10)
    client.close()
    waiting.join(10)
    assert outcomes == [Outcome(Status.LINK_LOST, 0, 0, True)]


def test_nothing_is_kept_after_use(place: Place) -> None:
    """Descriptors and mappings of clients that came and went are given back."""

    def used() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(list(Path("/proc/self/fd").iterdir())), maps.count("/dev/shm/smb-engine-")

    def come_and_go() -> None:
        reach = Reach(place, "mixed", 70)
        reach.add(deltas(DTYPES[Dtype(place.dtype)]))

    come_and_go()
    settled = used()
    for _ in range(20):
        come_and_go()
    wait_for(lambda: used() <= settled, "return to what was used before")


def test_attach_is_refused_with_its_reason(place: Place) -> None:
    """A descriptor of a segment that is not there, of another epoch, or over TCP is an error that says which."""
    client = EngineClient(80)
    unix, _ = client.connect_unix(place.sockets[0], Lane.UNIX_ATTACH, TIMEOUT_MS)
    tcp, _ = client.connect_tcp("127.0.0.1", place.ports[0], Lane.TCP_DATA, TIMEOUT_MS)
    cases = [(unix, 99, EPOCH, Status.NOT_FOUND), (unix, 1, 9, Status.STALE_EPOCH), (tcp, 1, EPOCH, Status.DENIED)]
    for link, segment, epoch, status in cases:
        with pytest.raises(EngineError) as caught:
            link.attach(segment, epoch, TIMEOUT_MS)
        assert caught.value.status == status
        assert link.alive()
    assert isinstance(unix.attach(1, EPOCH, TIMEOUT_MS), Segment)
