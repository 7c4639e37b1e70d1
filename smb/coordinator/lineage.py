"""The history of the coordinator's store: whether it has each change that a memory server was told of. Pure.

Each run of a coordinator is a term. Each stored change of a buffer's record has a number, and the numbers go on over
the terms. A store that was restored from a backup lacks the later terms, or the end of the last term. So the stamp
(cluster, term, sequence) that a server was told is in the history of each store that is at least as new, and of no
older store. That also holds after the restored store has counted past that number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import NamedTuple

TERMS_MAX = 256  # if a server was away for more terms, its segments without a record are quarantined


class Stamp(NamedTuple):
    """How new a store is. `cluster` identifies the history, which all restored copies of a store share."""

    cluster: int
    term: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """The terms, oldest first, each with the number of its first change. `sequence` is the number of the last
    change."""

    cluster: int = 0
    terms: tuple[tuple[int, int], ...] = ()
    sequence: int = 0

    @property
    def stamp(self) -> Stamp:
        """The stamp of the store's last change."""
        return Stamp(self.cluster, self.terms[-1][0] if self.terms else 0, self.sequence)

    def begun(self, term: int) -> Lineage:
        """Return the history with one more term. The number of the first term names the cluster."""
        if self.terms and self.terms[-1][0] == term:
            return self
        terms = (*self.terms, (term, self.sequence + 1))[-TERMS_MAX:]
        return replace(self, cluster=self.cluster or term, terms=terms)

    def changed(self) -> Lineage:
        """Return the history with one more change."""
        return replace(self, sequence=self.sequence + 1)

    def covers(self, stamp: Stamp) -> bool:
        """Whether this store has each change up to that stamp."""
        if stamp.cluster != self.cluster:
            return False
        for at, (term, _) in enumerate(self.terms):
            if term == stamp.term:
                last = self.terms[at + 1][1] - 1 if at + 1 < len(self.terms) else self.sequence
                return stamp.sequence <= last
        return False

    def terms_json(self) -> str:
        """Return the text that `of` reads, without the sequence."""
        return json.dumps({"cluster": self.cluster, "terms": self.terms})

    @staticmethod
    def of(text: str, sequence: str) -> Lineage:
        """Read stored texts; empty ones are from a release without a history. Raises KeyError, TypeError,
        ValueError."""
        if not text:
            return Lineage()
        fields = json.loads(text)
        terms = tuple((int(term), int(first)) for term, first in fields["terms"])
        return Lineage(int(fields["cluster"]), terms, int(sequence or 0))
