"""A state with deltas=: the description of a generation, and how deltas lie in the ring (docs/decisions/0024).

Version g of NAME.generations is the description of generation g: its publication is what makes it exist. The deltas
that it names lie in NAME.deltas, a ring of bytes. They stay there while g + 1 and g + 2 are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.engine import memory_of
from smb.errors import Error
from smb.relay.arrived import Arrived, Pieces
from smb.spi import versions_of

if TYPE_CHECKING:
    from smb.buffer import Buffer

HEAD_WORDS = 8  # before the entries
ENTRY_WORDS = 3
_FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """One delta: of which generation, where in the ring (counted on without end), bytes."""

    generation: int
    start: int
    nbytes: int

    def pieces(self, ring: Buffer) -> Pieces:
        """Return how it is cut on its way through relays; alike for everybody."""
        cut = Pieces.cut(self.nbytes, ring.layout.chunk_bytes)
        return Pieces(self.nbytes, cut, self.start % ring.size, self.generation)

    def is_in(self, ring: Buffer, has: Arrived) -> bool:
        """Whether all of it is in a mirror of the ring, by what that says has arrived."""
        if has.version == self.generation:
            return has.bits == (1 << self.pieces(ring).count) - 1
        return has.oldest <= self.generation < has.version


@dataclass(frozen=True)
class Head:
    """The description of a generation."""

    generation: int = 0
    total: int = 0  # the sum of its state
    anchor: int = 0  # version of the anchors' buffer
    anchor_generation: int = 0
    anchor_total: int = 0
    end: int = 0  # of the last delta in the ring
    entries: tuple[Entry, ...] = ()

    def to_words(self, size: int) -> np.ndarray[Any, Any]:
        """Return what is published."""
        words = np.zeros(size, np.int64)
        unsigned = words.view(np.uint64)
        words[0], words[1], words[6], words[7] = _FORMAT, self.generation, self.end, len(self.entries)
        words[3], words[4] = self.anchor, self.anchor_generation
        unsigned[2], unsigned[5] = self.total, self.anchor_total
        for index, entry in enumerate(self.entries):
            at = HEAD_WORDS + ENTRY_WORDS * index
            words[at : at + ENTRY_WORDS] = entry.generation, entry.start, entry.nbytes
        return words

    @classmethod
    def of(cls, asked: str, words: np.ndarray[Any, Any], version: int, ring_bytes: int) -> Head:
        """Read what `to_words` wrote as that version. Raises Error if it makes no sense."""
        unsigned = words.view(np.uint64)
        count = int(words[7])
        if words[0] != _FORMAT or not 0 <= count <= (len(words) - HEAD_WORDS) // ENTRY_WORDS:
            raise Error(f"{asked}: what describes its generations makes no sense; it was not written by a Publisher")
        found = (map(int, words[HEAD_WORDS + ENTRY_WORDS * i :][:ENTRY_WORDS]) for i in range(count))
        head = cls(
            int(words[1]), int(unsigned[2]), int(words[3]), int(words[4]), int(unsigned[5]), int(words[6]),
            tuple(Entry(*entry) for entry in found),
        )  # fmt: skip
        if any(entry.start < 0 or not 0 <= entry.nbytes <= ring_bytes for entry in head.entries):
            raise Error(f"{asked}: what describes generation {version} names bytes that its deltas can't have")
        if head.generation != version:
            raise Error(f"{asked}: what describes generation {version} is of {head.generation}")
        return head

    @classmethod
    def read(cls, asked: str, heads: Buffer, ring_bytes: int, wanted: int | None = None) -> Head:
        """Read the latest from NAME.generations or a mirror of it, or the one that is wanted; generation 0 before the
        first. Raises NotFoundError if that is not there."""
        words = np.empty(heads.size, np.int64)
        version = versions_of(heads).read(0, heads.size, memory_of(words), 0, wanted)
        return cls.of(asked, words, version, ring_bytes) if version else cls()

    def since(self, generation: int) -> tuple[Entry, ...] | None:
        """The deltas from a generation to this one; None if some are not there any more."""
        chain = tuple(entry for entry in self.entries if entry.generation > generation)
        whole = [entry.generation for entry in chain] == list(range(generation + 1, self.generation + 1))
        return chain if whole else None
