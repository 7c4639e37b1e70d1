"""A buffer where an array is expected: indices, np.asarray, pickle, and what a notebook shows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import smb
from smb.html_tables import listed
from tests.conftest import Connect

VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture
def buffer(connect: Connect) -> smb.Buffer:
    made = connect().create("cube", VALUES.shape)
    made.write(VALUES)
    return made


INDICES: list[Any] = [
    0, -1, slice(None), slice(1, 2), slice(5, 9), slice(-1, None), ..., (), (1, 2), (0, slice(1, 3)),
    (1, 2, slice(1, 3)), (1, 2, 3), (1, ...), (slice(0, 1), slice(None)), np.int64(1), (0, slice(None, 2), ...),
]  # fmt: skip


def test_an_index_reads_and_writes_as_numpys(buffer: smb.Buffer) -> None:
    """Each index selects what it selects of an array; assignment spreads one number, and takes what fits."""
    for index in INDICES:
        told = f"[{index}]"
        buffer.write(VALUES)
        expected = VALUES.copy()
        found = buffer[index]
        np.testing.assert_array_equal(found, expected[index], told)
        assert found.shape == expected[index].shape, told
        assert found.dtype == np.float32, told
        for value in (7, -expected[index], (expected[index] * 2).tolist() if found.size else 8):
            expected[index] = value
            buffer[index] = value
            np.testing.assert_array_equal(buffer.read(), expected, told)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (slice(None, None, 2), smb.InvalidArgumentError, "lie side by side"),
    ([0, 1], smb.InvalidArgumentError, "read\\(\\) returns"),
    (np.array([0, 1]), smb.InvalidArgumentError, "read\\(\\) returns"),
    ((0, np.array([0, 1])), smb.InvalidArgumentError, "read\\(\\) returns"),
    (torch.tensor([0, 1], device="cpu"), smb.InvalidArgumentError, "read\\(\\) returns"),
    (VALUES > 3, smb.InvalidArgumentError, "read\\(\\) returns"),
    ((slice(0, 1), 0), smb.InvalidArgumentError, "one slice without a step"),
    (None, smb.InvalidArgumentError, "lie side by side"),
    ("x", smb.InvalidArgumentError, "'cube'"),
    (2, IndexError, "out of range for dimension 0 of 2"),
    ((0, -4), IndexError, "out of range for dimension 1 of 3"),
    ((0, 0, 0, 0), IndexError, "3 dimensions, and the index has 4"),
]


def test_what_no_single_call_can_do_is_refused(buffer: smb.Buffer) -> None:
    for index, kind, said in REFUSED:
        print(f"[{index}]")
        with pytest.raises(kind, match=said):
            buffer[index]
        with pytest.raises(kind, match=said):
            buffer[index] = 1
    np.testing.assert_array_equal(buffer.read(), VALUES)


def test_what_does_not_fit_changes_nothing(buffer: smb.Buffer) -> None:
    for value in ([1, 2, 3], "x", np.zeros((2, 2)), torch.zeros(3), 1j, None):
        print(repr(value))
        with pytest.raises(smb.InvalidArgumentError, match="cube"):
            buffer[0, 0] = value
    np.testing.assert_array_equal(buffer.read(), VALUES)


def test_other_kinds_of_elements(connect: Connect) -> None:
    """Whole numbers stay whole; bfloat16 takes tensors; a single element and no element at all."""
    client = connect()
    whole = client.create("whole", 4, "int32")
    whole[:] = 2**31 - 1
    for value in (1.5, 2**31, [1, 2, 3, 2**40]):
        with pytest.raises(smb.InvalidArgumentError, match="would change as int32"):
            whole[:] = value
    assert whole[:].tolist() == [2**31 - 1] * 4
    half = client.create("half", 4, "bfloat16")
    half[:] = 0.5
    half[0] = torch.tensor(2.0, dtype=torch.bfloat16)
    half[2:] = np.ones(2, np.float32)
    assert half[:].astype(np.float32).tolist() == [2.0, 0.5, 1.0, 1.0]
    single = client.create("single", ())
    single[...] = 3.5
    assert single[()] == 3.5
    assert np.asarray(single) == 3.5
    for ask in (len, iter):
        with pytest.raises(TypeError, match="single element"):
            ask(single)  # type: ignore[operator]
    none = client.create("none", (0, 3))
    none[:] = np.empty((0, 3), np.float32)
    assert none[:].shape == (0, 3)
    assert len(none) == 0
    assert none  # as every object: `if buffer:` asks for None


def test_numpy_takes_it(buffer: smb.Buffer) -> None:
    """One read each; never without a copy, which would not be the buffer."""
    np.testing.assert_array_equal(np.asarray(buffer), VALUES)
    assert np.asarray(buffer, np.float64).dtype == np.float64
    assert len(buffer) == 2
    assert [row.shape for row in buffer] == [(3, 4), (3, 4)]
    assert np.mean(buffer) == VALUES.mean()
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(ValueError, match=r"without a copy; use buffer\.view"):
            np.asarray(buffer, copy=False)


def test_pickle_and_copy_say_what_to_do(buffer: smb.Buffer, connect: Connect, cluster: smb.LocalCluster) -> None:
    """A process pool, or a deepcopy, fails at once, with the call that the other process has to make."""
    client = connect()
    for thing, instead in (
        (buffer, rf"smb\.connect\({cluster.address!r}\)\.open\('cube'\)"),
        (client, rf"smb\.connect\({cluster.address!r}\)"),
        (cluster, rf"smb\.connect\({cluster.address!r}\)"),
        (client.lock("turn"), r"take the lock of a client or buffer of its own"),
    ):
        for refused in (pickle.dumps, copy.deepcopy, copy.copy):
            with pytest.raises(TypeError, match=f"belongs to this process.*{instead}"):
                refused(thing)


def test_notebooks_show_tables(connect: Connect, cluster: smb.LocalCluster) -> None:
    """As HTML, in which a name is text and nothing else."""
    client = connect()
    nothing = client.list()
    buffer = client.create("w", (3, 4), versions=2)
    assert "no buffers" in nothing._repr_html_()  # type: ignore[attr-defined]
    assert "<td>&lt;b&gt;&amp;</td>" in listed([{"name": "<b>&"}], "")
    for thing, shown in (
        (client.list(), ["<td>w</td>", "(3, 4)", "float32", "48 B", "server-"]),
        (client.servers(), ["server-0", "server-2", "alive", "of 64 MiB"]),
        (buffer, ["<td>w</td>", "(3, 4)"]),
        (client, [client.name, cluster.address, "open"]),
        (cluster, [cluster.address, "http://", "server-2 (runs)"]),
    ):
        html = thing._repr_html_()  # type: ignore[attr-defined]
        assert html.startswith("<table>")
        for part in shown:
            assert part in html
    assert repr(cluster) == f"<smb.LocalCluster {cluster.address}, 3 memory servers>"
