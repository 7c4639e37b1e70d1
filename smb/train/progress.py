"""A worker's view of its training: each exchange, and how far the group is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smb.train import member_table as t


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """One exchange of this worker. `step`: its optimizer steps, counted as Progress does. `round`: the group's open
    round afterwards (0 without rounds). `norm` and `staleness` are the contribution's, `bytes` what was sent and
    received as contributions and models, `seconds` how long the step took that exchanged.
    """

    step: int
    round: int
    norm: float
    staleness: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a group is, as of its members' last exchanges. `steps`: optimizer steps that a member has done that was
    there from the start; who joins late begins where the others are. `samples`: of all members, those that left too.
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
