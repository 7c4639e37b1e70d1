"""Strangers at a data port with TLS: however many connect and say nothing, or a byte now and then, a client gets in at
once, clients that are in go on, and the server holds no more strangers than its bound. `SMB_LONG=1 pytest -s` of this
file is the measurement with 5000.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.config.parse import parse_address
from smb.engine import EngineClient, EngineError, Lane, Status, Tls
from smb.security.credentials import load_directory, server_name
from tests.support.daemons import cluster_metric, wait_for
from tests.support.transports import SLOWNESS

SPAWN = multiprocessing.get_context("spawn")
STRANGERS_MAX = 512  # csrc/server/strangers.h
LONG = os.environ.get("SMB_LONG") == "1"
STRANGERS, CALLS = (5000, 10_000) if LONG else (700, 500)
# The beginning of a ClientHello: a record of 512 bytes, of which a few come.
DRIPPED = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32)


BACK_AFTER_S = 1.0
BURST = 800 if LONG else 560  # more than there may be strangers


def _be_strangers(where: tuple[str, int], count: int, pipe: Connection) -> None:
    """Keep so many connections, in a process of their own: the even ones silent, the others send a byte each second.
    One that is closed comes again a second later. Says when all have come, and ends with the pipe.
    """
    selector = selectors.DefaultSelector()
    selector.register(pipe, selectors.EVENT_READ)
    here: dict[socket.socket, int] = {}
    due: deque[tuple[float, int]] = deque((0.0, index) for index in range(count))
    dripped, at, closed, told = time.monotonic(), 0, 0, False
    while True:
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, index = due.popleft()
            made = socket.socket()
            made.setblocking(False)
            with suppress(BlockingIOError):
                made.connect(where)
            here[made] = index
            selector.register(made, selectors.EVENT_READ)
        if not due and not told:
            told = True
            pipe.send(None)
        for key, _ in selector.select(0.05):
            gone = key.fileobj
            if not isinstance(gone, socket.socket):
                pipe.send(closed)
                return
            selector.unregister(gone)
            due.append((now + BACK_AFTER_S, here.pop(gone)))
            gone.close()
            closed += 1
        if now - dripped > 1:
            dripped, at = now, at + 1
            for each, index in here.items():
                with suppress(OSError):
                    if index % 2:
                        each.send(DRIPPED[at - 1 : at])


@contextmanager
def strangers_at(where: tuple[str, int], count: int) -> Iterator[list[int]]:
    """So many strangers, until the block ends; how often they were closed is in the list then."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_be_strangers, args=(where, count, theirs), daemon=True)
    process.start()
    theirs.close()
    closed: list[int] = []
    try:
        assert ours.poll(30 * SLOWNESS), "the strangers do not come"
        ours.recv()
        yield closed
    finally:
        ours.send(None)
        with suppress(EOFError):
            closed.append(ours.recv())
        process.join(10)
        ours.close()


@pytest.fixture(scope="module")
def besieged(certificates: Path) -> Iterator[smb.LocalCluster]:
    """One memory server with TLS."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with smb.LocalCluster(servers=1, capacity="16MiB", credentials=certificates) as running:
        yield running


def p99_us(buffer: smb.Buffer, calls: int) -> float:
    """The 99th percentile of so many reads."""
    out = np.empty(buffer.size, "float32")
    times = []
    for _ in range(calls):
        begun = time.perf_counter()
        buffer.read(out=out)
        times.append(time.perf_counter() - begun)
    return float(np.quantile(times, 0.99)) * 1e6


def test_strangers_keep_nobody_out(besieged: smb.LocalCluster, certificates: Path) -> None:
    """A client comes in within a second, five times; the one that is in reads on; strangers are bounded and evicted."""
    where = parse_address(besieged.servers[0].address)

    def connect() -> smb.Client:
        return smb.connect(besieged.address, transport="tcp", credentials=certificates / "client", timeout=10)

    with connect() as inside:
        buffer = inside.create("kept", (2,))
        before = min(p99_us(buffer, CALLS) for _ in range(3))
        took, during = [], []
        with strangers_at(where, STRANGERS) as closed:
            wait_for(lambda: cluster_metric(besieged, "smb_server_strangers_evicted_total") > 0, "the bound")
            for _ in range(5):
                with connect() as late:  # its session is the coordinator's matter, and not timed
                    begun = time.perf_counter()
                    assert late.open("kept").read().tolist() == [0, 0]
                    took.append(time.perf_counter() - begun)
                during.append(p99_us(buffer, CALLS))
                assert cluster_metric(besieged, "smb_server_strangers") <= STRANGERS_MAX
            assert max(took) < 1 * SLOWNESS
        print(
            f"{STRANGERS} strangers, {closed[0]} times closed: connected and read in {min(took) * 1e3:.1f} to "
            f"{max(took) * 1e3:.1f} ms; p99 {before:.0f} us before, {sorted(during)[2]:.0f} us beside them "
            f"({min(during):.0f} to {max(during):.0f})"
        )
        assert buffer.read().tolist() == [0, 0]


def test_a_burst_of_clients_gets_in(besieged: smb.LocalCluster, certificates: Path) -> None:
    """More clients at once from one address than there may be strangers, as when a large job starts: each is in within
    its timeout, though some are cut on the way."""
    host, port = parse_address(besieged.servers[0].address)
    found = load_directory(certificates / "client")
    tls = Tls(found.ca, found.certificate, found.key)
    start = threading.Barrier(BURST)
    again: list[int] = []

    def come_in(number: int) -> float:
        client = EngineClient(1 + number)
        start.wait(60)
        begun = time.monotonic()
        while True:  # as a buffer's first call does
            try:
                link, _ = client.connect_tls(host, port, tls, server_name("server-0"), Lane.TCP_DATA, 20_000)
                break
            except EngineError as error:
                if error.status is not Status.DISCONNECTED or time.monotonic() - begun > 20 * SLOWNESS:
                    raise
                again.append(number)
        took = time.monotonic() - begun
        assert link.connected()
        client.close()
        return took

    with ThreadPoolExecutor(BURST) as threads:
        took = sorted(threads.map(come_in, range(BURST)))
    print(
        f"{BURST} at once: half of them in {took[BURST // 2]:.2f} s, all in {took[-1]:.2f} s, {len(again)} tried again"
    )
