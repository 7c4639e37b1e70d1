"""Work units: each one in one worker's hands at a time, done once an epoch, whoever dies."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.train import Unit, WorkUnits, delete_units
from tests.support.clients import in_process
from tests.support.daemons import stop, wait_for
from tests.support.training import together

Connect = Callable[..., smb.Client]


def _rows(units: list[Unit], total: int) -> np.ndarray[Any, Any]:
    """How often each row was handed out."""
    counts = np.zeros(total, np.int64)
    for unit in units:
        counts[unit.start : unit.start + unit.count] += 1
    return counts


def test_each_once(connect: Connect) -> None:
    """Four workers at once, three epochs: each row three times, in an order that differs from epoch to epoch."""

    def work() -> list[Unit]:
        with WorkUnits(connect(), "units", 1003, 10, seed=4, epochs=3, lease=2.0) as units:
            return list(units)

    done = [unit for units in together(work, work, work, work) for unit in units]
    assert (_rows(done, 1003) == 3).all()
    assert Counter(unit.epoch for unit in done) == {0: 101, 1: 101, 2: 101}
    assert len(set(done)) == len(done)


def test_order(client: smb.Client) -> None:
    """The order is the seed's, and another one in each epoch; another seed gives another one."""
    orders = []
    for seed in (1, 1, 2):
        with WorkUnits(client, "units", 50, 1, seed=seed, epochs=2) as units:
            orders.append([unit.start for unit in units])
        delete_units(client, "units")
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:50]) == sorted(orders[0][50:]) == list(range(50))
    assert orders[0][:50] != orders[0][50:]
    assert client.list() == []
    with pytest.raises(smb.NotFoundError):
        delete_units(client, "units")


def test_handed_back(client: smb.Client, connect: Connect) -> None:
    """What is in hand at close is handed out again; so is the unit of a ticket that was drawn and lost."""
    first = WorkUnits(client, "units", 6, 1, epochs=1)
    unit = first.take()
    client.open("units").fetch_add(0, 1)
    first.close()
    first.close()
    with WorkUnits(connect(), "units", 6, 1, epochs=1) as second:
        done = list(second)
        assert unit in done
        assert (_rows(done, 6) == 1).all()
    with pytest.raises(smb.InvalidArgumentError, match="closed"):
        first.take()


def test_other_numbers(client: smb.Client) -> None:
    """All who use a name say the same; numbers that mean nothing are refused."""
    with WorkUnits(client, "units", 6, 2):
        with pytest.raises(smb.InvalidArgumentError, match="not"):
            WorkUnits(client, "units", 6, 3)
        WorkUnits(client, "units", 6, 2).close()
        WorkUnits(client, "units", 6, 2, epochs=3).close()
    for total, unit, seed in ((0, 1, 0), (1, 0, 0), (1, 1, -1), (1 << 30, 1, 0)):
        with pytest.raises(smb.InvalidArgumentError):
            WorkUnits(client, "others", total, unit, seed)


@pytest.mark.parametrize("scheme", [smb.train.BSP(), smb.train.ASP()])
@pytest.mark.parametrize("worker_first", [True, False])
def test_with_and_without_a_worker(client: smb.Client, scheme: smb.train.Scheme, worker_first: bool) -> None:
    """Whoever comes first makes the table of members, for as many as it likes; the others take that."""
    with smb.train.join(client, "run", np.zeros(10, np.float32), scheme) as worker:
        workers = (worker, None) if worker_first else (None, worker)
        made = [WorkUnits(client, "units", 6, 2, epochs=1, worker=each) for each in workers]
        assert made[0].take() != made[1].take()
        for each in made:
            each.close()


def _take(messages: Any, address: str, count: int, lease: float, epochs: int) -> None:
    with smb.connect(address) as client, WorkUnits(client, "units", 200, 1, epochs=epochs, lease=lease) as units:
        for number, unit in enumerate(units):
            messages.put(unit)
            if number == count:
                client.open("go", timeout=60)
    messages.put(None)


def test_killed(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Three workers are killed with a unit in hand: these units, and no others, are handed out again, in that epoch."""
    finished: list[Unit] = []
    for count in (0, 7, 30):
        with in_process(_take, cluster.address, count, 0.3, 2) as (process, messages):
            taken = [messages.get(timeout=30) for _ in range(count + 1)]
            process.kill()
            process.join()
            finished += taken[:-1]
    with WorkUnits(connect(), "units", 200, 1, epochs=2, lease=0.3) as units:
        for unit in units:
            finished.append(unit)
    assert (_rows(finished, 200) == 2).all()
    assert len(set(finished)) == len(finished)


def test_stopped(cluster: smb.LocalCluster, connect: Connect) -> None:
    """A worker that is stopped past its lease: its unit is done by another, the last waiting for it; it goes on."""
    with in_process(_take, cluster.address, 5, 0.3, 1) as (process, messages):
        taken = [messages.get(timeout=30) for _ in range(6)]
        stop(process.pid)
        client = connect()
        with WorkUnits(client, "units", 200, 1, epochs=1, lease=0.3) as units:
            mine = list(units)
            assert taken[-1] in mine
            assert (_rows(taken[:-1] + mine, 200) == 1).all()
            client.create("go", 1)
            os.kill(process.pid, signal.SIGCONT)
            assert messages.get(timeout=30) is None


def test_last_of_others(connect: Connect) -> None:
    """Who finds nothing left waits for what others have in hand, and ends once they are done with it."""
    first, second = (WorkUnits(connect(), "units", 2, 1, epochs=1, lease=60.0) for _ in range(2))
    assert first.take()
    assert second.take()

    def end() -> None:
        wait_for(lambda: (connect().open("units").read(1) >> 32 == 1).sum() == 1, "the first one's end")
        assert second.take() is None

    assert together(first.take, end) == [None, None]
    first.close()
    second.close()


def test_rounds_and_units(connect: Connect) -> None:
    """Who has no unit left waits for the others' last ones, and these do not wait for it in a round."""
    values = [np.zeros(100, np.float32) for _ in range(2)]
    clients = [connect() for _ in values]
    workers = [smb.train.join(client, "run", own, smb.train.BSP()) for client, own in zip(clients, values, strict=True)]
    both = threading.Barrier(2)

    def train(number: int, steps: int) -> int:
        own, worker, count = values[number], workers[number], 0
        with worker, WorkUnits(clients[number], "run/units", 2, 1, epochs=1, worker=worker) as units:
            for unit in units:
                both.wait(30)  # each has one
                for _ in range(steps):
                    own += unit.start + 1
                    worker.step()
                    count += 1
        return count

    assert together(lambda: train(0, 1), lambda: train(1, 3)) == [1, 3]
    assert smb.train.status(clients[0], "run").round == 3
