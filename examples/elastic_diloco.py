"""DiLoCo on machines that come and go. Run it: python examples/elastic_diloco.py [KILLS]

Three processes train on handwritten digits. Again and again one process is killed with SIGKILL, at any point of its
work, and a new one joins with the shared model. The rounds go on with the processes that are there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import smb.torch
import smb.train

WORKERS = 3
KILLS = 5
ROUNDS = 20  # between two kills
LEASE_S = 1.5  # how long the others wait for a process that was killed


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images (1797, 64) and their classes, in the same order in all processes; the
    last 397 are for testing.
    """
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (images[order] / 16).float(), labels[order]


def network() -> nn.Sequential:
    """Return the model, untrained."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(address: str) -> None:
    """Train until killed."""
    torch.set_num_threads(1)
    images, labels = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with smb.torch.join(
        model, optimizer, "elastic", scheme="diloco", every=25, lease=LEASE_S, coordinator=address, samples=32
    ):
        while True:
            batch = torch.randint(1400, (32,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()


def main() -> None:
    """Repeatedly wait for more rounds, test the shared model, kill a worker and start another one."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else KILLS
    images, labels = digits()
    model = network()
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:

        def start() -> multiprocessing.process.BaseProcess:
            worker = processes.Process(target=train, args=(cluster.address,), daemon=True)
            worker.start()
            return worker

        workers = [start() for _ in range(WORKERS)]
        rounds = 0
        for killed in range(kills + 1):
            rounds = after(client, rounds + ROUNDS)
            model.load_state_dict(smb.torch.shared_state_dict(client, "elastic"))
            accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
            alive = sum(worker.alive for worker in smb.train.status(client, "elastic").workers)
            print(f"round {rounds}: {alive} members, {killed} killed, test accuracy {accuracy:.3f}", flush=True)
            if killed == kills:
                break
            victim = killed % WORKERS
            workers[victim].kill()
            workers[victim].join()
            workers[victim] = start()
        for worker in workers:
            worker.kill()
            worker.join()


def after(client: smb.Client, rounds: int) -> int:
    """Return the number of the group's round once it is at least `rounds`."""
    while True:
        with contextlib.suppress(smb.NotFoundError):  # the first worker has not made the group yet
            if (now := smb.train.status(client, "elastic").round) >= rounds:
                return now
        time.sleep(0.1)


if __name__ == "__main__":
    main()
