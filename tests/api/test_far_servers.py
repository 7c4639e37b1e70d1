"""Servers that are far away: several connections carry the data to each, and every promise holds over all of them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from perf import far as far_link
from smb.engine import Lane
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role
from smb.transport import reconnect
from tests.support.clients import pattern
from tests.support.daemons import add_over_kills, wait_for
from tests.support.proxy import Fault, RandomPlan, behind_a_proxy
from tests.support.raw import Frame, Opcode

CONNECTIONS = 4
CHUNK = 4096
MANY = 64 * (CONNECTIONS + 1)  # chunks: 64 are on their way over one connection at most
SIZE = 2 * MANY * CHUNK // 8  # elements of int64, in so many chunks of each of two servers
ROUNDS = 4


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server counts as far away."""
    monkeypatch.setattr(reconnect, "connections_for", lambda _: CONNECTIONS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2, capacity="64MiB") as running:
        yield running


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with smb.connect(cluster.address, transport="tcp", timeout=30) as made:
        yield made
        for info in made.list():
            made.delete(info.name)


def connections(client: smb.Client, server: int = 0) -> int:
    """How many this client has to that server."""
    port = client.servers()[server].address.rpartition(":")[2]
    found = 0
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, *_ = line.split()
        found += state == "01" and int(remote.rpartition(":")[2], 16) == int(port)
    return found


def test_each_kind_of_call(client: smb.Client) -> None:
    """Chunks go over the connections in turn, and every element gets what is its own; also under a lock's token."""
    buffer = client.create("w", SIZE, "int64", servers=2, stripe=CHUNK)
    expected = pattern(0, SIZE, "int64")
    buffer.write(expected)
    np.testing.assert_array_equal(buffer.read(), expected)
    begin, end = CHUNK // 16, SIZE - 3  # within a chunk
    buffer.accumulate(expected[begin:end], begin)
    expected[begin:end] *= 2
    np.testing.assert_array_equal(buffer.accumulate(np.ones(SIZE, np.int64), fetch=True), expected + 1)
    expected += 1
    for at in range(0, SIZE, CHUNK // 8):
        assert buffer.fetch_add(at, 5) == expected[at]
        assert buffer.compare_swap(at, int(expected[at]) + 5, at) == expected[at] + 5
        expected[at] = at
    other = client.create("other", like=buffer)
    other.fill(7)
    buffer.accumulate_from(other)
    expected += 7
    with buffer.lock() as lock:
        buffer.write(expected[:2000] - 1, 0, fence=lock)
    expected[:2000] -= 1
    np.testing.assert_array_equal(buffer.read(), expected)
    np.testing.assert_array_equal(buffer.read(1, SIZE - 2), expected[1:-1])


def test_a_step_of_an_optimizer(client: smb.Client) -> None:
    """Weights, gradient and state are changed where they lie, chunk by chunk over the connections."""
    weights = client.create("w", SIZE, servers=2, stripe=CHUNK)
    gradient, momentum = (client.create(name, like=weights) for name in ("g", "m"))
    gradient.write(pattern(0, SIZE, "float32"))
    for _ in range(2):
        weights.apply("momentum", gradient, momentum, lr=0.5, mu=0.5)
    np.testing.assert_allclose(weights.read(), -1.25 * pattern(0, SIZE, "float32"))


def test_connections_are_made_when_they_are_needed(client: smb.Client) -> None:
    """One chunk takes one connection; a large call all of them, each once."""
    wait_for(lambda: connections(client) == 0, "no connection of an earlier test")
    small = client.create("small", CHUNK, "uint8", servers=["server-0"], stripe=CHUNK)
    small.fill(1)
    assert (small.read() == 1).all()
    assert connections(client) == 1
    large = client.create("large", 10 * MANY * CHUNK, "uint8", servers=["server-0"], stripe=CHUNK)
    values = pattern(0, large.size, "uint8")
    wait_for(lambda: large.write(values) or connections(client) == CONNECTIONS, "all connections")
    np.testing.assert_array_equal(large.read(), values)
    assert connections(client) == CONNECTIONS


def test_a_server_that_takes_no_more_connections(tmp_path: Path) -> None:
    """It is full, say: all goes over the one that there is."""
    refused = threading.Event()

    def refuse(reply: bool, header: bytes) -> Fault | None:
        if reply or Frame.unpack(header).lane < Lane.TCP_FURTHER:
            return None
        refused.set()
        return Fault("drop request")

    with (
        behind_a_proxy(tmp_path, refuse) as (address, _),
        smb.connect(address, transport="tcp", timeout=30) as client,
    ):
        buffer = client.create("w", SIZE, "int64", stripe=CHUNK)
        ones = np.ones(SIZE, np.int64)
        counts: list[int] = []

        def add() -> bool:
            buffer.accumulate(ones)
            counts.append(1)
            return refused.is_set()

        wait_for(add, "attempt to have more")
        add()
        assert (buffer.read() == len(counts)).all()


class Holding:
    """A plan for a proxy: once told to, it keeps the writes of one lane on their way, and new connections of it."""

    def __init__(self, lane: int) -> None:
        self._lane = lane
        self.seen, self.keeps = threading.Event(), threading.Event()
        self.kept: list[Frame] = []
        self.admits, self.lets_go = threading.Event(), threading.Event()

    def __call__(self, reply: bool, header: bytes) -> Fault | None:
        frame = Frame.unpack(header)
        if reply or frame.lane != self._lane:
            return None
        if frame.opcode == Opcode.WRITE:
            self.seen.set()
        if self.keeps.is_set():
            if frame.opcode == Opcode.WRITE:
                self.kept.append(frame)
                self.lets_go.wait(60)
            else:
                self.admits.wait(60)
        return None


def test_what_was_given_up_does_not_come_later(tmp_path: Path) -> None:
    """A write's time is over while a part of it is on its way over one connection. A later write of the same chunk,
    over another, waits until that part can't arrive any more.
    """
    plan = Holding(Lane.TCP_FURTHER + 1)
    with (
        behind_a_proxy(tmp_path, plan) as (address, _),
        smb.connect(address, transport="tcp", timeout=1.0) as client,
    ):
        buffer = client.create("w", 2 * MANY * CHUNK, "uint8", stripe=CHUNK)
        zeros = np.zeros(buffer.size, np.uint8)
        wait_for(lambda: wrote(buffer, zeros, 0) and plan.seen.is_set(), "use of that lane")
        plan.keeps.set()
        with pytest.raises(smb.TimeoutError):
            buffer.write(np.full(buffer.size, 1, np.uint8))
        at = plan.kept[0].offset
        later = np.full(CHUNK, 2, np.uint8)
        if not wrote(buffer, later, at):
            plan.admits.set()
            wait_for(lambda: wrote(buffer, later, at), "the later write")
        plan.lets_go.set()
        wait_for(lambda: wrote(buffer, later[:10], buffer.size - 10), "one more write")
        assert (buffer.read(at, CHUNK) == 2).all()


def test_a_caller_leaves_while_a_lane_resumes(tmp_path: Path) -> None:
    """Its connection broke, and the new one was not told yet what had arrived. Later calls are not held for that."""
    held, told, broken = threading.Event(), threading.Event(), threading.Event()

    def plan(reply: bool, header: bytes) -> Fault | None:
        frame = Frame.unpack(header)
        if reply or frame.lane != Lane.TCP_FURTHER + 1 or not held.is_set():
            return None
        if frame.opcode == Opcode.WRITE and not broken.is_set():
            broken.set()
            return Fault("cut request", 100)
        if frame.opcode == Opcode.WATERMARK:
            told.wait(60)
        return None

    with (
        behind_a_proxy(tmp_path, plan) as (address, _),
        smb.connect(address, transport="tcp", timeout=2.0) as client,
    ):
        buffer = client.create("w", 2 * MANY * CHUNK, "uint8", stripe=CHUNK)
        ones = np.ones(buffer.size, np.uint8)
        held.set()
        wait_for(lambda: not wrote(buffer, ones, 0), "a write that waits for the lane")
        assert broken.is_set()
        told.set()
        wait_for(lambda: wrote(buffer, ones[:10], 0), "a later write")
        wait_for(lambda: wrote(buffer, ones, 0), "a large one")
        assert (buffer.read() == 1).all()


def wrote(buffer: smb.Buffer, values: np.ndarray[tuple[int], np.dtype[np.uint8]], at: int) -> bool:
    try:
        buffer.write(values, at)
    except (smb.TimeoutError, smb.UnavailableError):
        return False
    return True


@pytest.mark.parametrize("seed", [1, 2])
def test_additions_count_once_over_broken_connections(tmp_path: Path, seed: int) -> None:
    """Frames are cut, dropped, doubled and held back on all of the connections."""
    plan = RandomPlan(seed, every=40)
    ones = np.ones(MANY * CHUNK // 8, np.int64)
    with (
        behind_a_proxy(tmp_path, plan) as (address, proxy),
        smb.connect(address, transport="tcp", timeout=60) as client,
    ):
        buffer = client.create("w", ones.size, "int64", stripe=CHUNK)
        for _ in range(40):
            buffer.accumulate(ones)
            buffer.fetch_add(3 * CHUNK // 8, -1)
        plan.quiet = True
        found = buffer.read()
        assert found[3 * CHUNK // 8] == 0
        found[3 * CHUNK // 8] = 40
        assert (found == 40).all()
        assert sum(proxy.fired.values()) > 10


def test_additions_go_on_over_kills(cluster: smb.LocalCluster, client: smb.Client) -> None:
    """All connections to a server that is killed and comes back go on; none of the additions is lost or doubled."""
    buffer = client.create("w", SIZE, "int64", servers=2, stripe=CHUNK)
    done = add_over_kills(cluster, buffer, np.ones(SIZE, np.int64), ROUNDS)
    assert (buffer.read() == done).all()


def test_each_connection_shows_its_right(tmp_path: Path) -> None:
    """With credentials each proves who it is, also for buffers that are opened once it is there; a reader may read."""
    holders = [Holder(role, "") for role in (Role.COORDINATOR, Role.CLIENT, Role.READER)]
    make_set(tmp_path, [*holders, Holder(Role.SERVER, "server-0")])
    with (
        smb.LocalCluster(servers=1, capacity="64MiB", credentials=tmp_path) as cluster,
        smb.connect(cluster.address, transport="tcp", credentials=tmp_path / "client") as writer,
        smb.connect(cluster.address, transport="tcp", credentials=tmp_path / "reader") as reader,
    ):
        for name in ("first", "second"):
            buffer = writer.create(name, 10 * MANY * CHUNK, "uint8", stripe=CHUNK)
            values = pattern(0, buffer.size, "uint8")
            wait_for(lambda b=buffer, v=values: b.write(v) or connections(writer) >= CONNECTIONS, "all connections")
            np.testing.assert_array_equal(reader.open(name).read(), pattern(0, buffer.size, "uint8"))
            with pytest.raises(smb.PermissionDeniedError):
                reader.open(name).fill(1)
        np.testing.assert_array_equal(writer.open("first").read(), pattern(0, buffer.size, "uint8"))


ASKED = """
import logging
import sys
import numpy as np
import smb

logging.basicConfig(level=logging.INFO)
with smb.connect(sys.argv[1], transport="tcp", timeout=60) as client:
    buffer = client.create("w", 4 << 20, "uint8")
    values = (np.arange(buffer.size) % 251).astype(np.uint8)
    buffer.write(values)
    assert np.array_equal(buffer.read(), values)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/net/tun", os.R_OK | os.W_OK) or shutil.which("cc") is None,
    reason="not run: needs root, /dev/net/tun and a C compiler for a link with a delay",
)
def test_a_real_round_trip() -> None:
    """Of 40 ms: each 10 ms take one connection more, and what is written arrives."""
    with far_link.Link(20.0, "1gbit", 0.0) as link:
        asked = link.lab.run("client", [sys.executable, "-c", ASKED, link.serve()], capture_output=True, text=True)
    assert re.search("[5-8] connections for [4-9]", str(asked.stderr))
