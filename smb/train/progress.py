"""A worker's view of its training: each exchange, and how far the group is."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from smb.errors import Error
from smb.train import member_table as t
from smb.train.group import Group

_log = logging.getLogger("smb")


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """One exchange of this worker.

    - `step`: its optimizer steps so far, counted as in Progress.
    - `round`: the group's open round afterwards; 0 in schemes without rounds.
    - `norm`, `staleness`: of the contribution.
    - `bytes`: sent and received as contributions and models.
    - `seconds`: the duration of the step that exchanged.
    - `members`: the number of members afterwards, including this worker.

    If the server that knows `round` and `members` could not be asked, they are those of this worker's exchange before.
    """

    step: int
    round: int
    norm: float
    staleness: int
    bytes: int
    seconds: float
    members: int

    def scalars(self) -> dict[str, float]:
        """Return the values that a log shows, by name: smb/round, smb/members, smb/staleness, smb/norm, smb/bytes,
        smb/seconds.

        ```python
        with smb.train.join(client, "run", values) as worker:
            worker.on_exchange(lambda event: print(event.step, event.scalars()))
        ```
        """
        return {f"smb/{name}": float(getattr(self, name)) for name in _LOGGED}


_LOGGED = ("round", "members", "staleness", "norm", "bytes", "seconds")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a group is, as of its members' last exchanges.

    - `steps`: optimizer steps of a member that was there from the start. A member that joins late begins where the
      others are.
    - `samples`: the samples of all members, including members that have left.
    - `lost_steps`: steps of this process that are not in the shared model, because its lease ended before they were
      sent, as when its computer slept.
    """

    steps: int
    samples: int
    round: int
    lost_steps: int = 0


def progress_of(rows: t.Rows) -> Progress:
    members = rows[1:]
    return Progress(
        steps=int(np.max(members[:, t.STEPS])),
        samples=int((members[:, t.SAMPLES] + members[:, t.SAMPLES_BEFORE]).sum()),
        round=int(rows[0, t.ROUND]) >> t.ROUND_SHIFT,
    )


class ExchangeListeners:
    """The functions that are called after each exchange of one worker, in the thread that steps."""

    def __init__(self, group: Group, look: Callable[[], t.Rows]) -> None:
        """`look` reads the group's table."""
        self._group = group
        self._look = look
        self._round, self._members = 0, 1  # as of the last look
        self._listeners: list[Callable[[ExchangeEvent], object]] = []

    def add(self, listener: Callable[[ExchangeEvent], object]) -> None:
        """Call `listener` after each exchange from now on."""
        self._listeners.append(listener)

    def tell(self, moved: int, seconds: float) -> None:
        """Call all listeners after a step that moved `moved` bytes in `seconds`. One small read if there are any
        listeners.

        If the read fails, no error is raised: the step is done, and a caller that repeated it would take another one.
        """
        if not self._listeners:
            return
        member = self._group.member
        try:
            rows = self._look()
            self._round, self._members = progress_of(rows).round, max(1, len(self._group.live(rows)))
        except Error as error:
            _log.debug("training %r: an exchange's event has the round before: %s", self._group.name, error)
        norm = struct.unpack("<d", struct.pack("<q", member.get(t.NORM)))[0]
        event = ExchangeEvent(
            member.get(t.STEPS), self._round, norm, member.get(t.STALENESS), moved, seconds, self._members
        )
        for listener in self._listeners:
            listener(event)
