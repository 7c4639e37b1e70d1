"""A process saw that all units were done, while another one whose units they were had not contributed its rest yet."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import smb.train
from smb.train import LocalSGD, WorkUnits
from smb.train.members import Member
from smb.train.work_units import Unit
from tests.conftest import Connect
from tests.support.daemons import DEADLINE_S, wait_for


def test_the_rest_comes_before_the_end(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between drawing its last ticket and taking that unit a process stands still; another one does the unit, and ends.
    It ends after the first one's rest."""
    first, second = (WorkUnits(connect(), "units", 2, 1, epochs=1) for _ in range(2))
    told: list[str] = []
    claim = WorkUnits._claim

    def end() -> None:
        while second.take(lambda: told.append("rest of the second")) is not None:
            pass
        told.append("end of the second")

    other = threading.Thread(target=end)

    def claim_late(units: WorkUnits, member: Member, index: int, *rest: Any) -> Unit | None:
        if units is first and not other.ident:
            other.start()
            wait_for(lambda: first._words.read(1 + index, 1)[0], "the unit in the other's hands")
            wait_for(lambda: "rest of the second" in told, "the other's end", DEADLINE_S)
        return claim(units, member, index, *rest)

    assert first.take() is not None
    monkeypatch.setattr(WorkUnits, "_claim", claim_late)
    assert first.take(lambda: told.append("rest of the first")) is None
    other.join(DEADLINE_S)
    assert told.index("rest of the first") < told.index("end of the second")
    for units in (first, second):
        units.close()


def test_a_unit_that_comes_again_at_once(connect: Connect) -> None:
    """One unit alone, or the last one of an epoch as the first one of the next, is handed out in each epoch in turn,
    also where there is no last epoch."""
    with WorkUnits(connect(), "units", 5, 5) as units:
        found = [units.take() for _ in range(4)]
    assert found == [Unit(epoch, 0, 5) for epoch in range(4)]


class Watched:
    """A buffer of units, which notes its first unit's word after each swap."""

    def __init__(self, words: Any) -> None:
        self._words = words
        self.seen: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._words, name)

    def compare_swap(self, index: int, expected: int, new: int) -> int:
        before: int = self._words.compare_swap(index, expected, new)
        self.seen.append(int(self._words.read(1, 1)[0]))
        return before


def test_a_unit_that_comes_again_is_free_at_no_moment(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, between its epochs: another process could take it, and end, before the rest of the first was in."""
    with WorkUnits(connect(), "units", 1, 1, epochs=2) as units:
        assert units.take() == Unit(0, 0, 1)
        watched = Watched(units._words)
        monkeypatch.setattr(units, "_words", watched)
        assert units.take() == Unit(1, 0, 1)
        assert watched.seen
        assert all(word % 2**32 for word in watched.seen), watched.seen
        assert units.take() is None


def test_who_has_nothing_to_contribute_closes_the_round_of_those_who_left(connect: Connect) -> None:
    """Their rest lay in a round that was open still, and was in no model, though all was done."""
    ones = [np.ones(10, np.float32) for _ in range(2)]
    first, second = (smb.train.join(connect(), "run", own, LocalSGD(every=4)) for own in ones)
    second.contribute_rest()  # nobody has contributed: there is nothing to close
    for _ in range(2):
        ones[0] += 1
        first.step(samples=1)
    first.close()
    np.testing.assert_array_equal(second.shared(), np.ones(10))
    second.contribute_rest()
    np.testing.assert_array_equal(second.shared(), np.full(10, 3))
    second.contribute_rest()
    for _ in range(4):  # it goes on from there
        ones[1] += 1
        second.step(samples=1)
    second.close()
    np.testing.assert_array_equal(ones[1], np.full(10, 7))
    assert smb.train.status(connect(), "run").samples == 6


def test_who_ends_is_waited_for_by_nobody(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without a unit stands still before it says that it is done. The rest of the other one is in the model,
    at the latest when all is done."""
    ones = [np.ones(10, np.float32) for _ in range(2)]
    first, second = (smb.train.join(connect(), "run", own, LocalSGD(every=4)) for own in ones)
    mine, others = (WorkUnits(w.group.client, "run/units", 1, 1, epochs=1, worker=w) for w in (first, second))
    still, go_on, finish = threading.Event(), threading.Event(), WorkUnits._finish

    def finish_late(units: WorkUnits) -> None:
        if units is others:
            still.set()
            assert go_on.wait(DEADLINE_S)
        finish(units)

    assert mine.take() is not None
    monkeypatch.setattr(WorkUnits, "_finish", finish_late)
    ending = threading.Thread(target=others.take)
    ending.start()
    try:
        assert still.wait(DEADLINE_S)
        ones[0] += 1
        first.step(samples=1)
        assert mine.take() is None
        np.testing.assert_array_equal(first.shared(), np.full(10, 2))
    finally:
        go_on.set()
        ending.join(DEADLINE_S)
    for each in (mine, others, first, second):
        each.close()  # type: ignore[attr-defined]
