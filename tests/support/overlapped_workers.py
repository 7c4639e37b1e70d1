"""Workers with overlap= whose updates mark the model, judged by what their forward passes see; and schedules to order.

Each module's weights take part of the model of tests/support/training_judges.py, and note what they are when they are
used. So a read is what a forward pass computed with, whatever parts had come by then.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.overlap import parts, planner
from smb.overlap import plan as overlap_plan
from smb.train import group
from smb.train.exchange import contribution, round_closing, rounds
from smb.train.partition import Prediction
from smb.train.traits import FUSED
from tests.support.training_judges import mark_of, seen_in

SIZES = (30_000, 7, 120_000, 3, 90_000)  # weights of each module; odd ones, so that marks differ from part to part
JOIN_S = 60.0


def plan_by(kind: str, slice_bytes: int) -> Callable[..., overlap_plan.ExchangePlan]:
    """Return a planner that picks "slices", or "runs" of two layers: what the real one picks depends on the machine."""

    def plan(
        places: Sequence[Any], layers: Sequence[Any], channel: Any, exchange: str, closing_s: float, overlap: str
    ) -> overlap_plan.ExchangePlan:
        count = len(places)
        if kind == "slices":
            chosen = Prediction(overlap, "slices", 1.0, 0.0, slice_bytes=slice_bytes, credit_bytes=4 * slice_bytes)
        else:
            sizes = (2,) * (count // 2) + (1,) * (count % 2)
            pushes = sizes if overlap == "both" else ()
            pulls = () if overlap == "both" and exchange == FUSED else sizes
            chosen = Prediction(overlap, "planned", 1.0, 0.0, pushes=pushes, pulls=pulls)
        cut = overlap_plan.cut_of(places, chosen, exchange)
        return overlap_plan.ExchangePlan(chosen, chosen, cut, tuple(layers), channel)

    return plan


class _Marking(nn.Module):
    def __init__(self, mark: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(mark.numel()))
        self.mark = mark
        self.seen = torch.empty(0)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value whose gradient is minus the mark."""
        self.seen = self.weight.detach().clone()
        return value - (self.weight * self.mark).sum()


class MarkingModel(nn.Module):
    """SGD with lr=1 adds the worker's mark to it."""

    def __init__(self, worker: int, workers: int) -> None:
        super().__init__()
        marks = torch.from_numpy(mark_of(worker, sum(SIZES), workers)).split(SIZES)
        self.layers = nn.Sequential(*(_Marking(mark.clone()) for mark in marks))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return self.layers(value)  # type: ignore[no-any-return]

    def seen(self) -> Any:
        """Return the values that the last forward pass computed with, float32 (n,)."""
        return torch.cat([layer.seen for layer in self.layers]).numpy()  # type: ignore[union-attr,misc]


def mark_behind_passes(
    messages: Any,
    address: str,
    scheme: smb.train.Scheme,
    worker: int,
    workers: int,
    overlap: str,
    *,
    steps: int = 10**9,
    lease: float = 30.0,
    whole: bool = False,
    halt: Any = None,
    judged: bool = True,
    point: str = "",
    count: int = 0,
    kind: str = "slices",
) -> None:
    """Join, wait for all others, then take `steps` steps; tell what each forward pass was seen to compute with (the
    values themselves, unless `judged`), then "done". At the count-th time at a `point` of an exchange it kills itself.
    """
    torch.set_num_threads(1)
    planner.LEARNING_STEPS = 2
    planner.plan_of = plan_by(kind, 40_000)
    if point:
        _kill_at(point, count)
    model = MarkingModel(worker, workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with (
        smb.connect(address, transport="tcp", timeout=30) as client,
        smb.torch.join(model, optimizer, "run", scheme=scheme, client=client, lease=lease, overlap=overlap),
    ):
        client.barrier("all-have-joined", workers, timeout=JOIN_S)
        for clock in range(steps + 1):
            loss = model(torch.zeros(()))
            if clock:
                seen = model.seen()
                messages.put(seen_in(seen, worker, clock, workers, whole=whole) if judged else seen)
            if clock == steps or (halt is not None and halt.is_set()):
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    messages.put("done")


def _kill_at(point: str, count: int) -> None:
    left = [count]

    def reach(name: str) -> None:
        left[0] -= name == point
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    for module in (rounds, contribution, round_closing, group, parts):
        module.failpoint = reach  # type: ignore[attr-defined]
