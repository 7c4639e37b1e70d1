"""What follows after an attempt has failed, row by row; and what no row may do, for every combination of facts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from smb.call.recovery import (
    UNREACHED,
    WITHOUT_IT,
    Action,
    Facts,
    Heard,
    Refusal,
    decide,
    decide_path,
    is_lost,
    needs_paths,
)
from smb.engine import Status

RETRY, REFRESH, REOPEN = Action.RETRY, Action.REFRESH, Action.REOPEN
BRING, SETTLE, FAIL = Action.BRING, Action.SETTLE, Action.FAIL
STAYED, MOVED = Heard(answered=True), Heard(answered=True, moved=True)
LOST, AWAY = Heard(answered=True, lost=True), Heard(answered=False)


class Ended(NamedTuple):
    """The end of an attempt."""

    status: Status
    sent: bool = False


@pytest.mark.parametrize(
    ("status", "sent", "facts", "action"),
    [
        # A server was not reached in time. Only the coordinator knows whether its memory is lost.
        (Status.TIMEOUT, True, {}, REFRESH),
        (Status.DISCONNECTED, False, {}, REFRESH),
        (Status.TIMEOUT, True, {"heard": STAYED}, FAIL),
        (Status.LINK_LOST, False, {"heard": STAYED}, FAIL),
        # Its link can't be mended any more: the next attempt looks for another path, if no part of this one was sent.
        (Status.LINK_LOST, False, {"heard": STAYED, "alive": False}, RETRY),
        (Status.LINK_LOST, True, {"heard": STAYED, "alive": False}, FAIL),
        (Status.LINK_LOST, False, {"heard": STAYED, "alive": False, "in_time": False}, FAIL),
        (Status.LINK_LOST, False, {"heard": LOST, "alive": False}, FAIL),
        (Status.LINK_LOST, False, {"heard": AWAY, "alive": False}, RETRY),
        # The server does not have the segment, or another role than we thought.
        (Status.NOT_FOUND, False, {}, REFRESH),
        (Status.NOT_FOUND, False, {"heard": STAYED}, FAIL),
        (Status.NOT_FOUND, False, {"heard": LOST}, FAIL),
        (Status.NOT_FOUND, False, {"heard": MOVED}, RETRY),
        (Status.NOT_FOUND, False, {"heard": AWAY}, RETRY),
        (Status.NOT_FOUND, False, {"heard": MOVED, "in_time": False}, FAIL),
        (Status.NOT_FOUND, True, {"heard": MOVED}, SETTLE),
        (Status.NOT_FOUND, True, {"heard": MOVED, "in_time": False}, FAIL),
        (Status.STALE_EPOCH, False, {}, RETRY),
        (Status.STALE_EPOCH, False, {"known_lost": True}, REFRESH),
        (Status.STALE_EPOCH, False, {"known_lost": True, "heard": LOST}, FAIL),
        (Status.STALE_EPOCH, True, {}, REFRESH),
        (Status.STALE_EPOCH, True, {"heard": STAYED}, SETTLE),
        (Status.STALE_EPOCH, True, {"heard": LOST}, SETTLE),
        (Status.NAMESPACE, False, {}, RETRY),
        (Status.NAMESPACE, True, {}, SETTLE),
        # A server refuses the token.
        (Status.DENIED, False, {}, REOPEN),
        (Status.DENIED, True, {"repeatable": False}, REFRESH),
        (Status.DENIED, False, {"repeatable": False, "read_only": True}, FAIL),
        (Status.DENIED, False, {"heard": AWAY}, FAIL),
        (Status.DENIED, False, {"reopened": True}, FAIL),
        (Status.DENIED, False, {"reopened": True, "movable": True}, REOPEN),
        (Status.DENIED, False, {"reopened": True, "movable": True, "read_only": True}, REOPEN),
        (Status.DENIED, False, {"reopened": True, "movable": True, "read_only": True, "repeatable": False}, FAIL),
        (Status.DENIED, True, {"reopened": True, "movable": True, "repeatable": False}, REFRESH),
        (Status.DENIED, False, {"reopened": True, "movable": True, "in_time": False}, FAIL),
        (Status.DENIED, True, {"repeatable": False, "heard": MOVED}, SETTLE),
        (Status.DENIED, False, {"repeatable": False, "heard": MOVED}, RETRY),
        (Status.DENIED, True, {"repeatable": False, "heard": STAYED}, FAIL),
        # Servers were to read other buffers, which have moved away.
        (Status.APART, True, {"sources": True}, BRING),
        (Status.DENIED, True, {"sources": True, "movable": True}, BRING),
        (Status.DENIED, True, {"sources": True}, REOPEN),
        (Status.NOT_FOUND, True, {"sources": True, "movable": True}, REFRESH),
        (Status.NOT_FOUND, True, {"sources": True, "movable": True, "heard": MOVED}, BRING),
        (Status.NOT_FOUND, True, {"sources": True, "heard": STAYED}, FAIL),
        # An optimizer's state moves together with its buffer.
        (Status.APART, False, {"has_state": True, "movable": True}, REFRESH),
        (Status.APART, False, {"has_state": True, "movable": True, "heard": STAYED}, RETRY),
        (Status.APART, True, {"has_state": True, "movable": True, "heard": STAYED}, SETTLE),
        # A lock by itself is made anew by its name.
        (Status.NOT_FOUND, False, {"named": True}, REOPEN),
        (Status.NOT_FOUND, False, {"named": True, "known_lost": True}, FAIL),
        (Status.NOT_FOUND, False, {"named": True, "in_time": False}, FAIL),
        # A request that waits goes where the coordinator says.
        (Status.STALE_EPOCH, False, {"asks_first": True}, REFRESH),
        (Status.STALE_EPOCH, False, {"asks_first": True, "heard": STAYED}, RETRY),
        (Status.STALE_EPOCH, False, {"asks_first": True, "heard": AWAY}, RETRY),
        (Status.STALE_EPOCH, False, {"asks_first": True, "heard": LOST}, FAIL),
        # All else is the caller's.
        (Status.INVALID, False, {}, FAIL),
        (Status.LOCK_LOST, True, {}, FAIL),
        (Status.OUT_OF_MEMORY, True, {}, FAIL),
        (Status.EVICTED, True, {}, FAIL),
        (Status.SESSION_ENDED, False, {}, FAIL),
        (Status.INVALID, False, {"alive": False}, RETRY),
    ],
)
def test_what_follows(status: Status, sent: bool, facts: dict[str, Any], action: Action) -> None:
    assert decide(Ended(status, sent), Facts(**({"in_time": True} | facts))) is action


FLAGS = [name for name in Facts._fields if name not in ("heard", "sources", "has_state")]


def combinations() -> Iterator[tuple[Ended, Facts]]:
    """Yield every end of an attempt with every combination of facts that there can be."""
    heard = [None, *(Heard(*flags) for flags in itertools.product((False, True), repeat=3))]
    ends = [Ended(status, sent) for status in Status if status is not Status.OK for sent in (False, True)]
    facts = [
        Facts(**dict(zip(FLAGS, flags, strict=True)), heard=said, sources=others == 1, has_state=others == 2)
        for flags in itertools.product((False, True), repeat=len(FLAGS))
        for said in heard
        for others in range(3)
    ]
    yield from itertools.product(ends, facts)


def test_no_combination_counts_twice_or_goes_on_for_ever() -> None:
    """What was sent is never simply repeated; the coordinator is asked once for each attempt; and no attempt is made
    after the deadline, but the first one with a newer token.
    """
    for ended, facts in combinations():
        action = decide(ended, facts)
        if action is RETRY:
            assert not ended.sent, (ended, facts)
            assert needs_paths(ended, facts)
            assert not is_lost(ended, facts)
        if action in (RETRY, SETTLE):
            assert facts.in_time, (ended, facts)
        if action is REFRESH:
            assert facts.heard is None, (ended, facts)
        if action is REOPEN:
            assert ended.status in (Status.DENIED, Status.NOT_FOUND), (ended, facts)
            assert ended.status is Status.NOT_FOUND or facts.repeatable
            assert facts.in_time or not facts.reopened
        if action is BRING:
            assert facts.sources, (ended, facts)
        if action is SETTLE:
            assert ended.sent, (ended, facts)
        if ended.status not in UNREACHED | WITHOUT_IT | {Status.DENIED, Status.APART, Status.NAMESPACE}:
            assert action in (FAIL, RETRY), (ended, facts)


@pytest.mark.parametrize(
    ("why", "before", "facts", "action"),
    [
        (Refusal.AWAY, None, {}, RETRY),
        (Refusal.AWAY, STAYED, {}, RETRY),
        (Refusal.AWAY, AWAY, {}, RETRY),
        (Refusal.AWAY, LOST, {}, FAIL),
        (Refusal.AWAY, STAYED, {"in_time": False}, FAIL),
        (Refusal.DENIED, None, {}, REFRESH),
        (Refusal.DENIED, None, {"heard": STAYED}, REOPEN),
        (Refusal.DENIED, None, {"heard": AWAY}, REOPEN),
        (Refusal.DENIED, STAYED, {}, REFRESH),
        (Refusal.DENIED, STAYED, {"heard": MOVED}, REOPEN),
        (Refusal.DENIED, STAYED, {"heard": STAYED}, FAIL),
        (Refusal.DENIED, STAYED, {"heard": STAYED, "movable": True}, RETRY),
        (Refusal.DENIED, STAYED, {"heard": STAYED, "movable": True, "in_time": False}, FAIL),
        (Refusal.DENIED, AWAY, {"heard": AWAY, "movable": True}, FAIL),
        (Refusal.NO_WAY, None, {}, REFRESH),
        (Refusal.NO_WAY, None, {"heard": STAYED}, REOPEN),
        (Refusal.NO_WAY, STAYED, {"heard": STAYED, "movable": True}, FAIL),
        (Refusal.NO_WAY, STAYED, {"heard": MOVED}, REOPEN),
    ],
)
def test_what_follows_where_a_segment_was_not_reached(
    why: Refusal, before: Heard | None, facts: dict[str, Any], action: Action
) -> None:
    assert decide_path(why, before, Facts(**({"in_time": True} | facts))) is action
