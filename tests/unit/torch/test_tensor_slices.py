"""Where a part of a tensor lies in the whole one, against numpy's own indexing, and what importing this costs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smb.errors import InvalidArgumentError
from smb.torch.tensor_slices import TensorSlice, checked_slice, runs_of, shape_of, whole


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], TensorSlice]:
    """A shape, and for each dimension ranges that ascend and do not touch."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    part = []
    for extent in shape:
        taken = sorted(draw(st.sets(st.integers(0, extent - 1), min_size=1)))
        starts = [at for at in taken if at - 1 not in taken]
        part.append(tuple((at, next(n for n in range(1, extent + 2) if at + n not in taken)) for at in starts))
    return shape, tuple(part)


@settings(max_examples=300)
@given(parts())
def test_runs_are_the_elements_that_indexing_takes(part: tuple[tuple[int, ...], TensorSlice]) -> None:
    """In order, each once, and as few runs as the last dimensions that are whole allow."""
    shape, part = part
    size = int(np.prod(shape))
    everything = np.arange(size).reshape(shape)
    indices = [[at for first, count in ranges for at in range(first, first + count)] for ranges in part]
    wanted = everything[np.ix_(*indices)] if shape else everything
    found = np.full(wanted.size, -1)
    runs = list(runs_of(part, shape))
    for run in runs:
        assert (found[run.indices] == -1).all()
        found[run.indices] = np.arange(run.there, run.there + run.count)
    assert shape_of(part) == wanted.shape
    assert (found == wanted.reshape(-1)).all()
    if part == whole(shape):
        assert len(runs) == 1


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=3))
def test_slices_take_what_they_take_of_an_array(dimensions: list[tuple[int, int, int]]) -> None:
    """Or are refused: outside of the tensor, or not one for each dimension."""
    shape = tuple(extent for extent, _, _ in dimensions)
    slices = tuple(slice(start, stop) for _, start, stop in dimensions)
    everything = np.arange(int(np.prod(shape))).reshape(shape)
    if any(max(start, stop) > extent for extent, start, stop in dimensions):
        with pytest.raises(InvalidArgumentError, match="0 <= start <= stop"):
            checked_slice("follow 'w'", "t", slices, shape)
        return
    part = checked_slice("follow 'w'", "t", slices, shape)
    wanted = everything[slices]
    assert shape_of(part) == wanted.shape
    taken = [at for run in runs_of(part, shape) for at in range(run.there, run.there + run.count)]
    assert taken == wanted.reshape(-1).tolist()
    with pytest.raises(InvalidArgumentError, match="a slice for each dimension"):
        checked_slice("follow 'w'", "t", (*slices, slice(None)), shape)


def test_what_a_plain_model_never_needs_is_not_imported() -> None:
    """PyTorch's sharded tensors bring sympy with them, and take half a second: only for a program that has some."""
    code = "import sys, torch; before = set(sys.modules); import smb.torch; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    brought = done.stdout.split()
    assert "smb.torch.tensor_slices" in brought
    assert not {"torch.distributed.tensor", "sympy"} & set(brought)
