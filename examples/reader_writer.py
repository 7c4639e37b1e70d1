"""One trainer, many readers: whole sets of weights, never a mix of two. Run it: python examples/reader_writer.py

A chunk is read as it stood at one instant, but weights of several chunks may be read while a later set is written.
A counter tells: it is odd while the trainer writes and has moved if a set was written meanwhile; the reader then reads
again. It takes one writer, and one that dies while it writes leaves the counter odd.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np

import smb

PARAMETERS = 1_000_000
SETS = 20


def publish(weights: smb.Buffer, version: smb.Buffer, values: np.ndarray[Any, Any]) -> None:
    """Write one set of weights."""
    version.fetch_add(0, 1)
    weights.write(values)
    version.fetch_add(0, 1)


def read_whole(weights: smb.Buffer, version: smb.Buffer, out: np.ndarray[Any, Any]) -> int:
    """Read one whole set into out, shape (PARAMETERS,); return its number."""
    while True:
        before = int(version.read()[0])
        weights.read(out=out)
        if before % 2 == 0 and before == int(version.read()[0]):
            return before // 2


def evaluate(address: str) -> None:
    """Read until SETS different sets were seen; each is checked to be one set."""
    with smb.connect(address) as client:
        weights, version = client.open("weights"), client.open("version")
        values = np.empty(PARAMETERS, dtype=np.float32)
        seen: set[int] = set()
        while len(seen) < SETS:
            number = read_whole(weights, version, values)
            assert (values == number).all(), "a mix of two sets"
            seen.add(number)
        print(f"a reader saw {len(seen)} whole sets, numbers {min(seen)} to {max(seen)}")


def main() -> None:
    """Write one set after the other as long as a reader follows."""
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
        weights = client.create("weights", (PARAMETERS,))
        version = client.create("version", (1,), "int64")
        readers = [processes.Process(target=evaluate, args=(cluster.address,)) for _ in range(2)]
        for reader in readers:
            reader.start()
        number = 0
        while any(reader.is_alive() for reader in readers):
            number += 1
            time.sleep(0.005)  # training
            publish(weights, version, np.full(PARAMETERS, number, dtype=np.float32))
        print(f"the trainer wrote {number} sets")


if __name__ == "__main__":
    main()
