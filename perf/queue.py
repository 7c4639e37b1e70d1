"""An async call's cost beside its share of a large call, and how soon an urgent read comes through.

    python -m perf.queue [--rounds 15] [--transports shm,tcp] [--remote]

All is measured in turns within one run, on this machine, servers included: only the ratios travel. --remote: over TCP
between two network namespaces of a veth pair (perf/netlab.py, needs root), as between two hosts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import smb
from perf.lab_daemons import LabDaemons
from perf.netlab import Host, Lab

_SMALL, _PARTS, _LARGE, _LARGE_PARTS = 64 << 10, 64, 4 << 20, 8  # bytes, operations in flight
_WARM_UP = 2  # rounds


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _burst(later: Callable[..., Future[None]], array: NDArray[np.float32], parts: int) -> None:
    for future in [later(array, part * array.size) for part in range(parts)]:
        future.result()


def _one_round(name: str, whole: smb.Buffer, fine: smb.Buffer) -> dict[str, float]:
    """Return seconds of one part of each."""
    blocking, later = getattr(whole, name), getattr(whole, f"{name}_async")
    small, large = np.ones(_SMALL // 4, np.float32), np.ones(_LARGE // 4, np.float32)
    share = np.ones(_SMALL * _PARTS // 4, np.float32)
    places = [part * large.size for part in range(_LARGE_PARTS)]
    return {
        f"{name} 64 KiB, share of one call": _seconds(lambda: blocking(share)) / _PARTS,
        f"{name} 64 KiB, share of one call in as many frames": _seconds(lambda: getattr(fine, name)(share)) / _PARTS,
        f"{name} 64 KiB, blocking": _seconds(lambda: [blocking(small) for _ in range(8)]) / 8,
        f"{name} 64 KiB, async, 64 in flight": _seconds(lambda: _burst(later, small, _PARTS)) / _PARTS,
        f"{name} 4 MiB, blocking": _seconds(lambda: [blocking(large, at) for at in places]) / _LARGE_PARTS,
        f"{name} 4 MiB, async, one by one": _seconds(lambda: [later(large, at).result() for at in places])
        / _LARGE_PARTS,
        f"{name} 4 MiB, async, 8 in flight": _seconds(lambda: _burst(later, large, _LARGE_PARTS)) / _LARGE_PARTS,
    }


def _measure(address: str, transport: str, rounds: int) -> None:
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    overtaken, windows = [], []
    with smb.connect(address, transport=transport) as client:
        whole = client.create("w", _LARGE * _LARGE_PARTS // 4)
        fine = client.create("fine", _SMALL * _PARTS // 4, stripe=_SMALL)  # one call of as many frames
        urgent = client.create("urgent", _SMALL // 4)
        for name in ("write", "accumulate"):
            for turn in range(rounds + _WARM_UP):
                for what, took in _one_round(name, whole, fine).items():
                    if turn >= _WARM_UP:
                        seconds[what].append(took)
        part = np.ones(_LARGE * _LARGE_PARTS // _PARTS // 4, np.float32)
        with client.queue() as queue:
            for turn in range(rounds + _WARM_UP):
                passed: list[int] = []
                writes = [queue.write(whole, part, number * part.size) for number in range(_PARTS)]
                done_before = sum(write.done() for write in writes)
                read = queue.read(urgent, priority=1)
                # Futures are completed in the order in which the operations ended.
                read.add_done_callback(lambda _: passed.append(sum(write.done() for write in writes)))  # noqa: B023
                read.result()
                for write in writes:
                    write.result()
                if turn >= _WARM_UP:
                    overtaken.append(passed[0] - done_before)
                    windows.append(queue.credit / part.nbytes)
    middle = {what: statistics.median(found) for what, found in seconds.items()}
    print(f"\n{transport}: microseconds of one, median of {rounds}; its ratio")
    for what, took in middle.items():
        name, size, *_ = what.replace(",", "").split()
        base = middle[f"{name} 64 KiB, share of one call" if size == "64" else f"{name} 4 MiB, blocking"]
        print(f"  {what:52} {took * 1e6:8.1f}  {took / base:6.2f}")
    print(
        f"  an urgent read behind 64 writes of {part.nbytes >> 10} KiB: {statistics.median(overtaken):g} of them ended "
        f"between (most {max(overtaken)}); the window holds {statistics.median(windows):.1f}"
    )


def _between_hosts(rounds: int) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as place,
        Lab([Host("server"), Host("client")], direct=True) as lab,
    ):
        directory = Path(place)
        daemons = LabDaemons(lab, directory)
        address = daemons.coordinator("server")
        (directory / "memory").mkdir(mode=0o700)
        command = ["memserver", "--coordinator", address, "--capacity", "256MiB", "--name", "far"]
        daemons.serve("server", [*command, "--memory-dir", str(directory / "memory")], name="memserver")
        lab.run("client", [sys.executable, "-m", "perf.queue", "--at", address, "--rounds", str(rounds)])


def main() -> None:
    """Measure over each transport."""
    parser = argparse.ArgumentParser(description="What async operations cost.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--remote", action="store_true", help="between two network namespaces instead")
    parser.add_argument("--at", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.at:
        _measure(arguments.at, "tcp", arguments.rounds)
    elif arguments.remote:
        _between_hosts(arguments.rounds)
    else:
        for transport in arguments.transports.split(","):
            with smb.LocalCluster(servers=1) as cluster:
                _measure(cluster.address, transport, arguments.rounds)


if __name__ == "__main__":
    main()
