"""What others ask of a scheme: the planner, overlap=, the tools. A scheme's own file says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

EXACT = "exact"  # a wire, as wire= of a buffer

# How an exchange moves values. ELASTIC: read, then add a difference. ROUNDS: write into an inbox, wait until the round
# is closed, read. FUSED: one call adds a change and brings the new values back.
ELASTIC, ROUNDS, FUSED = "elastic", "rounds", "fused"
WAYS = (ELASTIC, ROUNDS, FUSED)


class Closing(NamedTuple):
    """What the servers read to close a round, in buffers of the model's size.

    state: for the group. each: for each contribution. terms: of the largest sum, beside the contributions.
    """

    state: int
    each: int
    terms: int = 2  # momentum and the model


@dataclass(frozen=True, kw_only=True)
class Traits:
    """A scheme's traits.

    way: one of WAYS. each_step: every local step is an exchange. calls: those of one exchange that wait for each other,
    with one worker who closes its own rounds (0: `smb plan` leaves the scheme out). Of a round some calls go at one
    time over a network, and some in the background (tests/train/test_round_trips.py counts those that wait): all are
    counted here, to be safe. closing: None without rounds. outer: the servers keep an optimizer's state. in_turn:
    workers exchange one after the other. hides: the addition hides behind the next steps. no_overlap: why
    smb.torch.join(overlap=) is not for it; "" where it is. plans_overlap: `smb plan` predicts that, too. fragments,
    delay, step_wire: see DiLoCo.
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
        """By what lists of schemes are sorted: those that exchange at each step first."""
        return not self.each_step, WAYS.index(self.way), self.calls
