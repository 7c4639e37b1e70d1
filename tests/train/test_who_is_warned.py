"""What a member is told of: its own lost steps, other members' optimizers, and a cluster that can't take it now."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.train import member_table as t
from smb.train import members, optimizers
from tests.conftest import Connect
from tests.support.daemons import wait_for

LEASE_S = 60.0  # it ends in tests alone, also on a busy machine


def lose(worker: smb.train.Worker) -> None:
    """End the lease, as if the process had been stopped; with HSGD the one in the host's group."""
    lock = (worker.group.nested or worker.group).member._lock
    lock.lose(lock.token)


@pytest.mark.parametrize(
    ("scheme", "before", "lost"),
    [
        (smb.train.LocalSGD(every=3), 4, 3),  # one step after an exchange, then two more until the next one
        (smb.train.BSP(), 2, 1),
        (smb.train.ASP(), 2, 1),
        (smb.train.EASGD(every=3), 4, 3),
        (smb.train.DiLoCo(every=4, fragments=2), 4, 4),  # the fragment that was sent longest ago
        (smb.train.HSGD(every=1), 2, 1),
    ],
    ids=lambda value: value.NAME if isinstance(value, smb.train.Scheme) else "",
)
def test_lost_steps_are_counted(
    connect: Connect, caplog: pytest.LogCaptureFixture, scheme: smb.train.Scheme, before: int, lost: int
) -> None:
    """A member that is back says in its progress and in the log how many of its own steps are lost; they stay counted
    over a second loss.
    """
    values = np.ones(1000, np.float32)
    with smb.train.join(connect(), "run", values, scheme, lease=LEASE_S) as worker:
        for _ in range(before):
            worker.step()
        assert worker.progress.lost_steps == 0
        for times in (1, 2):
            caplog.clear()
            lose(worker)
            for _ in range(20):
                worker.step()
                if worker.status.rejoins == times:
                    break
            found = worker.progress.lost_steps
            if times == 1:
                assert found == lost
                is_or_are = "is" if lost == 1 else "are"
                assert (
                    f"is back as member {worker.status.slot}; {lost} of its local steps {is_or_are} lost" in caplog.text
                )
            else:
                assert found > lost


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def adam(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)


def scheduled(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """A warm-up that begins far below the rate."""
    optimizer = sgd(model, rate)
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 100)
    return optimizer


@pytest.mark.parametrize(
    ("make", "rate", "said"),
    [
        (sgd, 0.1, ""),
        (scheduled, 0.1, ""),
        (sgd, 0.2, "SGD with learning rate 0.2"),
        (adam, 0.1, "AdamW with learning rate 0.1"),
    ],
)
def test_differing_optimizers_are_warned_of(
    connect: Connect, caplog: pytest.LogCaptureFixture, make: Any, rate: float, said: str
) -> None:
    """Once, by the member that joins, which names both members and both values; a schedule is no difference. It is
    never refused.
    """
    first, second = nn.Linear(6, 2), nn.Linear(6, 2)
    with (
        caplog.at_level(logging.WARNING),
        smb.torch.join(first, sgd(first, 0.1), "run", scheme="asp", client=connect(), lease=LEASE_S),
        smb.torch.join(second, optimizer := make(second, rate), "run", client=connect()) as shared,
    ):
        warned = [record.message for record in caplog.records if "different optimizers" in record.message]
        assert len(warned) == bool(said)
        here = members.name_of(shared.worker.group.table.read()[shared.worker.group.member.row])
        if said:
            assert f"{here} has SGD with learning rate 0.1, and this process ({here}) has {said};" in warned[0]
        caplog.clear()
        lose(shared.worker)
        second(torch.ones(3, 6)).square().mean().backward()
        optimizer.step()
        assert shared.worker.status.rejoins == 1
        assert "different optimizers" not in caplog.text
        row = shared.worker.group.table.read()[shared.worker.group.member.row]
        used = optimizers.read(row)  # a member that is back still says what it uses
        assert used is not None
        assert (used.name, used.rate) == (type(optimizer).__name__, pytest.approx(rate))


def test_optimizers_without_a_rate_and_unknown_ones_are_no_difference() -> None:
    """A row of a member that has said nothing, as one without PyTorch, is not compared; long names are cut alike."""
    rows = np.zeros((1 + t.SLOTS, t.FIELDS), np.int64)

    class Written:
        def write(self, row: int, column: int, values: Any) -> None:
            rows[row, column : column + len(values)] = values

    table: Any = Written()
    optimizers.write(table, 1, optimizers.OptimizerUsed("Optimizer" * 9, math.nan))
    optimizers.write(table, 2, optimizers.OptimizerUsed("Optimizer" * 9, math.nan))
    assert optimizers.differing(rows, 1, [1, 2, 3]) == ""
    optimizers.write(table, 3, optimizers.OptimizerUsed("SGD", 0.5))
    assert re.search(
        r"has SGD with learning rate 0.5, and this .* has Optimizer", optimizers.differing(rows, 1, [1, 2, 3])
    )


@pytest.mark.parametrize("by", ["smb.train", "smb.torch"])
def test_a_join_is_tried_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    """A cluster that says "try again" is asked again, which the log says once; nothing of the failed attempts is
    left. With a short timeout the error comes, and at once if the client is closed.
    """
    model, client = nn.Linear(6, 2), connect()
    create, refused = client.create, []

    def busy(name: str, *arguments: Any, **options: Any) -> smb.Buffer:
        if name == "run/members" and len(refused) < 3:
            refused.append(name)
            raise smb.UnavailableError("the coordinator waits until server-0 has said what it holds; try again")
        return create(name, *arguments, **options)

    def join(to: smb.Client) -> Any:
        if by == "smb.train":
            return smb.train.join(to, "run", np.ones(100, np.float32), smb.train.ASP())
        return smb.torch.join(model, sgd(model, 0.1), "run", scheme="asp", client=to)

    monkeypatch.setattr(client, "create", busy, raising=False)
    with join(client):
        assert len(refused) == 3
        assert caplog.text.count("trying again for up to") == 1
    smb.train.delete(connect(), "run")
    assert connect().list() == []

    hasty = connect(timeout=0.05)
    monkeypatch.setattr(hasty, "create", lambda *_, **__: busy_for_ever(), raising=False)
    with pytest.raises(smb.UnavailableError, match="for ever"):
        join(hasty)
    closed = connect()
    closed.close()
    with pytest.raises(smb.UnavailableError, match="closed"):
        join(closed)


def busy_for_ever() -> None:
    raise smb.UnavailableError("busy for ever; try again")


def test_a_joiner_waits_for_a_slot(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all slots are taken, it gets the first one that is free within its client's timeout."""
    client = connect()
    monkeypatch.setattr(smb.train.BSP, "MEMBERS_MAX", t.SLOTS)
    workers = [smb.train.join(client, "full", np.ones(10, np.float32), smb.train.BSP()) for _ in range(t.SLOTS)]
    joined: list[smb.train.Worker] = []
    joining = threading.Thread(
        target=lambda: joined.append(smb.train.join(connect(timeout=60), "full", np.zeros(10, np.float32)))
    )
    joining.start()
    wait_for(lambda: "slots are taken" in caplog.text, "the joiner to wait")
    assert not joined
    workers[7].close()
    joining.join(60)
    assert joined[0].status.slot == 7
    for worker in (*workers, *joined):
        worker.close()


@pytest.mark.parametrize("scheme", [smb.train.SSP(staleness=0), smb.train.R2SP()], ids=lambda each: each.NAME)
def test_who_waits_for_a_step_or_a_turn_says_for_whom(
    connect: Connect, caplog: pytest.LogCaptureFixture, scheme: smb.train.Scheme
) -> None:
    """Once, after a lease, and that the other worker is in the same process."""
    first, second = (smb.train.join(connect(), "run", np.zeros(4, np.float32), scheme, lease=1.0) for _ in range(2))

    def train() -> None:  # the second step at the latest waits for the other worker
        first.step(1)
        first.step(1)

    waiting = threading.Thread(target=train)
    with caplog.at_level(logging.WARNING, "smb.train"):
        waiting.start()
        wait_for(lambda: "has waited for" in caplog.text, "warning")
    second.step(1)
    second.step(1)
    waiting.join(60)
    assert not waiting.is_alive()
    said = [record.getMessage() for record in caplog.records if "has waited for" in record.getMessage()]
    assert len(said) == 1
    assert f":{os.getpid()}, alive and " in said[0]
    assert said[0].endswith("; this process has joined twice: close() or abandon() the other worker")
    first.close()
    second.close()


def test_who_waits_for_the_last_units_says_for_whom(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    slow, quick = (smb.train.WorkUnits(connect(), "units", 2, 1, epochs=1, lease=1.0) for _ in range(2))
    mine = iter(slow)
    next(mine)
    done: list[int] = []
    waiting = threading.Thread(target=lambda: done.extend(unit.start for unit in quick))
    with caplog.at_level(logging.WARNING, "smb.train"):
        waiting.start()
        wait_for(lambda: "work units 'units': for" in caplog.text, "warning")
    assert f":{os.getpid()}, alive and with units that are not done" in caplog.text
    assert list(mine) == []
    waiting.join(60)
    assert len(done) == 1
