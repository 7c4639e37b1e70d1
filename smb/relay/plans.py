"""Which plan a relay follows for which version. Thread-safe.

The coordinator gives plans for ranges of versions that do not overlap (smb/coordinator/mirrors/plans.py), so all relays
follow one plan for one version. A relay without a plan for a version waits for one, which its memory server fetches. It
does not wait for a coordinator that is away: it follows the latest plan that it has, or takes all from the source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WAIT_S = 5.0  # more than a renewal's interval; the first plan waits for all relays to begin
_LOOK_S = 0.1  # timeout of one wait, after which a stop is noticed
_KEPT = 3  # plans: a relay may be behind by a version or two


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to take the versions `first_version` to `last_version` from.

    `parents` has the end of each range of [0, 1), and the buffer that gives the blocks of that range. Number 0 is no
    plan of the coordinator's: it takes all from the source.
    """

    number: int
    first_version: int
    last_version: int
    parents: Sequence[tuple[float, str]]

    @staticmethod
    def direct(source: str) -> Plan:
        """Return the plan that takes all from the source."""
        return Plan(0, 0, 0, ((1.0, source),))


def plan_for(plans: Iterable[Plan], version: int) -> Plan | None:
    """Return the plan that holds for a version; None if none does. Pure."""
    held = [plan for plan in plans if plan.first_version <= version <= plan.last_version]
    return max(held, key=_number, default=None)


def _number(plan: Plan) -> int:
    return plan.number


class Plans:
    """The plans that one mirror's relay was given."""

    def __init__(self, source: str, ask: Callable[[], None] = lambda: None) -> None:
        """`ask` is called when `wait` begins to wait."""
        self._direct = Plan.direct(source)
        self._ask = ask
        self._changed = threading.Condition()
        self._plans: dict[int, Plan] = {}  # by number
        self._waits = False
        self._unanswered = False  # True if a wait was in vain, and nothing came since

    @property
    def is_waiting(self) -> bool:
        """True while a plan is wanted."""
        return self._waits

    @property
    def latest(self) -> Plan:
        """The plan with the highest number."""
        with self._changed:
            return max(self._plans.values(), key=_number, default=self._direct)

    def take(self, plans: Iterable[Plan]) -> None:
        """Add these plans, or replace those of the same number. No plans are an answer, too: some will come."""
        with self._changed:
            self._plans |= {plan.number: plan for plan in plans}
            for number in sorted(self._plans)[:-_KEPT]:
                del self._plans[number]
            self._unanswered = False
            self._changed.notify_all()

    def wait(self, version: int, stopping: threading.Event) -> None:
        """Wait until there is a plan for a version. Blocks for WAIT_S at most, and only once while nothing comes."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while self._is_wanted(version) and not (self._unanswered or stopping.is_set()):
                if not self._waits:
                    self._waits = True
                    self._ask()
                self._unanswered = time.monotonic() >= deadline
                self._changed.wait(_LOOK_S)
            self._waits = False

    def of(self, version: int) -> Plan:
        """Return the plan to follow for a version.

        If there is none, a version that is older than all plans is taken from the source, and a newer one by the latest
        plan.
        """
        with self._changed:
            return plan_for(self._plans.values(), version) or (
                self.latest if self._is_wanted(version) else self._direct
            )

    def _is_wanted(self, version: int) -> bool:
        """Return True if a plan for the version may still come."""
        return version > max((plan.last_version for plan in self._plans.values()), default=0)
