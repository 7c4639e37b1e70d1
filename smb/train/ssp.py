"""SSP(s), stale synchronous: a worker may be ahead of the slowest one by s clocks, and waits at this bound. ASP has no
bound.

    W_global += W_local - base;  clock += 1        after every local step
    wait until clock - min(clocks of all) <= s;  W_local = base = W_global

Source: Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter server". With s = 0 it
is lock-step as in bulk synchronous training, with one exception: a worker may read a model to which a faster one has
already added its next update. Without a bound the scheme is ASP, totally asynchronous: every worker adds each change at
once and waits for nobody (Dean et al. 2012, "Large scale distributed deep networks", Downpour SGD).

One call adds on the servers, and the sums come back in the same round trip.

Taxonomy: data parallel; central (a parameter server); bounded asynchronous, clocks seen by all, or asynchronous; each
worker with the servers alone.

Staleness of SSP: a read at clock c contains every update up to clock c - s, of every live worker, and all of the
reader's own updates. So no worker is ever more than s clocks ahead. This holds because a worker writes its clock after
its contribution was acknowledged, and reads after it saw the clocks. The staleness in the status is how many clocks the
slowest worker was behind at the read. If a worker dies, or is stopped for longer than its lease, the others notice it
by its lock and go on. A worker that joins begins at the slowest worker's clock. A test with a stopped worker checks the
contents of every read.

Staleness of ASP: how many contributions of others were acknowledged between a worker's read and its next contribution.
The scheme promises no bound, but the group's guards may set one (staleness_max): a contribution beyond it is refused.
No contribution is lost, and each counts once; the test checks this against the workers' own records.

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
from smb.train.long_waits import LongWait
from smb.train.parameters import Parameters
from smb.train.scheme import Exchange, Scheme, is_whole
from smb.train.traits import FUSED, Traits

if TYPE_CHECKING:
    from smb.train.group import Group


_ARRIVED = t.GROUP_EXTRA  # ASP's column: number of contributions acknowledged so far


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
    """Stale synchronous updates: a worker may be at most `staleness` steps ahead of the slowest
    one, and waits there.
    """

    NAME: ClassVar[str] = "ssp"
    TRAITS: ClassVar[Traits] = Traits(way=FUSED, calls=5, each_step=True, no_overlap="")
    staleness: int = 3

    def __post_init__(self) -> None:
        if not is_whole(self.staleness, 0):
            raise InvalidArgumentError(
                f"scheme 'ssp': staleness must be a whole number of clocks from 0 on, not {self.staleness!r}"
            )

    def first_clock(self, rows: t.Rows) -> int:
        """Return the slowest member's clock: a newcomer holds up nobody, and may be as far ahead
        as any other member.
        """
        return min(clocks_of(rows).values(), default=0)

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange."""
        return StaleSynchronous(group, parameters, self.staleness)


def clocks_of(rows: t.Rows) -> dict[int, int]:
    """Return the clock of each live member, by slot."""
    return {slot: t.clock_of(row[t.MARK]) for slot, row in enumerate(rows[1:]) if row[t.INCARNATION]}


def lag(clock: int, others: Mapping[int, int]) -> int:
    """Return how many clocks the slowest of the others is behind; 0 if no member is behind."""
    return max(0, clock - min(others.values(), default=clock))


def must_wake(clock: int, others: Mapping[int, int], bound: int) -> bool:
    """Return True if a member may be waiting for this worker's step to `clock`, which was just written: this worker was
    the last one below `clock`, and another one is so far ahead that it waited.
    """
    return min(others.values(), default=0) >= clock and max(others.values(), default=0) - (clock - 1) > bound


class StaleSynchronous(Exchange):
    """One worker's side. A step blocks for one accumulate and a few small calls. With a bound it also blocks while the
    worker is too far ahead, and then for one more read. Without a bound no clocks are written.
    """

    EACH_STEP = True

    def __init__(self, group: Group, parameters: Parameters, bound: int | None) -> None:
        self._group = group
        self._bound = bound
        self._mover = mover_of(group, parameters, FUSED)
        self._clock = group.member.clock
        self._long = LongWait(f"training {group.name!r}", group.table, group.lease)
        self._lag = 0  # at the last read
        # Contributions, including ours, at the beginning of the read on which the next contribution builds.
        self._arrived = 0
        self._unsent_samples = 0

    def step(self, samples: int) -> None:
        """Add the delta, and take over the shared model. With a bound, write the clock and wait while others are
        behind.

        With a bound a refused delta advances the clock too, so that a faulty worker holds up nobody.
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
        """Send what a failed call left unsent, and the clock if it was not written."""
        if self._mover.finish():
            self._count()
            self._clock += 1
            self._arrived += 1
        if self._bound is not None and self._group.member.clock != self._clock:
            self._tell(self._bound)

    def _step_within(self, bound: int) -> None:
        group, refused = self._group, None
        # Clocks only grow, so if no member is too far behind now, the sums that come back contain every update they
        # must.
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
                    slow = [slot for slot, clock in others.items() if clock < self._clock - bound]
                    dead = group.reap(slow)
                    alive = [slot for slot in slow if slot not in dead]
                    self._long.tell(group.table.read(), alive, self._clock, f"more than {bound} steps behind it")
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
        """Write the clock, wake members that may have waited for it, and return the others' clocks."""
        self._group.member.advance(self._clock)
        others = self._others()
        if must_wake(self._clock, others, bound):
            self._group.wake()
        return others

    def _others(self) -> dict[int, int]:
        clocks = clocks_of(self._group.table.read())
        clocks.pop(self._group.member.slot, None)
        return clocks
