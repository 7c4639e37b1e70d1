"""A training that goes on while something else is looked at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import smb
import smb.train


@contextmanager
def training(address: str) -> Iterator[None]:
    """Two workers with labels that train "vision/digits" all the while, one of them telling its samples."""
    leaving = threading.Event()

    def work(label: str, samples: int | None) -> None:
        with smb.connect(address, name=label) as client:
            values = np.zeros(50_000, np.float32)
            with smb.train.join(client, "vision/digits", values, smb.train.DiLoCo(every=5)) as worker:
                while not leaving.wait(0.01):
                    values += 0.01
                    worker.step(samples=samples)

    threads = [threading.Thread(target=work, args=each) for each in (("alice", 32), ("bob", None))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        leaving.set()
        for thread in threads:
            thread.join()
