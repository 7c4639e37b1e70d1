"""The first call on the way out failed, and the rest of leaving was left out: the others waited for what nobody had."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.call.sync_requests import Home
from smb.engine import AskOpcode
from smb.train import DiLoCo, WorkUnits, members
from smb.train.exchange.round_closing import Closer
from tests.conftest import Connect

AWAY = smb.UnavailableError("the server is away")
LEASE_S = 60.0  # longer than a test may take


class Words:
    """A buffer of units, whose server is away for who hands one back."""

    def __init__(self, words: smb.Buffer) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Any:
        return getattr(self._words, name)

    def compare_swap(self, *_: int) -> int:
        raise AWAY


def _units(client: smb.Client) -> WorkUnits:
    return WorkUnits(client, "units", 4, 1, epochs=1, lease=LEASE_S)


def _all_for(units: WorkUnits) -> bool:
    """Whether nobody else is there, and this one gets all units."""
    if list(members.live(units._table.read())) != [1]:
        return False
    return len(list(units)) == 4


def test_who_can_not_hand_back_leaves(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so; the unit is for the others at once, though somebody keeps the error."""
    first = _units(connect())
    with _units(connect()) as second:
        assert first.take() is not None
        monkeypatch.setattr(first, "_words", Words(first._words))
        seen = second._tick.version
        with pytest.raises(smb.UnavailableError, match="is away") as kept:
            first.close()
        assert second._tick.version > seen
        assert _all_for(second)
        first.close()
        del kept


def test_the_blocks_own_error_stays(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the way out of an error a failing close is a warning; without one it is raised. It has left both times."""

    def take_one(error: Exception | None) -> None:
        with _units(connect()) as units:
            assert units.take() is not None
            monkeypatch.setattr(units, "_words", Words(units._words))
            if error is not None:
                raise error

    with _units(connect()) as second:
        with pytest.raises(ValueError, match="the block's own"):
            take_one(ValueError("the block's own"))
        assert "while another error was raised: the server is away" in caplog.text
        with pytest.raises(smb.UnavailableError, match="is away"):
            take_one(None)
        assert list(members.live(second._table.read())) == [0]


@pytest.fixture
def worker(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Iterator[smb.train.Worker]:
    """One whose calls are made one after the other, and whose release of the weights' lock gets no answer."""
    ask = Home.ask

    def asked(home: Home, what: str, opcode: AskOpcode, *arguments: Any, **options: Any) -> Any:
        if opcode is AskOpcode.UNLOCK and home.what == "of buffer 'run'":
            raise AWAY
        return ask(home, what, opcode, *arguments, **options)

    values = np.zeros(10, np.float32)
    found = smb.train.join(connect("shm"), "run", values, DiLoCo(every=1), lease=LEASE_S)
    assert not found.group.remote
    with monkeypatch.context() as patch:
        patch.setattr(Home, "ask", asked)
        yield found
    found.abandon()  # close() would wait for that lock's lease


def _is_free(worker: smb.train.Worker, suffix: str) -> bool:
    """Whether another one gets the lock of that buffer at once."""
    lock = worker.group.buffer(suffix).lock(timeout=0.0)
    try:
        lock.acquire()
    except smb.TimeoutError:
        return False
    lock.release()
    return True


def test_a_lock_of_a_round_that_can_not_be_given_back(worker: smb.train.Worker) -> None:
    """The round is closed: the other locks are free, the others are woken, and step succeeds."""
    seen = worker.group.tick.version
    worker.step()
    assert worker.progress.round == 1
    assert worker.group.tick.version > seen
    assert _is_free(worker, "next")


def test_a_round_that_fails_says_why(worker: smb.train.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that a lock could not be given back after that; and the other locks are free."""

    def build(*_: Any) -> None:
        raise smb.TimeoutError("the sum took too long")

    with monkeypatch.context() as patch:
        patch.setattr(Closer, "_build", build)
        with pytest.raises(smb.TimeoutError, match="took too long"):
            worker.step()
    assert _is_free(worker, "next")
