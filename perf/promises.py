"""The cost of the promises: the figures of docs/promises.md, as ratios within one run. `python perf/promises.py`.

Needs nothing but the installed package, and 2.5 GiB of /dev/shm.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import smb
from memserver.engine import Engine, SegmentForm
from smb.engine import AskOpcode, BufferHandle, EngineClient, Lane, Link, Opcode, Request, memory_of

MEMORY = Path("/dev/shm")
BYTES = 64 << 20
CHUNK_BYTES = 256 << 10
FLOAT32 = 2
SUM = 1
ROUNDS = 9
WAITERS = 1000


@contextlib.contextmanager
def engine(journal: bool) -> Iterator[tuple[EngineClient, BufferHandle, Link]]:
    """A server in this process with one segment, reached over TCP; with its journal, or without."""
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="smb-perf-") as directory:
        server = Engine(1, 2, 2 * BYTES)
        server.create_segment(Path(directory) / "segment", SegmentForm(1, 1, FLOAT32, BYTES, CHUNK_BYTES))
        if journal:
            server.open_journal(Path(directory) / "journal")
        port = server.listen_tcp("127.0.0.1", 0)
        client = EngineClient(7)
        link, _ = client.connect_tcp("127.0.0.1", port, Lane.TCP_DATA, 5000)
        handle = BufferHandle(client, BYTES, BYTES, CHUNK_BYTES, 1, FLOAT32)
        handle.set_link(0, 1, 1, link)
        try:
            yield client, handle, link
        finally:
            client.close()
            server.close()


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cost_of_the_journal() -> dict[str, float]:
    """Bandwidth of TCP accumulates with the journal, as a part of that without it: rounds of both take turns."""
    source = np.ones(BYTES // 4, np.float32)
    found: dict[str, float] = {}
    for nbytes in (CHUNK_BYTES, 4 << 20, BYTES):
        times: dict[bool, list[float]] = {True: [], False: []}
        repeats = max(1, BYTES // nbytes // 4)
        with engine(True) as (_, on, _l), engine(False) as (_, off, _m):
            for turn in range(ROUNDS + 1):
                for journal, handle in ((True, on), (False, off)) if turn % 2 else ((False, off), (True, on)):
                    request = Request(Opcode.ACCUMULATE, 0, nbytes, memory_of(source), op=SUM)

                    def run(handle: BufferHandle = handle, request: Request = request, repeats: int = repeats) -> None:
                        for _ in range(repeats):
                            result = handle.transfer(request, 20000)
                            assert isinstance(result, int), result

                    taken = seconds(run)
                    if turn > 0:
                        times[journal].append(taken)
        found[f"{nbytes >> 10} KiB"] = statistics.median(times[False]) / statistics.median(times[True])
    return found


def lock_in_round_trips(cluster: smb.LocalCluster, transport: str) -> float:
    """An uncontended lock and unlock, in round trips of the smallest request over the same connection."""
    with smb.connect(cluster.address, transport=transport) as client:
        buffer = client.create(f"home-{transport}", 1, "int64")
        home = buffer._dispatcher.paths.homes()[0]
        lock = buffer.lock()

        def take() -> None:
            with lock:
                pass

        def ask() -> None:
            home.ask("version", AskOpcode.AWAIT_VERSION, 0, (0, 0))

        pairs, trips = [], []
        for _ in range(2000):
            pairs.append(seconds(take))
            trips.append(seconds(ask))
        return statistics.median(pairs) / statistics.median(trips)


def waking_the_waiters(cluster: smb.LocalCluster) -> dict[str, float]:
    """Milliseconds from one publish until every one of the waiters has its answer."""
    clients = [smb.connect(cluster.address, transport="tcp") for _ in range(10)]
    buffer = clients[0].create("woken", 16, "float32", versions=2)
    array = np.ones(16, np.float32)
    homes = [client.open("woken")._dispatcher.paths.homes()[0] for client in clients]
    times = []
    for turn in range(1, ROUNDS + 1):
        asked = [homes[i % 10].start(AskOpcode.AWAIT_VERSION, 0, (turn, 60_000)) for i in range(WAITERS)]
        for pending in asked[::100]:
            pending.wait(20)  # what is to be sent goes out when somebody waits
        for home in homes:
            home.ask("there", AskOpcode.AWAIT_VERSION, 0, (0, 0))  # all wait there: requests of a lane keep their order
        start = time.perf_counter()
        buffer.publish(array)
        for pending in asked:
            told = pending.wait(20_000)
            assert told is not None
            assert told.a == turn
        times.append(1000 * (time.perf_counter() - start))
        for pending in asked:
            pending.end()
    for client in clients:
        client.close()
    return {"median": statistics.median(times), "slowest": max(times)}


def serving_again() -> dict[str, float]:
    """Seconds from the start of a daemon with 1 GiB of segments, killed before, until it has made an addition."""
    times = []
    with (
        smb.LocalCluster(servers=1, capacity="1.2GiB") as cluster,
        smb.connect(cluster.address, transport="tcp", timeout=30) as client,
    ):
        big = client.create("big", 1 << 28, "float32")
        big.fill(1)
        for _ in range(5):
            cluster.servers[0].kill()
            starting = time.perf_counter()
            cluster.servers[0].start()
            big.accumulate(np.ones(1, np.float32), 0)
            times.append(time.perf_counter() - starting)
    return {"median": statistics.median(times), "slowest": max(times)}


def main() -> None:
    results: dict[str, Any] = {"journal on / off, TCP accumulate": cost_of_the_journal()}
    with smb.LocalCluster(servers=1, capacity="64MiB") as cluster:
        results["lock + unlock, round trips"] = {way: lock_in_round_trips(cluster, way) for way in ("tcp", "shm")}
        results[f"waking {WAITERS} waiters, ms"] = waking_the_waiters(cluster)
    results["serving again with 1 GiB, s"] = serving_again()
    json.dump(results, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
