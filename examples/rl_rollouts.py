"""One trainer, rollout workers that come and go, and how stale each sample's policy is. Needs torch.

Run it: python examples/rl_rollouts.py

Four workers sample with the newest policy that they have, and the trainer learns from what arrives (REINFORCE on a toy
task: each token should be the previous one plus one). No process waits for another. Workers follow the published
policy. One worker leaves in the middle and another replaces it, without a group that would have to be made anew. Each
sample names the generation that made it. Its staleness is the trainer's generation less that number, and samples that
are too stale are dropped.
"""

from __future__ import annotations

import multiprocessing
import queue
import sys
from collections import Counter
from typing import Any

import torch

import smb
import smb.torch

WORKERS = 4
TOKENS = 8  # size of the vocabulary
LENGTH = 6  # length of a sequence
BATCH = 64
STALENESS_MAX = 6


class Policy(torch.nn.Module):
    """A small transformer that maps the tokens so far to the logits of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(TOKENS, 32)
        self.block = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(32, TOKENS)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits after each token, (batch, length, vocabulary)."""
        length = tokens.shape[1]
        mask = self.mask[:length, :length]  # type: ignore[index]
        return self.head(self.block(self.embedding(tokens), src_mask=mask))  # type: ignore[no-any-return]


@torch.no_grad()
def roll_out(policy: Policy) -> torch.Tensor:
    """Sample a batch of sequences, (batch, length)."""
    tokens = torch.randint(0, TOKENS, (BATCH, 1))
    while tokens.shape[1] < LENGTH:
        following = torch.distributions.Categorical(logits=policy(tokens)[:, -1]).sample()
        tokens = torch.cat([tokens, following[:, None]], 1)
    return tokens


def rewards(tokens: torch.Tensor) -> torch.Tensor:
    """Return 1 for each token that equals the previous one plus one, (batch, length - 1)."""
    return (tokens[:, 1:] == (tokens[:, :-1] + 1) % TOKENS).float()


def work(address: str, number: int, samples: Any, batches: int) -> None:
    """Sample `batches` batches (0: until the trainer has enough), each with the newest policy."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    policy = Policy()
    with smb.connect(address, name=f"worker {number}") as client:
        follower = smb.torch.follow(client, "policy", timeout=60)
        follower.wait(timeout=60)
        done = 0
        while not batches or done < batches:
            if follower.latest > follower.generation:
                follower.load(policy)
            try:
                samples.put((number, follower.generation, roll_out(policy).numpy()), timeout=60)
            except (ValueError, queue.Full):
                return
            done += 1


def main(steps: int) -> None:
    """Train on the samples that arrive, and publish after every step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["smb.torch", "torch._dynamo"])  # loaded once, not five times
    samples = processes.Queue(maxsize=2)
    with smb.LocalCluster(servers=1) as cluster, smb.connect(cluster.address, name="trainer") as client:

        def start(number: int, batches: int = 0) -> Any:
            worker = processes.Process(target=work, args=(cluster.address, number, samples, batches), daemon=True)
            worker.start()
            return worker

        policy = Policy()
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
        publisher = smb.torch.Publisher(client, "policy", policy, versions=3)
        publisher.publish()
        leaves = max(1, steps // 20)  # number of batches after which the first worker leaves
        workers = [start(number, leaves if number == 0 else 0) for number in range(WORKERS)]
        staleness, came, dropped, recent = Counter[int](), Counter[int](), 0, []
        while publisher.generation <= steps:
            if len(workers) == WORKERS and not workers[0].is_alive():
                workers.append(start(WORKERS))  # replaces it
            number, generation, tokens = samples.get(timeout=60)
            age = publisher.generation - generation
            if age > STALENESS_MAX:
                dropped += 1
                continue
            staleness[age] += 1
            came[number] += 1
            batch = torch.from_numpy(tokens)
            reward = rewards(batch)
            chosen = torch.distributions.Categorical(logits=policy(batch)[:, :-1]).log_prob(batch[:, 1:])
            loss = -(chosen * (reward - reward.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            publisher.publish()
            recent.append(float(reward.mean()))
            if len(recent) % max(1, steps // 5) == 0:
                mean = sum(recent[-steps // 10 :]) / len(recent[-steps // 10 :])
                print(f"generation {publisher.generation:4}: reward {mean:.2f}", flush=True)
        for worker in workers:
            worker.kill()
            worker.join()
        print("staleness:", ", ".join(f"{age}: {count}" for age, count in sorted(staleness.items())),
              f"(dropped {dropped})")  # fmt: skip
        print("batches by worker:", ", ".join(f"{number}: {count}" for number, count in sorted(came.items())))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
