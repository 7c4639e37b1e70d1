"""SSP(s), stale synchronous: a worker may be ahead of the slowest one by s clocks, and waits there. ASP has no bound.

    W_global += W_local - base;  clock += 1        after every local step
    wait until clock - min(clocks of all) <= s;  W_local = base = W_global

Source: Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter server". With s = 0 it
is lock-step as in bulk synchronous training, with one exception: a worker may read a model to which a faster one has
already added its next update. Without a bound it is ASP, totally asynchronous: every worker adds what it did when it
has done it, and waits for nobody (Dean et al. 2012, "Large scale distributed deep networks", Downpour SGD).

In one call the servers add, and the sums come back in the same round trip.

Taxonomy: data parallel; central (a parameter server); bounded asynchronous, clocks seen by all, or asynchronous; each
worker with the servers alone.

Staleness of SSP: a read at clock c contains every update up to clock c - s, of every live worker, and all of the
reader's own. So no worker is ever more than s clocks ahead. This holds as a worker writes its clock after its
contribution was acknowledged, and reads after it saw the clocks. The staleness in the status is how far the slowest was
behind at the read. A worker that dies, or is stopped for longer than its lease, is found by its lock, and the others go
on; one that joins begins at the slowest one's clock. Tested with a stopped worker, on what every read was seen to
contain.

Staleness of ASP: how many contributions of others were acknowledged between a worker's read and its next contribution.
No bound is promised, but the group's guards may set one (staleness_max): a contribution beyond it is refused. Nobody's
contribution is lost, and each counts once: the workers' own records of what they saw show it.

A worker that is killed while it sends may leave a part of its last contribution, whole chunks of it, in the model.
tests/train/test_asp_and_ssp.py, judged by tests/support/training_judges.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from smb.errors import InvalidArgumentError
from smb.train import member_table as t
from smb.train.exchange.mover import mover_of
from smb.train.guards import RefusedContributionError
from smb.train.parameters import Parameters
from smb.train.scheme import Exchange, Scheme, is_whole
from smb.train.traits import FUSED, Traits

if TYPE_CHECKING:
    from smb.train.group import Group


_ARRIVED = t.GROUP_EXTRA  # of ASP: contributions acknowledged so far


@dataclass(frozen=True)
class ASP(Scheme):
    """Asynchronous updates: each worker adds its change and waits for nobody. No settings."""

    NAME: ClassVar[str] = "asp"
    TRAITS: ClassVar[Traits] = Traits(way=FUSED, calls=4, each_step=True, no_overlap="", plans_overlap=True)

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange."""
        return StaleSynchronous(group, parameters, None)


@dataclass(frozen=True)
class SSP(Scheme):
    """Stale synchronous updates: a worker may be at most `staleness` steps ahead of the slowest one, and
    waits there.
    """

    NAME: ClassVar[str] = "ssp"
    TRAITS: ClassVar[Traits] = Traits(way=FUSED, calls=5, each_step=True, no_overlap="")
    staleness: int = 3

    def __post_init__(self) -> None:
        if not is_whole(self.staleness, 0):
            raise InvalidArgumentError(f"scheme 'ssp': staleness={self.staleness!r} is no number of clocks, from 0 on")

    def first_clock(self, rows: t.Rows) -> int:
        """Return the slowest one's clock: nobody is held up by a newcomer, and it may be as far ahead as others."""
        return min(clocks_of(rows).values(), default=0)

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange."""
        return StaleSynchronous(group, parameters, self.staleness)


def clocks_of(rows: t.Rows) -> dict[int, int]:
    """Return the clock of each live member, by slot."""
    return {slot: t.clock_of(row[t.MARK]) for slot, row in enumerate(rows[1:]) if row[t.INCARNATION]}


def lag(clock: int, others: Mapping[int, int]) -> int:
    """Return how many clocks the slowest of the others is behind; 0 if nobody is."""
    return max(0, clock - min(others.values(), default=clock))


def must_wake(clock: int, others: Mapping[int, int], bound: int) -> bool:
    """Whether somebody may wait for a member's step to `clock`, just written: it was the last one below, and another is
    so far ahead that it waited.
    """
    return min(others.values(), default=0) >= clock and max(others.values(), default=0) - (clock - 1) > bound


class StaleSynchronous(Exchange):
    """One worker's side. A step blocks for one accumulate and a few small calls, and with a bound while the worker is
    too far ahead; then for one read more. Without a bound no clocks are told.
    """

    EACH_STEP = True

    def __init__(self, group: Group, parameters: Parameters, bound: int | None) -> None:
        self._group = group
        self._bound = bound
        self._mover = mover_of(group, parameters, FUSED)
        self._clock = group.member.clock
        self._lag = 0  # at the last read
        self._arrived = 0  # contributions, ours among them, when the read began that the next one builds on
        self._unsent_samples = 0

    def step(self, samples: int) -> None:
        """Add the delta, and take over the shared model; with a bound tell the clock, and wait where others are behind.

        With a bound a refused delta is a clock too: what is wrong with one worker holds up nobody.
        """
        self.flush()
        self._unsent_samples = samples
        if self._bound is not None:
            self._step_within(self._bound)
            return
        arrived = self._group.table.get(0, _ARRIVED)
        self._add(max(0, arrived - self._arrived), fetch=True)
        self._arrived = arrived + 1

    def restart(self) -> None:
        """Take over the shared model."""
        self._mover.restart()
        if self._bound is None:
            self._arrived = self._group.table.get(0, _ARRIVED)

    def flush(self) -> None:
        """Send what a failed call left unsent, and the clock that was not written."""
        if self._mover.finish():
            self._count()
            self._clock += 1
            self._arrived += 1
        if self._bound is not None and self._group.member.clock != self._clock:
            self._tell(self._bound)

    def _step_within(self, bound: int) -> None:
        group, refused = self._group, None
        # The others only go on: if none is too far behind now, the sums that come back contain all they must.
        behind = lag(self._clock + 1, self._others())
        try:
            self._add(self._lag, fetch=behind <= bound)
        except RefusedContributionError as error:
            refused = error
        self._clock += 1
        others = self._tell(bound)
        if behind > bound:
            while (behind := lag(self._clock, others)) > bound:
                if not group.wait():
                    group.reap(slot for slot, clock in others.items() if clock < self._clock - bound)
                group.member.check()
                others = self._others()
            if refused is None:
                self._mover.read()
        self._lag = behind
        if refused is not None:
            raise refused

    def _add(self, staleness: int, *, fetch: bool) -> None:
        self._mover.exchange(partial(self._group.check, staleness=staleness), fetch=fetch)
        self._count()

    def _count(self) -> None:
        if self._bound is None:
            self._group.table.add(0, _ARRIVED, 1)
        self._group.count(self._unsent_samples, self._mover.moved_bytes())

    def _tell(self, bound: int) -> dict[int, int]:
        """Tell the clock, wake who may have waited for it, and return the others' clocks."""
        self._group.member.advance(self._clock)
        others = self._others()
        if must_wake(self._clock, others, bound):
            self._group.wake()
        return others

    def _others(self) -> dict[int, int]:
        clocks = clocks_of(self._group.table.read())
        clocks.pop(self._group.member.slot, None)
        return clocks
