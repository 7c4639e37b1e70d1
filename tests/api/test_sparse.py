"""Some elements or rows of a buffer, in any order and several times: added and read, over each transport."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import smb
from smb.config.limits import SPARSE_BYTES_MAX
from smb.spi import session_of
from tests.conftest import Connect
from tests.support.transports import FAR

COUNT = 50_000
STRIPE = 4096
SEED = 31


def random_indices(random: np.random.Generator, size: int, count: int) -> np.ndarray[Any, Any]:
    """Return indices of which many occur several times, in no order."""
    return random.integers(0, size, count) // 3 * 3


CASES = [
    *(
        (dtype, op)
        for dtype in ("float32", "float16", "bfloat16", "int64", "uint8")
        for op in ("sum", "max", "replace")
    ),
    *((dtype, op) for dtype in ("float32", "bfloat16", "int32") for op in ("min", "prod")),
    *((dtype, op) for dtype in ("int32", "uint64", "bool") for op in ("band", "bor", "bxor")),
]


def test_values_of_one_index_are_combined_in_order(client: smb.Client) -> None:
    """The values of an index are scaled, then combined one after the other, then with the element, to numpy's bits."""
    for dtype, op in CASES:
        combined_in_order(client, dtype, op)
        client.delete("sums")


def combined_in_order(client: smb.Client, dtype: str, op: str) -> None:
    random = np.random.default_rng(SEED)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    buffer = client.create("sums", COUNT, dtype, servers=3, stripe=STRIPE)
    before = random.integers(0 if dtype == "bool" else 1, 2 if dtype == "bool" else 50, COUNT).astype(kind)
    buffer.write(before)
    indices = random_indices(random, COUNT, 2000)
    values = (random.integers(1, 40, indices.size) / (7 if kind.kind in "fV" else 1)).astype(kind)
    functions: dict[str, Any] = {
        "sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply,
        "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    }  # fmt: skip
    combine = functions.get(op, lambda _, new: new)
    scale = 1 if op.startswith("b") else 3
    with np.errstate(over="ignore", invalid="ignore"):
        folded: dict[int, Any] = {}
        for index, value in zip(indices.tolist(), values * kind.type(scale), strict=True):
            folded[index] = combine(folded[index], value) if index in folded else value
        for index, value in folded.items():
            before[index] = combine(before[index], value)
    buffer.accumulate_sparse(indices, values, op=op, scale=scale)
    assert buffer.read().tobytes() == before.tobytes(), (dtype, op)


def test_sums_are_those_of_numpy_and_torch(client: smb.Client) -> None:
    """Whole numbers: numpy.add.at, and a sparse tensor of torch with doubled indices, give the same array."""
    random = np.random.default_rng(SEED)
    buffer = client.create("same", 1000, "int64", stripe=STRIPE)
    indices, values = random_indices(random, 1000, 5000), random.integers(-99, 99, 5000)
    expected = np.zeros(1000, np.int64)
    np.add.at(expected, indices, values)
    buffer.accumulate_sparse(indices, values)
    np.testing.assert_array_equal(buffer.read(), expected)
    given = torch.tensor(indices)[None], torch.tensor(values)
    tensor = torch.sparse_coo_tensor(*given, (1000,), check_invariants=True)
    np.testing.assert_array_equal(buffer.read(), tensor.to_dense().numpy())


def test_any_order_without_repetition(client: smb.Client) -> None:
    """Also with op="elastic", which takes no index twice: this is refused, and changes nothing."""
    buffer = client.create("order", 100, stripe=STRIPE)
    buffer.accumulate_sparse([7, 3, 99], np.float32([1, 2, 3]), op="elastic", scale=0.5)
    assert buffer.read_sparse([3, 7, 99]).tolist() == [1.0, 0.5, 1.5]
    with pytest.raises(smb.InvalidArgumentError, match=r"several times, which op='elastic' does not allow"):
        buffer.accumulate_sparse([7, 3, 7], np.float32([1, 2, 3]), op="elastic", scale=0.5)
    assert buffer.read().sum() == 3.0


@pytest.mark.parametrize("dtype", ["float32", "uint8", "complex64", "bool", "float8_e5m2"])
def test_reads_of_some_elements(client: smb.Client, dtype: str) -> None:
    """Few, many, neighbours, all, in any order and several times, over chunks and servers."""
    random = np.random.default_rng(SEED)
    buffer = client.create("some", COUNT, dtype, servers=3, stripe=STRIPE)
    values = random.integers(0, 2, COUNT).astype(buffer.dtype)
    buffer.write(values)
    chosen = (
        np.array([], np.int64), np.array([0]), np.array([COUNT - 1, 0]), np.arange(COUNT), np.arange(COUNT)[::-1],
        np.arange(5000, 9900), np.full(100, 77), random.integers(0, COUNT, 20_000),
        np.sort(random.choice(COUNT, 3000, replace=False)),
    )  # fmt: skip
    for indices in chosen:
        assert buffer.read_sparse(indices).tobytes() == values[indices].tobytes()
        out = np.empty(indices.size, buffer.dtype)
        assert buffer.read_sparse(indices, out=out) is out
        assert out.tobytes() == values[indices].tobytes()


def test_rows(client: smb.Client) -> None:
    """Rows that cross chunks and servers are read and added, repeated ones too, as a table of embeddings needs it."""
    random = np.random.default_rng(SEED)
    shape = (300, 7, 13)
    buffer = client.create("table", shape, servers=3, stripe=STRIPE)
    table = random.integers(0, 9, shape).astype(np.float32)
    buffer.write(table)
    indices = random.integers(0, 300, 500)
    np.testing.assert_array_equal(buffer.read_sparse(indices, rows=True), table[indices])
    rows = random.integers(-9, 9, (500, 7, 13)).astype(np.float32)
    buffer.accumulate_sparse(indices, rows, rows=True, scale=2.0)
    np.add.at(table, indices, 2 * rows)
    np.testing.assert_array_equal(buffer.read(), table)
    tensor = torch.empty(500, 7, 13)
    assert buffer.read_sparse(torch.from_numpy(indices), rows=True, out=tensor) is tensor
    np.testing.assert_array_equal(tensor.numpy(), table[indices])
    flat = np.empty(500 * 91, np.float32)
    buffer.read_sparse(indices, rows=True, out=flat)
    np.testing.assert_array_equal(flat.reshape(500, 7, 13), table[indices])
    element = client.create("element", (), "float32")
    with pytest.raises(smb.InvalidArgumentError, match="single element and has no rows"):
        element.read_sparse([0], rows=True)


def test_a_view_is_read_into_itself(connect: Connect) -> None:
    """out= may be a part of the buffer's own view: as if the elements had been copied before."""
    buffer = connect("shm").create("view", COUNT, "int64", stripe=STRIPE)
    buffer.write(np.arange(COUNT))
    indices = np.arange(1, 2001, 2)
    buffer.read_sparse(indices, out=buffer.view()[:1000])
    np.testing.assert_array_equal(buffer.read(0, 1000), indices)


def test_what_is_refused(client: smb.Client) -> None:
    """An index out of range, of another type or shape, an array that does not fit, too much, several versions."""
    buffer = client.create("w", (10, 3))
    bad: list[tuple[dict[str, Any], str]] = [
        ({"indices": [30]}, "numbers of elements, between 0 and 29"),
        ({"indices": [-1]}, "between 0 and 29"),
        ({"indices": [10], "rows": True}, "numbers of rows, between 0 and 9"),
        ({"indices": [[1]]}, "flat array"),
        ({"indices": [0.5]}, "cannot be converted to int64; pass int64"),
        ({"indices": np.array([1], np.int32)}, "pass int64"),
        ({"indices": [1, 2], "out": np.empty(3, np.float32)}, "2 are to be read"),
        ({"indices": [1, 2], "out": np.empty(2)}, "out= is float64"),
        ({"indices": [1, 2], "rows": True, "out": np.empty((3, 2), np.float32)}, r"pass the shape \(2, 3\)"),
    ]
    for arguments, told in bad:
        with pytest.raises(smb.InvalidArgumentError, match=f"read_sparse of buffer 'w': .*{told}"):
            buffer.read_sparse(**arguments)
    with pytest.raises(smb.InvalidArgumentError, match=r"pass values of shape \[2, 3\]"):
        buffer.accumulate_sparse([1, 2], np.zeros(6, np.float32), rows=True)
    large = client.create("large", (2, 4096), "complex64")
    many = np.broadcast_to(np.int64(1), SPARSE_BYTES_MAX // large[0].nbytes + 1)
    with pytest.raises(smb.InvalidArgumentError, match="are more than the 1073741824 of one call"):
        large.read_sparse(many, rows=True)
    versions = client.create("versions", 10, versions=2)
    with pytest.raises(smb.InvalidArgumentError, match="keeps several versions"):
        versions.read_sparse([1])
    assert not buffer.read().any()


def test_a_call_counts_what_it_moved(connect: Connect) -> None:
    """A client's metrics count the elements that were asked for, not all from the first to the last."""
    client = connect(FAR)
    engine = session_of(client).engine
    buffer = client.create("counted", COUNT, servers=1)
    engine.count()
    buffer.read_sparse([0, COUNT - 1])
    buffer.accumulate_sparse([0, COUNT - 1], np.ones(2, np.float32))
    moved = engine.counters().transferred_bytes
    assert (moved[FAR, "read"], moved[FAR, "accumulate"]) == (8, 8)
