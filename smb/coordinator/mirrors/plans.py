"""Which plan of trees holds for which versions of a published buffer. Pure.

If relays filled one version by different plans, two of them could wait for each other: A takes a block from B by the
old plan, and B takes it from A by the new one. So a plan has a number and a range of versions, no version is in two
ranges, and a relay that knows no plan for a version asks for one (smb/relay/plans.py). While a plan is the latest one,
its range grows with the published versions. The next plan begins after the greatest version that any relay was told.

Within a plan a relay may skip parents: it then takes their blocks from an ancestor, so all relays still follow one tree
and none waits for itself. This is done for parents that are not alive. A relay that joins after the plan was made takes
its blocks from relays that the source feeds, and feeds no other relay until the next plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from smb.coordinator.mirrors.link_rates import LinkRates
from smb.coordinator.mirrors.trees import RelayTree

PACE_S = 2.0  # of a renewal: a server hears of the versions that will be published until it renews again


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """The trees for the versions `first_version` to `last_version`. A later plan has a higher number."""

    number: int
    first_version: int
    last_version: int
    trees: tuple[RelayTree, ...]

    @property
    def relays(self) -> frozenset[str]:
        return frozenset(self.trees[0].parents)

    def parents_of(self, relay: str, source: str, alive: Collection[str]) -> tuple[tuple[float, str], ...]:
        """Return where the relay reads what: the end of each range of [0, 1), and its parent there, which is alive."""
        found: list[tuple[float, str]] = []
        end = 0.0
        for tree in self.trees:
            end += tree.share
            parent = tree.parents.get(relay) or next(
                (name for name, of in tree.parents.items() if of == source and name in alive), source
            )
            while parent != source and parent not in alive:
                parent = tree.parents[parent]
            if found and found[-1][1] == parent:
                found.pop()
            found.append((end, parent))
        return tuple(found)


class MirrorPlans:
    """The plans of one published buffer: the latest one and its predecessor, which may still be in use."""

    def __init__(self, since: float) -> None:
        """`since` is the present time (monotonic)."""
        self.since = since
        self.plans: tuple[MirrorPlan, ...] = ()
        self.planned_for: object = None  # what the last decision was made from
        self.link_rates = LinkRates()
        self._number = 0
        self._last_version = 0  # greatest version that any relay has a plan for
        self._published = 0
        self._marks: tuple[float, int, int] | None = None  # a time, what was published then, and a mark before

    @property
    def number(self) -> int:
        """The number of the latest plan, also of one that another coordinator made; 0: none is known."""
        return self._number

    @property
    def is_in_force(self) -> bool:
        """True if the latest plan holds for what is published now. Until then it is not replaced."""
        return bool(self.plans) and self.plans[-1].first_version <= max(1, self._published)

    def is_measured(self, version: int) -> bool:
        """True if a relay that has this version has filled one by the latest plan."""
        return version >= max(1, self.plans[-1].first_version)

    def hear(self, published: int, number: int, last_version: int, now: float) -> None:
        """Note what a relay reported: the source's latest version, and the latest plan that the relay has."""
        self._published = max(self._published, published)
        self._number = max(self._number, number)
        self._last_version = max(self._last_version, last_version)
        if self._marks is None:
            self._marks = (now, self._published, self._published)
        elif now - self._marks[0] >= PACE_S:
            self._marks = (now, self._published, self._marks[1])

    def begin(self, trees: Sequence[RelayTree]) -> None:
        """Make these trees the latest plan.

        The very first plan holds from the first version on: relays without a plan take all from the source, which
        makes no circle with any plan.
        """
        self._number += 1
        first = self._last_version + 1 if self._number > 1 else 0
        self.plans = (*self.plans[-1:], MirrorPlan(self._number, first, first, tuple(trees)))
        self.extend()

    def extend(self) -> None:
        """Let the latest plan hold for the versions that are published until servers renew again."""
        if self.plans:
            latest = self.plans[-1]
            pace = self._published - self._marks[2] if self._marks is not None else 0
            last = self._published + pace + 1
            latest = replace(latest, last_version=max(latest.last_version, last))
            self.plans = (*self.plans[:-1], latest)
            self._last_version = max(self._last_version, latest.last_version)
