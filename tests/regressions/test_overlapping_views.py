"""write(view[:-1], offset=1) once wrote its first element over and over: what was written was read again further on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import smb
from tests.conftest import Connect

COUNT = 300_000  # 5 chunks of 256 KiB
View = np.ndarray[Any, Any]


def shift_up(buffer: smb.Buffer, view: View, model: View) -> None:
    buffer.write(view[:-1], offset=1)
    model[1:] = model[:-1].copy()


def shift_down(buffer: smb.Buffer, view: View, model: View) -> None:
    buffer.write(view[3:], offset=0)
    model[:-3] = model[3:].copy()


def shift_far(buffer: smb.Buffer, view: View, model: View) -> None:
    buffer.write(view[:-100_000], offset=100_000)
    model[100_000:] = model[:-100_000].copy()


def small(buffer: smb.Buffer, view: View, model: View) -> None:
    buffer.write(view[10:20], offset=15)
    model[15:25] = model[10:20].copy()


def add_shifted(buffer: smb.Buffer, view: View, model: View) -> None:
    buffer.accumulate(view[:-1], offset=1)
    model[1:] += model[:-1].copy()


def add_itself(buffer: smb.Buffer, view: View, model: View) -> None:
    buffer.accumulate(view)
    model += model


def fetch(buffer: smb.Buffer, view: View, model: View) -> None:
    result = buffer.accumulate(view[5:], 0, fetch=True)
    model[:-5] += model[5:].copy()
    assert result is not None
    np.testing.assert_array_equal(result, model[:-5])


def read_into(buffer: smb.Buffer, view: View, model: View) -> None:
    out = view[7:]
    assert buffer.read(0, COUNT - 7, out=out) is out
    model[7:] = model[:-7].copy()


def sparse(buffer: smb.Buffer, view: View, model: View) -> None:
    indices = np.arange(1, 200_001)
    buffer.accumulate_sparse(indices, view[:200_000])
    model[indices] += model[:200_000].copy()


def sparse_by_itself(buffer: smb.Buffer, view: View, model: View) -> None:
    ascending = np.arange(1000) * 3
    buffer.write(ascending, 0)
    model[:1000] = ascending
    buffer.accumulate_sparse(view[:1000], np.ones(1000, np.int64))
    model[ascending] += 1


def under_a_lock(buffer: smb.Buffer, view: View, model: View) -> None:
    with buffer.lock() as lock:
        buffer.write(view[:-1], offset=1, fence=lock)
    model[1:] = model[:-1].copy()


def published(buffer: smb.Buffer, view: View, model: View) -> None:
    buffer.publish(view[::-1])  # copied, as it is not contiguous
    buffer.publish(view)
    model[:] = model[::-1].copy()


CALLS = [
    shift_up, shift_down, shift_far, small, add_shifted, add_itself, fetch, read_into, sparse, sparse_by_itself,
    under_a_lock, published,
]  # fmt: skip


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", CALLS)
def test_a_buffers_own_memory(connect: Connect, transport: str, call: Callable[[smb.Buffer, View, View], None]) -> None:
    """As if the source had been copied first: what numpy does with overlapping arrays; also where another client of the
    process goes over TCP."""
    mapped = connect("shm").create("w", COUNT, "int64", servers=2)
    model = np.arange(COUNT) % 251
    mapped.write(model)
    view = mapped.view()
    call(connect(transport).open("w"), view, model)
    np.testing.assert_array_equal(mapped.read(), model)


def test_views_of_others_are_not_copied(connect: Connect) -> None:
    """And a view that is gone is forgotten: its addresses may be anybody's."""
    client = connect("shm")
    one, other = client.create("one", COUNT), client.create("other", COUNT)
    one.fill(3)
    view = one.view()
    other.write(view)
    assert (other.read() == 3).all()
    for _ in range(100):
        view = one.view()
        view[0] = 5
    one.write(view[:10], offset=5)
    assert one.read(0, 6).tolist() == [5, 3, 3, 3, 3, 5]
