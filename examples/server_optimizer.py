"""An optimizer on the memory servers: workers send gradients, and `apply` takes Adam's step on the servers.

Run it: python examples/server_optimizer.py
"""

from __future__ import annotations

import multiprocessing

import numpy as np

import smb

TRUTH = np.array([2.0, -3.0, 0.5, 1.0], dtype=np.float32)
WORKERS, STEPS = 3, 300


def work(address: str, seed: int) -> None:
    """Add a gradient for each step. The last worker at the barrier lets the servers take the step."""
    random = np.random.default_rng(seed)
    with smb.connect(address, name=f"worker-{seed}") as client:
        weights, gradient, mean, square = (client.open(name) for name in ("weights", "gradient", "mean", "square"))
        for step in range(1, STEPS + 1):
            inputs = random.normal(size=(16, TRUTH.size)).astype(np.float32)
            error = inputs @ (weights.read() - TRUTH)
            gradient.accumulate(inputs.T @ error / len(inputs))
            if client.barrier("summed", WORKERS) == WORKERS - 1:
                weights.apply("adam", gradient, mean, square, lr=0.05, step=step, scale=1 / WORKERS)  # no array is sent
                gradient.fill(0)
            client.barrier("stepped", WORKERS)


def main() -> None:
    """Run three workers on two memory servers."""
    # A client must not be used on both sides of a fork, so processes are spawned.
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
        weights = client.create("weights", TRUTH.shape)
        client.create("gradient", like=weights)  # the same placement, so that servers can combine them
        for name in ("mean", "square"):
            client.create(name, state_of=weights)  # with replicas=2 they would move together with the weights
        workers = [processes.Process(target=work, args=(cluster.address, seed)) for seed in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print("learnt", weights.read().round(2), "truth", TRUTH)


if __name__ == "__main__":
    main()
