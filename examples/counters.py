"""Work that is divided by a counter: each task is done once, by the first process that claims it.

Run it: python examples/counters.py
"""

from __future__ import annotations

import multiprocessing
import os

import smb

TASKS = 1000


def work(address: str) -> None:
    """Claim one task after another until none is left."""
    with smb.connect(address) as client:
        claimed, done, first = client.open("claimed"), client.open("done"), client.open("first")
        if first.compare_swap(0, expected=0, new=os.getpid()) == 0:  # won by exactly one process
            print(f"process {os.getpid()} was the first")
        mine = 0
        while (task := claimed.fetch_add(0, 1)) < TASKS:
            sum(range(50_000))  # the task itself
            done.fetch_add(task, 1)
            mine += 1
        print(f"process {os.getpid()} did {mine} tasks")


def main() -> None:
    """Run three workers, and check that each task was done once."""
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
        client.create("claimed", (1,), "int64")
        client.create("first", (1,), "int64")
        done = client.create("done", (TASKS,), "int64")
        workers = [processes.Process(target=work, args=(cluster.address,)) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print("each task done once:", bool((done.read() == 1).all()))


if __name__ == "__main__":
    main()
