"""A parameter server in ten lines: processes fit one model through a shared buffer, and none waits for another.

Run it: python examples/parameter_server.py
"""

from __future__ import annotations

import multiprocessing

import numpy as np

import smb

TRUTH = np.array([2.0, -3.0, 0.5, 1.0], dtype=np.float32)


def work(address: str, seed: int) -> None:
    """Descend along 500 gradients of a least-squares problem, each computed from the latest shared weights."""
    random = np.random.default_rng(seed)
    with smb.connect(address) as client:
        weights = client.open("weights")
        for _ in range(500):
            inputs = random.normal(size=(16, TRUTH.size)).astype(np.float32)
            error = inputs @ (weights.read() - TRUTH)
            weights.accumulate(inputs.T @ error / len(inputs), scale=-0.05)  # weights -= 0.05 * gradient


def main() -> None:
    """Run three workers on two memory servers."""
    # A client must not be used on both sides of a fork, so processes are spawned.
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
        weights = client.create("weights", TRUTH.shape)
        workers = [processes.Process(target=work, args=(cluster.address, seed)) for seed in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print("learnt", weights.read(), "truth", TRUTH)


if __name__ == "__main__":
    main()
