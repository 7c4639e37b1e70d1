"""One version on its way into a mirror: which parent gives which block, what has arrived, what failed. Thread-safe.

The plan gives each block a parent. A block that is late there is taken from any other parent that has it, and so from
the source at last:

- the parent broke;
- UNSURE_S have passed, and the parent has neither the block nor begun the version by the same plan, so nothing says
  that the block will come. Relays that follow different plans may wait for each other;
- the parent has had nothing new for STALL_S, and not this block either;
- the block was asked of the parent, and nothing of that answer came for STALL_S.

A mirror that has nothing else to give takes over blocks of a parent with a backlog, which has more than it can send.
So links that are slower than planned delay a version less. Each relay begins at another block, and takes from a parent
with a backlog what no other mirror has: so relays that read from one parent take different blocks from it, and the rest
from each other. The source helps with a small part only, since its link is the one that all relays need.

So a plan that is outdated or wrong can delay a version, but neither falsify nor stop it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from smb.relay.arrived import Blocks, bits_of
from smb.relay.plans import Plan

STALL_S = 3.0
UNSURE_S = 0.5
_BUSY_MIN = 0.3
_SPARE = 0.15  # copies that all relays together may take from the source beyond the plan
_AT_ONCE_BYTES = 1 << 20  # so many take longer to read than to check
_BACKLOG = 4  # calls: a parent with more to give than these has a backlog


@dataclass(frozen=True, slots=True)
class FeedRate:
    """How fast bytes came from a parent. `limited` says that it had a backlog, so the rate is that of its links."""

    bytes_per_s: float
    limited: bool


class _Meter:
    """The bytes of calls, and the time with at least one of them in progress."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.busy_s = 0.0
        self._calls = 0
        self._since = 0.0

    def begin(self, now: float) -> None:
        self._calls += 1
        if self._calls == 1:
            self._since = now

    def end(self, now: float, nbytes: int) -> None:
        self._calls -= 1
        self.nbytes += nbytes
        if self._calls == 0:
            self.busy_s += now - self._since


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
        self.all_calls = _Meter()
        self.limited_calls = _Meter()  # those with a backlog
        self.came_at = now

    def waiting(self, taken: int) -> int:
        """Return the bits of the blocks that it can give now."""
        return self.open & self.offered & ~taken

    def late(self, now: float, taken: int) -> int:
        """Return the bits of its blocks that others should give, without those that were asked of it."""
        if self.broken or now - self.heard_at > STALL_S:
            return self.open & ~taken
        unsure = not self.comes and now - self.unsure_at > UNSURE_S
        return self.open & ~taken & ~self.offered if unsure or self.looked_at - self.grew_at > STALL_S else 0


class Fill:
    def __init__(self, blocks: Blocks, version: int, source: str, plan: Plan, first: int = 0) -> None:
        """`first` is the block at which this relay begins."""
        self.blocks = blocks
        self._first = first % max(1, blocks.count)
        self.version = version
        self.source = source
        self.plan = plan
        self.all_bits = (1 << blocks.count) - 1
        # Blocks that are read together from one parent, with one check for all of them. Few and small, since none of
        # them is passed on before the last one has arrived.
        self.at_once = max(1, min(blocks.count // 256, _AT_ONCE_BYTES // blocks.block_bytes))
        self.failure: Exception | None = None
        self.changed = threading.Condition()
        self._taken: dict[int, float] = {}  # blocks that are being read: the time of the last news of them
        self._limited: set[int] = set()  # those that were taken from a backlog
        self._bits = 0
        self._ended = False
        self._began = now = time.monotonic()
        self._parents: dict[str, _Parent] = {}
        for block in range(blocks.count):
            point = blocks.point(block)
            name = next((name for end, name in plan.parents if point < end), source)
            self._parents.setdefault(name, _Parent(now)).open |= 1 << block
        # Blocks that this relay may still take from the source beyond the plan, because a mirror has a backlog. All
        # relays feed each other, or nearly so.
        self._spare = int(_SPARE * blocks.count / (1 + len(self._parents.keys() - {source})))

    @property
    def parents(self) -> list[str]:
        """Return the parents from which blocks are expected."""
        with self.changed:
            return list(self._parents)

    def rates(self) -> dict[str, FeedRate]:
        """Return how fast bytes came from each parent, counting only the time with calls in progress.

        If most bytes of a parent came while it had a backlog, only those are counted.
        """
        found = {}
        with self.changed:
            for name, parent in self._parents.items():
                every, limited = parent.all_calls, parent.limited_calls
                if 2 * limited.nbytes > every.nbytes:
                    found[name] = FeedRate(limited.nbytes / max(1e-3, limited.busy_s), True)
                elif every.nbytes:
                    elapsed = parent.came_at - self._began
                    found[name] = FeedRate(every.nbytes / max(1e-3, elapsed * _BUSY_MIN, every.busy_s), False)
        return found

    @contextmanager
    def reading(self, name: str, blocks: Collection[int]) -> Iterator[None]:
        """Count the time inside the block as time with a call to that parent in progress, for these blocks."""
        nbytes = sum(self.blocks.range(block)[1] for block in blocks)
        with self.changed:
            parent, now = self._parent(name), time.monotonic()
            meters = [parent.all_calls, *([parent.limited_calls] if self._limited.issuperset(blocks) else [])]
            for meter in meters:
                meter.begin(now)
        try:
            yield
        finally:
            with self.changed:
                now = time.monotonic()
                for meter in meters:
                    meter.end(now, nbytes)

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
        """Return True if blocks are still expected from that parent, or wanted in place of others'; from the source,
        if any block is still expected.
        """
        with self.changed:
            return self.active and (name == self.source or self._parent(name).open > 0 or self._behind(name) > 0)

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
            waiting = parent.waiting(bits_of(self._taken))
            if name != self.source and waiting.bit_count() > _BACKLOG * self.at_once:
                waiting = waiting & ~self._elsewhere(name) or waiting
            found = self._next(waiting, most)
            self._taken.update((block, now) for block in found)
            if parent.waiting(bits_of(self._taken)):
                self._limited.update(found)
            else:
                self._limited.difference_update(found)
            if not found:
                found = self._next(self._late(name, now) & offered, 1)
                if not found:
                    most = most if name != self.source else min(most, self._spare)
                    found = self._next(self._behind(name) & offered, most, last=True)
                    self._spare -= len(found) if name == self.source else 0
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
            self._parent(name).came_at = time.monotonic()
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

    def _elsewhere(self, name: str) -> int:
        """Return the bits of the blocks that other mirrors have."""
        found = 0
        for other, parent in self._parents.items():
            found |= parent.offered if other not in (name, self.source) else 0
        return found

    def _behind(self, name: str) -> int:
        """Return the bits of the blocks that wait at other mirrors with a backlog."""
        taken, found = bits_of(self._taken), 0
        for other, parent in self._parents.items():
            waiting = parent.waiting(taken) if other not in (name, self.source) else 0
            if waiting.bit_count() > _BACKLOG * self.at_once:
                found |= waiting
        return found

    def _next(self, bits: int, most: int, *, last: bool = False) -> list[int]:
        """Return the next of these blocks, or the last ones, in this relay's order."""
        before = bits & ((1 << self._first) - 1)
        parts = [before, bits & ~before] if last else [bits & ~before, before]
        found: list[int] = []
        for part in parts:
            left = part
            while left and len(found) < most:
                block = left.bit_length() - 1 if last else (left & -left).bit_length() - 1
                found.append(block)
                left &= ~(1 << block)
        return found

    def _move(self, block: int, to: _Parent | None) -> None:
        for parent in self._parents.values():
            parent.open &= ~(1 << block)
        if to is not None:
            to.open |= 1 << block
