"""This server's work by buffer and by client, counted under a bounded number of names.

The engine counts by segment and by session. The coordinator knows the names and sends them with its answers to
renewals. A segment or session is shown once its name is known, together with all its earlier work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from memserver.engine_figures import Share
from smb.daemon.metric_names import NAMED_MAX, OTHER

ASKED_MAX = 256  # names that one renewal asks for


class Names:
    """The known names of ids. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}

    def unknown(self, ids: Iterable[int]) -> list[int]:
        """Return the ids without a name, at most ASKED_MAX. Forgets the names of all ids that are not given."""
        there = set(ids)
        with self._lock:
            self._names = {number: name for number, name in self._names.items() if number in there}
            return sorted(there - self._names.keys())[:ASKED_MAX]

    def learn(self, names: Mapping[int, str]) -> None:
        with self._lock:
            self._names.update(names)

    def known(self) -> dict[int, str]:
        """Return the names by id."""
        with self._lock:
            return dict(self._names)


class NamedShares:
    """Sums of shares by name: the first NAMED_MAX names that are seen, and OTHER for all later ones. No sum ever
    decreases: what has gone to OTHER stays there. A name whose ids are all gone is forgotten, which makes room.
    """

    def __init__(self) -> None:
        self._last: dict[int, Share] = {}
        self._labels: dict[str, str] = {}  # by name
        self._sums: dict[str, dict[tuple[int, int], tuple[int, int]]] = {}

    def update(self, shares: Mapping[int, Share], names: Mapping[int, str]) -> dict[str, Share]:
        """Add what the engine reports now, and return the sums by label."""
        self._forget({name for number, name in names.items() if number in shares})
        for number, share in shares.items():
            name = names.get(number)
            if name is None:
                continue
            label = self._label(name)
            # The difference is at least 0: counts of local clients lie in memory that these clients may change.
            last, sums = self._last.get(number, {}), self._sums.setdefault(label, {})
            for cell, (count, nbytes) in share.items():
                seen, sum_ = last.get(cell, (0, 0)), sums.get(cell, (0, 0))
                sums[cell] = (sum_[0] + max(0, count - seen[0]), sum_[1] + max(0, nbytes - seen[1]))
            self._last[number] = share
        self._last = {number: share for number, share in self._last.items() if number in shares}
        return {label: dict(sums) for label, sums in self._sums.items()}

    def label(self, name: str) -> str:
        """Return the label under which a name is shown."""
        return self._labels.get(name, OTHER)

    def _forget(self, there: set[str]) -> None:
        for name in self._labels.keys() - there:
            label = self._labels.pop(name)
            if label != OTHER:
                del self._sums[label]

    def _label(self, name: str) -> str:
        if name not in self._labels:
            room = sum(label != OTHER for label in self._labels.values()) < NAMED_MAX
            self._labels[name] = name if room and name != OTHER else OTHER
        return self._labels[name]
