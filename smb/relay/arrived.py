"""Which bytes of a version have arrived in a mirror: so that they are served on before all are there.

Beside each mirror NAME.mirror.SERVER lies a small buffer of int64 words, NAME.mirror.SERVER.arrived: the version that
arrives (or has arrived), the slot in which it lies, and 16 words with a bit for each block, the lowest first. A block
is the smallest number of whole chunks of which at most 1024 make the buffer. The words' own version is counted up with
each change, which wakes those who wait. Rules:

- the words name another version before the first byte of it is written into a slot;
- a bit is set after its block was written.

A reader that sees the bit of a block, reads the block and finds version and slot unchanged, or that version published
in that slot, has read that version.

A mirror of a log (smb/relay/publication_log.py) has such words, too. Their version is the generation whose delta
arrives or has arrived last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from smb.errors import NotFoundError

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client

SUFFIX = ".arrived"
BLOCKS_MAX = 1024
WORDS = 2 + BLOCKS_MAX // 64
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a version is cut: into whole chunks, at most BLOCKS_MAX blocks; alike for everybody."""

    nbytes: int
    block_bytes: int
    start: int = 0  # first byte in the buffer
    first: int = 0  # which block the first one stands for in `point`: so that a row of small ones has many parents

    @staticmethod
    def of(buffer: Buffer) -> Blocks:
        """Return the cut of a buffer, or of its mirrors."""
        return Blocks(buffer.nbytes, Blocks.cut(buffer.nbytes, buffer.layout.chunk_bytes))

    @staticmethod
    def cut(nbytes: int, chunk_bytes: int) -> int:
        """Return the bytes of a block."""
        return max(1, -(-nbytes // BLOCKS_MAX // chunk_bytes)) * chunk_bytes

    @property
    def count(self) -> int:
        return -(-self.nbytes // self.block_bytes)

    def range(self, block: int) -> tuple[int, int]:
        """Return (first byte in the buffer, bytes)."""
        start = block * self.block_bytes
        return self.start + start, min(self.block_bytes, self.nbytes - start)

    def point(self, block: int) -> float:
        """Return where in [0, 1) a block is: evenly, and neighbours far from each other."""
        return ((self.first + block) * _GOLDEN) % 1.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """The blocks that a mirror has, of this version, in this slot."""

    version: int
    slot: int
    bits: int

    @staticmethod
    def of(words: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Arrived:
        """Read what `to_words` wrote."""
        return Arrived(int(words[0]), int(words[1]), int.from_bytes(words[2:].tobytes(), "little"))

    def to_words(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        words = np.zeros(WORDS, np.int64)
        words[0], words[1] = self.version, self.slot
        words[2:] = np.frombuffer(self.bits.to_bytes(BLOCKS_MAX // 8, "little"), np.int64)
        return words

    def has(self, block: int) -> bool:
        return bool(self.bits >> block & 1)


def bits_of(blocks: Iterable[int]) -> int:
    """Return the bits of these blocks."""
    bits = 0
    for block in blocks:
        bits |= 1 << block
    return bits


def open_mirror(client: Client, mirror: str, server: str) -> tuple[Buffer, Buffer]:
    """Open a mirror and the words beside it, which are made where they are not there. Raises NotFoundError, and leaves
    none, if the mirror is gone."""
    client.open(mirror)
    words = client.create(mirror + SUFFIX, WORDS, "int64", servers=[server], exist_ok=True)
    try:
        return client.open(mirror), words
    except NotFoundError:  # deleted at this moment, and its words were not there to be deleted with it
        client.delete(words, missing_ok=True)
        raise


def look(words: Buffer) -> Arrived:
    return Arrived.of(words.read())
