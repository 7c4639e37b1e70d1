"""A lock, a barrier, and a call whose outcome was unknown. Run it: python examples/taking_turns.py"""

from __future__ import annotations

import multiprocessing

import numpy as np

import smb

WORKERS = 3
TURNS = 20


def work(address: str, number: int) -> None:
    """Change the buffer in turn with the others: read it, compute, and write it."""
    with smb.connect(address) as client:
        buffer = client.open("shared")
        index = client.barrier("start", WORKERS, timeout=60)  # no worker begins before all have arrived
        for _ in range(TURNS):
            with buffer.lock(ttl=10) as lock:  # in the order of requests; a dead holder loses the lock within ttl
                values = buffer.read()
                buffer.write(values + 1, fence=lock)  # refused with LockLostError if the lock was lost meanwhile
        print(f"worker {number}, {index + 1}. to arrive, is done")


def add_exactly_once(buffer: smb.Buffer, values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    """Add the values. If the call ran out of time with an unknown outcome, add only the ranges that did not arrive."""
    try:
        buffer.accumulate(values)
    except (smb.UnavailableError, smb.TimeoutError) as error:
        for part in buffer.settle(error, timeout=60):  # ranges of elements that the call did not reach and never will
            buffer.accumulate(values[part.start : part.stop], part.start)


def main() -> None:
    """Run the workers, and check that every turn of each counted."""
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
