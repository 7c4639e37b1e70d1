"""One version on its way into a mirror: which parent gives which block, what has arrived, what failed. Thread-safe.

The plan gives each block a parent. The blocks of a parent that broke, or that has sent nothing for STALL_S, are taken
from the source. So a plan that is outdated or wrong can delay a version, but neither falsify nor stop it.
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
        """`parents` has the end of each range of [0, 1), and the buffer that gives the blocks of that range."""
        self.blocks = blocks
        self.version = version
        self.source = source
        # Blocks that are read together from one parent, with one check for all of them. Few, since none of them is
        # passed on before the last one has arrived.
        self.at_once = max(1, blocks.count // 256)
        self.failure: Exception | None = None
        self.changed = threading.Condition()
        self._open: dict[str, dict[int, None]] = {}  # missing blocks by parent, in order
        self._taken: set[int] = set()
        self._bits = 0
        self._moved: dict[str, float] = {}  # by parent: the time of the last arrival
        self._broken: set[str] = set()
        self._ended = False
        self._came: dict[str, int] = {}  # by parent: number of blocks that have arrived
        self._reading: dict[str, int] = {}  # by parent: number of calls in progress
        self._since: dict[str, float] = {}  # by parent: start of the present calls
        self._busy_s: dict[str, float] = {}
        self._began = now = time.monotonic()
        for block in range(blocks.count):
            point = blocks.point(block)
            parent = next((name for end, name in parents if point < end), source)
            self._open.setdefault(parent, {})[block] = None
            self._moved[parent] = now

    @property
    def parents(self) -> list[str]:
        """Return the parents from which blocks are expected."""
        return list(self._moved)

    def rates(self) -> dict[str, float]:
        """Return the bytes per second by parent, counting only the time with calls in progress.

        A parent that had nothing to give in between therefore shows its possible speed, approximately: the few bytes
        may have waited in the network's queues.
        """
        size, found = self.blocks.block_bytes, {}
        for parent, count in self._came.items():
            elapsed = self._moved[parent] - self._began
            found[parent] = count * size / max(1e-3, elapsed * _BUSY_MIN, self._busy_s.get(parent, 0.0))
        return found

    @contextmanager
    def reading(self, parent: str) -> Iterator[None]:
        """Count the time inside the block as time with a call to that parent in progress."""
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
        """Return True if there is work left."""
        return not (self._ended or self.failure is not None or self.done)

    def wants(self, parent: str) -> bool:
        """Return True if blocks are still expected from that parent; from the source, if any block is still
        expected.
        """
        return self.active and (parent == self.source or bool(self._open.get(parent)))

    def take(self, parent: str, has: Callable[[int], bool], most: int = 1) -> list[int]:
        """Return the next blocks to read from this parent, of those that the parent has."""
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
        """Return a block of a parent that does not deliver it, for the source. The thread that reads it may be
        hanging.
        """
        now = time.monotonic()
        for parent, blocks in self._open.items():
            lost = parent in self._broken or now - self._moved[parent] > STALL_S
            if parent != self.source and blocks and lost:
                block = next(iter(blocks))
                del blocks[block]  # from now on the block is read from the source
                self._open.setdefault(self.source, {})[block] = None
                return [block]
        return []

    def put(self, block: int, parent: str, write: Callable[[], None]) -> bool:
        """Write a block that has arrived, unless it is there already; return True if it was written."""
        with self.changed:
            if not self.active or self._bits >> block & 1:
                return False
        write()  # another thread may write the same bytes
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
        """Return these blocks to the queue: they did not arrive."""
        with self.changed:
            self._taken.difference_update(blocks)

    def broke(self, parent: str) -> None:
        """Note that this parent delivers nothing for now."""
        with self.changed:
            if parent != self.source:
                self._broken.add(parent)
            self._taken -= set(self._open.get(parent, ()))
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """End the fill with an error: the source no longer has this version."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def end(self) -> None:
        """End the fill. Nothing is written after this call and all calls of `put` have returned."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()
