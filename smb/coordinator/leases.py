"""Leases: which holders count as alive, and until when. Pure; time is passed in."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from smb.config.limits import RENEWALS_PER_LEASE

Holder = TypeVar("Holder", bound=Hashable)


@dataclass(frozen=True)
class Leases(Generic[Holder]):
    """Holders and the moments at which their leases run out, in seconds of one monotonic clock. Immutable.

    A lease runs for `duration_s`. If all holders together would renew more than `most_per_s` times a second, leases
    become longer, up to `longest_s`.
    """

    duration_s: float
    ends: Mapping[Holder, float] = field(default_factory=dict)
    most_per_s: float = math.inf
    longest_s: float = math.inf

    @property
    def granted_s(self) -> float:
        """How long a lease that is granted now runs, in seconds."""
        return max(self.duration_s, min(self.longest_s, RENEWALS_PER_LEASE * len(self.ends) / self.most_per_s))

    def grant(self, holder: Holder, now: float) -> Leases[Holder]:
        """Start or renew: the holder's lease runs from now."""
        return replace(self, ends={**self.ends, holder: now + self.granted_s})

    def grant_all(self, holders: Collection[Holder], now: float) -> Leases[Holder]:
        """Start or renew all these leases at once. Their duration follows from the new number of holders."""
        counted = replace(self, ends={**self.ends, **dict.fromkeys(holders, now)})
        return replace(self, ends={**counted.ends, **dict.fromkeys(holders, now + counted.granted_s)})

    def prolong(self, holders: Collection[Holder], until: float) -> Leases[Holder]:
        """Let these leases run until that moment at least. A holder without a lease gets none."""
        longer = {holder: max(self.ends[holder], until) for holder in holders if holder in self.ends}
        return replace(self, ends={**self.ends, **longer})

    def end(self, *holders: Holder) -> Leases[Holder]:
        """End these leases. A holder without a lease is not an error."""
        gone = set(holders)
        return replace(self, ends={other: at for other, at in self.ends.items() if other not in gone})

    def runs(self, holder: Holder, now: float) -> bool:
        """Whether the holder has a lease that has not run out. A lease has run out at its very end."""
        return now < self.ends.get(holder, now)

    def run_out(self, now: float) -> tuple[Holder, ...]:
        """Return the holders whose lease has run out but was not ended yet, in the order of their first lease."""
        return tuple(holder for holder, at in self.ends.items() if at <= now)
