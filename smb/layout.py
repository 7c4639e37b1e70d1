"""Which bytes of a buffer live where. Pure: no I/O. The engine does the arithmetic (csrc/base/layout.c)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smb import engine
from smb.errors import InvalidArgumentError
from smb.transport.base import SegmentLocation


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of a segment: `count` elements from element `offset` of segment number `segment`."""

    segment: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a buffer is spread over segments. Stripe i lives on segment i modulo the number of segments.

    The stripes of a segment follow each other without gaps. `epoch` grows with every change of placement. A stripe is a
    whole number of chunks, the unit of atomicity.
    """

    epoch: int
    nbytes: int
    itemsize: int
    stripe_bytes: int
    chunk_bytes: int
    segments: tuple[SegmentLocation, ...]

    def pieces(self, offset: int, count: int) -> Iterator[Piece]:
        """Yield the pieces of `count` elements from element `offset`, in order. Does not block. Raises
        InvalidArgumentError.

        ```python
        list(buffer.layout.pieces(0, 1000))  # [Piece(segment=0, offset=0, count=1000)]
        ```
        """
        if offset < 0 or count < 0 or (offset + count) * self.itemsize > self.nbytes:
            raise InvalidArgumentError(
                f"elements {offset} to {offset + count} are not inside {self.nbytes // self.itemsize} elements"
            )
        at, end = offset * self.itemsize, (offset + count) * self.itemsize
        while at < end:
            segment, within, length = engine.layout_piece(
                self.nbytes, self.stripe_bytes, self.chunk_bytes, len(self.segments), at, end - at
            )
            yield Piece(segment, within // self.itemsize, length // self.itemsize)
            at += length
