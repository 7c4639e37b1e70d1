"""The members' optimizers and learning rates, in the table of a training. A joiner compares its own with the others'.

They may differ on purpose, so a difference is logged and never refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smb.train import member_table as t
from smb.train import members

_NAME_BYTES = 8 * (t.RATE - t.RULE)
_ALIKE = 1e-6  # relative difference of two rates that count as one: they may come from different arithmetic


class OptimizerUsed(NamedTuple):
    """An optimizer: its class's name, and its learning rate before any schedule, the largest of its parameter groups;
    NaN if it has none.
    """

    name: str
    rate: float

    def __str__(self) -> str:
        return self.name if math.isnan(self.rate) else f"{self.name} with learning rate {self.rate:g}"


def write(table: t.Table, row: int, used: OptimizerUsed) -> None:
    """Write a member's optimizer into its row. One small call."""
    name = used.name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    table.write(row, t.RULE, np.frombuffer(name + struct.pack("<d", used.rate), np.int64))


def read(row: NDArray[np.int64]) -> OptimizerUsed | None:
    """Return what a member's row says of its optimizer; None if the member has said nothing."""
    name = row[t.RULE : t.RATE].tobytes().rstrip(b"\0").decode(errors="ignore")
    return OptimizerUsed(name, struct.unpack("<d", row[t.RATE].tobytes())[0]) if name else None


def differing(rows: t.Rows, own: int, live: Sequence[int]) -> str:
    """Return a sentence that names a live member with another optimizer or rate than the member in row `own`, and both
    optimizers; "" if there is none.
    """
    ours = read(rows[own])
    others = [(row, read(rows[row])) for row in live if row != own]
    found = [(row, used) for row, used in others if ours is not None and used is not None and not _alike(ours, used)]
    if not found:
        return ""
    row, theirs = found[0]
    more = f" (and {len(found) - 1} more differ)" if len(found) > 1 else ""
    return (
        f"members have different optimizers: {members.name_of(rows[row])} has {theirs}, and this process "
        f"({members.name_of(rows[own])}) has {ours}{more}; they train one model all the same. If this is not on "
        f"purpose, use the same in all processes"
    )


def _alike(one: OptimizerUsed, other: OptimizerUsed) -> bool:
    if one.name != other.name:
        return False
    both_none = math.isnan(one.rate) and math.isnan(other.rate)
    return both_none or math.isclose(one.rate, other.rate, rel_tol=_ALIKE)
