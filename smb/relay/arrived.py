"""Which bytes of a version have arrived in a mirror, so that they can be passed on before all have arrived.

Beside each mirror NAME.mirror.SERVER lies a small buffer of int64 words, NAME.mirror.SERVER.arrived: the version that
arrives (or has arrived), its slot plus 256 times the number of the relay's plan for it (smb/relay/plans.py), and 16
words with a bit for each block, the lowest block first. A block is the smallest number of whole chunks with which the
buffer has at most 1024 blocks. Each change of the words publishes a new version of them, which wakes waiting readers.
Rules:

- the words name another version before the first byte of it is written into a slot;
- a bit is set after its block was written.

A reader that sees the bit of a block, reads the block and finds version and slot unchanged, or finds that version
published in that slot, has read that version.

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
_SLOTS = 256  # more than a buffer has
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Blocks:
    """The division of a version into blocks: whole chunks, at most BLOCKS_MAX blocks. The same for all clients."""

    nbytes: int
    block_bytes: int
    start: int = 0  # first byte in the buffer
    # the number of the first block for `point`: so a sequence of small versions is spread over many parents
    first: int = 0

    @staticmethod
    def of(buffer: Buffer) -> Blocks:
        """Return the blocks of a buffer, or of its mirrors."""
        return Blocks(buffer.nbytes, Blocks.cut(buffer.nbytes, buffer.layout.chunk_bytes))

    @staticmethod
    def cut(nbytes: int, chunk_bytes: int) -> int:
        """Return the size of a block in bytes."""
        return max(1, -(-nbytes // BLOCKS_MAX // chunk_bytes)) * chunk_bytes

    @property
    def count(self) -> int:
        return -(-self.nbytes // self.block_bytes)

    def range(self, block: int) -> tuple[int, int]:
        """Return (first byte in the buffer, bytes) of a block."""
        start = block * self.block_bytes
        return self.start + start, min(self.block_bytes, self.nbytes - start)

    def point(self, block: int) -> float:
        """Return the position of a block in [0, 1). Positions are evenly spread, and neighbours are far from each
        other.
        """
        return ((self.first + block) * _GOLDEN) % 1.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """The blocks of one version that a mirror has, the version's slot, and the number of the plan that is followed."""

    version: int
    slot: int
    bits: int
    plan: int = 0

    @staticmethod
    def of(words: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Arrived:
        """Parse the words that `to_words` made."""
        plan, slot = divmod(int(words[1]), _SLOTS)
        return Arrived(int(words[0]), slot, int.from_bytes(words[2:].tobytes(), "little"), plan)

    def to_words(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        words = np.zeros(WORDS, np.int64)
        words[0], words[1] = self.version, self.slot + self.plan * _SLOTS
        words[2:] = np.frombuffer(self.bits.to_bytes(BLOCKS_MAX // 8, "little"), np.int64)
        return words


def bits_of(blocks: Iterable[int]) -> int:
    """Return an integer with the bits of these blocks."""
    bits = 0
    for block in blocks:
        bits |= 1 << block
    return bits


def open_mirror(client: Client, mirror: str, server: str) -> tuple[Buffer, Buffer]:
    """Open a mirror and the words beside it, which are made if they are missing.

    Raises NotFoundError, and leaves no words, if the mirror is gone.
    """
    client.open(mirror)
    words = client.create(mirror + SUFFIX, WORDS, "int64", servers=[server], exist_ok=True)
    try:
        return client.open(mirror), words
    except NotFoundError:  # the mirror was deleted just now, before its words existed
        client.delete(words, missing_ok=True)
        raise


def look(words: Buffer) -> Arrived:
    return Arrived.of(words.read())
