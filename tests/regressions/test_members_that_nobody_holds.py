"""A notebook's cell that joined a training and was run again hung, without a word: the others, and the cell itself,
waited for the member that the first run had made and nobody could step or close any more.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.spi import session_of
from tests.conftest import Connect
from tests.fault.long import LONG
from tests.support.daemons import wait_for

LEASE_S = 3600.0  # nobody goes on because a lease has ended
CELL = """
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it and the optimizer refer to each other
shared = smb.torch.join(model, optimizer, "run", client=client, lease=lease, **options)
"""


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Off: nobody knows when it runs in a notebook."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def members(client: smb.Client) -> int:
    return sum(worker.alive for worker in smb.train.status(client, "run").workers)


def steps(values: dict[str, Any], count: int) -> None:
    model, optimizer = values["model"], values["optimizer"]
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


@pytest.fixture
def cell(connect: Connect) -> dict[str, Any]:
    """A notebook's variables."""
    names = {"smb": smb, "torch": torch, "nn": nn, "client": connect(), "lease": LEASE_S}
    return names | {"options": {"scheme": "localsgd", "every": 2}}


OPTIONS: dict[str, dict[str, Any]] = {
    "localsgd": {"scheme": "localsgd", "every": 2},
    "overlap": {"scheme": "bsp", "overlap": "forward"},
    "diloco": {"scheme": "diloco", "every": 2},
    "asyncdiloco": {"scheme": "asyncdiloco", "every": 2},
    "r2sp": {"scheme": "r2sp"},
}
STEPPED = OPTIONS if LONG else ("localsgd", "overlap")


@pytest.mark.parametrize(("name", "before"), [*((name, 0) for name in OPTIONS), *((name, 3) for name in STEPPED)])
def test_a_cell_that_is_run_again(cell: dict[str, Any], connect: Connect, name: str, before: int) -> None:
    """Whether or not its first run has stepped: the second one trains, and waits for nobody."""
    cell["options"] = OPTIONS[name]
    exec(CELL, cell)
    steps(cell, before)
    exec(CELL, cell)
    steps(cell, 5)
    wait_for(lambda: members(connect()) == 1, "that the first run's member has left")
    assert cell["shared"].worker.contributions >= 2
    cell["shared"].close()


def test_the_batch_in_the_hand_of_a_former_run(cell: dict[str, Any]) -> None:
    """It is done in the second run, which would otherwise wait for it at the end of the epoch, in each scheme."""
    cell["options"] = {"scheme": "asp"}
    exec(CELL, cell)
    left = next(cell["shared"].batches(20, 10, epochs=1))
    steps(cell, 1)
    exec(CELL, cell)
    rows = torch.cat(list(cell["shared"].batches(20, 10, epochs=1)))
    assert set(left.tolist()) < set(rows.tolist()) == set(range(20))
    cell["shared"].close()


def test_a_model_with_another_optimizer(cell: dict[str, Any], connect: Connect) -> None:
    """The model may be joined anew once the optimizer of its former join is gone, and not before."""
    exec(CELL, cell)
    model = cell["model"]
    with pytest.raises(smb.InvalidArgumentError, match=r"already joined to 'run'.*make the optimizer anew"):
        smb.torch.join(model, torch.optim.SGD(model.parameters()), "run", client=cell["client"])
    del cell["optimizer"], cell["schedule"]
    optimizer = torch.optim.SGD(model.parameters())
    shared = smb.torch.join(model, optimizer, "run", client=cell["client"])
    wait_for(lambda: members(connect()) == 1, "that the former member has left")
    assert repr(cell["shared"]).endswith("closed>")
    shared.close()


def test_a_second_worker_of_one_thread_is_refused_when_it_steps(cell: dict[str, Any], connect: Connect) -> None:
    """While nobody has stepped the first, it may be another thread's, which is no error. The second leaves again."""
    exec(CELL, cell)
    other = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    shared = smb.torch.join(other, optimizer, "run", client=connect())
    with pytest.raises(smb.InvalidArgumentError, match=r"each of its two workers would wait for the other.*undone"):
        steps(cell | {"model": other, "optimizer": optimizer}, 1)
    assert repr(shared).endswith("closed>")
    steps(cell, 5)
    assert members(connect()) == 1
    cell["shared"].close()


@pytest.mark.parametrize("at", [0, 3])
def test_what_an_exception_keeps_is_in_the_way_once(cell: dict[str, Any], at: int) -> None:
    """A notebook keeps the last exception, with the variables of the function that raised it. That of the next run,
    which is refused, takes its place, and the run after that one trains.
    """
    kept: list[BaseException] = []

    def train(stops: int) -> None:
        names = dict(cell)
        exec(CELL, names)
        steps(names, stops)
        if stops < 5:
            raise KeyboardInterrupt
        names["shared"].close()

    for stops in (at, 5):
        with pytest.raises((KeyboardInterrupt, smb.InvalidArgumentError)) as caught:
            train(stops)
        kept[:] = [caught.value]
        del caught
    train(5)


@pytest.mark.parametrize(
    "options",
    [{"scheme": "localsgd", "every": 2}, {"scheme": "bsp", "overlap": "forward"}],
    ids=["localsgd", "overlap"],
)
def test_a_member_without_a_variable(
    cell: dict[str, Any], connect: Connect, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """Its optimizer's steps are still exchanged; it leaves with the optimizer and the model, and says so."""
    cell["options"] = options
    exec(CELL, cell)
    worker = cell["shared"].worker
    contributions = worker.contributions
    del cell["shared"]
    steps(cell, 4)
    assert worker.contributions > contributions
    del worker
    with caplog.at_level(logging.INFO, "smb.train"):
        del cell["optimizer"], cell["schedule"], cell["model"]
        gc.collect()
        wait_for(lambda: members(connect()) == 0, "that the member has left")
        wait_for(lambda: "nothing refers to its worker any more" in caplog.text, "line in the log")


def test_a_worker_that_nobody_holds(connect: Connect) -> None:
    """At once, without a garbage collection: nothing in it refers to it. Another one does not wait for it."""
    client = connect()
    kept = smb.train.join(client, "run", np.zeros(4, np.float32), smb.train.BSP(), lease=LEASE_S)
    dropped = smb.train.join(client, "run", np.zeros(4, np.float32))
    del dropped
    kept.step(1)
    wait_for(lambda: members(client) == 1, "that the dropped worker has left")
    kept.close()


@pytest.mark.parametrize("scheme", [smb.train.BSP(), smb.train.SEASGD(), smb.train.HSGD()], ids=lambda each: each.NAME)
def test_a_member_whose_leaving_thread_cannot_start(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, scheme: smb.train.Scheme
) -> None:
    """Its lease ends, so another one goes on then, and it is not reported any more."""
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "smb-leave":
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    client = connect()
    kept = smb.train.join(client, "run", np.zeros(4, np.float32), scheme, lease=1.0)
    dropped = smb.train.join(client, "run", np.zeros(4, np.float32))
    del dropped
    assert refused == ["smb-leave"]
    kept.step(1)
    wait_for(lambda: members(client) == 1, "that the dropped worker's lease has ended")
    wait_for(lambda: list(session_of(client).reports) == [kept.group], "that the last report was sent")
    kept.close()


def test_a_lock_that_was_not_acquired_keeps_nothing(connect: Connect) -> None:
    """The error and the frame that raised it do not refer to each other, nor to the callers' variables."""
    holder, client = connect(), connect()

    class Kept:
        pass

    def fail() -> weakref.ref[Kept]:
        kept = Kept()
        with contextlib.suppress(TimeoutError):
            client.lock("taken", timeout=0).acquire()
        return weakref.ref(kept)

    with holder.lock("taken"):
        assert fail()() is None
