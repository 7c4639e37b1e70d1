"""A worker's view of its training: each exchange, and how far the group is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smb.train import member_table as t


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
    - `samples`: of all members, also of those that have left.
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
