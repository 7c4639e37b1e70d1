"""A lock, a barrier, and a call whose outcome was unknown. Run it: python examples/taking_turns.py"""

from __future__ import annotations

import multiprocessing

import numpy as np

import smb

WORKERS = 3
TURNS = 20


def work(address: str, number: int) -> None:
    """Change the buffer in turns with the others, by reading it, thinking, and writing it."""
    with smb.connect(address) as client:
        buffer = client.open("shared")
        index = client.barrier("start", WORKERS, timeout=60)  # nobody begins before all are there
        for _ in range(TURNS):
            with buffer.lock(ttl=10) as lock:  # first come, first served; a dead holder loses it within ttl
                values = buffer.read()
                buffer.write(values + 1, fence=lock)  # refused if the lock was lost meanwhile: LockLostError
        print(f"worker {number}, {index + 1}. to arrive, is done")


def add_exactly_once(buffer: smb.Buffer, values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    """Add, and if the call ran out of time with its outcome unknown, do just what is missing of it."""
    try:
        buffer.accumulate(values)
    except (smb.UnavailableError, smb.TimeoutError) as error:
        for part in buffer.settle(error, timeout=60):  # the ranges of elements that it did not reach, and never will
            buffer.accumulate(values[part.start : part.stop], part.start)


def main() -> None:
    """Run the workers; every turn of each must have counted."""
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
        buffer = client.create("shared", (100_000,), stripe="64KiB")
        workers = [processes.Process(target=work, args=(cluster.address, number)) for number in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        add_exactly_once(buffer, np.ones(100_000, dtype=np.float32))
        assert (buffer.read() == WORKERS * TURNS + 1).all()
        print(f"{WORKERS * TURNS} turns and one addition, none lost")


if __name__ == "__main__":
    main()
