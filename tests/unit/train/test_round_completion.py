"""When a round may be closed: by the table's rows, the quorum and the time. Table, members and clock are given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from smb.train import member_table as t
from smb.train.exchange.grace import Grace
from smb.train.exchange.round_completion import RoundCompletion
from smb.train.group import BUILT

MEMBERS = 3


class Members:
    """Members that are all alive but `dead`, of a group with a patience of 2.5 seconds."""

    name, table, lease, patience = "run", None, 10.0, 2.5

    def __init__(self, dead: tuple[int, ...] = ()) -> None:
        self._dead = dead
        self.looked_at = list[int]()

    def live(self, rows: t.Rows) -> list[int]:
        """Return the slots that are taken."""
        return [slot for slot in range(t.SLOTS) if rows[1 + slot, t.INCARNATION]]

    def reap(self, slots: list[int]) -> list[int]:
        """Return the dead ones of these."""
        self.looked_at += slots
        return [slot for slot in slots if slot in self._dead]


class Clock:
    """A clock that a test sets, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def rows_of(marked: tuple[int, ...], number: int = 4, *, built: bool = False) -> t.Rows:
    """A table in which `marked` have marked for round `number`, which is open, with the weight 1."""
    rows = np.zeros((1 + t.SLOTS, t.FIELDS), np.int64)
    rows[0, t.ROUND] = number << t.ROUND_SHIFT | (BUILT if built else 0)
    for slot in range(MEMBERS):
        incarnation = 10 + slot
        rows[1 + slot, t.INCARNATION] = incarnation
        rows[1 + slot, t.MARK] = t.mark(incarnation, number + (slot in marked))
        rows[1 + slot, t.WEIGHT] = incarnation << 32 | int(np.float32(1.0).view(np.uint32))
    return rows


def completion(
    quorum: int | None, grace: float = 3.0, dead: tuple[int, ...] = ()
) -> tuple[RoundCompletion, Clock, Any]:
    clock, died = Clock(), list[int]()
    group: Any = Members(dead)
    return RoundCompletion(group, quorum, Grace(grace, 10.0), died.append, clock), clock, died


@pytest.mark.parametrize("quorum", [None, 2])
def test_a_round_that_all_have_marked_is_complete(quorum: int | None) -> None:
    """Also one whose next weights were built: anybody may finish it, whoever is late for it."""
    found, _, _ = completion(quorum)
    assert found.complete(rows_of((0, 1, 2)), 4)
    assert found.complete(rows_of((0,), built=True), 4)
    assert not found.complete(rows_of((0,)), 4)
    assert found.late(rows_of((0,)), 4) == [1, 2]


def test_without_a_quorum_time_changes_nothing() -> None:
    """All live members are waited for; a member looks for dead ones after the group's patience."""
    found, clock, _ = completion(None)
    assert not found.complete(rows_of((0, 1)), 4)
    clock.now += 1e6
    assert not found.complete(rows_of((0, 1)), 4)
    assert (found.grace_left(4), found.patience(4)) == (math.inf, Members.patience)


def test_a_quorum_waits_for_the_grace_from_when_it_is_seen() -> None:
    """Fewer begin no grace. While it lasts, waiting ends with it if that is sooner than the group's patience."""
    found, clock, _ = completion(2)
    assert not found.complete(rows_of((0,)), 4)
    clock.now += 50.0
    assert not found.complete(rows_of((0, 1)), 4)
    assert (found.grace_left(4), found.patience(4)) == (3.0, 2.5)
    clock.now += 2.0
    assert not found.complete(rows_of((0, 1)), 4)
    assert (found.grace_left(4), found.patience(4)) == (1.0, 1.0)
    clock.now += 1.0
    assert found.complete(rows_of((0, 1)), 4)
    assert not found.complete(rows_of((0, 1), 5), 5)  # the next round has a grace of its own


def test_dead_members_are_reported_by_incarnation() -> None:
    """Only those that the round waits for are asked about."""
    found, _, died = completion(None, dead=(0, 2))
    found.reap(rows_of((0, 1)), 4)
    assert died == [12]


def test_members_that_wait_look_at_a_few_living_ones_each() -> None:
    """Of 40 that have not marked, each look takes four others, at random; if one of them is dead, the next four, too.
    So a member that waits for the dead alone finds all of them at once."""
    found, _, died = completion(None)
    rows = rows_of(())
    for slot in range(40):
        rows[1 + slot, t.INCARNATION] = 10 + slot
        rows[1 + slot, t.MARK] = t.mark(10 + slot, 4)
    group: Any = found._group
    seen = set[int]()
    for _ in range(1000):
        group.looked_at.clear()
        found.reap(rows, 4)
        assert len(group.looked_at) == 4
        seen |= {*group.looked_at}
    assert seen == {*range(40)}
    assert died == []
    found, _, died = completion(None, dead=tuple(range(40)))
    found.reap(rows, 4)
    assert sorted(died) == [10 + slot for slot in range(40)]
