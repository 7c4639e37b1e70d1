"""The judge of counted steps finds planted faults, and lets good runs pass."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.counted_steps import SIZE, STEPS, faults_of, gaps_in

LOG = "joined\n0 0\n1 0\n2 0\n3 1\n4 1\n"


def _model(*counted: int, share: float = 0.5) -> np.ndarray:  # type: ignore[type-arg]
    model = np.zeros(SIZE, np.float32)
    model[[STEPS + k for k in counted]] = share
    return model


def _faults(model: np.ndarray, log: str = LOG, *, killed: bool = False, may_lose_last: bool = False) -> list[str]:  # type: ignore[type-arg]
    return list(faults_of(model, 1, log, killed=killed, may_lose_last=may_lose_last))


def test_good_runs() -> None:
    """All counted, or one contribution of two steps was dropped; a killed worker's step under way counted, or not."""
    assert _faults(_model(0, 1, 2, 3, 4)) == []
    assert _faults(_model(0, 1, 4)) == []
    assert _faults(_model(0, 1, 2, 3, 4, 5), killed=True) == []
    assert _faults(_model(0, 3), killed=True, may_lose_last=True) == []
    assert _faults(_model(), "joined\n") == []


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (_model(1, 3, 4), {}, r"\[\[0\], \[2\]\] are not in the model, and 1 dropped"),
        (_model(0, 3), {"killed": True}, r"\[\[1, 2\], \[4\]\] are not in the model"),
        (_model(0, 3), {"may_lose_last": True}, "are not in the model"),
        (_model(0, 1, 2, 3, 4, share=1.5), {}, "count more than once"),
        (_model(0, 1, 2, 3, 4, 5), {}, "were never made"),
        (_model(0, 1, 2, 3, 4, 6), {"killed": True}, "were never made"),
    ],
)
def test_planted_faults(model: np.ndarray, options: dict[str, bool], words: str) -> None:  # type: ignore[type-arg]
    """Lost, counted twice, or out of nowhere."""
    with pytest.raises(AssertionError, match=words):
        assert not _faults(model, **options), _faults(model, **options)


def test_a_torn_log() -> None:
    """A line is missing."""
    assert _faults(_model(0, 2), "joined\n0 0\n2 0\n") != []


def test_gaps() -> None:
    """Runs of those that are missing."""
    assert gaps_in([True, False, False, True, False]) == [[1, 2], [4]]
    assert gaps_in([]) == []
