"""tests/ops/deploy/day.py: a wrong sum, a late step and an alert that should not fire are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from tests.ops.deploy.day import Day, Row, spend, table

WRONG = "WRONG SUM: common has 6 to 7, not 7"


class FakeDay:
    """Two steps; alerts of the first are given, and the sums after the second may be wrong."""

    prometheus = object()

    def __init__(self, alerts: set[str], wrong: bool = False, bound_s: float = 60.0) -> None:
        self.done = {"client-0": 0}
        self._alerts, self._wrong, self._bound_s = alerts, wrong, bound_s

    def steps(self) -> list[tuple[str, float, Callable[[], None], set[str]]]:
        return [("one", self._bound_s, lambda: None, {"May"}), ("two", 60.0, lambda: None, set())]

    def check(self) -> None:
        self.done["client-0"] += 7
        if self._wrong and self.done["client-0"] > 7:
            raise AssertionError(WRONG)

    def firing(self) -> set[str]:
        return {"Old"} | (self._alerts if self.done["client-0"] else set())

    def fired(self, seconds: float) -> set[str]:
        assert seconds >= 0
        return {"Old"} | self._alerts


def spent(day: FakeDay) -> list[Row]:
    rows: list[Row] = []
    spend(cast(Day, day), rows)
    return rows


def test_a_day_in_which_all_holds() -> None:
    """An alert that may fire does; one that fired before is not this day's."""
    rows = spent(FakeDay({"May"}))
    assert [(row.added, row.sums, row.alerts, row.wrong) for row in rows] == [
        (7, "exact", ["May"], []),
        (7, "exact", [], []),
    ]
    assert table(rows).splitlines()[1].endswith("7  exact         May")


def test_what_is_wrong_is_told(capsys: Any) -> None:
    """After a wrong sum nothing follows, and late steps and other alerts do not keep the rest from running."""
    one, two = spent(FakeDay({"Never"}, bound_s=-time.monotonic()))
    assert one.sums == "exact"
    assert one.wrong[0] == "unexpected alerts: Never"
    assert one.wrong[1].startswith("took 0 s, at most ")
    assert not two.wrong
    rows = spent(FakeDay(set(), wrong=True))
    assert rows[1].sums == "not compared"
    assert rows[1].wrong == [f"AssertionError: {WRONG}"]
    assert f"two: AssertionError: {WRONG}" in table(rows)
    assert WRONG in capsys.readouterr().err
