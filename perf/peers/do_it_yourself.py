"""A solution without any library: Python's shared_memory, numpy, and 64 locks, each for every 64th 256 KiB."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Lock

import numpy as np

from perf.clients import SPAWN, Array
from perf.contender import SHM, Case, Sample
from perf.peers import processes

LOCKS = 64
STRIPE = (256 << 10) // 4  # elements


class Mapped:
    """The shared array in one process."""

    def __init__(self, name: str, locks: Sequence[Lock], case: Case, client: int) -> None:
        self._memory = SharedMemory(name)
        self._array: Array = np.ndarray(case.nbytes // 4, np.float32, self._memory.buf)
        self._counter = memoryview(self._memory.buf)[:8].cast("q")
        self._locks = locks
        stripes = [
            (locks[number % LOCKS], slice(start, start + STRIPE))
            for number, start in enumerate(range(0, self._array.size, STRIPE))
        ]
        first = len(stripes) * max(client, 0) // case.clients  # every client begins elsewhere, so they meet less
        self._stripes = stripes[first:] + stripes[:first]

    def write(self, source: Array) -> None:
        np.copyto(self._array, source)

    def read(self, into: Array) -> Array:
        np.copyto(into, self._array)
        return into

    def accumulate(self, contribution: Array) -> None:
        for lock, stripe in self._stripes:
            there = self._array[stripe]
            with lock:
                np.add(there, contribution[stripe], out=there)

    def fetch_add(self, value: int) -> int:
        with self._locks[0]:
            before = self._counter[0]
            self._counter[0] = before + value
        return before

    def close(self) -> None:
        self._counter.release()
        del self._array
        self._memory.close()


class SharedMemoryAndLocks(processes.Peer):
    """New memory for every case."""

    name = "shared_memory, 64 locks, numpy"

    def missing(self) -> str | None:
        return None

    def takes(self, case: Case) -> bool:
        return case.transport == SHM

    def measure(self, case: Case) -> Sample:
        memory = SharedMemory(create=True, size=case.nbytes)
        try:
            locks = [SPAWN.Lock() for _ in range(LOCKS)]
            return processes.measure(case, functools.partial(Mapped, memory.name, locks))
        finally:
            memory.close()
            memory.unlink()


CONTENDERS = [SharedMemoryAndLocks()]
