"""smb.arrays.memory: other people's arrays as plain memory."""

from __future__ import annotations

import array as array_module
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from smb._engine import ffi
from smb.arrays.dtypes import DTYPES
from smb.arrays.memory import Memory, readable, scalar, writable
from smb.errors import InvalidArgumentError

FLOAT32, INT64, UINT8, BFLOAT16 = (DTYPES[name] for name in ("float32", "int64", "uint8", "bfloat16"))


class OnlyInterface:
    """Has __array_interface__ and nothing else."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self._values = values
        self.__array_interface__ = values.__array_interface__


class OnGpu:
    """Looks like a tensor in a GPU's memory: DLPack's device type 2 is CUDA."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self) -> object:
        raise AssertionError("nobody may touch it")

    def data_ptr(self) -> int:
        raise AssertionError("nobody may touch it")


def address(memory: Memory) -> int:
    return int(ffi.cast("uintptr_t", memory.pointer))


def address_of(values: np.ndarray[Any, Any]) -> int:
    return int(values.__array_interface__["data"][0])


def as_numpy(memory: Memory, dtype: Any) -> np.ndarray[Any, Any]:
    """Copy what lies at the address."""
    import ctypes

    nbytes = memory.count * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address(memory), nbytes), dtype).reshape(memory.shape)


def test_contiguous_memory_is_used_where_it_is() -> None:
    """numpy, torch, memoryview, array.array and __array_interface__ give their own address: nothing is copied."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    numbers = array_module.array("f", range(12))
    for given, at, shape in (
        (values, address_of(values), (3, 4)),
        (values[1:], address_of(values) + 16, (2, 4)),
        (OnlyInterface(values), address_of(values), (3, 4)),
        (memoryview(values), address_of(values), (3, 4)),
        (numbers, numbers.buffer_info()[0], (12,)),
        (tensor, tensor.data_ptr(), (3, 4)),
        (tensor[1:], tensor.data_ptr() + 16, (2, 4)),
        (tensor.clone().requires_grad_(), None, (3, 4)),
        (torch.nn.Parameter(tensor), tensor.data_ptr(), (3, 4)),
    ):
        for memory in (readable(given, FLOAT32), writable(given, FLOAT32, int(np.prod(shape)))):
            assert memory.shape == shape
            assert address(memory) == at or at is None


def test_bfloat16_tensors_and_arrays() -> None:
    """bfloat16 works without conversion from torch (which numpy cannot represent) and from ml_dtypes."""
    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    assert address(readable(tensor, BFLOAT16)) == tensor.data_ptr()
    assert address(writable(tensor, BFLOAT16, 2)) == tensor.data_ptr()
    assert address(readable(values, BFLOAT16)) == address_of(values)
    for given in (tensor, values):
        assert as_numpy(readable(given, BFLOAT16), ml_dtypes.bfloat16).tolist() == [1.5, -2.0]


def test_what_is_not_contiguous_is_copied_to_read_and_refused_to_write() -> None:
    """Strided and transposed input arrives in its logical order; as out= it is refused."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = torch.from_numpy(values)
    for given in (values.T, values[:, ::2], tensor.T, tensor[:, ::2], memoryview(values)[::2]):
        memory = readable(given, FLOAT32)
        assert as_numpy(memory, np.float32).tolist() == np.asarray(given).tolist()
        with pytest.raises(InvalidArgumentError, match="not contiguous"):
            writable(given, FLOAT32, memory.count)


def test_lists_and_numbers_become_the_buffers_dtype() -> None:
    """A list of integers is float32 for a float32 buffer, and a number is one element."""
    assert as_numpy(readable([[1, 2], [3, 4]], FLOAT32), np.float32).tolist() == [[1, 2], [3, 4]]
    assert as_numpy(readable([1, True], INT64), np.int64).tolist() == [1, 1]
    assert as_numpy(readable(2.5, BFLOAT16), ml_dtypes.bfloat16).tolist() == 2.5
    assert as_numpy(readable([1e300], FLOAT32), np.float32).tolist() == [np.inf]
    assert readable([], FLOAT32).count == 0


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ([1.5], INT64),
        ([float("nan")], INT64),
        ([2**64], INT64),
        ([256], UINT8),
        ([-1], UINT8),
        (["1"], FLOAT32),
        ([1j], FLOAT32),
        ([[1], [1, 2]], FLOAT32),
        ([None], FLOAT32),
        ("text", FLOAT32),
        (object(), FLOAT32),
    ],
)
def test_lists_that_would_change_are_refused(given: Any, dtype: Any) -> None:
    """Values that the dtype cannot hold, and what is no number at all, are refused instead of being bent."""
    with pytest.raises(InvalidArgumentError, match=dtype.name):
        readable(given, dtype)


def test_another_dtype_is_refused_by_both_names() -> None:
    """The message names what came, what the buffer is, and the conversion."""
    values = np.zeros(3)
    for given, name in (
        (values, "float64"),
        (values.astype(">f4"), ">f4"),
        (memoryview(values), "float64"),
        (OnlyInterface(values), "float64"),
        (b"abcd", "uint8"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"is {name} but the buffer is float32; .*astype\('float32'\)"):
            readable(given, FLOAT32)
    for dtype, name in ((torch.float16, "float16"), (torch.bool, "bool"), (torch.complex128, "torch.complex128")):
        tensor = torch.zeros(3, dtype=dtype)
        with pytest.raises(InvalidArgumentError, match=rf"is {name} but the buffer is float32; .*tensor\.float\(\)"):
            readable(tensor, FLOAT32)
        with pytest.raises(InvalidArgumentError, match=rf"is {name} but .* int64; .*tensor\.to\(torch\.int64\)"):
            readable(tensor, INT64)
    for out in (values, torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(
            InvalidArgumentError, match=r"^out= is float64 but the buffer is float32; pass an array of float32"
        ):
            writable(out, FLOAT32, 3)


def test_out_must_be_writable_and_fit() -> None:
    """Read-only memory, a wrong number of elements, and objects without memory are refused as out=."""
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    for given, told in (
        (frozen, "read-only"),
        (memoryview(frozen), "read-only"),
        (np.zeros(4, np.float32), "has 4 elements but 3"),
        (torch.zeros(2), "has 2 elements but 3"),
        ([0.0, 0.0, 0.0], "a list does not give access to its memory"),
        (None, "does not give access to its memory"),
    ):
        with pytest.raises(InvalidArgumentError, match=told):
            writable(given, FLOAT32, 3)


def test_memory_of_a_gpu_is_refused() -> None:
    """A tensor on a device is refused before it is touched, with the way out."""
    for take in (lambda: readable(OnGpu(), FLOAT32), lambda: writable(OnGpu(), FLOAT32, 1)):
        with pytest.raises(InvalidArgumentError, match=r"move it first, e.g. with .cpu\(\)"):
            take()


def test_memory_lives_as_long_as_it_is_used() -> None:
    """The owner of a copy and of a DLPack capsule stays alive with the Memory, and goes with it."""
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    memory = readable(tensor, FLOAT32)
    del tensor
    assert gone() is not None
    assert as_numpy(memory, np.float32).sum() == 1000
    del memory
    assert gone() is None


def test_scalars() -> None:
    """A number becomes one element; text, complex numbers, arrays and integers out of range do not."""
    half = scalar(0.5, BFLOAT16)
    assert half is not None
    assert half.tobytes() == np.array(0.5, ml_dtypes.bfloat16).tobytes()
    for value in (7, 7.0, np.int32(7), True + 6, torch.tensor(7)):
        element = scalar(value, INT64)
        assert element is not None
        assert element == 7
    for value in (torch._neg_view(torch.tensor(-7)), torch.nn.Parameter(torch.tensor(7.0)), torch.tensor(7).bfloat16()):
        element = scalar(value, INT64)
        assert element is not None
        assert element == 7
    for value in (np.ma.masked, np.ma.masked_array(7, mask=True), torch.empty((), device="meta"), torch.ones(2)):
        assert scalar(value, INT64) is None
    for value in (0.5, float("nan"), 2**63, "7", 7j, None, [7], object()):
        assert scalar(value, INT64) is None
    assert scalar(1e300, FLOAT32) == np.inf
    assert scalar("7", FLOAT32) is None
