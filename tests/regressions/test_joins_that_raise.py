"""A join that raised at its very end left a member behind: its lock was renewed, and the others waited for it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.call.sync_requests import Home
from smb.engine import AskOpcode
from smb.torch.training import joining
from smb.train import group, join_locks, members
from smb.train.members import Member
from smb.train.membership import Membership
from tests.conftest import Connect

AWAY = smb.UnavailableError("the server is away")
LOST = smb.LockLostError("the lease ran out")


def fails_once(error: BaseException, call: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Any:
    """The call, which raises once after it is done."""
    left = [error]

    def made(*arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        if left and when(*arguments):
            raise left.pop()
        return result

    return made


def fail_release(monkeypatch: pytest.MonkeyPatch, lock: str, error: BaseException) -> None:
    """The answer to the next release of that lock is the error."""

    def is_it(home: Home, asked: str, opcode: AskOpcode, *_: Any) -> bool:
        return opcode is AskOpcode.UNLOCK and home.what == repr(lock)

    monkeypatch.setattr(Home, "ask", fails_once(error, Home.ask, is_it))


def join(client: smb.Client) -> smb.train.Worker:
    return smb.train.join(client, "run", np.zeros(10, np.float32), smb.train.BSP(), lease=60.0)


def join_torch(client: smb.Client) -> smb.torch.Shared:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return smb.torch.join(model, optimizer, "run", scheme="bsp", client=client, lease=60.0)


@pytest.fixture
def first(connect: Connect) -> Iterator[smb.train.Worker]:
    """One who trains, and waits for all members."""
    with join(connect()) as worker:
        yield worker


def waits_for_nobody(worker: smb.train.Worker) -> bool:
    """Whether it is alone, and its step is done: a lease is longer than this test may take."""
    if worker.members != 1:
        return False
    worker.step()
    return True


def test_whose_arrival_is_not_known_has_joined(
    connect: Connect, first: smb.train.Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line of the log needs a read; if that fails, the join is done all the same."""
    monkeypatch.setattr(Membership, "arrival", fails_once(AWAY, Membership.arrival))
    with join(connect()):
        assert first.members == 2
        assert "not known now: the server is away" in caplog.text
    assert waits_for_nobody(first)


@pytest.mark.parametrize("torch_too", [False, True])
def test_an_interrupted_join_leaves_no_member(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, torch_too: bool
) -> None:
    """Ctrl-C in the line of the log: nobody stays, nor does what a maker made; the next try joins once."""
    client = connect()
    monkeypatch.setattr(Membership, "arrival", fails_once(KeyboardInterrupt(), Membership.arrival))
    joins: Callable[[smb.Client], Any] = join_torch if torch_too else join
    with pytest.raises(KeyboardInterrupt):
        joins(client)
    assert client._session.reports == {}
    assert client.list() == []
    with joins(client), joins(connect()):
        assert len(smb.train.status(client, "run").workers) == 2


@pytest.mark.parametrize("error", [AWAY, LOST], ids=["away", "lost"])
@pytest.mark.parametrize("lock", ["run/setup", "run/state"])
def test_a_lock_of_joining_that_can_not_be_given_back(
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lock: str,
    error: smb.Error,
) -> None:
    """All is done by then: it is logged, and the join counts."""
    fail_release(monkeypatch, lock, error)
    with join_torch(connect()) as shared:
        assert str(error) in caplog.text
        assert shared.worker.members == 1
        shared.worker.step()


def test_ctrl_c_as_the_setup_lock_is_given_back(
    connect: Connect, first: smb.train.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is kept, as an interactive Python keeps it, and with it the lock: nobody waits for its member."""
    fail_release(monkeypatch, "run/setup", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as kept:
        join(connect())
    assert waits_for_nobody(first)
    del kept


def test_ctrl_c_as_the_lock_of_a_model_is_given_back(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of smb.torch.join, whose worker is complete by then."""
    with join_torch(connect()) as shared:
        client = connect()
        fail_release(monkeypatch, "run/state", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            join_torch(client)
        assert client._session.reports == {}
        assert waits_for_nobody(shared.worker)


def test_a_rank_that_fails_after_its_mesh_has_joined(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh's ranks do more once the speaker is a member. If that fails, it is none any more."""

    class Ranks(smb.torch.Shared):
        def _join(self, *arguments: Any) -> None:
            super()._join(*arguments)
            raise AWAY

    with join_torch(connect()) as shared:
        client = connect()
        monkeypatch.setattr(joining, "Shared", Ranks)
        with pytest.raises(smb.UnavailableError):
            join_torch(client)
        assert client._session.reports == {}
        assert waits_for_nobody(shared.worker)


def test_the_others_can_not_be_woken(
    connect: Connect, first: smb.train.Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last call for a slot fails: the slot is free again, though somebody keeps the error."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(group, "wake", fails_once(LOST, group.wake))
    with pytest.raises(smb.LockLostError, match="the lease ran out") as kept:
        join(connect())
    assert waits_for_nobody(first)
    del kept


def test_a_maker_without_a_slot(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever taking the slot fails, what was made for it is gone."""
    client = connect()
    for owner, name in ((group, "wake"), (Member, "report"), (members, "lock_of")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails_once(LOST, getattr(owner, name)))
            with pytest.raises(smb.LockLostError, match="the lease ran out"):
                join(client)
        assert client.list() == []


def test_a_slot_that_was_half_taken_is_free(
    connect: Connect, first: smb.train.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is given back, though somebody keeps the error: the next one gets that slot."""
    with monkeypatch.context() as patch:
        patch.setattr(Member, "report", fails_once(LOST, Member.report))
        with pytest.raises(smb.LockLostError, match="the lease ran out") as kept:
            join(connect())
    with join(connect()) as second:
        assert second.status.slot == 1
    assert waits_for_nobody(first)
    del kept


@pytest.mark.parametrize("lock", ["run/setup", "run/state"])
def test_who_waits_to_join_says_for_whom(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lock: str
) -> None:
    """Another process that joins, and stands still, is named in the log and in the error."""
    monkeypatch.setattr(join_locks, "_SILENT_S", 0.1)
    monkeypatch.setattr(join_locks, "_SETUP_S", 0.3)
    name = f"{socket.gethostname()}:{os.getpid()}"
    with connect().lock(lock):
        with pytest.raises(smb.TimeoutError, match=f"{name} holds it"):
            join_torch(connect(timeout=0.3))
        (record,) = (each for each in caplog.records if "joins or makes the same training" in each.message)
        assert f"lock {lock!r}" in record.message
        assert name in record.message
    with join_torch(connect()) as shared:
        assert shared.worker.members == 1
