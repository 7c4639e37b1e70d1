"""Fragments: the parts of a group's vector that are exchanged at times of their own. Pure.

Each is one range of elements, of whole tensors that follow each other, so that a server's call takes one range of it.
All members cut alike: what is cut by is the group's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from smb.errors import InvalidArgumentError

FRAGMENTS_MAX = 1 << 16  # each is a range that every member keeps: a file or metadata may ask for any number


class Span(NamedTuple):
    """So many elements from `offset` on."""

    offset: int
    elements: int


def cut(size: int, starts: Sequence[int], fragments: int, asked: str) -> tuple[Span, ...]:
    """Cut `size` elements into as many fragments, the largest of them as small as can be.

    `starts`: where tensors begin, ascending, the first at 0; empty where there are none: then any element may be the
    first of a fragment. Raises InvalidArgumentError, whose message begins with `asked`.
    """
    units, what = (len(starts), "tensors") if starts else (size, "elements")
    if fragments > units:
        raise InvalidArgumentError(f"{asked}: fragments={fragments}, and the model has {units} {what}")
    if starts:
        bounds = [*_whole_tensors([*starts, size], fragments), size]
    else:
        bounds = [number * size // fragments for number in range(fragments + 1)]
    return tuple(Span(begin, end - begin) for begin, end in pairwise(bounds))


def _whole_tensors(bounds: list[int], fragments: int) -> list[int]:
    """Return where fragments begin. A bisection over the size of the largest one: whether it is enough is seen by
    filling one fragment after the other.
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
    """Fill fragments of at most `most` elements, one after the other, and at least as many fragments as asked for."""
    tensors = len(bounds) - 1
    begins = [0]
    for tensor in range(1, tensors):
        must = fragments - len(begins) >= tensors - tensor  # else there are too few tensors for those that are left
        if must or bounds[tensor + 1] - begins[-1] > most:
            begins.append(bounds[tensor])
    return begins
