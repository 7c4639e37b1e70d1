"""Contributions were lost without a word: more than 16 rounds were closed between a worker's look for the open round
and its mark, or after its mark, and one of which nobody knew any more was taken for counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.train import ASP, R2SP, SSP, AsyncDiLoCo, DiLoCo, LocalSGD, members
from tests.support.daemons import wait_for

Connect = Callable[..., smb.Client]

MANY = 40  # rounds: more than the table remembers the decisions of
COUNT = 8


def _async(**settings: Any) -> AsyncDiLoCo:
    return AsyncDiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0, **settings)


def _diloco(**settings: Any) -> DiLoCo:
    return DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0, **settings)


class _Two:
    """Two workers of one training, the second of which is slow. Worker w adds to element w of the model."""

    def __init__(self, connect: Connect, scheme: smb.train.Scheme, count: int = 2) -> None:
        self.values = [np.zeros(COUNT, np.float32) for _ in range(count)]
        self.workers = [smb.train.join(connect(), "run", values, scheme) for values in self.values]

    def step(self, number: int) -> None:
        self.values[number][number] += 1
        self.workers[number].step(samples=1)

    def fast(self) -> None:
        for _ in range(MANY):
            self.step(0)

    @property
    def model(self) -> list[float]:
        return self.workers[0].shared().tolist()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.mark.parametrize("place", ["sending", "marking"])
@pytest.mark.parametrize("scheme", [_async(), _diloco(quorum=1), LocalSGD(every=1, quorum=1)], ids=lambda s: s.NAME)
def test_rounds_that_close_before_the_mark(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, scheme: smb.train.Scheme, place: str
) -> None:
    """While its delta travels, or between its look for the open round and its mark: it is marked anew."""
    two = _Two(connect, scheme)
    slow_one: Any = two.workers[1]
    target, name = (slow_one.exchange.mover, "write") if place == "sending" else (slow_one.group, "check")
    real = getattr(target, name)

    def slow(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        two.fast()
        return result

    monkeypatch.setattr(target, name, slow)
    for _ in range(2):
        two.step(1)
    assert two.model[:2] == [2 * MANY, 2.0]
    status = two.workers[1].status
    assert (status.contributions, status.dropped, status.samples) == (2, 0, 2)
    two.close()


def test_one_that_counted_long_ago_counts_once(connect: Connect) -> None:
    """It is found out however many rounds were closed since, and the next one is another contribution."""
    three = _Two(connect, _async(quorum=2), count=3)
    three.step(1)
    assert three.workers[1].status.contributions == 0  # nobody knows yet
    for _ in range(MANY):
        three.step(0)
        three.step(2)
    assert three.model[1] == 0.5
    three.step(1)  # closes a round with the third one's last
    assert three.workers[1].status.contributions == 2
    assert 0.5 < three.model[1] < 1.0
    assert [worker.status.dropped for worker in three.workers] == [0, 0, 0]
    three.close()


def test_a_late_one_of_who_leaves_is_marked_anew(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mark came as the closer had looked already, so its round ended without it; then it left."""
    two = _Two(connect, _async(quorum=1, grace=0.05), count=3)  # the third one does nothing: a round has its grace
    exchange: Any = two.workers[0].exchange
    closer = exchange._closer
    real, stepped = closer.decide, []

    def decide(*arguments: Any) -> Any:
        if not stepped:
            stepped.append(True)
            two.step(1)
        return real(*arguments)

    monkeypatch.setattr(closer, "decide", decide)

    def step_until(done: Callable[[], bool], what: str) -> None:
        def check() -> bool:
            two.step(0)
            return done()

        wait_for(check, what)

    step_until(lambda: smb.train.status(two.workers[0].group.client, "run").round == 1, "a round without the second")
    assert two.model[1] == 0.0
    two.workers[1].close()
    step_until(lambda: two.model[1] > 0, "the second one's contribution")
    two.close()


@pytest.mark.parametrize("closed", [True, False])
def test_steps_that_were_kept_back_are_sent_or_counted_by_who_leaves(connect: Connect, closed: bool) -> None:
    """A worker went on alone, as its last contribution waited for a quorum, and left: nothing told of its steps."""
    three = _Two(connect, _async(quorum=2), count=3)
    for _ in range(3):
        three.step(1)
    if closed:
        three.step(0)  # closes the round with the first of them
    three.workers[1].close()
    status = next(each for each in smb.train.status(connect(), "run").workers if each.slot == 1)
    assert status.dropped == (0 if closed else 1)
    three.step(0)
    three.step(2)
    # Closed: half of the first, and of the other two, which are one contribution, what its staleness leaves.
    assert three.model[1] == (pytest.approx(1.33, abs=0.2) if closed else 0.5)
    three.close()


def test_what_is_lost_with_a_lease_is_counted(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """A worker was stopped past its lease before it could send: its steps are in no round."""
    two = _Two(connect, _diloco(quorum=1))
    two.workers[1].group.member._lock.release()
    assert two.workers[0].group.reap([1]) == [1]
    two.step(1)
    status = two.workers[1].status
    assert (status.rejoins, status.dropped, status.contributions) == (1, 1, 0)
    assert "dropped the local steps" in caplog.text
    two.step(1)
    assert two.model[1] == 1.0
    status = two.workers[1].status
    assert (status.rejoins, status.dropped, status.contributions) == (1, 1, 1)
    two.close()


@pytest.mark.parametrize("failing", ["wake", "report"])
def test_what_was_counted_stays_if_the_coming_back_fails_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A server was away just when a worker took a slot again: the next try began with empty statistics, so a dropped
    contribution was counted nowhere.
    """
    two = _Two(connect, _diloco(quorum=1))
    group = two.workers[1].group
    group.member._lock.release()
    assert two.workers[0].group.reap([1]) == [1]
    away = [True]
    target: Any = group if failing == "wake" else members.Member
    real = getattr(target, failing)

    def fail_once(*given: Any) -> None:
        if away and (failing == "wake" or given[0] is group.member):
            away.clear()
            raise smb.UnavailableError("the server is away")
        real(*given)

    monkeypatch.setattr(target, failing, fail_once)
    with pytest.raises(smb.UnavailableError, match="is away"):
        two.step(1)
    two.step(1)
    status = two.workers[1].status
    assert (status.rejoins, status.dropped, status.contributions) == (1, 1, 0)
    two.close()


@pytest.mark.parametrize("scheme", [ASP(), SSP(staleness=5), R2SP()], ids=lambda s: s.NAME)
def test_a_delta_that_is_lost_with_a_lease_is_counted(connect: Connect, scheme: smb.train.Scheme) -> None:
    """The same without rounds, where each step is a contribution."""
    two = _Two(connect, scheme)
    two.workers[1].group.member._lock.release()
    assert two.workers[0].group.reap([1]) == [1]
    two.step(1)
    status = two.workers[1].status
    assert (status.rejoins, status.dropped, status.contributions) == (1, 1, 0)
    assert two.model[1] == 0
    two.close()
