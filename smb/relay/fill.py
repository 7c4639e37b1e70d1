"""One version on its way into a mirror: which block comes from whom, what is there, what went wrong. Thread-safe.

Blocks have a parent each by the plan. Those of a parent that broke, or from which nothing has come for STALL_S, are
taken from the source: a plan that is out of date, or wrong, makes a version late, never wrong, and never stops it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from smb.relay.arrived import Blocks, bits_of

STALL_S = 3.0
_BUSY_MIN = 0.3


class Fill:
    def __init__(self, blocks: Blocks, version: int, source: str, parents: Sequence[tuple[float, str]]) -> None:
        """`parents`: where each range of [0, 1) ends, and the buffer that those blocks come from."""
        self.blocks = blocks
        self.version = version
        self.source = source
        # In a row from one parent, with one look for all whether they were what they should be; few, as what is in
        # such a row is not served on before its end.
        self.at_once = max(1, blocks.count // 256)
        self.failure: Exception | None = None
        self.changed = threading.Condition()
        self._open: dict[str, dict[int, None]] = {}  # not there, by parent, in order
        self._taken: set[int] = set()
        self._bits = 0
        self._moved: dict[str, float] = {}  # when something came last
        self._broken: set[str] = set()
        self._ended = False
        self._came: dict[str, int] = {}  # blocks, by parent; so below
        self._reading: dict[str, int] = {}  # calls under way
        self._since: dict[str, float] = {}  # there is one
        self._busy_s: dict[str, float] = {}
        self._began = now = time.monotonic()
        for block in range(blocks.count):
            point = blocks.point(block)
            parent = next((name for end, name in parents if point < end), source)
            self._open.setdefault(parent, {})[block] = None
            self._moved[parent] = now

    @property
    def parents(self) -> list[str]:
        """From whom something is to come."""
        return list(self._moved)

    def rates(self) -> dict[str, float]:
        """Return bytes per second by parent, while some were on their way. A parent that had nothing to give in between
        looks as fast as it could be, within bounds: what little came may have waited in the network's queues.
        """
        size, found = self.blocks.block_bytes, {}
        for parent, count in self._came.items():
            elapsed = self._moved[parent] - self._began
            found[parent] = count * size / max(1e-3, elapsed * _BUSY_MIN, self._busy_s.get(parent, 0.0))
        return found

    @contextmanager
    def reading(self, parent: str) -> Iterator[None]:
        """Count the time inside as such with bytes on their way from there."""
        with self.changed:
            count = self._reading.get(parent, 0)
            self._reading[parent] = count + 1
            if count == 0:
                self._since[parent] = time.monotonic()
        try:
            yield
        finally:
            with self.changed:
                self._reading[parent] -= 1
                if self._reading[parent] == 0:
                    took = time.monotonic() - self._since[parent]
                    self._busy_s[parent] = self._busy_s.get(parent, 0.0) + took

    @property
    def bits(self) -> int:
        return self._bits

    @property
    def done(self) -> bool:
        return not any(self._open.values())

    @property
    def active(self) -> bool:
        """Whether there is anything left to do."""
        return not (self._ended or self.failure is not None or self.done)

    def wants(self, parent: str) -> bool:
        """Whether anything is still to come from there; from the source, as long as anything is at all."""
        return self.active and (parent == self.source or bool(self._open.get(parent)))

    def take(self, parent: str, has: Callable[[int], bool], most: int = 1) -> list[int]:
        """Return the next blocks that are to come from this parent, of those that it has."""
        with self.changed:
            if not self.active:
                return []
            here = (p for p in self._open.get(parent, ()) if p not in self._taken and has(p))
            found = list(islice(here, most))
            if not found and parent == self.source:
                found = self._abandoned()
            self._taken.update(found)
            return found

    def _abandoned(self) -> list[int]:
        """Return a block of a parent that does not give it. A thread that has taken it may be hanging."""
        now = time.monotonic()
        for parent, blocks in self._open.items():
            lost = parent in self._broken or now - self._moved[parent] > STALL_S
            if parent != self.source and blocks and lost:
                block = next(iter(blocks))
                del blocks[block]  # it is the source's from now on
                self._open.setdefault(self.source, {})[block] = None
                return [block]
        return []

    def put(self, block: int, parent: str, write: Callable[[], None]) -> bool:
        """Have a block that came written, unless it is there; return whether it was not."""
        with self.changed:
            if not self.active or self._bits >> block & 1:
                return False
        write()  # twice the same bytes, perhaps
        with self.changed:
            if self._ended:
                return False
            self._bits |= bits_of((block,))
            for blocks in self._open.values():
                blocks.pop(block, None)
            self._moved[parent] = time.monotonic()
            self._came[parent] = self._came.get(parent, 0) + 1
            self.changed.notify_all()
        return True

    def give_back(self, blocks: Iterable[int]) -> None:
        """They did not come after all."""
        with self.changed:
            self._taken.difference_update(blocks)

    def broke(self, parent: str) -> None:
        """Nothing comes from there for now."""
        with self.changed:
            if parent != self.source:
                self._broken.add(parent)
            self._taken -= set(self._open.get(parent, ()))
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """It cannot be had any more."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def end(self) -> None:
        """Nothing is written any more after this returns and `put` has."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()
