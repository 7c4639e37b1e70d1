"""One version on its way into a mirror: which parent gives which block, what has arrived, what failed. Thread-safe.

The plan gives each block a parent. A block that is late there is taken from any other parent that has it, and so from
the source at last:

- the parent broke;
- UNSURE_S have passed, and the parent has neither the block nor begun the version by the same plan, so nothing says
  that the block will come. Relays that follow different plans may wait for each other;
- the parent has had nothing new for STALL_S, and not this block either;
- the block was asked of the parent, and nothing of that answer came for STALL_S.

So a plan that is outdated or wrong can delay a version, but neither falsify nor stop it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from smb.relay.arrived import Blocks, bits_of
from smb.relay.plans import Plan

STALL_S = 3.0
UNSURE_S = 0.5
_BUSY_MIN = 0.3


class _Parent:
    """What is known of a parent. All times are monotonic; those at the beginning are the fill's beginning."""

    def __init__(self, now: float) -> None:
        self.open = 0  # bits of the blocks that are expected from it and have not arrived
        self.offered = 0  # bits of the blocks that it has
        self.broken = False
        self.comes = False  # True once it has begun the version by the same plan
        self.unsure_at = now  # since when that is not so
        self.grew_at = now  # the last time at which it had something new
        self.looked_at = now  # the last time at which a thread of ours looked at what it has
        self.heard_at = now  # the last time at which a thread of ours heard from it
        self.reading = 0  # number of calls in progress
        self.since = 0.0  # start of the present calls
        self.busy_s = 0.0
        self.came = 0  # number of blocks that have arrived from it
        self.came_at = now

    def late(self, now: float, taken: int) -> int:
        """Return the bits of its blocks that others should give, without those that were asked of it."""
        if self.broken or now - self.heard_at > STALL_S:
            return self.open & ~taken
        unsure = not self.comes and now - self.unsure_at > UNSURE_S
        return self.open & ~taken & ~self.offered if unsure or self.looked_at - self.grew_at > STALL_S else 0


class Fill:
    def __init__(self, blocks: Blocks, version: int, source: str, plan: Plan) -> None:
        self.blocks = blocks
        self.version = version
        self.source = source
        self.plan = plan
        self.all_bits = (1 << blocks.count) - 1
        # Blocks that are read together from one parent, with one check for all of them. Few, since none of them is
        # passed on before the last one has arrived.
        self.at_once = max(1, blocks.count // 256)
        self.failure: Exception | None = None
        self.changed = threading.Condition()
        self._taken: dict[int, float] = {}  # blocks that are being read: the time of the last news of them
        self._bits = 0
        self._ended = False
        self._began = now = time.monotonic()
        self._parents: dict[str, _Parent] = {}
        for block in range(blocks.count):
            point = blocks.point(block)
            name = next((name for end, name in plan.parents if point < end), source)
            self._parents.setdefault(name, _Parent(now)).open |= 1 << block

    @property
    def parents(self) -> list[str]:
        """Return the parents from which blocks are expected."""
        return list(self._parents)

    def rates(self) -> dict[str, float]:
        """Return the bytes per second by parent, counting only the time with calls in progress.

        A parent that had nothing to give in between therefore shows its possible speed, approximately: the few bytes
        may have waited in the network's queues.
        """
        size, found = self.blocks.block_bytes, {}
        for name, parent in self._parents.items():
            if parent.came:
                elapsed = parent.came_at - self._began
                found[name] = parent.came * size / max(1e-3, elapsed * _BUSY_MIN, parent.busy_s)
        return found

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Count the time inside the block as time with a call to that parent in progress."""
        with self.changed:
            parent = self._parent(name)
            parent.reading += 1
            if parent.reading == 1:
                parent.since = time.monotonic()
        try:
            yield
        finally:
            with self.changed:
                parent.reading -= 1
                if parent.reading == 0:
                    parent.busy_s += time.monotonic() - parent.since

    @property
    def bits(self) -> int:
        return self._bits

    @property
    def done(self) -> bool:
        return self._bits == self.all_bits

    @property
    def active(self) -> bool:
        """Return True if there is work left."""
        return not (self._ended or self.failure is not None or self.done)

    def wants(self, name: str) -> bool:
        """Return True if blocks are still expected from that parent; from the source, if any block is still
        expected.
        """
        return self.active and (name == self.source or self._parent(name).open > 0)

    def take(self, name: str, offered: int, most: int = 1, *, comes: bool = True) -> list[int]:
        """Return the next blocks to read from this parent.

        `offered` has the bits of the blocks that it has. `comes` says that the others will come, too: the parent has
        begun this version, by the same plan or from the source alone.
        """
        with self.changed:
            if not self.active:
                return []
            now, parent = time.monotonic(), self._parent(name)
            parent.heard_at = parent.looked_at = now
            if parent.comes and not comes:
                parent.unsure_at = now
            parent.comes = comes
            if offered & ~parent.offered:
                parent.grew_at = now
            parent.offered = offered
            found = _lowest(parent.open & offered & ~bits_of(self._taken), most)
            if not found:
                found = _lowest(self._late(name, now) & offered, 1)
                for block in found:
                    self._move(block, parent)
            self._taken.update((block, now) for block in found)
            return found

    def moved(self, name: str, blocks: Iterable[int]) -> None:
        """Note that an answer with these blocks is still coming."""
        with self.changed:
            now = self._parent(name).heard_at = time.monotonic()
            self._taken.update((block, now) for block in blocks if block in self._taken)

    def put(self, block: int, name: str, write: Callable[[], None]) -> bool:
        """Write a block that has arrived, unless it is there already; return True if it was written."""
        with self.changed:
            if not self.active or self._bits >> block & 1:
                return False
        write()  # another thread may write the same bytes
        with self.changed:
            if self._ended:
                return False
            self._bits |= 1 << block
            self._taken.pop(block, None)
            self._move(block, None)
            parent = self._parent(name)
            parent.came += 1
            parent.came_at = time.monotonic()
            self.changed.notify_all()
        return True

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return these blocks to the queue: they did not arrive."""
        with self.changed:
            for block in blocks:
                self._taken.pop(block, None)

    def broke(self, name: str) -> None:
        """Note that this parent delivers nothing for now."""
        with self.changed:
            parent = self._parent(name)
            parent.broken = name != self.source
            for block in [each for each in self._taken if parent.open >> each & 1]:
                del self._taken[block]
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

    def _parent(self, name: str) -> _Parent:
        return self._parents.setdefault(name, _Parent(self._began))

    def _late(self, name: str, now: float) -> int:
        """Return the bits of the blocks that other parents than this one should have given."""
        taken = bits_of(self._taken)
        # The threads that asked for these may be hanging.
        late = bits_of(block for block, at in self._taken.items() if now - at > STALL_S)
        late &= ~self._parent(name).open
        for other, parent in self._parents.items():
            if other not in (name, self.source):
                late |= parent.late(now, taken)
        return late

    def _move(self, block: int, to: _Parent | None) -> None:
        for parent in self._parents.values():
            parent.open &= ~(1 << block)
        if to is not None:
            to.open |= 1 << block


def _lowest(bits: int, most: int) -> list[int]:
    """Return the lowest bits that are set."""
    found: list[int] = []
    while bits and len(found) < most:
        found.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return found
