"""The planner by itself: after which steps a plan is made, and which plan stays. Steps and measurements are given."""

from __future__ import annotations

import pytest

from smb.overlap import planner as planner_of
from smb.overlap.plan import ExchangePlan, LayerRuns, Measured
from smb.overlap.planner import COMPARED_STEPS, LEARNING_STEPS, Planner
from smb.train.ledger import Run
from smb.train.partition import Prediction
from smb.train.traits import ROUNDS

PLACES = [LayerRuns((Run(0, 0, 4096),)), LayerRuns((Run(4096, 4096, 4096),))]


def measurements(*, computed: bool = True) -> Measured:
    """Two layers whose exchange takes as long as their passes."""
    found = Measured(PLACES, 1e-3, 1e-4)
    for pull in (False, True):
        found.moved(32768, 0.03, pull=pull)
    if computed:
        found.computed([0.01, 0.01], [0.02, 0.02], 0.001)
    return found


def steps_with_plans(planner: Planner, measured: Measured, count: int) -> list[tuple[int, str, str]]:
    """Every step after which the plan was changed, with the overlap of the new plan and the line for the log."""
    changes = []
    for step in range(1, count + 1):
        if planner.due(step, measured):
            news = planner.advance(step, measured, ROUNDS)
            changes.append((step, planner.overlap, news))
    return changes


def test_a_plan_waits_for_the_first_steps_and_for_measurements() -> None:
    """Too few steps: no plan. Without any layer's times: no plan either, and that is said once."""
    planner, measured = Planner("both"), measurements()
    assert [planner.due(step, measured) for step in range(1, LEARNING_STEPS + 1)] == [False] * 3 + [True]
    assert (planner.plan, planner.overlap, planner.cut) == (None, "none", None)
    nothing = measurements(computed=False)
    assert not any(planner.due(step, nothing) for step in range(100))
    assert [step for step in range(100) if planner.hopeless(step, nothing)] == [2 * LEARNING_STEPS]
    assert not any(planner.hopeless(step, measured) for step in range(100))


@pytest.mark.parametrize("faster", ["both", "none"])
def test_the_faster_of_two_ways_stays(faster: str) -> None:
    """A plan with overlap, then as many steps without, then the faster one; a look again after twice as many steps."""
    planner, measured = Planner("both"), measurements()
    measured.stepped(1.0, overlapped=faster == "both")
    measured.stepped(2.0, overlapped=faster != "both")
    decided = LEARNING_STEPS + 2 * COMPARED_STEPS
    changes = steps_with_plans(planner, measured, 4 * decided)
    assert [(step, overlap) for step, overlap, _ in changes] == [
        (LEARNING_STEPS, "both"),
        (LEARNING_STEPS + COMPARED_STEPS, "none"),
        (decided, faster),
    ]
    times = {"both": "1000.0 ms with overlap 'both' and 2000.0", "none": "2000.0 ms with overlap 'both' and 1000.0"}
    assert changes[1][2] == ""
    assert changes[2][2] == f"a step took {times[faster]} ms without: overlap {faster!r} from here on"
    assert not planner.comparing


def test_a_new_plan_is_made_once_measurements_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before twice as many steps as at the decision; then the comparison begins once more."""
    planner, measured = Planner("both"), measurements()
    for overlapped in (True, False):
        measured.stepped(1.0, overlapped=overlapped)
    decided = LEARNING_STEPS + 2 * COMPARED_STEPS
    steps_with_plans(planner, measured, decided)
    monkeypatch.setattr(Measured, "outdated", lambda *_: True)
    changes = [step for step in range(decided + 1, 3 * decided) if planner.due(step, measured)]
    assert changes[0] == 2 * decided
    planner.advance(2 * decided, measured, ROUNDS)
    assert (planner.overlap, planner.comparing) == ("both", True)


def test_a_plan_without_overlap_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no overlap is predicted to help, the next look comes COMPARED_STEPS later, or later than that."""

    def without(places: object, layers: object, channel: object, way: str, closing_s: float, overlap: str) -> object:
        none = Prediction("none", "one message", 1.0, 0.0)
        return ExchangePlan(none, none, planner_of.Cut((), ()), (), measured.channel())

    monkeypatch.setattr(planner_of, "plan_of", without)
    planner, measured = Planner("both"), measurements()
    assert planner.advance(LEARNING_STEPS, measured, ROUNDS) == str(planner.plan)
    assert not planner.comparing
    monkeypatch.setattr(Measured, "outdated", lambda *_: True)
    looks = (step for step in range(LEARNING_STEPS, 100) if planner.due(step, measured))
    assert next(looks) == LEARNING_STEPS + COMPARED_STEPS
