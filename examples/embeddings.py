"""An embedding table on memory servers: 4 processes read and change the rows that their batches name, and no others.

Each process learns from batches of its own, as torch.nn.Embedding(sparse=True) does it in one process below. A row that
a batch names twice gets both gradients. Run it: python examples/embeddings.py
"""

from __future__ import annotations

import multiprocessing

import numpy as np
import torch

import smb

ROWS, WIDTH = 2000, 16
PROCESSES, STEPS, BATCH, RATE = 4, 400, 64, 0.1
TRUTH = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)  # what the table has to learn


def batches(seed: int, count: int) -> list[np.ndarray]:
    """Return row numbers, small ones more often, as words of a language are."""
    random = np.random.default_rng(seed)
    return [(ROWS * random.random(BATCH) ** 2).astype(np.int64) for _ in range(count)]


def learn(address: str, seed: int) -> None:
    """Learn from one process's batches, beside the other processes."""
    with smb.connect(address) as client:
        table = client.open("embeddings")
        for rows in batches(seed, STEPS):
            error = table.read_sparse(rows, rows=True) - TRUTH[rows]
            table.accumulate_sparse(rows, error, rows=True, scale=-RATE)


def learn_alone() -> np.ndarray:
    """Learn from all batches in this process, with PyTorch."""
    table = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = torch.optim.SGD(table.parameters(), lr=RATE)
    truth = torch.from_numpy(TRUTH)
    for rows in (torch.from_numpy(rows) for seed in range(PROCESSES) for rows in batches(seed, STEPS)):
        optimizer.zero_grad()
        (0.5 * (table(rows) - truth[rows]) ** 2).sum().backward()
        optimizer.step()
    return table.weight.detach().numpy()


def main() -> None:
    """Print how far both tables are from the truth in the end."""
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
        table = client.create("embeddings", (ROWS, WIDTH), stripe="4KiB")
        workers = [processes.Process(target=learn, args=(cluster.address, seed)) for seed in range(PROCESSES)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        shared = table.read()
    print(f"at the start: mean error {np.abs(TRUTH).mean():.4f}")
    print(f"shared by {PROCESSES} processes: mean error {np.abs(shared - TRUTH).mean():.4f}")
    print(f"torch.nn.Embedding in one process: mean error {np.abs(learn_alone() - TRUTH).mean():.4f}")


if __name__ == "__main__":
    main()
