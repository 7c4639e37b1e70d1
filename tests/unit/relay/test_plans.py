"""A relay follows the plan that holds for a version, and does not wait for a coordinator that is away."""

from __future__ import annotations

import threading

import pytest

from smb.relay import plans as module
from smb.relay.plans import Plan, Plans, plan_for


def plan(number: int, first: int, last: int) -> Plan:
    return Plan(number, first, last, ((1.0, f"peer{number}"),))


def test_a_version_has_the_plan_in_whose_range_it_is() -> None:
    held = [plan(2, 4, 6), plan(1, 0, 3)]
    assert [found.number if (found := plan_for(held, version)) else 0 for version in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 0]
    assert plan_for([], 1) is None
    # Plans of two coordinators may overlap.
    assert plan_for([plan(3, 5, 9), plan(2, 4, 6)], 5) == plan(3, 5, 9)


def test_a_plan_that_is_missing_is_asked_for_and_waited_for() -> None:
    asked = threading.Event()
    plans = Plans("source", asked.set)
    waiting = threading.Thread(target=plans.wait, args=(3, threading.Event()))
    waiting.start()
    assert asked.wait(10)
    assert plans.is_waiting
    plans.take([plan(1, 0, 2)])
    plans.take([plan(1, 0, 3)])
    waiting.join(10)
    assert not waiting.is_alive()
    assert not plans.is_waiting
    assert plans.of(3).number == 1


def test_without_an_answer_the_latest_plan_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait is in vain; there is no other one until plans come again."""
    waits: list[int] = []
    monkeypatch.setattr(module, "WAIT_S", 0.0)
    plans, stopping = Plans("source", lambda: waits.append(1)), threading.Event()
    plans.wait(1, stopping)
    assert plans.of(1) == Plan.direct("source")
    plans.take([plan(1, 2, 3)])
    plans.wait(3, stopping)
    assert len(waits) == 1
    for version in (4, 5):
        plans.wait(version, stopping)
        assert plans.of(version).number == 1
    assert len(waits) == 2
    plans.take([])
    plans.wait(6, stopping)
    assert len(waits) == 3
    assert plans.of(1) == Plan.direct("source"), "older than every plan that is known"


def test_few_plans_are_kept() -> None:
    plans = Plans("source")
    for number in range(1, 10):
        plans.take([plan(number, number, number)])
    assert [plans.of(version).number for version in (9, 8, 7, 6)] == [9, 8, 7, 0]
    assert plans.latest.number == 9
