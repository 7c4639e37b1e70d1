"""The cost of instruments: calls of 8 bytes with another build of the package beside this one, and a scrape.

    python perf/instruments.py OTHER     OTHER: a folder with a built package, without them

A process of each build holds a cluster of its own; they are asked in turns, many times, and both are started anew for
each round: where the memory of a process lies decides more than what is measured. Prints the median of the ratios.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, cast

HERE = Path(__file__).resolve().parents[1]
ROUNDS, PAIRS = 6, 8
WAYS = {"tcp": 1000, "shm": 40_000}
_CHILD = """
import os, sys, time
import numpy as np, smb
out = np.zeros(1, dtype=np.int64)
with smb.LocalCluster(servers=1, capacity="32MiB") as cluster, \\
     smb.connect(cluster.address, transport="tcp") as tcp, smb.connect(cluster.address, transport="shm") as shm:
    reads = {"shm": shm.create("x", (1000,), "int64").read, "tcp": tcp.open("x").read}
    if os.environ.get("COUNTED"):
        tcp.engine.count(), shm.engine.count()
    for read in reads.values():
        read(0, 1, out=out)
    print("ready", flush=True)
    for line in sys.stdin:
        way, calls = line.split()
        read, begun = reads[way], time.perf_counter()
        for _ in range(int(calls)):
            read(0, 1, out=out)
        print((time.perf_counter() - begun) / int(calls) * 1e9, flush=True)
"""


def start(tree: Path, counted: bool = False) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(tree), "COUNTED": "1" if counted else ""}
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        cwd=tree,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert cast(IO[str], process.stdout).readline() == "ready\n", tree
    return process


def ask(process: subprocess.Popen[str], way: str) -> float:
    """Nanoseconds of a call."""
    asked, told = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    asked.write(f"{way} {WAYS[way]}\n")
    asked.flush()
    return float(told.readline())


def compare(before: Path, after: Path, counted: bool) -> None:
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        pair = (start(before), start(after, counted))
        rounds: dict[str, list[float]] = {way: [] for way in WAYS}
        for i in range(PAIRS):
            for way in WAYS:
                found = {p: ask(p, way) for p in (pair if i % 2 else pair[::-1])}
                rounds[way].append(found[pair[1]] / found[pair[0]])
                took[way].append(found[pair[0]])
        for process in pair:
            process.communicate()
        for way in WAYS:
            ratios[way].append(statistics.median(rounds[way]))
    for way, found_ratios in ratios.items():
        each = " ".join(f"{ratio:.3f}" for ratio in sorted(found_ratios))
        median = statistics.median(found_ratios)
        print(f"{way}: {statistics.median(took[way]):.0f} ns, times {median:.3f} (rounds: {each})", flush=True)


def scrape() -> None:
    """A server with 64 buffers that 16 clients use: how long its page takes, and how large it is."""
    import urllib.request

    import smb

    with smb.LocalCluster(servers=1, capacity="64MiB") as cluster:
        clients = [smb.connect(cluster.address, transport="tcp") for _ in range(16)]
        for i in range(64):
            clients[i % 16].create(f"b{i}", (100,)).read()
        time.sleep(5)  # until the names are told
        times, size = [], 0
        for _ in range(20):
            begun = time.perf_counter()
            with urllib.request.urlopen(f"http://{cluster.servers[0].metrics}/metrics") as page:
                size = len(page.read())
            times.append(time.perf_counter() - begun)
        print(f"scrape: {statistics.median(times) * 1e3:.1f} ms, {size / 1e3:.0f} kB", flush=True)
        for client in clients:
            client.close()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        compare(Path(sys.argv[1]).resolve(), HERE, counted=bool(os.environ.get("COUNTED")))
    scrape()
