"""DiLoCo on machines that come and go: workers are killed, others take their place. Run it: python
examples/elastic_diloco.py [SECONDS]

Three processes train on handwritten digits. Every few seconds one is killed with SIGKILL, in the middle of whatever it
does, and a new one joins from the shared model. The rounds go on with those who are there.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import smb.torch
import smb.train

WORKERS = 3
SECONDS = 12.0
LEASE_S = 1.5  # for so long the others wait for one that was killed


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images (1797, 64) and their classes, in one order for all; the last 397 are for testing."""
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
    """Kill a worker and start another one again and again, and look at the shared model meanwhile."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    images, labels = digits()
    model = network()
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:

        def start() -> multiprocessing.process.BaseProcess:
            worker = processes.Process(target=train, args=(cluster.address,), daemon=True)
            worker.start()
            return worker

        workers = [start() for _ in range(WORKERS)]
        client.open("elastic/members", timeout=60)  # the first worker has made the group
        ends, kills = time.monotonic() + seconds, 0
        for tick in itertools.count(1):
            time.sleep(0.5)
            with contextlib.suppress(smb.NotFoundError):  # not complete yet
                model.load_state_dict(smb.torch.shared_state_dict(client, "elastic"))
                accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
                status = smb.train.status(client, "elastic")
                alive = sum(worker.alive for worker in status.workers)
                print(
                    f"round {status.round:4}: {alive} members, {kills} killed, test accuracy {accuracy:.3f}", flush=True
                )
            if time.monotonic() > ends:
                break
            if tick % 4 == 0:
                victim = int(torch.randint(WORKERS, ()))
                workers[victim].kill()
                workers[victim].join()
                kills += 1
                workers[victim] = start()
        for worker in workers:
            worker.kill()
            worker.join()


if __name__ == "__main__":
    main()
