"""smb.torch.join(overlap=): what is exchanged behind the passes comes to the same; what that would spoil is refused."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.torch import overlap as overlap_of
from tests.conftest import Connect
from tests.support.clients import in_process
from tests.support.daemons import wait_for
from tests.support.marking_workers import in_threads, members
from tests.support.overlapped_workers import SIZES, mark_behind_passes, plan_by
from tests.support.training_judges import check_bound, check_own, check_rotation

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
    """Have the planner pick a schedule, after two steps."""
    monkeypatch.setattr(overlap_of, "_LEARNING", 2)
    monkeypatch.setattr(overlap_of, "plan", plan_by(kind, slice_bytes))


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


WORKERS = 3


@pytest.fixture(params=["forward", "both"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each overlap; with its planner put back afterwards, as marking workers in threads replace it."""
    force(monkeypatch, "slices")
    return str(request.param)


@pytest.mark.parametrize("scheme", [smb.train.ASP(), smb.train.SSP(staleness=1), smb.train.R2SP()], ids=SCHEMES[1:])
def test_every_update_counts_once_and_the_scheme_holds(
    cluster: smb.LocalCluster, connect: Connect, scheme: smb.train.Scheme, overlap: str
) -> None:
    """Three workers: every forward pass computes with all of its own updates, and with others' as the scheme promises;
    the bound of SSP, the rotation of R2SP, in which no part of an update is seen without the rest.
    """
    steps = 12
    rotates = isinstance(scheme, smb.train.R2SP)
    tasks = [
        partial(mark_behind_passes, address=cluster.address, scheme=scheme, worker=number, workers=WORKERS,
                overlap=overlap, steps=steps, whole=rotates)
        for number in range(WORKERS)
    ]  # fmt: skip
    history = in_threads(tasks)
    assert len(history) == WORKERS * steps
    check_own(history)
    if isinstance(scheme, smb.train.SSP):
        check_bound(history, 1)
    if rotates:  # who is done leaves
        check_rotation([read for read in history if read.clock < steps], WORKERS)
    shared = smb.train.shared(connect(), "run")
    assert shared.sum() == sum(SIZES) * steps
    assert [worker.contributions for worker in members(connect())] == [steps] * WORKERS


POINTS = ("train-sent", "train-marked", "train-claimed", "train-decided", "train-computed", "train-built",
          "train-copied", "train-committed")  # fmt: skip
KILLS = [("asp", "both", "train-part", 12), ("bsp", "both", "train-part", 12), ("bsp", "forward", "train-built", 4)]
if os.environ.get("SMB_LONG"):
    KILLS = [(scheme, how, "train-part", count) for scheme in SCHEMES for how in ("forward", "both")
             for count in (1, 2, 3, 12, 27, 40)]  # fmt: skip
    KILLS += [("bsp", how, point, count) for how in ("forward", "both") for point in POINTS for count in (1, 4)]


@pytest.mark.parametrize(("scheme", "how", "point", "count"), KILLS)
def test_killed_in_the_middle(
    cluster: smb.LocalCluster, connect: Connect, monkeypatch: pytest.MonkeyPatch, scheme: str, how: str, point: str,
    count: int,
) -> None:  # fmt: skip
    """A worker is killed at a place of its exchange. The other goes on, its own updates count once; of the dead one
    each element has all updates that were seen, and at most one more; in rounds no part of an update without the rest.
    """
    force(monkeypatch, "slices")
    made, halt, told = smb.train.SCHEMES[scheme](), threading.Event(), queue.Queue[Any]()
    judged = scheme != "bsp"
    with ExitStack() as stack:
        killed, _ = stack.enter_context(
            in_process(mark_behind_passes, cluster.address, made, 0, 2, how, lease=0.7, judged=judged, point=point,
                       count=count)
        )  # fmt: skip
        wait_for(lambda: members(connect()), "the first member", 60)
        survivor = partial(mark_behind_passes, address=cluster.address, scheme=made, worker=1, workers=2, overlap=how,
                           halt=halt, judged=judged, lease=0.7)  # fmt: skip

        def watch(_: Any) -> None:
            wait_for(lambda: not killed.is_alive(), "the kill", 60)
            before = told.qsize()
            wait_for(lambda: told.qsize() > before + 5, "the other going on", 60)
            halt.set()

        in_threads([lambda _: survivor(told), watch])
    reads = list(told.queue)[:-1]
    found = smb.torch.shared_state_dict(connect(), "run")
    final = np.concatenate([found[f"layers.{layer}.weight"].numpy() for layer in range(len(SIZES))])
    if judged:
        check_own(reads)
        dead, own = final[np.arange(final.size) % 2 == 0], final[np.arange(final.size) % 2 == 1]
        assert (own == reads[-1].clock).all()
        assert set(np.unique(dead)) <= {reads[-1].seen[0], reads[-1].seen[0] + 1}
    else:
        rows = [read.reshape(-1, 2) for read in [*reads, final]]
        assert all((row == row[0]).all() for row in rows), "a part of a round was seen without the rest"
        gained = np.diff([row[0] for row in rows], axis=0)
        # The first reads may be of a round that it joined in the middle of, and was not in.
        assert set(map(tuple, gained[2:-1])) <= {(0.5, 0.5), (0.0, 1.0), (0.0, 0.0)}
        assert tuple(gained[-2]) == (0.0, 1.0)
