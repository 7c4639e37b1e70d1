"""R2SP with unequal workers: each takes a number of samples that fits its speed. Run it: python
examples/unequal_workers.py

Workers update the shared model in turns. With equal batches the slowest one sets the pace of all; with batch_size=64 in
the scheme each worker gets its share of 64 * 3 samples by its measured speed, and all are ready when their turn comes.
One worker here is made three times slower, by taking three times as long over the same numbers.
"""

from __future__ import annotations

import multiprocessing
import sys
import time

import numpy as np
from numpy.typing import NDArray

import smb
import smb.train
from smb.train.rare.r2sp import RoundRobin

FEATURES = 100
BATCH = 64
SLOWNESS = (1, 1, 3)
SECONDS_A_SAMPLE = 1e-4  # seconds of a worker that is not slow, as if its model were larger
ITERATIONS = 150
Array = NDArray[np.float32]


def work(address: str, number: int, iterations: int, adapt: bool, group: str) -> None:
    """Descend, with batches of the size that the scheme asks for."""
    truth = np.linspace(-1, 1, FEATURES, dtype=np.float32)
    values = np.zeros(FEATURES, dtype=np.float32)
    random = np.random.default_rng(number)
    scheme = smb.train.R2SP(batch_size=BATCH if adapt else None)
    with smb.connect(address) as client, smb.train.join(client, group, values, scheme) as worker:
        client.barrier(f"{group}/start", len(SLOWNESS), timeout=60)
        started = time.perf_counter()
        for _ in range(iterations):
            rotation = worker.exchange
            assert isinstance(rotation, RoundRobin)
            size = rotation.batch_size or BATCH
            points = random.standard_normal((size, FEATURES), dtype=np.float32)
            error = points @ (values - truth)
            time.sleep(SECONDS_A_SAMPLE * SLOWNESS[number] * size)
            # A larger batch gives a better estimate and weighs more in proportion: the sum over workers is one over
            # single samples.
            values -= 0.05 * rotation.gradient_scale * (points.T @ error / size)
            worker.step(samples=size)
        seconds = (time.perf_counter() - started) / iterations
        print(f"  worker {number}: batches of {size} at the end, {1e3 * seconds:.1f} ms an iteration", flush=True)


def main() -> None:
    """Run with equal batches, then with batches by speed."""
    iterations = int(sys.argv[1]) if len(sys.argv) > 1 else ITERATIONS
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=1) as cluster, smb.connect(cluster.address) as client:
        for adapt in (False, True):
            print("batches by speed:" if adapt else "equal batches:", flush=True)
            group = f"r2sp-{adapt}"
            workers = [
                processes.Process(target=work, args=(cluster.address, number, iterations, adapt, group))
                for number in range(len(SLOWNESS))
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            distance = np.abs(smb.train.shared(client, group) - np.linspace(-1, 1, FEATURES)).max()
            staleness = [each.staleness_max for each in smb.train.status(client, group).workers]
            print(f"  largest error of a parameter {distance:.3f}; staleness at most {max(staleness)}")


if __name__ == "__main__":
    main()
