"""One trainer publishes its model, 16 readers follow it, and no reader ever sees a mix of two generations. Needs torch.

Run it: python examples/trainer_to_readers.py

The readers may be rollout workers or evaluators: they start before the trainer or later, take the newest weights when
they like, and skip generations if they are slow. A reader that wants one generation for longer pins it.
"""

from __future__ import annotations

import multiprocessing
import time

import torch

import smb
import smb.torch

READERS = 16
GENERATIONS = 50


def build() -> torch.nn.Module:
    """Return a model with float32 weights, some bfloat16 weights, and batch norm's statistics: 0.7 million elements."""
    return torch.nn.Sequential(
        torch.nn.Linear(512, 1024),
        torch.nn.BatchNorm1d(1024),
        torch.nn.Linear(1024, 128),
        torch.nn.Linear(128, 128, dtype=torch.bfloat16),
    )


def read(address: str, number: int) -> None:
    """Follow the trainer to its last generation, and check that no generation is a mix."""
    torch.set_num_threads(1)  # 16 readers share the processor
    with smb.connect(address) as client:
        follower = smb.torch.follow(client, "policy", timeout=60)  # waits for a trainer
        model, seen = build(), []
        while follower.generation < GENERATIONS:
            follower.wait(timeout=60)  # sleeps until a newer generation is published
            generation = follower.load(model)
            for name, tensor in model.state_dict().items():
                assert (tensor == generation).all(), f"a mix: {name} in generation {generation}"
            seen.append(generation)
        with follower.pin(ttl=5) as pinned:  # stays the same while tensors are read one by one
            assert pinned["0.weight"][0, 0] == pinned["3.bias"][0] == pinned.number
        line = f"reader {number:2} saw {len(seen):2} generations, {seen[0]} to {seen[-1]}, each of one piece\n"
        print(line, end="", flush=True)  # a single write, so that the readers' lines do not mix


def main() -> None:
    """Train, and publish after every step."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["smb.torch"])  # torch is loaded once, not 16 times
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address) as client:
        readers = [processes.Process(target=read, args=(cluster.address, number)) for number in range(READERS)]
        for reader in readers:
            reader.start()
        model = build()
        publisher = smb.torch.Publisher(client, "policy", model)
        for generation in range(1, GENERATIONS + 1):
            for tensor in model.state_dict().values():
                tensor.fill_(generation)  # stands for a step of training, and makes a mix easy to see
            time.sleep(0.01)
            assert publisher.publish() == generation
        for reader in readers:
            reader.join()
        assert not any(reader.exitcode for reader in readers)
        print(f"the trainer published {publisher.generation} generations of {publisher.buffer.nbytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
