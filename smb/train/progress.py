"""A worker's view of its training: each exchange, and how far the group is."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from smb.train import member_table as t
from smb.train.group import Group


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """One exchange of this worker.

    - `step`: its optimizer steps so far, counted as in Progress.
    - `round`: the group's open round afterwards; 0 in schemes without rounds.
    - `norm`, `staleness`: of the contribution.
    - `bytes`: sent and received as contributions and models.
    - `seconds`: the duration of the step that exchanged.
    """

    step: int
    round: int
    norm: float
    staleness: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a group is, as of its members' last exchanges.

    - `steps`: optimizer steps of a member that was there from the start. A member that joins late begins where the
      others are.
    - `samples`: the samples of all members, including members that have left.
    """

    steps: int
    samples: int
    round: int


def progress_of(rows: t.Rows) -> Progress:
    members = rows[1:]
    return Progress(
        steps=int(np.max(members[:, t.STEPS])),
        samples=int((members[:, t.SAMPLES] + members[:, t.SAMPLES_BEFORE]).sum()),
        round=int(rows[0, t.ROUND]) >> t.ROUND_SHIFT,
    )


class ExchangeListeners:
    """The functions that are called after each exchange of one worker, in the thread that steps."""

    def __init__(self, group: Group, progress: Callable[[], Progress]) -> None:
        self._group = group
        self._progress = progress
        self._listeners: list[Callable[[ExchangeEvent], object]] = []

    def add(self, listener: Callable[[ExchangeEvent], object]) -> None:
        """Call `listener` after each exchange from now on."""
        self._listeners.append(listener)

    def tell(self, moved: int, seconds: float) -> None:
        """Call all listeners after a step that moved `moved` bytes in `seconds`. One small read if there are any
        listeners.
        """
        if not self._listeners:
            return
        member, progress = self._group.member, self._progress()
        norm = struct.unpack("<d", struct.pack("<q", member.get(t.NORM)))[0]
        event = ExchangeEvent(member.get(t.STEPS), progress.round, norm, member.get(t.STALENESS), moved, seconds)
        for listener in self._listeners:
            listener(event)
