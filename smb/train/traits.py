"""A scheme's traits: what the planner, overlap= and the tools need to know of it. Each scheme's
own file states them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

EXACT = "exact"  # a wire, for wire= of a buffer

# How an exchange moves values. ELASTIC: read, then add a difference. ROUNDS: write into an inbox, wait until the round
# is closed, read. FUSED: one call adds a change and brings the new values back.
ELASTIC, ROUNDS, FUSED = "elastic", "rounds", "fused"
WAYS = (ELASTIC, ROUNDS, FUSED)


class Closing(NamedTuple):
    """What the servers read to close a round, in buffers of the model's size.

    state: for the group. each: for each contribution. terms: buffers in the largest sum, besides the contributions.
    """

    state: int
    each: int
    terms: int = 2  # momentum and the model


@dataclass(frozen=True, kw_only=True)
class Traits:
    """A scheme's traits.

    way: one of WAYS. each_step: every local step is an exchange. calls: the number of calls in one exchange that wait
    for each other, for one worker that closes its own rounds (0: `smb plan` leaves the scheme out). Over a network some
    of a round's calls run at the same time or in the background (tests/train/test_round_trips.py counts the calls that
    wait); to be safe, `calls` counts all of them. closing: None without rounds. outer: the servers keep an optimizer's
    state. in_turn: workers exchange one after the other. hides: the addition runs behind the next steps. no_overlap:
    the reason why smb.torch.join(overlap=) can't be used, or "" if it can. plans_overlap: `smb plan` predicts overlap,
    too. fragments, delay, step_wire: see DiLoCo.
    """

    way: str
    calls: int = 0
    each_step: bool = False
    closing: Closing | None = None
    outer: bool = False
    in_turn: bool = False
    hides: bool = False
    no_overlap: str = "it does not exchange after every step by parts"
    plans_overlap: bool = False
    fragments: int = 1
    delay: int = 0
    step_wire: str = EXACT

    @property
    def sort_key(self) -> tuple[bool, int, int]:
        """The key by which lists of schemes are sorted: schemes that exchange at each step come first."""
        return not self.each_step, WAYS.index(self.way), self.calls
