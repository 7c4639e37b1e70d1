"""The soak's own judge finds planted bad histories; the others are those of test_checkers.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import smb.train
from tests.soak.clients import WEIGHTS
from tests.soak.judges import check_meetings, judge_training
from tests.support.checkers import BadHistoryError
from tests.support.history import Step

ARRIVES, PASSES = Step.ASKS, Step.TOLD


def test_both_arrive_before_one_passes() -> None:
    """The second one may be told later, or never."""
    first = [(ARRIVES, 1.0, 5), (PASSES, 2.0, 5), (ARRIVES, 3.0, 6)]
    second = [(ARRIVES, 1.5, 5)]
    assert check_meetings([first, second]) == 1


@pytest.mark.parametrize(
    "second", [[], [(ARRIVES, 2.5, 5)], [(ARRIVES, 1.5, 4)]], ids=["never", "too late", "at another one"]
)
def test_one_alone_does_not_pass(second: list[tuple[Step, float, int]]) -> None:
    """Nobody else was there."""
    with pytest.raises(BadHistoryError, match="barrier 5 was passed when 1 had arrived"):
        check_meetings([[(ARRIVES, 1.0, 5), (PASSES, 2.0, 5)], second])


def test_a_model_of_nans_is_bad_after_any_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody: Any = None
    monkeypatch.setattr(smb.train, "shared", lambda *_: np.full(WEIGHTS, np.nan, np.float32))
    with pytest.raises(BadHistoryError, match="its loss is still nan"):
        judge_training(nobody, "rounds", [])
