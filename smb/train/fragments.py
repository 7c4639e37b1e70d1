"""Fragments: the parts of a group's vector that are exchanged at times of their own. Pure.

A fragment is one range of elements, made of whole tensors that follow each other, so that a server's call takes one
range. All members cut the vector alike, because the group's settings and table of tensors decide the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from smb.errors import InvalidArgumentError

# Each fragment is a range that every member keeps, and a file or metadata may ask for any number.
FRAGMENTS_MAX = 1 << 16


class Span(NamedTuple):
    """A range of elements that begins at `offset`."""

    offset: int
    elements: int


def cut(size: int, starts: Sequence[int], fragments: int, asked: str) -> tuple[Span, ...]:
    """Cut `size` elements into this many fragments, so that the largest fragment is as small as possible.

    `starts` says where tensors begin, in ascending order, the first at 0. If it is empty, any element may begin a
    fragment. Raises InvalidArgumentError, whose message begins with `asked`.
    """
    units, what = (len(starts), "tensors") if starts else (size, "elements")
    if fragments > units:
        raise InvalidArgumentError(f"{asked}: fragments must be at most {units}, the model's {what}, not {fragments}")
    if starts:
        bounds = [*_whole_tensors([*starts, size], fragments), size]
    else:
        bounds = [number * size // fragments for number in range(fragments + 1)]
    return tuple(Span(begin, end - begin) for begin, end in pairwise(bounds))


def _whole_tensors(bounds: list[int], fragments: int) -> list[int]:
    """Return where fragments begin. Bisects over the size of the largest fragment: a size is enough if fragments that
    are filled one after the other, up to this size, are not too many.
    """
    low = max(end - begin for begin, end in pairwise(bounds))
    high = bounds[-1]
    while low < high:
        middle = (low + high) // 2
        if len(_filled(bounds, middle, 1)) <= fragments:
            high = middle
        else:
            low = middle + 1
    return _filled(bounds, high, fragments)


def _filled(bounds: list[int], most: int, fragments: int) -> list[int]:
    """Fill fragments of at most `most` elements one after the other, but make at least `fragments` of them."""
    tensors = len(bounds) - 1
    begins = [0]
    for tensor in range(1, tensors):
        # Otherwise too few tensors would be left for the remaining fragments.
        must = fragments - len(begins) >= tensors - tensor
        if must or bounds[tensor + 1] - begins[-1] > most:
            begins.append(bounds[tensor])
    return begins
