"""Other people's arrays as plain memory: an address and a number of elements, without a hidden copy.

numpy arrays are taken as they are; torch tensors, JAX arrays and others through DLPack; the rest through the buffer
protocol or __array_interface__, as numpy does. Lists and numbers become arrays of the buffer's dtype.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import reprlib
import weakref
from typing import Any, cast

import numpy as np

from smb.arrays.dtypes import DTYPES, Dtype
from smb.engine import address_of, memory_at, memory_of, unmap
from smb.errors import InvalidArgumentError

_HUGE_BYTES = 2 << 20  # of a large page
_CPU_DEVICES = (1, 3)  # kDLCPU, and kDLCUDAHost: pinned memory of the host
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class Memory:
    """Memory of somebody else: `count` elements at `place`, alive as long as `owner` is. `shape` is the array's."""

    __slots__ = ("count", "owner", "place", "shape")  # a dataclass that is frozen takes 3 times as long to make

    def __init__(self, place: Any, count: int, shape: tuple[int, ...], owner: object) -> None:
        self.place = place
        self.count = count
        self.shape = shape
        self.owner = owner


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    """DLPack's DLTensor, the first member of its DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def readable(array: Any, dtype: Dtype) -> Memory:
    """Return the memory of an array to read from. One that is not contiguous is copied first.

    Raises InvalidArgumentError for another dtype, for memory of a GPU, for what is no array at all.
    """
    if type(array) is np.ndarray:
        return _of_numpy(_contiguous(_same_dtype(array, dtype)))
    if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
        return _of_dlpack(array, dtype, copy=True)
    return _of_numpy(_contiguous(_same_dtype(_as_numpy(array, dtype), dtype)))


class _Held:
    """The object that numpy makes an array of. The array keeps this object, and so the memory, alive."""

    def __init__(self, memory: Memory, count: int, typestr: str, read_only: bool) -> None:
        self._memory = memory
        at = (address_of(memory.place), read_only)
        self.__array_interface__ = {"version": 3, "shape": (count,), "typestr": typestr, "data": at}


def whole_pages(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return zeros in pages of their own, large ones where there is room for them and the system has them.

    An ordinary array of some size begins 16 bytes past a page's start, where copies are slower (perf/README.md).
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < mmap.PAGESIZE:
        return np.zeros(shape, dtype)
    page = _HUGE_BYTES if nbytes >= _HUGE_BYTES else mmap.PAGESIZE
    mapping = mmap.mmap(-1, nbytes + page - mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if page > mmap.PAGESIZE:
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % page
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def as_float32(memory: Memory) -> np.ndarray[Any, Any]:
    """Return readable float32 memory as a flat, read-only array, without a copy."""
    return np.asarray(_Held(memory, memory.count, "<f4", True))


def as_bytes(memory: Memory, itemsize: int) -> np.ndarray[Any, Any]:
    """Return memory of elements of that many bytes as a flat array of uint8, without a copy: writable only if
    the memory is.
    """
    return np.asarray(_Held(memory, memory.count * itemsize, "|u1", False))


def scalar(value: Any, dtype: Dtype) -> np.ndarray[Any, Any] | None:
    """Return a number as one element of the dtype; None for what is none, or no integer of an integer dtype's range."""
    try:
        given = np.asarray(value)
        if given.ndim != 0 or given.dtype.kind in "cmMSU":  # numpy would take the real part, or parse the text
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            element = given.astype(dtype.numpy)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if dtype.numpy.kind in "iu" and element != given else element


def writable(out: Any, dtype: Dtype, count: int) -> Memory:
    """Return the memory of an array to write `count` elements to. Nothing is copied.

    Raises InvalidArgumentError for another dtype or number of elements, for one that is read-only or not contiguous.
    """
    if hasattr(out, "__dlpack__") and not isinstance(out, np.ndarray):
        if not hasattr(out, "data_ptr"):  # torch's; JAX arrays are immutable
            raise InvalidArgumentError(f"out= is a {type(out).__name__}, which can't be written to; pass a numpy array")
        memory = _of_dlpack(out, dtype, copy=False)
    else:
        array = out if isinstance(out, np.ndarray) else _view_of(out)
        if array.dtype != dtype.numpy:
            raise _wrong_out(str(array.dtype), dtype)
        if not array.flags.c_contiguous:
            raise InvalidArgumentError("out= is not contiguous in memory; pass a contiguous array")
        if not array.flags.writeable:
            raise InvalidArgumentError("out= is read-only; pass a writable array")
        memory = _of_numpy(array)
    if memory.count != count:
        raise InvalidArgumentError(
            f"out= has {memory.count} elements, but {count} are to be read; pass an array of {count}"
        )
    return memory


def _of_numpy(array: np.ndarray[Any, Any]) -> Memory:
    return Memory(memory_of(array), array.size, array.shape, array)


def _contiguous(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _same_dtype(array: np.ndarray[Any, Any], dtype: Dtype) -> np.ndarray[Any, Any]:
    if array.dtype is not dtype.numpy and array.dtype != dtype.numpy:
        raise _wrong_dtype(array, str(array.dtype), dtype)
    return array


def _wrong_dtype(array: Any, given: str, dtype: Dtype) -> InvalidArgumentError:
    tensor = hasattr(array, "data_ptr")  # torch's
    how = f"tensor.to(torch.{dtype.name})" if tensor else f"array.astype({dtype.name!r})"
    how = "tensor.float()" if tensor and dtype.name == "float32" else how
    return InvalidArgumentError(
        f"the {'tensor' if tensor else 'array'} is {given} but the buffer is {dtype.name}; convert it first, e.g. with "
        f"{how}"
    )


def _wrong_out(given: str, dtype: Dtype) -> InvalidArgumentError:
    return InvalidArgumentError(f"out= is {given} but the buffer is {dtype.name}; pass a {dtype.name} one")


def _as_numpy(array: Any, dtype: Dtype) -> np.ndarray[Any, Any]:
    if hasattr(array, "__array_interface__") or hasattr(array, "__array__"):
        return np.asarray(array)
    try:
        return _view_of(array)
    except InvalidArgumentError:
        pass
    refusal = f"{reprlib.repr(array)} can't be written as {dtype.name}"
    try:
        plain = np.asarray(array)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"{refusal}: {error}") from error
    if plain.dtype.kind not in "biuf":
        raise InvalidArgumentError(refusal)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = plain.astype(dtype.numpy)
    # A list of numbers is meant as numbers of the buffer's type, as far as these can hold them.
    if dtype.numpy.kind in "iu" and not np.array_equal(plain, converted):
        raise InvalidArgumentError(refusal)
    return converted


def _view_of(array: Any) -> np.ndarray[Any, Any]:
    """Return a numpy view of what has the buffer protocol or __array_interface__."""
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    try:
        return np.asarray(memoryview(array))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"a {type(array).__name__} has no memory to use; pass a numpy array, a CPU tensor or a buffer"
        ) from error


def _of_dlpack(array: Any, dtype: Dtype, *, copy: bool) -> Memory:
    device = array.__dlpack_device__()
    if int(device[0]) not in _CPU_DEVICES:
        raise InvalidArgumentError(
            f"the {type(array).__name__} lies on a device, not in this host's memory; move it first, e.g. with .cpu()"
        )
    if getattr(array, "requires_grad", False):
        array = array.detach()  # torch exports no tensor that records gradients; this shares its memory
    try:
        capsule = array.__dlpack__()
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InvalidArgumentError(f"the {type(array).__name__} can't be used through DLPack: {error}") from error
    address = _capsule_pointer(capsule, b"dltensor")
    tensor = _DLTensor.from_address(cast(int, address))
    bits = tensor.dtype.bits
    name = f"{_DLPACK_KINDS.get(tensor.dtype.code, 'unknown')}{bits}".replace("bool8", "bool")
    if name != dtype.name or tensor.dtype.lanes != 1:
        given = name if name in DTYPES else str(getattr(array, "dtype", name))
        raise _wrong_dtype(array, given, dtype) if copy else _wrong_out(given, dtype)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if not _strides_are_dense(tensor, shape):
        if not copy:
            raise InvalidArgumentError("out= is not contiguous in memory; pass a contiguous tensor")
        if not hasattr(array, "contiguous"):
            raise InvalidArgumentError(f"the {type(array).__name__} is not contiguous in memory; copy it first")
        return _of_dlpack(array.contiguous(), dtype, copy=False)
    count = int(np.prod(shape, dtype=np.int64))
    return Memory(memory_at((tensor.data or 0) + tensor.byte_offset), count, shape, (capsule, array))


def _strides_are_dense(tensor: _DLTensor, shape: tuple[int, ...]) -> bool:
    if not tensor.strides or 0 in shape:
        return True
    expected = 1
    for i in reversed(range(tensor.ndim)):
        if shape[i] != 1 and tensor.strides[i] != expected:
            return False
        expected *= shape[i]
    return True


class _MappedMemory:
    """Owns a mapping; numpy arrays on it keep it alive."""

    def __init__(self, address: int, nbytes: int, length: int) -> None:
        # Not at exit: other threads may still use it then, and the process's end unmaps anyway.
        weakref.finalize(self, unmap, address, nbytes).atexit = False
        self.__array_interface__ = {"version": 3, "shape": (length,), "typestr": "|u1", "data": (address, False)}


def mapped_array(
    address: int, mapped: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the memory of `mapped` bytes at `address` as an array; unmapped when nobody has it any more."""
    length = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.asarray(_MappedMemory(address, mapped, length)).view(dtype).reshape(shape)
