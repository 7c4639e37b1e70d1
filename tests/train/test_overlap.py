"""smb.torch.join(overlap=): behind the passes exchanges come to the same as without; what they would spoil is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.torch import overlap as overlap_of
from smb.train import overlap_plan
from smb.train.partition import FUSED, Prediction
from tests.conftest import Connect

DEADLINE_S = 60.0
SCHEMES = ("bsp", "asp", "ssp", "r2sp")


class Attention(nn.Module):
    """A block whose inner module is not called: its weight is used by the one around it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.out = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return them, changed."""
        return self.norm(values + nn.functional.linear(values, self.out.weight, self.out.bias))


class Network(nn.Module):
    """Modules in another order than they are called in, tied weights, an uncalled module, one that is not used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(24, 40, bias=False)
        self.first = nn.Embedding(40, 24)
        self.middle = nn.Sequential(Attention(24), nn.Tanh(), Attention(24))
        self.unused = nn.Linear(5, 5)
        self.head.weight = self.first.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.middle(self.first(tokens)))


def loss_of(model: nn.Module, worker: int, number: int) -> torch.Tensor:
    tokens = torch.randint(40, (6, 9), generator=torch.Generator().manual_seed(100 * worker + number))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, number: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, worker, number)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def force(monkeypatch: pytest.MonkeyPatch, kind: str, slice_bytes: int = 1000) -> None:
    """Have the planner pick a schedule, after two steps: what it would pick depends on the machine."""

    def plan(
        places: Sequence[Any], layers: Sequence[Any], channel: Any, exchange: str, closing_s: float, overlap: str
    ) -> overlap_plan.Plan:
        count = len(places)
        if kind == "slices":
            chosen = Prediction(overlap, "slices", 1.0, 0.0, slice_bytes=slice_bytes, credit_bytes=4 * slice_bytes)
        else:  # runs of two layers
            sizes = (2,) * (count // 2) + (1,) * (count % 2)
            pushes = sizes if overlap == "both" else ()
            pulls = () if overlap == "both" and exchange == FUSED else sizes
            chosen = Prediction(overlap, "planned", 1.0, 0.0, pushes=pushes, pulls=pulls)
        cut = overlap_plan.cut_of(places, chosen, exchange)
        return overlap_plan.Plan(chosen, chosen, cut, tuple(layers), channel)

    monkeypatch.setattr(overlap_of, "_LEARNING", 2)
    monkeypatch.setattr(overlap_of, "plan", plan)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def together(*calls: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(at: int) -> None:
        try:
            results[at] = calls[at]()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive() or errors, "a worker hangs"
    if errors:
        raise errors[0]
    return results


def trace(connect: Connect, name: str, overlap: str, scheme: str, steps: int = 8) -> tuple[list[list[float]], Any]:
    """Two workers' losses by step, and the shared model."""
    models = [Network(1), Network(2)]
    optimizers = [adam(model) for model in models]
    members = [
        smb.torch.join(model, optimizer, name, scheme=scheme, client=connect(), overlap=overlap)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]

    def train(which: int) -> list[float]:
        with members[which]:
            return [step(models[which], optimizers[which], which, number) for number in range(steps)]

    losses = together(lambda: train(0), lambda: train(1))
    return losses, smb.torch.shared_state_dict(connect(), name)


@pytest.mark.parametrize("kind", ["slices", "runs"])
def test_bsp_comes_to_the_same_to_the_bit(connect: Connect, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Two workers' losses and model are those of overlap="none", to the bit: servers add the inboxes in one order."""
    force(monkeypatch, kind)
    expected, model = trace(connect, "none", "none", "bsp")
    for overlap in ("forward", "both"):
        losses, found = trace(connect, overlap, overlap, "bsp")
        assert losses == expected
        assert all(torch.equal(found[key], model[key]) for key in model)
    assert expected[0][-1] < expected[0][0]
