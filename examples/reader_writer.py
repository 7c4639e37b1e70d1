"""One trainer, many readers: whole sets of weights, never a mix of two. Run it: python examples/reader_writer.py

With versions=2 the servers keep two copies: readers see the latest published copy, as a whole, while the trainer writes
the other one. A call that waits for a version is woken when the version is published.
"""

from __future__ import annotations

import multiprocessing
import time

import numpy as np

import smb

PARAMETERS = 1_000_000
SETS = 20


def evaluate(address: str) -> None:
    """Follow the trainer for SETS sets, and check that each is one whole set."""
    with smb.connect(address) as client:
        weights = client.open("weights")
        values = np.empty(PARAMETERS, dtype=np.float32)
        version, seen = 0, set()
        while len(seen) < SETS:
            version = weights.wait(version + 1, timeout=30)  # sleeps until a newer version is published
            weights.read(out=values)
            assert (values == values[0]).all(), "a mix of two sets"
            seen.add(int(values[0]))
        print(f"a reader saw {len(seen)} whole sets, numbers {min(seen)} to {max(seen)}")


def main() -> None:
    """Publish one set after another as long as a reader follows."""
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
        weights = client.create("weights", (PARAMETERS,), versions=2)
        readers = [processes.Process(target=evaluate, args=(cluster.address,)) for _ in range(2)]
        for reader in readers:
            reader.start()
        number = 0
        while any(reader.is_alive() for reader in readers):
            time.sleep(0.005)  # training
            number = weights.publish(np.full(PARAMETERS, number + 1, dtype=np.float32))
        print(f"the trainer published {number} sets")


if __name__ == "__main__":
    main()
