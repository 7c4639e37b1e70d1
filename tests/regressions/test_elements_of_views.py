"""A look at a view found elements that were a mixture of two writes: daemons received writes into the segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest

import smb
from tests.conftest import Connect
from tests.fault.long import times

_COUNT = 1 << 16  # elements: a chunk of float32, two of int64
ROUNDS = times(30, 60)
_SMALL = ((1, 7), (13, 101), (1000, 1003), (3000, 5001))  # elements, and from where


def _changes(buffer: smb.Buffer, states: list[np.ndarray[Any, Any]]) -> Iterator[Callable[[], Future[Any]]]:
    """Yield calls, without end, that give the buffer's elements the one state and the other in turn."""
    for state in cycle(states):
        yield partial(buffer.write_async, state)
        if state is states[0]:
            yield partial(buffer.accumulate_async, state, op="replace")
            for size, offset in _SMALL:
                yield partial(buffer.write_async, state[:size], offset)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_an_element_is_the_old_or_the_new_one(connect: Connect, transport: str) -> None:
    """Looks at a view while another client changes all of it, by large and small writes and additions that replace."""
    looking, changing = connect("shm"), connect(transport)
    for dtype in ("int64", "float32", "float16"):
        bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
        low, high = bits.type(0), bits.type(np.iinfo(bits).max)  # of any mixture some bytes differ from both
        view = looking.create(f"x-{dtype}", _COUNT, dtype, servers=["server-0"]).view().view(bits)
        changes = _changes(
            changing.open(f"x-{dtype}"), [np.full(_COUNT, each, bits).view(dtype) for each in (low, high)]
        )
        for _ in range(ROUNDS):
            begun = [change() for change in islice(changes, 28)]
            while not all(each.done() for each in begun):
                seen = view.copy()
                mixed = (seen != low) & (seen != high)
                assert not mixed.any(), (dtype, seen[mixed])
            for each in begun:
                each.result()
