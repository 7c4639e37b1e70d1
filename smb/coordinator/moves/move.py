"""Planned moves of copies, and switches of their roles. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

MOVES_MAX = 1000  # in one plan, because each move makes clients wait; run rebalance again for more


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a copy, with the rest of its bundle, from one server to another. `title`: the buffer's title.
    `nbytes`: bytes of the whole bundle. `switches`: the primary moves to the server of the backup, and the backup to
    that of the primary, so that no data moves.
    """

    segment_id: int
    leaving: str
    target: str
    nbytes: int
    title: str
    switches: bool = False
