"""The verdict on a soak at its end, from the clients' notes and the cluster's contents. Each returns one line, or
raises.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import smb
import smb.train
from tests.soak.clients import goal
from tests.support import second_copy
from tests.support.checkers import BadHistoryError, check_between, check_locks, check_tickets
from tests.support.history import LockHistory, Note, Step, read_notes, tickets_of


def asked_and_told(paths: Sequence[Path]) -> tuple[int, int]:
    """How many calls were begun, and how many ended."""
    steps = [step for path in paths for step, _, _ in read_notes(path)]
    return steps.count(Step.ASKS), steps.count(Step.TOLD)


def judge_additions(client: smb.Client, lanes: dict[str, list[Path]]) -> str:
    """Each lane has every acknowledged addition once, and those of killed clients once or not at all."""
    asked = told = 0
    for lane, paths in lanes.items():
        began, ended = asked_and_told(paths)
        check_between(client.open(lane).read(), ended, began, lane)
        asked, told = asked + began, told + ended
    check_between(client.open("common").read(), told, asked, "common")
    return f"additions: {told}, and {asked - told} cut off: each counted once"


def judge_tickets(client: smb.Client, paths: Sequence[Path]) -> str:
    """The tickets are those of one counter."""
    tickets = [ticket for path in paths for ticket in tickets_of(read_notes(path))]
    check_tickets(tickets, 0, client.open("tickets").fetch_add(0, 1))
    return f"tickets: {len(tickets)}: linearizable"


def judge_locks(paths: Sequence[Path]) -> str:
    """Nobody held the lock beside another, and no write of one who had lost it was accepted."""
    history = LockHistory()
    for number, path in enumerate(paths):
        history.add(number, read_notes(path))
    check_locks(history.holdings, history.writes)
    lost = sum(event.kind == "lost" for event in history.events)
    return f"locks: held {len(history.holdings)} times, {lost} lost: never by two"


def check_meetings(clients: Sequence[Sequence[Note]]) -> int:
    """Nobody passed a barrier before two had arrived at it. Returns how many barriers were passed."""
    arrivals: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    passed = []
    for who, notes in enumerate(clients):
        for step, at, number in notes:
            if step == Step.ASKS:
                arrivals[number][who].append(at)
            elif step == Step.TOLD:
                passed.append((number, at))
    for number, at in passed:
        there = sum(bisect.bisect_left(sorted(times), at) > 0 for times in arrivals[number].values())
        if there < 2:
            raise BadHistoryError(f"barrier {number} was passed when {there} had arrived of 2")
    return len({number for number, _ in passed})


def judge_meetings(seats: Sequence[Sequence[Path]]) -> str:
    """`seats`: of each of the two, the notes of all that sat there."""
    passed = check_meetings([[note for path in paths for note in read_notes(path)] for paths in seats])
    if not passed:
        raise BadHistoryError("no barrier was passed")
    return f"barriers: {passed}: none passed early"


def judge_copies(client: smb.Client, memory: Path, paths: Sequence[Path]) -> str:
    """Each call on buffers with two copies counts once, and the copies are equal. `paths`: each client's notes."""
    done = [int(path.with_suffix(".done").read_text()) for path in paths]
    second_copy.check(client, done, list(paths))
    compared = second_copy.check_copies(client, memory)
    return f"two copies: {sum(done)} rounds, each call counted once; {compared} segments equal"


def judge_training(client: smb.Client, name: str, paths: Sequence[Path]) -> str:
    """The model came near the goal: what is left of the loss is the gradients' noise."""
    left = float(np.mean((smb.train.shared(client, name) - goal()) ** 2))
    steps = asked_and_told(paths)[1]
    if not math.isfinite(left) or (steps > 500 and left > 0.2):
        raise BadHistoryError(f"training {name!r}: after {steps} steps its loss is still {left:.3f} of 1 at the start")
    return f"training {name!r}: {steps} steps, {left:.3f} of the loss left"
