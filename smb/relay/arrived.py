"""Which bytes of a version have arrived in a mirror: so that they are served on before all are there.

Beside each mirror lies a small buffer of words: the version that arrives (or has arrived), the copy in which it lies,
and a bit for each piece. Its own version is counted up with each change, which wakes who waits. Rules:

- the words name another version before the first byte of it is written into a copy;
- a bit is set after its piece was written.

A reader that sees the bit of a piece, reads the piece and finds version and copy unchanged has read that version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client

SUFFIX = ".arrived"
PIECES_MAX = 1024
WORDS = 2 + PIECES_MAX // 64
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Pieces:
    """How a version is cut: into whole chunks, at most PIECES_MAX pieces; alike for everybody."""

    nbytes: int
    piece_bytes: int

    @staticmethod
    def of(buffer: Buffer) -> Pieces:
        """Return the cut of a buffer, or of its mirrors."""
        chunk = buffer.layout.chunk_bytes
        return Pieces(buffer.nbytes, max(1, -(-buffer.nbytes // PIECES_MAX // chunk)) * chunk)

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-self.nbytes // self.piece_bytes)

    def range(self, piece: int) -> tuple[int, int]:
        """Return (first byte, bytes)."""
        start = piece * self.piece_bytes
        return start, min(self.piece_bytes, self.nbytes - start)

    def place(self, piece: int) -> float:
        """Return where in [0, 1) a piece is: evenly, and neighbours far from each other."""
        return (piece * _GOLDEN) % 1.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """The pieces that a mirror has, of this version, in this copy."""

    version: int
    copy: int
    bits: int

    @staticmethod
    def of(words: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Arrived:
        """Read what `to_words` wrote."""
        return Arrived(int(words[0]), int(words[1]), int.from_bytes(words[2:].tobytes(), "little"))

    def to_words(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the words."""
        words = np.zeros(WORDS, np.int64)
        words[0], words[1] = self.version, self.copy
        words[2:] = np.frombuffer(self.bits.to_bytes(PIECES_MAX // 8, "little"), np.int64)
        return words

    def has(self, piece: int) -> bool:
        """Whether that piece is there."""
        return bool(self.bits >> piece & 1)


def bits_of(pieces: Iterable[int]) -> int:
    """Return the bits of these pieces."""
    bits = 0
    for piece in pieces:
        bits |= 1 << piece
    return bits


def make(client: Client, mirror: str, server: str) -> Buffer:
    """Return the words' buffer of a mirror, made where it is not there."""
    return client.create(mirror + SUFFIX, WORDS, "int64", servers=[server], exist_ok=True)


def look(words: Buffer) -> Arrived:
    """Read them, as one."""
    return Arrived.of(words.read())
