"""Notes become histories: what a killed client left open is unknown, and planted faults are found from the notes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkers import BadHistoryError, FencedWrite, Ticket, check_locks, check_tickets, search_lock_order
from tests.support.history import NEVER, LockHistory, Note, Notes, Step, count_notes, read_notes, tickets_of


def turn(at: float, token: int) -> list[Note]:
    """Somebody takes the lock at `at`, writes, and gives it back within 6 s."""
    steps = (Step.ACQUIRES, Step.HOLDS, Step.WRITES, Step.ACCEPTED, Step.RELEASES, Step.RELEASED)
    return [(step, at + late, token) for late, step in enumerate(steps)]


def history_of(*clients: list[Note]) -> LockHistory:
    history = LockHistory()
    for number, notes in enumerate(clients):
        history.add(number, notes)
    return history


def check(history: LockHistory) -> None:
    check_locks(history.holdings, history.writes)
    search_lock_order(history.events)


def test_notes_are_read_back_as_they_were_made(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    assert count_notes(path) == 0
    notes = Notes(path)
    for number in range(3):
        notes.add(Step.TOLD, number)
    assert count_notes(path) == 3
    found = read_notes(path)
    assert [(step, number) for step, _, number in found] == [(Step.TOLD, 0), (Step.TOLD, 1), (Step.TOLD, 2)]
    assert sorted(at for _, at, _ in found) == [at for _, at, _ in found]


def test_a_ticket_that_was_asked_for_and_not_told_is_unknown() -> None:
    notes: list[Note] = [(Step.ASKS, 1.0, 0), (Step.TOLD, 2.0, 7), (Step.ASKS, 3.0, 0)]
    found = list(tickets_of(notes))
    assert found == [Ticket(1.0, 2.0, 7), Ticket(3.0, NEVER, None)]
    check_tickets(found, 7, 8)
    check_tickets(found, 7, 9)
    with pytest.raises(BadHistoryError):
        check_tickets(found, 7, 10)


def test_clients_in_turn_are_good() -> None:
    history = history_of([*turn(0, 2), *turn(20, 6)], turn(10, 4))
    check(history)
    assert history.writes[0] == FencedWrite(2, 2, 3, True)


@pytest.mark.parametrize("notes_left", range(1, 6))
def test_a_client_killed_at_any_step_may_be_followed_by_another(notes_left: int) -> None:
    check(history_of([*turn(0, 2), *turn(10, 4)[:notes_left]], turn(30, 6)))
    # Its token, if it was told none, is anybody's guess; but the one that it was told before is not given again.
    with pytest.raises(BadHistoryError):
        check(history_of([*turn(0, 2), *turn(10, 4)[:notes_left]], turn(30, 2)))


def test_two_holders_are_found() -> None:
    check(history_of(turn(0, 2), turn(3, 4)))  # one may have let go in the moment in which the other was told
    for other in (turn(2, 4), turn(2.9, 4), turn(2, 4)[:4]):
        history = history_of(turn(0, 2), other)
        with pytest.raises(BadHistoryError):
            search_lock_order(history.events)


def test_a_lost_lock_is_no_second_holder_but_its_write_must_be_refused() -> None:
    """It is told long after the next one has the lock."""
    stopped = turn(0, 2)[:2]
    refused: list[Note] = [(Step.WRITES, 20, 2), (Step.REFUSED, 21, 0), (Step.RELEASES, 22, 0), (Step.LOST, 23, 0)]
    check(history_of([*stopped, *refused], turn(10, 4)))
    stale: list[Note] = [(Step.WRITES, 20, 2), (Step.ACCEPTED, 21, 0), (Step.RELEASES, 22, 0), (Step.LOST, 23, 0)]
    with pytest.raises(BadHistoryError, match="accepted after a later holder"):
        check(history_of([*stopped, *stale], turn(10, 4)))


def test_a_lock_lost_before_its_token_was_told_is_good() -> None:
    check(history_of([(Step.ACQUIRES, 1, 0), (Step.LOST, 30, 0)], turn(10, 4)))


def test_a_lock_lost_before_its_grant_was_told_is_good() -> None:
    """The answer came after the lease; then everything is refused."""
    late: list[Note] = [(Step.ACQUIRES, 1, 0), (Step.HOLDS, 13, 2), (Step.WRITES, 14, 2), (Step.REFUSED, 15, 0)]
    lost: list[Note] = [(Step.RELEASES, 16, 0), (Step.LOST, 17, 0)]
    check(history_of([*late, *lost], turn(10, 4)))
    for good, bad in ((Step.LOST, Step.RELEASED), (Step.REFUSED, Step.ACCEPTED)):
        kept = [(bad if step == good else step, at, number) for step, at, number in [*late, *lost]]
        with pytest.raises(BadHistoryError):
            check(history_of(kept, turn(10, 4)))
