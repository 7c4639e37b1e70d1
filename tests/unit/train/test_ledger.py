"""The ledger beside a reference in numpy: whatever fails, is interrupted or dropped, each element counts once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import smb
from smb.train import ledger as ledger_of
from smb.train.ledger import Ledger, Run, Values

SIZE = 24


class Wire:
    """A buffer by whose wire elements travel in halves, and that applies a part of what fails."""

    def __init__(self, random_: random.Random, exact: bool) -> None:
        self.wire = "exact" if exact else "halves"
        self.arrived: Values = np.zeros(SIZE, np.float32)
        self.failing = 0.0
        self.missing: dict[int, list[Run]] = {}
        self._random = random_

    def rounded(self, values: Values) -> Values:
        """What arrives of them: whole halves."""
        return values.copy() if self.wire == "exact" else np.round(2 * values) / 2

    def add(self, due: Values, run: Run) -> None:
        """Add a run, all of it or, where it fails, a part."""
        fails = self._random.random() < self.failing
        count = self._random.randint(0, run.count) if fails else run.count
        self.arrived[run.there : run.there + count] += self.rounded(due[run.here : run.here + count])
        if fails:
            error = (smb.UnavailableError if self._random.random() < 0.5 else KeyboardInterrupt)("says the test")
            self.missing[id(error)] = [Run(run.here + count, run.there + count, run.count - count)]
            raise error

    def missed(self, run: Run, error: BaseException) -> list[Run]:
        """What an addition has not applied; at times nobody knows yet."""
        if self._random.random() < self.failing:
            raise smb.TimeoutError("nobody knows yet")
        return [left for left in self.missing[id(error)] if left.count]


@pytest.fixture(params=["exact", "halves"])
def exact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Wires that keep all bits, and some."""
    monkeypatch.setattr(ledger_of, "as_sent", lambda wire, values, _: wire.rounded(values))
    monkeypatch.setattr(ledger_of, "BLOCK_ELEMENTS", 5)
    return bool(request.param == "exact")


def _some(random_: random.Random) -> Values:
    return np.array([random_.randint(-9, 9) / 8 for _ in range(SIZE)], np.float32)  # sums are exact


def _until_done(step: Any) -> None:
    for _ in range(200):
        try:
            step()
        except (smb.Error, KeyboardInterrupt):
            continue
        return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("seed", range(40))
def test_what_is_added_counts_once(exact: bool, seed: int) -> None:
    """Additions that fail and are asked for: all that was done arrived, is due, or is in the parameters still."""
    print("seed", seed)
    random_ = random.Random(seed)
    wire = Wire(random_, exact)
    ledger = Ledger(np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32))
    values, done = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    runs = (Run(0, 0, 9), Run(9, 9, 15))

    def settle() -> None:
        ledger.ask(wire.missed)
        ledger.add(lambda run: wire.add(ledger.due, run))  # type: ignore[arg-type]
        ledger.count()

    for _ in range(8):
        change = _some(random_)
        values += change
        done += change
        for begin in range(0, SIZE, 7):
            here = slice(begin, begin + 7)
            due = ledger.note(begin, values[here] - ledger.base[here])
            assert np.array_equal(due, ledger.due[here])  # type: ignore[index]
        wire.failing = 0.3
        ledger.begin(runs, wire)  # type: ignore[arg-type]
        assert ledger.under_way
        later = _some(random_)  # what the worker does meanwhile is in nothing of this
        values += later
        done += later
        _until_done(settle)
        assert not ledger.under_way
        assert ledger.due is not None
        assert np.array_equal(done, wire.arrived + ledger.due + (values - ledger.base))
        assert not exact or not ledger.due.any()
        if random_.random() < 0.5:  # the parameters become what all have, of which this worker's part is what arrived
            ledger.landing = wire.arrived.copy()
            done -= values - ledger.base  # local changes since are dropped
            values[:] = ledger.landing
            ledger.take_over()
            wire.arrived, done = wire.arrived.copy(), wire.arrived + ledger.due
            assert np.array_equal(values, ledger.base)


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_written_counts_when_it_is_said(exact: bool, apart: bool) -> None:
    """A contribution lies in an inbox until it counts, and is written again, with what was done since, where it does
    not. With a rest apart the next one is noted before that is known.
    """
    for seed in range(20):
        print("seed", seed)
        random_ = random.Random(seed)
        wire = Wire(random_, exact)
        zeros = lambda: np.zeros(SIZE, np.float32)  # noqa: E731
        ledger = Ledger(zeros(), zeros(), zeros() if apart else None)
        assert ledger.due is not None
        values, done, counted, inbox, whole, settled = zeros(), zeros(), zeros(), zeros(), Run(0, 0, SIZE), True
        for _ in range(30):
            change = _some(random_)
            values += change
            done += change
            if apart:
                before = ledger.rest if settled else ledger.due.copy()
                ledger.due[:] = values - ledger.base
                ledger.noted(whole, before)
            else:
                ledger.note(0, values - ledger.base)
            inbox[:] = wire.rounded(ledger.due)
            ledger.written.clear()
            ledger.written.extend((wire, block) for block in whole.cut())  # type: ignore[misc]
            settled = random_.random() < 0.6
            if apart:
                ledger.count()
            if settled:
                counted += inbox
                ledger.count()
                rest = ledger.rest if apart else ledger.due
                assert np.array_equal(done, counted + rest + (values - ledger.base))


def test_without_due_nothing_moves() -> None:
    """A contribution that is made anew until it counts: the base stays, and what is noted is what was done."""
    ledger, done = Ledger(np.ones(4, np.float32)), np.arange(4, dtype=np.float32)
    assert ledger.note(0, done) is done
    assert ledger.base.tolist() == [1, 1, 1, 1]
    out = np.empty(4, np.float32)
    assert ledger.draw(0, done, out).tolist() == done.tolist()
    ledger.count()
    ledger.forget()


def test_what_is_drawn_stays_until_it_is_kept(exact: bool) -> None:
    """`draw` moves nothing: a contribution that is not written after all leaves the books as they were."""
    wire = Wire(random.Random(1), exact)
    ledger, done = Ledger(np.zeros(4, np.float32), np.full(4, 0.125, np.float32)), np.full(4, 0.5, np.float32)
    for _ in range(2):
        drawn = ledger.draw(0, done, np.empty(4, np.float32))
        assert drawn.tolist() == [0.625] * 4
    for _ in range(2):
        ledger.keep(drawn, wire, 0)  # type: ignore[arg-type]
        assert ledger.due is not None
        assert ledger.due.tolist() == [0.0 if exact else 0.125] * 4


def test_what_is_dropped_is_gone() -> None:
    """Runs, failures and what was due."""
    ledger = Ledger(np.zeros(4, np.float32), np.ones(4, np.float32), np.ones(4, np.float32))
    ledger.begin([Run(0, 0, 4)])
    ledger.failed.append((Run(0, 0, 4), smb.UnavailableError("away")))
    ledger.forget()
    assert not ledger.under_way
    assert ledger.due is not None
    assert ledger.rest is not None
    assert not ledger.due.any()
    assert not ledger.rest.any()
