"""Clients' calls and their times, noted by each client in a file of its own: notes survive a kill between any two of
them.

Before a call and after it a note is made. A call whose second note is missing has an unknown outcome. Times are
CLOCK_MONOTONIC's, which all processes of a host share.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

import smb
from tests.support.checkers import FencedWrite, Holding, LockEvent, Operation, Ticket

NEVER = float("inf")
TTL_S = 1.0
_NOTE = struct.Struct("<Bdq")


class Step(IntEnum):
    """A note's kind; what its number is stands behind."""

    ASKS = 1  # for a ticket
    TOLD = 2  # value
    ACQUIRES = 3
    HOLDS = 4  # token
    WRITES = 5  # token
    ACCEPTED = 6
    REFUSED = 7
    RELEASES = 8
    RELEASED = 9
    LOST = 10
    READS = 11  # an element
    PUTS = 12  # value
    ADDS = 13  # amount
    EXPECTS = 14  # value; the next note is SWAPS
    SWAPS = 15  # value
    FOUND = 16  # value; of PUTS 0


Note = tuple[Step, float, int]


class Notes:
    """One client's, to be written."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, step: Step, number: int = 0) -> None:
        """Note it, with the time. One write: it is there whole, or not."""
        os.write(self._file, _NOTE.pack(step, time.monotonic(), number))


def count_notes(path: Path) -> int:
    """Return how many there are so far."""
    return path.stat().st_size // _NOTE.size if path.exists() else 0


def read_notes(path: Path) -> list[Note]:
    """Return them in the order in which they were made."""
    return [(Step(step), at, number) for step, at, number in _NOTE.iter_unpack(path.read_bytes())]


# ---- what runs in the clients' processes


def draw_tickets(
    _messages: Any, address: str, transport: str, path: Path, stop: Path, pause_s: float = 0.0, name: str = "counter"
) -> None:
    """Draw from the buffer of that name until the file `stop` is there, with a pause after each ticket."""
    notes = Notes(path)
    with smb.connect(address, transport=transport, timeout=60) as client:
        counter = client.open(name)
        while not stop.exists():
            notes.add(Step.ASKS)
            notes.add(Step.TOLD, counter.fetch_add(0, 1))
            time.sleep(pause_s)


def take_turns(_messages: Any, address: str, transport: str, path: Path, stop: Path, pause_s: float = 0.0) -> None:
    """Take the lock of the buffer "locked", write its token under it, and give it back, until the file `stop` is there.
    Then a pause.

    Raises AssertionError where somebody else's token is among ours while we hold the lock.
    """
    notes = Notes(path)
    with smb.connect(address, transport=transport, timeout=60) as client:
        buffer = client.open("locked")
        while not stop.exists():
            notes.add(Step.ACQUIRES)
            lock = buffer.lock(ttl=TTL_S, timeout=60)
            try:
                lock.acquire()
            except smb.LockLostError:  # its lease was over before all servers had been told of it
                notes.add(Step.LOST)
                continue
            notes.add(Step.HOLDS, lock.token)
            _write_and_release(buffer, lock, notes)
            time.sleep(pause_s)


def _write_and_release(buffer: smb.Buffer, lock: smb.Lock, notes: Notes) -> None:
    token = lock.token
    notes.add(Step.WRITES, token)
    try:
        buffer.write(np.full(buffer.size, token), fence=lock)
        notes.add(Step.ACCEPTED)
        found = buffer.read()
        lock.check()
        assert (found == token).all(), f"{np.unique(found)} under the lock with token {token}"
    except smb.LockLostError:
        notes.add(Step.REFUSED)
    notes.add(Step.RELEASES)
    try:
        lock.release()
        notes.add(Step.RELEASED)
    except smb.LockLostError:
        notes.add(Step.LOST)


# ---- from notes to what the checkers take


def tickets_of(notes: Sequence[Note]) -> Iterator[Ticket]:
    """Give a client's tickets."""
    asked: float | None = None
    for step, at, number in notes:
        if step == Step.ASKS:
            asked = at
        elif step == Step.TOLD:
            assert asked is not None, "an answer without a question"
            yield Ticket(asked, at, number)
            asked = None
    if asked is not None:
        yield Ticket(asked, NEVER, None)


def operations_of(notes: Sequence[Note]) -> Iterator[Operation]:
    """Give a client's calls on an element."""
    asked: tuple[float, str, tuple[int, ...]] | None = None
    expected = 0
    for step, at, number in notes:
        match step:
            case Step.READS:
                asked = at, "read", ()
            case Step.PUTS:
                asked = at, "write", (number,)
            case Step.ADDS:
                asked = at, "add", (number,)
            case Step.EXPECTS:
                expected = number
            case Step.SWAPS:
                asked = at, "swap", (expected, number)
            case Step.FOUND:
                assert asked is not None, "an answer without a question"
                began, kind, given = asked
                yield Operation(began, at, kind, given, None if kind == "write" else number)
                asked = None
    if asked is not None:
        began, kind, given = asked
        yield Operation(began, NEVER, kind, given)


@dataclass
class LockHistory:
    """All clients' doings with one lock."""

    events: list[LockEvent] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    writes: list[FencedWrite] = field(default_factory=list)

    def add(self, client: int, notes: Sequence[Note]) -> None:
        """Add those of one client."""
        asked = granted = began = freeing = 0.0
        token: int | None = None
        waits = False
        for step, at, number in notes:
            match step:
                case Step.ACQUIRES:
                    asked, waits = at, True
                case Step.HOLDS:
                    granted, token, waits = at, number, False
                    self.events.append(LockEvent(client, "acquire", asked, at, token))
                case Step.WRITES:
                    began = at
                case Step.ACCEPTED | Step.REFUSED:
                    assert token is not None
                    # An accepted write stays accepted, if the lock was found lost only by a later call.
                    if began:
                        self.writes.append(FencedWrite(token, began, at, step == Step.ACCEPTED))
                    began = 0.0
                case Step.RELEASES:
                    freeing = at
                case Step.RELEASED:
                    assert token is not None
                    self.events.append(LockEvent(client, "release", freeing, at))
                    self.holdings.append(Holding(client, token, granted, freeing))
                    token = None
                case Step.LOST:
                    self._lost(client, token, asked, granted, at)
                    token, waits = None, False
                case _:
                    raise AssertionError(step)
        if waits or token is not None:  # killed while it asked, or held
            self._lost(client, token, asked, granted, NEVER)

    def _lost(self, client: int, token: int | None, asked: float, granted: float, told: float) -> None:
        """It had the lock from some time on, or perhaps never, and was told, or killed, after it had lost it.

        Its lease may have run out before it was told of its grant: on a busy machine the answer can take that long.
        """
        if token is None:
            self.events.append(LockEvent(client, "acquire", asked, told))
        else:
            self.holdings.append(Holding(client, token, granted, asked))
        self.events.append(LockEvent(client, "lost", asked, told))
