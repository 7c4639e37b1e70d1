"""Processes that train one model with nothing but numpy, by elastic averaging. Run it: python examples/numpy_only.py

A scheme sees one flat float32 array, before and after local steps; the program decides how it takes these steps.
Workers name the group and know nothing of each other: start as many as you like, whenever you like.
"""

from __future__ import annotations

import multiprocessing

import numpy as np
from numpy.typing import NDArray

import smb
import smb.train

CLASSES, FEATURES = 5, 20
WORKERS = 3
SAMPLES = 4000
EPOCHS = 3
Array = NDArray[np.float32]


def samples(seed: int, count: int) -> tuple[Array, NDArray[np.int64]]:
    """Return points (count, FEATURES) around one centre per class, and their classes."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    random = np.random.default_rng(seed)
    classes = random.integers(CLASSES, size=count)
    return (centres[classes] + 1.2 * random.normal(size=(count, FEATURES))).astype(np.float32), classes


def gradient(values: Array, points: Array, classes: NDArray[np.int64]) -> Array:
    """Return the gradient of the mean cross-entropy of a linear classifier, flat like `values`."""
    scores = points @ values.reshape(FEATURES, CLASSES)
    share = np.exp(scores - scores.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    share[np.arange(len(classes)), classes] -= 1
    return (points.T @ share / len(classes)).reshape(-1)


def work(address: str, number: int) -> None:
    """Train on samples that no other worker has taken."""
    points, classes = samples(1, SAMPLES)
    values = np.zeros(FEATURES * CLASSES, dtype=np.float32)
    scheme = smb.train.SEASGD(alpha=0.25, every=10)
    with (
        smb.connect(address) as client,
        smb.train.join(client, "numpy", values, scheme) as worker,
        # Each unit once per epoch, by one worker.
        smb.train.WorkUnits(client, "numpy/units", SAMPLES, 16, epochs=EPOCHS) as units,
    ):
        for done, unit in enumerate(units):
            if done == 20:
                client.barrier("at-work", WORKERS, timeout=60)  # only so that every worker finds some work
            batch = slice(unit.start, unit.start + unit.count)
            values -= 0.1 * gradient(values, points[batch], classes[batch])
            worker.step(samples=unit.count)  # at every tenth step `values` and the shared model move towards each other
        print(f"worker {number}: {worker.contributions} contributions", flush=True)


def main() -> None:
    """Run the workers, then test the shared model."""
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
        workers = [processes.Process(target=work, args=(cluster.address, number)) for number in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a worker failed; its error is printed above")
        points, classes = samples(2, 2000)
        shared = smb.train.shared(client, "numpy").reshape(FEATURES, CLASSES)
        print(f"test accuracy {((points @ shared).argmax(1) == classes).mean():.3f}")


if __name__ == "__main__":
    main()
