"""The state of one worker, read from its training's table."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from smb.train import member_table as t
from smb.train import members


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One member of a training.

    - `joined`: when it joined first, in seconds since 1970 by its own clock. It keeps that when it comes back.
    - `norm`: of its last contribution. `bytes`: sent and received as contributions and models.
    - `alive`: its lease has not ended; the lease of a dead member ends up to its length later.
    - `finished`: it left by itself. A member that is neither alive nor finished was lost.
    """

    slot: int
    incarnation: int
    host: str
    pid: int
    joined: float
    alive: bool
    finished: bool
    clock: int
    contributions: int
    refused: int
    dropped: int
    staleness: int
    staleness_max: int
    norm: float
    samples: int
    bytes: int
    rejoins: int


def worker_status(rows: t.Rows, slot: int) -> WorkerStatus:
    """Return the status of a slot's member."""
    row = rows[1 + slot]
    return WorkerStatus(
        slot=slot,
        incarnation=t.incarnation_of(row[t.MARK]),
        host=members.host_of(row),
        pid=abs(int(row[t.PID])),
        joined=int(row[t.JOINED_US]) / 1e6,
        alive=bool(row[t.INCARNATION]),
        finished=bool(not row[t.INCARNATION] and row[t.PID] < 0),
        clock=t.clock_of(row[t.MARK]),
        contributions=int(row[t.CONTRIBUTIONS]),
        refused=int(row[t.REFUSED]),
        dropped=int(row[t.DROPPED]),
        staleness=int(row[t.STALENESS]),
        staleness_max=int(row[t.STALENESS_MAX]),
        norm=struct.unpack("<d", struct.pack("<q", int(row[t.NORM])))[0],
        samples=int(row[t.SAMPLES]),
        bytes=int(row[t.BYTES]),
        rejoins=int(row[t.REJOINS]),
    )
