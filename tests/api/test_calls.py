"""The public API against real daemons, over shared memory and over TCP."""

from __future__ import annotations

import array as array_module
import logging
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import smb
from tests.conftest import Connect
from tests.support.clients import create_or_open, run_together
from tests.support.transports import FAR

PAGE = 4096
DTYPES = {
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
}
STORAGE = {  # dtypes without arithmetic
    **{name: np.dtype(name) for name in ("int8", "int16", "uint16", "uint32", "uint64", "complex64", "bool")},
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
BITS = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
OPS: dict[str, Any] = {
    "sum": lambda b, a, s: b + s * a,
    "min": lambda b, a, s: np.minimum(b, s * a),
    "max": lambda b, a, s: np.maximum(b, s * a),
    "prod": lambda b, a, s: b * (s * a),
    "replace": lambda b, a, s: s * a,
    "elastic": lambda b, a, s: b + s * (a - b),
}


class OnlyInterface:
    """Has __array_interface__ and nothing else."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self._values = values
        self.__array_interface__ = values.__array_interface__


def counting(size: int, dtype: Any) -> np.ndarray[Any, Any]:
    """1, 2, ... 101, 1, 2, ...: every dtype holds them, and no piece looks like its neighbour."""
    return (np.arange(size) % 101 + 1).astype(dtype)


# ---- reading and writing


def test_every_dtype_and_any_range(client: smb.Client) -> None:
    """What is written at an offset is read there, around it stays what was; an odd size over three servers."""
    for dtype in DTYPES | STORAGE:
        print(dtype)  # the one that fails is the last
        size = 7 * PAGE + 13
        buffer = client.create("w", size, dtype, stripe=PAGE)
        assert not buffer.read().any()
        values = counting(size, (DTYPES | STORAGE)[dtype]) if dtype != "bool" else counting(size, int) % 3 == 1
        buffer.write(values)
        assert buffer.read().dtype == values.dtype
        np.testing.assert_array_equal(buffer.read(), values)
        rng = np.random.default_rng(7)
        for _ in range(20):
            offset = int(rng.integers(size))
            count = int(rng.integers(1, size - offset + 1))
            part = values[:count][::-1].copy()
            values[offset : offset + count] = part
            buffer.write(part, offset)
            np.testing.assert_array_equal(buffer.read(offset, count), part)
        np.testing.assert_array_equal(buffer.read(), values)
        buffer.fill(1)
        np.testing.assert_array_equal(buffer.read(), np.ones(size, buffer.dtype))
        client.delete("w")


def test_shapes(client: smb.Client) -> None:
    """A whole read has the buffer's shape, a part is flat; () is one element; what is written may have any shape."""
    matrix = client.create("matrix", (3, 5), "int32")
    matrix.write(np.arange(15, dtype=np.int32))
    assert matrix.read().tolist() == np.arange(15).reshape(3, 5).tolist()
    assert matrix.read(0, 15).shape == (15,)
    assert matrix.read(13).tolist() == [13, 14]
    scalar = client.create("scalar", (), "float64")
    scalar.write(2.5)
    assert scalar.read().shape == ()
    assert scalar.read() == 2.5
    assert (scalar.size, scalar.nbytes, matrix.size, matrix.nbytes) == (1, 8, 15, 60)
    assert client.create("line", 7).shape == (7,)


def test_arrays_of_any_kind(client: smb.Client) -> None:
    """numpy (strided too), lists, numbers, memoryview, array.array and __array_interface__ can be written."""
    buffer = client.create("w", (2, 3), "float32")
    values = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    for given in (
        values,
        np.asfortranarray(values),
        np.repeat(values, 2, axis=1)[:, ::2],
        values.tolist(),
        memoryview(values),
        array_module.array("f", values.ravel()),
        OnlyInterface(values),
    ):
        buffer.fill(0)
        buffer.write(given)
        np.testing.assert_array_equal(buffer.read(), values)
    buffer.write(9, offset=4)
    assert buffer.read(4, 1)[0] == 9


def test_out_is_filled_and_returned(client: smb.Client) -> None:
    """read(out=) writes straight into numpy arrays and bytearrays, and returns them."""
    buffer = client.create("w", 10, "float32")
    buffer.write(np.arange(10, dtype=np.float32))
    for out in (np.empty((2, 5), np.float32), np.zeros(20, np.float32)[5:15]):
        assert buffer.read(out=out) is out
        assert np.asarray(out).ravel().tolist() == list(range(10))
    raw = client.create("raw", 4, "uint8")
    raw.write(b"abcd")
    letters = bytearray(4)
    assert raw.read(out=letters) is letters
    assert letters == b"abcd"


def test_torch_tensors(client: smb.Client) -> None:
    """Tensors (strided ones, parameters, bfloat16) can be written, and read(out=) writes straight into them."""
    torch = pytest.importorskip("torch", reason="PyTorch is not here")
    buffer = client.create("w", (2, 3), "float32")
    values = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    for given in (values, values.T.contiguous().T, torch.nn.Parameter(values)):
        buffer.fill(0)
        buffer.write(given)
        np.testing.assert_array_equal(buffer.read(), values.numpy())
    whole = torch.empty(6)
    assert buffer.read(out=whole) is whole
    assert whole.tolist() == [1, 2, 3, 4, 5, 6]
    part = torch.zeros(6)
    buffer.read(3, 2, out=part[:2])
    assert part.tolist() == [4, 5, 0, 0, 0, 0]
    half = client.create("half", 4, torch.bfloat16)
    half.write(torch.tensor([1, 2, 3, 4.5], dtype=torch.bfloat16))
    into = torch.zeros(4, dtype=torch.bfloat16)
    assert half.read(out=into) is into
    assert into.tolist() == [1, 2, 3, 4.5]


def test_numpys_integers_are_offsets(client: smb.Client) -> None:
    """An offset of a small numpy type counts elements, although as bytes it would not fit its type."""
    buffer = client.create("w", 1000, "int64")
    buffer.write(np.arange(1000))
    assert buffer.read(np.uint8(200), np.uint8(100)).tolist() == list(range(200, 300))
    buffer.write([7], offset=np.int8(100))
    assert buffer.fetch_add(np.uint8(100), np.int64(-8)) == 7
    assert buffer.compare_swap(np.uint8(100), np.int8(-1), np.int16(5)) == -1
    assert buffer.read(100, 1)[0] == 5


def test_nothing_is_copied_on_the_way(client: smb.Client) -> None:
    """write, accumulate and read(out=) of 8 MiB allocate next to nothing in this process; a strided array is copied."""
    buffer = client.create("w", 2 << 20)
    values, out = np.ones(2 << 20, np.float32), np.empty(2 << 20, np.float32)
    strided = np.ones((2 << 20, 2), np.float32)[:, 0]
    buffer.write(values)

    def allocated(*calls: Callable[[], object]) -> int:
        tracemalloc.start()
        for call in calls:
            call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    calls = [lambda: buffer.write(values), lambda: buffer.accumulate(values), lambda: buffer.read(out=out)]
    assert allocated(*calls) < 100_000
    assert (out == 2).all()
    assert allocated(lambda: buffer.write(strided)) >= 8 << 20


# ---- combining


def test_accumulate_is_numpys_arithmetic(client: smb.Client) -> None:
    """Every op on every dtype with a scale gives what numpy gives, each step rounded to the dtype; fetch returns it."""
    for dtype in DTYPES:
        print(dtype)  # the one that fails is the last
        rng = np.random.default_rng(3)
        size, offset = 3 * PAGE + 5, 11
        numpy_dtype = DTYPES[dtype]
        before, array = (rng.integers(0, 9, size).astype(numpy_dtype) for _ in range(2))
        scale = 3 if np.dtype(numpy_dtype).kind in "iu" else 0.5
        buffer = client.create("w", size, dtype, stripe=PAGE)
        for op, combined in OPS.items():
            buffer.write(before)
            expected = before.copy()
            with np.errstate(over="ignore"):
                expected[offset:] = combined(before[offset:], array[offset:], numpy_dtype(scale))
            assert buffer.accumulate(array[offset:], offset, op=op, scale=scale) is None
            np.testing.assert_array_equal(buffer.read(), expected, op)
            with np.errstate(over="ignore"):
                expected = combined(expected, array, numpy_dtype(1))
            fetched = buffer.accumulate(array, op=op, fetch=True)
            np.testing.assert_array_equal(fetched, expected, op)
            np.testing.assert_array_equal(buffer.read(), expected, op)
        client.delete("w")


@pytest.mark.parametrize("dtype", STORAGE)
def test_dtypes_for_storage_have_no_arithmetic(client: smb.Client, dtype: str) -> None:
    """Every op but replace is refused by a sentence that names the dtype, and nothing changes; replace is taken, with
    fetch and on the servers, too.
    """
    buffer = client.create("s", 3 * PAGE, dtype, stripe=PAGE)
    values = counting(3 * PAGE, int).astype(buffer.dtype)
    buffer.write(values)
    whole = buffer.dtype.kind in "iub"
    for op in OPS:
        for scale in (1, 1.0, 2.0):
            if op == "replace" and scale != 2.0:
                continue
            with pytest.raises(smb.InvalidArgumentError, match=f"there is no arithmetic on {dtype}, .* op='replace'"):
                buffer.accumulate(values, op=op, scale=scale)
    with pytest.raises(smb.InvalidArgumentError, match=f"on {dtype}"):
        buffer.accumulate(values)
    with pytest.raises(smb.InvalidArgumentError, match=f"on {dtype}"):
        buffer.accumulate_sparse([1], values[:1])
    with pytest.raises(smb.InvalidArgumentError, match=f"on {dtype}"):
        buffer.accumulate_from(buffer)
    if not whole:
        with pytest.raises(smb.InvalidArgumentError, match=f"on {dtype}"):
            buffer.accumulate(values, op="bor")
    np.testing.assert_array_equal(buffer.read(), values)
    other = client.create("o", like=buffer)
    other.accumulate_from(buffer, op="replace")
    np.testing.assert_array_equal(other.read(), values)
    back = values[::-1].copy()
    np.testing.assert_array_equal(buffer.accumulate(back, op="replace", fetch=True), back)
    buffer.accumulate_sparse([1, 5], values[:2], op="replace")
    np.testing.assert_array_equal(buffer.read()[[1, 5]], values[:2])


def test_bits_are_combined(client: smb.Client) -> None:
    """As numpy does it: whole, in part, with fetch, of some elements, and between buffers."""
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"):
        print(dtype)  # the one that fails is the last
        random = np.random.default_rng(9)
        size = 3 * PAGE + 5
        start, array = (random.integers(0, 2 if dtype == "bool" else 256, size).astype(dtype) for _ in range(2))
        buffer = client.create("b", size, dtype, stripe=PAGE)
        other = client.create("o", like=buffer)
        for op, combined in BITS.items():
            before = start.copy()
            buffer.write(before)
            before[11:] = combined(before[11:], array[11:])
            np.testing.assert_array_equal(buffer.accumulate(array[11:], 11, op=op, fetch=True), before[11:], op)
            indices = np.sort(random.choice(size, 500, replace=False))
            before[indices] = combined(before[indices], array[:500])
            buffer.accumulate_sparse(indices, array[:500], op=op)
            np.testing.assert_array_equal(buffer.read(), before, op)
            other.write(array)
            other.accumulate_from(buffer, op=op)
            np.testing.assert_array_equal(other.read(), combined(array, before), op)
        client.delete("b")
        client.delete("o")


def test_integers_wrap_around(client: smb.Client) -> None:
    """Sums and products of integers are taken modulo 2 to the number of bits, as numpy does."""
    buffer = client.create("w", 2, "int64")
    buffer.write([2**63 - 1, -(2**63)])
    buffer.accumulate(np.array([1, -1]))
    assert buffer.read().tolist() == [-(2**63), 2**63 - 1]
    bytes_ = client.create("bytes", 1, "uint8")
    assert bytes_.accumulate(np.uint8([200]), scale=2, fetch=True) == [144]


def test_fetch_has_the_arrays_shape(client: smb.Client) -> None:
    """The new values come back in the shape of what was added, and contain it."""
    buffer = client.create("w", (4, 4), "float32")
    new = buffer.accumulate(np.ones(6, np.float32), offset=1, scale=-0.5, fetch=True)
    assert new is not None
    assert new.shape == (6,)
    assert (new == -0.5).all()
    assert buffer.read().sum() == -3
    new = buffer.accumulate(np.ones((4, 4), np.float32), fetch=True)
    assert new is not None
    assert new.shape == (4, 4)


def test_buffers_are_combined_where_they_are(client: smb.Client) -> None:
    """accumulate_from is numpy's arithmetic between two buffers made alike, also of a buffer with itself."""
    size = 5 * PAGE + 3
    a = client.create("a", size, "float32", stripe=PAGE)
    b = client.create("b", like=a)
    assert (b.shape, b.dtype) == (a.shape, a.dtype)
    assert [place.server for place in b.layout.segments] == [place.server for place in a.layout.segments]
    x, y = counting(size, np.float32), counting(size, np.float32)[::-1].copy()
    a.write(x)
    b.write(y)
    a.accumulate_from(b, op="elastic", scale=0.5)
    np.testing.assert_array_equal(a.read(), x + np.float32(0.5) * (y - x))
    np.testing.assert_array_equal(b.read(), y)
    b.accumulate_from(b)
    np.testing.assert_array_equal(b.read(), 2 * y)


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8", "int4"])
def test_a_source_is_rounded_as_a_read_rounds_it(client: smb.Client, wire: str) -> None:
    """accumulate_from(wire=) adds what a read of that range with that wire brings, and leaves the source as it is.
    Without wire= it adds the source as it is, whatever the buffers' own wire is."""
    size = 5 * PAGE + 3
    a = client.create("a", size, "float32", stripe=PAGE, wire=wire)
    b = client.create("b", like=a)
    y = np.random.default_rng(1).normal(size=size).astype(np.float32)
    b.write(y, wire="exact")
    a.accumulate_from(b, offset=7, count=size - 11, scale=-2.0, wire=wire)
    rounded = b.read(7, size - 11, wire=wire)
    assert not np.array_equal(rounded, y[7:-4])
    x = np.zeros(size, np.float32)
    x[7:-4] += np.float32(-2) * rounded
    np.testing.assert_array_equal(a.read(wire="exact"), x)
    np.testing.assert_array_equal(b.read(wire="exact"), y)
    a.accumulate_from(b)
    np.testing.assert_array_equal(a.read(wire="exact"), x + y)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64"])
def test_several_buffers_are_summed_where_they_are(client: smb.Client, dtype: str) -> None:
    """accumulate_from of several is numpy's sum of them, from the first on, in one call; this buffer may be one."""
    size = 5 * PAGE + 3
    buffers = [client.create("0", size, dtype, stripe=PAGE)]
    buffers += [client.create(str(number), like="0") for number in range(1, 5)]
    random = np.random.default_rng(1)
    arrays = [random.integers(-1000, 1000, size).astype(buffers[0].dtype) for _ in buffers]
    for buffer, array in zip(buffers, arrays, strict=True):
        buffer.write(array)
    scales = [3, -1, 2, 5, 7] if dtype == "int64" else [0.5, -1.0, 2.25, 1 / 3, 1e-3]
    kind = buffers[0].dtype.type
    total = (kind(scales[0]) * arrays[0]).astype(kind)
    for scale, array in zip(scales[1:], arrays[1:], strict=True):
        total = (total + (kind(scale) * array).astype(kind)).astype(kind)
    buffers[0].accumulate_from(buffers, op="replace", scale=scales, offset=7, count=size - 11)
    arrays[0][7:-4] = total[7:-4]
    for buffer, array in zip(buffers, arrays, strict=True):
        np.testing.assert_array_equal(buffer.read(), array)
    with buffers[1].lock() as lock:
        buffers[1].accumulate_from(buffers[2:4], op="replace", fence=lock)
    np.testing.assert_array_equal(buffers[1].read(), (arrays[2] + arrays[3]).astype(kind))


def test_buffers_combined_both_ways_at_once_do_not_lock_each_other(client: smb.Client) -> None:
    """a from b beside b from a, again and again: neither waits for the other's lock, and no addition is lost."""
    a = client.create("a", 200_000, "int64", stripe="64KiB")
    b = client.create("b", like="a")

    def add(into: smb.Buffer, other: smb.Buffer) -> None:
        for _ in range(20):
            into.accumulate_from(other)

    threads = [threading.Thread(target=add, args=pair) for pair in ((a, b), (b, a))]
    a.fill(1)
    b.fill(1)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = np.concatenate([a.read(), b.read()])
    assert last.min() >= 21  # as if one's additions had all come before the other's first


def test_counters(client: smb.Client) -> None:
    """fetch_add and compare_swap return the value from before; they reach every element, wrap, and take negatives."""
    buffer = client.create("counters", 3 * PAGE, "int64", stripe=PAGE)
    last = buffer.size - 1
    for index in (0, 700, last):
        assert buffer.fetch_add(index, 5) == 0
        assert buffer.fetch_add(index, -7) == 5
        assert buffer.compare_swap(index, -2, 2**63 - 1) == -2
        assert buffer.compare_swap(index, -2, 0) == 2**63 - 1
        assert buffer.fetch_add(index, 1) == 2**63 - 1
        assert buffer.read(index, 1)[0] == -(2**63)
    assert np.count_nonzero(buffer.read()) == 3


@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint64"])
def test_counters_of_other_integers(client: smb.Client, dtype: str) -> None:
    """They wrap around in their own width, leave their neighbours alone, and take only numbers that they can hold."""
    buffer = client.create("counters", 3 * PAGE, dtype, stripe=PAGE)
    low, high = int(np.iinfo(buffer.dtype).min), int(np.iinfo(buffer.dtype).max)
    for index in (1, 1024, buffer.size - 2):
        assert buffer.fetch_add(index, high) == 0
        assert buffer.fetch_add(index, 3) == high
        assert buffer.fetch_add(np.int16(index), np.uint8(0)) == low + 2
        assert buffer.compare_swap(index, low + 2, high) == low + 2
        assert buffer.compare_swap(index, low, 0) == high
        assert type(buffer.fetch_add(index, 0)) is int
        for bad in (low - 1, high + 1):
            with pytest.raises(smb.InvalidArgumentError, match=f"does not fit into .* bits of {dtype}"):
                buffer.fetch_add(index, bad)
            with pytest.raises(smb.InvalidArgumentError, match="does not fit"):
                buffer.compare_swap(index, bad, 0)
        with pytest.raises(smb.InvalidArgumentError, match="must be integers"):
            buffer.fetch_add(index, 0.5)
    assert np.count_nonzero(buffer.read()) == 3
    buffer.accumulate(np.ones(1, dtype), 0, op="replace")
    assert buffer.compare_swap(0, 1, 5) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_counters_of_floats(client: smb.Client, dtype: str) -> None:
    """Sums are the dtype's own, and compare_swap compares bits: 0.0 is not -0.0, and a NaN equals itself."""
    kind = np.dtype(dtype).type
    buffer = client.create("floats", 3 * PAGE, dtype, stripe=PAGE)
    expected = kind(0)
    for value in (0.1, 0.2, 1e9, -3, np.float32(0.3), float("inf")):
        assert buffer.fetch_add(1500, value) == float(expected)
        expected += kind(value)
    assert buffer.fetch_add(1500, 0.0) == float("inf")
    assert buffer.compare_swap(0, -0.0, 1.0) == 0.0
    assert buffer.read(0, 1)[0] == 0.0
    assert buffer.compare_swap(0, 0.0, float("nan")) == 0.0
    assert np.isnan(buffer.compare_swap(0, float("nan"), 0.7))
    assert buffer.compare_swap(0, 0.7, 2) == float(kind(0.7))
    assert type(buffer.fetch_add(0, 0)) is float
    assert buffer.read()[[0, 1, 1500]].tolist() == [2.0, 0.0, float("inf")]


def test_dtypes_without_counters(client: smb.Client) -> None:
    """fetch_add and compare_swap name the dtypes that they take, and this one."""
    for dtype in ("float16", "bfloat16", "uint8", "int8", "bool", "complex64", "float8_e5m2"):
        print(dtype)  # the one that fails is the last
        buffer = client.create("w", 10, dtype)
        for call, numbers in ((buffer.fetch_add, (0, 1)), (buffer.compare_swap, (0, 0, 1))):
            with pytest.raises(smb.InvalidArgumentError, match=f"of int32, .* or float64, and this one is {dtype}"):
                call(*numbers)
        assert not buffer.read().any()
        client.delete("w")


# ---- the same memory, seen in several ways


def test_transports_see_the_same_buffer(connect: Connect) -> None:
    """What one client changes over shm the other reads over tcp, and the other way round."""
    near, far = connect("shm"), connect(FAR)
    a = near.create("w", 100_000, "float32", stripe=PAGE)
    b = far.open("w")
    a.write(np.ones(100_000, np.float32))
    b.accumulate(np.ones(100_000, np.float32))
    assert (a.read() == 2).all()
    assert (a.transports, b.transports) == (("shm",), (FAR,))
    assert connect("auto").open("w").transports == ("shm",)


def test_view_is_the_memory_itself(connect: Connect) -> None:
    """A view over three servers is one contiguous array, of the shape, that changes with the buffer and changes it."""
    buffer = connect().create("w", (9, PAGE), "uint8", stripe=PAGE)
    view = buffer.view()
    assert view.shape == (9, PAGE)
    assert view.flags.c_contiguous
    values = counting(9 * PAGE, np.uint8).reshape(9, PAGE)
    connect(FAR).open("w").write(values)
    np.testing.assert_array_equal(view, values)
    view[3:5] = 0
    values[3:5] = 0
    np.testing.assert_array_equal(buffer.read(), values)


def test_view_outlives_what_it_came_from(connect: Connect) -> None:
    """Once the buffer is deleted and the client closed it is mapped still, and zeros; it goes with its last name."""
    client = connect()
    client.create("w", 10 * PAGE, "uint8", stripe=PAGE).fill(7)
    view = client.open("w").view()
    address = f"{view.ctypes.data:x}-"
    client.delete("w")
    client.close()
    part = view[5:]
    del view
    assert (part == 0).all()
    assert is_mapped(address)
    del part
    assert not is_mapped(address)


def is_mapped(address: str) -> bool:
    with open("/proc/self/maps") as maps:  # noqa: PTH123 - a file of the kernel's
        return any(line.startswith(address) for line in maps)


def test_view_needs_shared_memory(connect: Connect) -> None:
    """Over tcp there is no view; the error says over what the buffer is reached and what to use instead."""
    buffer = connect(FAR).create("w", 10)
    with pytest.raises(smb.TransportError, match=r"view of buffer 'w'.*over tcp.*use read\(\)"):
        buffer.view()


@pytest.mark.parametrize("shape", [(), (3, 5), (1024, 1025), (3, 1 << 20)])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "bfloat16"])
def test_an_empty_array_has_pages_of_its_own(connect: Connect, shape: Any, dtype: str) -> None:
    """client.empty() gives zeros of that form, that can be written; from a page on they begin at
    one, from 2 MiB on at a large one."""
    array = connect("tcp").empty(shape, dtype)
    assert array.shape == np.zeros(shape).shape
    assert array.dtype == DTYPES[dtype]
    assert not array.any()
    assert array.flags.c_contiguous
    assert array.flags.writeable
    if array.nbytes >= PAGE:
        assert array.ctypes.data % (2 << 20 if array.nbytes >= 2 << 20 else PAGE) == 0
    array[...] = 1
    assert np.array_equal(array, np.ones(shape, DTYPES[dtype]))


# ---- names and places


def test_list_and_servers(connect: Connect, cluster: smb.LocalCluster) -> None:
    """list() shows every buffer with shape, dtype and layout, by name; servers() every server with its use."""
    client = connect()
    empty = client.servers()
    client.create("b", (2, 3), "bfloat16", servers=2, stripe=PAGE)
    client.create("a/x", 5)
    infos = client.list()
    assert [(info.name, info.shape, info.dtype.name, info.nbytes) for info in infos] == [
        ("a/x", (5,), "float32", 20),
        ("b", (2, 3), "bfloat16", 12),
    ]
    assert infos[1].created >= infos[0].created - 60
    assert infos[1].layout == client.open("b").layout
    servers = client.servers()
    assert [server.name for server in servers] == ["server-0", "server-1", "server-2"]
    assert [server.address for server in servers] == [daemon.address for daemon in cluster.servers]
    assert all(server.alive and server.capacity == 64 << 20 for server in servers)
    assert sum(server.used for server in servers) > sum(server.used for server in empty)
    assert all(server.free == server.capacity - server.used for server in servers)


def test_placement_by_number_name_and_likeness(connect: Connect) -> None:
    """servers= takes a number, names in order, or one name; like= takes the other's placement by buffer or by name."""
    client = connect()
    size = 10 * PAGE
    used = {
        name: [place.server for place in client.create(name, size, "uint8", stripe=PAGE, servers=wish).layout.segments]
        for name, wish in {"two": 2, "named": ["server-2", "server-0"], "one": "server-1"}.items()
    }
    assert len(set(used["two"])) == 2
    assert used["named"] == ["server-2", "server-0"]
    assert used["one"] == ["server-1"]
    alike = client.create("alike", size, "uint8", like="named").layout
    assert (alike.stripe_bytes, [place.server for place in alike.segments]) == (PAGE, used["named"])
    pieces = list(client.open("named").layout.pieces(PAGE // 2, PAGE))
    assert [(piece.segment, piece.offset, piece.count) for piece in pieces] == [(0, 2048, 2048), (1, 0, 2048)]


def test_metadata_is_there_for_whoever_opens(connect: Connect) -> None:
    """Every client sees what the first creation gave, as a dict that is its own; list() does without."""
    one, two = connect(), connect(FAR)
    given = {"run": {"every": 50, "names": ["a", "b"]}, "rate": 0.1}
    made = one.create("w", 10, metadata=given)
    assert made.metadata == given
    opened = two.open("w")
    opened.metadata["run"]["every"] = 1
    assert opened.metadata == two.open("w").metadata == given
    assert two.create("w", 10, metadata={"other": 1}, exist_ok=True).metadata == given
    assert two.create("v", like=opened).metadata == {}
    assert two.create("u", 10, metadata={"a": "x" * ((4 << 20) - 8)}).metadata == two.open("u").metadata
    assert [info.metadata_json for info in two.list()] == ["", "", ""]
    for wrong, told in (
        ({"a": np.zeros(3)}, "ndarray"),
        ({"a": "x" * (4 << 20)}, r"metadata \(as JSON\) may have at most 4 MiB"),
        ([1], "must be a mapping"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match=rf"create 't': .*{told}"):
            one.create("t", 10, metadata=wrong)  # type: ignore[arg-type]
    assert len(one.list()) == 3
    one.delete("w")
    assert one.create("w", 10).metadata == {}


def test_open_waits_for_the_creator(connect: Connect) -> None:
    """open(timeout=) returns when somebody creates the name, and gives up with NotFoundError."""
    client, creator = connect(), connect()
    found: list[smb.Buffer] = []
    thread = threading.Thread(target=lambda: found.append(client.open("late", timeout=20)))
    thread.start()
    creator.create("late", 3)
    thread.join()
    assert found[0].shape == (3,)
    with pytest.raises(smb.NotFoundError, match="never"):
        client.open("never", timeout=0.05)


def test_many_creators_make_one_buffer(connect: Connect, cluster: smb.LocalCluster) -> None:
    """Eight processes create the same name with exist_ok at once: all get the same memory."""
    ids = run_together(*((create_or_open, cluster.address, "shared") for _ in range(8)))
    client = connect()
    assert set(ids) == {info.id for info in client.list()}
    assert client.open("shared").read(0, 1)[0] == 8


def test_deleting_gives_the_memory_back(connect: Connect) -> None:
    """After delete the servers hold what they held before, and users of either transport get NotFoundError."""
    client, far = connect("shm"), connect(FAR)
    before = [server.used for server in client.servers()]
    users = [client.create("w", 1 << 20), far.open("w")]
    for user in users:
        user.fill(1)
    client.delete("w")
    for user in users:
        with pytest.raises(smb.NotFoundError, match="buffer 'w' was deleted"):
            user.read()
        with pytest.raises(smb.NotFoundError, match="buffer 'w' was deleted"):
            user.accumulate([1.0], 0)
    assert [server.used for server in client.servers()] == before
    client.create("w", 5)
    for user in users:
        with pytest.raises(smb.NotFoundError, match="or replaced; open it again"):
            user.read()
    assert far.open("w").read().tolist() == [0] * 5


def test_deleting_under_readers(connect: Connect) -> None:
    """Readers that are in the middle of it over either transport end with NotFoundError, and read nothing wrong."""
    client = connect()
    client.create("w", 1 << 18, stripe=PAGE).fill(7)
    users = [connect(transport).open("w") for transport in ("shm", FAR)]
    reading = threading.Barrier(3)
    ends: list[str] = []

    def read_on(buffer: smb.Buffer) -> None:
        assert (buffer.read() == 7).all()
        reading.wait(20)
        try:
            while (buffer.read() == 7).all():
                pass
            ends.append("something else was read")
        except smb.Error as error:
            ends.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=read_on, args=(user,)) for user in users]
    for thread in threads:
        thread.start()
    reading.wait(20)
    client.delete("w")
    for thread in threads:
        thread.join()
    assert ends == ["NotFoundError: buffer 'w' was deleted"] * 2


# ---- around it


def test_the_environment_fills_in(cluster: smb.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """$SMB_COORDINATOR is the default address, and $SMB_TRANSPORT overrides the transport."""
    monkeypatch.setattr("smb.client.DEFAULT_COORDINATOR", cluster.address)
    with smb.connect() as client:  # nothing is set: where `smb up` listens
        assert len(client.servers()) == 3
    monkeypatch.setenv("SMB_COORDINATOR", cluster.address)
    monkeypatch.setenv("SMB_TRANSPORT", FAR)
    with smb.connect(transport="shm") as client:
        assert client.create("w", 5).transports == (FAR,)
        client.delete("w")


def test_one_log_line_says_which_way_and_why(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """A buffer's first use logs, once, the transport and the reason for each group of servers."""
    with caplog.at_level(logging.INFO, "smb"):
        near, far = connect(), connect(FAR)
        near.create("w", 10 * PAGE, "uint8", stripe=PAGE, servers=["server-0", "server-1"]).fill(1)
        buffer = far.open("w")
        buffer.read()
        buffer.read()
    lines = [record.getMessage() for record in caplog.records if record.name == "smb"]
    assert lines[0] == 'buffer "w": shm to server-0, server-1: same host'
    assert lines[1].startswith('buffer "w": tcp to server-0: 127.0.0.1:')
    assert len(lines) == 2


def test_representations_tell_what_it_is(connect: Connect) -> None:
    """repr() of a buffer names dtype, shape and servers; of a client, its coordinator."""
    client = connect()
    assert repr(client.create("w", (2, 3), servers=1)) == "<smb.Buffer 'w' float32[2, 3] on 1 server>"
    assert client.address in repr(client)
    client.close()
    assert "closed" in repr(client)
