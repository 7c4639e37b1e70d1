"""smb.layout: which elements live where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smb.errors import InvalidArgumentError
from smb.layout import Layout, Piece
from smb.transport.base import SegmentLocation

PAGE = 4096


def make(nbytes: int, stripe_pages: int = 1, segments: int = 2, itemsize: int = 4) -> Layout:
    places = tuple(SegmentLocation(i + 1, f"s{i}", 0, "127.0.0.1:1", "", 1) for i in range(segments))
    return Layout(1, nbytes, itemsize, stripe_pages * PAGE, PAGE, places)


def test_stripes_take_turns() -> None:
    """Stripe i lies on segment i modulo their number, after the stripes it has; the last one may be short."""
    layout = make(4 * PAGE + 8, segments=3)
    assert list(layout.pieces(0, PAGE + 2)) == [
        Piece(0, 0, 1024),
        Piece(1, 0, 1024),
        Piece(2, 0, 1024),
        Piece(0, 1024, 1024),
        Piece(1, 1024, 2),
    ]
    assert list(layout.pieces(1023, 2)) == [Piece(0, 1023, 1), Piece(1, 0, 1)]
    assert list(layout.pieces(5, 0)) == []


@given(st.data())
def test_pieces_cover_the_range_once_and_in_order(data: st.DataObject) -> None:
    """Element by element, a range's pieces name the place that the definition of striping gives."""
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    size = data.draw(st.integers(1, 9 * PAGE))
    stripe_pages, segments = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    layout = make(size * itemsize, stripe_pages, segments, itemsize)
    offset = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(0, size - offset))
    per_stripe = stripe_pages * PAGE // itemsize
    at = offset
    for piece in layout.pieces(offset, count):
        assert piece.count > 0
        for element, within in ((at, piece.offset), (at + piece.count - 1, piece.offset + piece.count - 1)):
            stripe, rest = divmod(element, per_stripe)
            assert (piece.segment, within) == (stripe % segments, stripe // segments * per_stripe + rest)
        at += piece.count
    assert at == offset + count


@pytest.mark.parametrize(("offset", "count"), [(-1, 1), (0, -1), (0, 1025), (1024, 1), (2**70, 1)])
def test_ranges_outside_are_refused(offset: int, count: int) -> None:
    """Negative, too long, past the end, beyond 64 bits: refused, with the size in the message."""
    with pytest.raises(InvalidArgumentError, match="not inside 1024 elements"):
        list(make(PAGE).pieces(offset, count))


def test_layouts_that_cannot_be() -> None:
    """A stripe that is no whole number of chunks, or no segment at all, is refused by the engine's own check."""
    for layout in (Layout(1, PAGE, 4, PAGE + 4, PAGE, make(1).segments), make(PAGE, segments=0)):
        with pytest.raises(InvalidArgumentError, match="4096 bytes cannot be laid out"):
            list(layout.pieces(0, 1))
