"""Leases: who is known to be alive, and until when. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

Holder = TypeVar("Holder", bound=Hashable)


@dataclass(frozen=True)
class Leases(Generic[Holder]):
    """Holders and the moments at which their leases run out, in seconds of one monotonic clock. Immutable."""

    duration_s: float
    ends: Mapping[Holder, float] = field(default_factory=dict)

    def grant(self, holder: Holder, now: float) -> Leases[Holder]:
        """Start or renew: the holder's lease runs for `duration_s` from now."""
        return replace(self, ends={**self.ends, holder: now + self.duration_s})

    def end(self, *holders: Holder) -> Leases[Holder]:
        """Let go of leases; one that is not held is no error."""
        gone = set(holders)
        return replace(self, ends={other: at for other, at in self.ends.items() if other not in gone})

    def runs(self, holder: Holder, now: float) -> bool:
        """Whether the holder has a lease that has not run out. At its very end it has run out."""
        return now < self.ends.get(holder, now)

    def run_out(self, now: float) -> tuple[Holder, ...]:
        """Holders whose lease has run out and was not let go of yet, in the order in which they came."""
        return tuple(holder for holder, at in self.ends.items() if at <= now)
