"""Other libraries' arrays as plain memory: an address and a number of elements, without a hidden copy.

numpy arrays are used as they are; torch tensors by their address; JAX arrays and others through DLPack; all other
objects through the buffer protocol or __array_interface__, as numpy does. Lists and numbers become arrays of the dtype.

The values count, not the memory. The memory of a tensor whose negative or conjugate bit is set has other values than
the tensor, so such a tensor is copied first. Masked elements have no value to send, so a masked array is refused.
docs/arrays.md has the table of all kinds.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import reprlib
import sys
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from smb.arrays.dtypes import DTYPES, Dtype
from smb.engine import address_of, memory_at, memory_of, unmap
from smb.errors import InvalidArgumentError

_HUGE_BYTES = 2 << 20  # size of a large page
_CPU_DEVICES = (1, 3)  # kDLCPU, and kDLCUDAHost: pinned memory of the host
_ELSEWHERE = "the {} lies on a device, not in this host's memory; move it first, e.g. with .cpu()"
_MASKED = (
    "{} of the array's {} elements are masked, and a buffer has no mask: give the masked ones a value first, e.g. with "
    "array.filled(0)"
)
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_FLOAT8 = {10: "float8_e4m3fn", 12: "float8_e5m2"}


class Memory:
    """Memory of another library: `count` elements at `pointer`, alive as long as `owner` is. `shape` is the array's.

    `deliver` is set for an array to write to whose memory does not hold its values. `pointer` is a separate buffer
    then; a call that has filled it calls `deliver`, which sets the array.
    """

    # A frozen dataclass takes 3 times as long to make.
    __slots__ = ("count", "deliver", "owner", "pointer", "shape")

    def __init__(
        self,
        pointer: Any,
        count: int,
        shape: tuple[int, ...],
        owner: object,
        deliver: Callable[[], object] | None = None,
    ) -> None:
        self.pointer = pointer
        self.count = count
        self.shape = shape
        self.owner = owner
        self.deliver = deliver


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
    """Return the memory of an array to read from. An array that is not contiguous is copied first, and so is a tensor
    whose negative or conjugate bit is set.

    Raises InvalidArgumentError for another dtype or byte order, for masked elements, for memory of a GPU, for sparse
    tensors, tensors that wrap others or are on the meta device, and for objects that are not arrays.
    """
    if type(array) is not np.ndarray:
        if is_tensor(array):
            return _of_tensor(_resolved(_plain(array, dtype, out=False)).contiguous())
        if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
            return _of_dlpack(array, dtype)
        array = _as_numpy(unmasked(array), dtype)
    if array.dtype != dtype.numpy:
        raise _wrong_dtype(array, str(array.dtype), dtype)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return Memory(memory_of(array), array.size, array.shape, array)


def is_tensor(array: Any) -> bool:
    """Return True if the object is a torch tensor. Does not import torch."""
    return hasattr(array, "data_ptr") and hasattr(array, "is_conj")


def unmasked(array: Any) -> Any:
    """Return an array without its mask. Raises InvalidArgumentError if an element is masked, also in lists of arrays.

    numpy drops masks when it is asked for memory or for an array, so everything that is passed to numpy is checked
    here.
    """
    if isinstance(array, (list, tuple)):
        for each in array:
            if isinstance(each, (list, tuple, np.ma.MaskedArray)):
                unmasked(each)
    elif isinstance(array, np.ma.MaskedArray):
        if np.ma.is_masked(array):
            raise InvalidArgumentError(_MASKED.format(int(np.ma.getmaskarray(array).sum()), array.size))
        return array.data
    return array


class _ArraySource:
    """The object that numpy makes an array of. The array keeps this object alive, and so the memory."""

    def __init__(self, memory: Memory, count: int, typestr: str, read_only: bool) -> None:
        self._memory = memory
        at = (address_of(memory.pointer), read_only)
        self.__array_interface__ = {"version": 3, "shape": (count,), "typestr": typestr, "data": at}


def whole_pages(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return zeros in memory pages of their own; large pages if the system has them and the array fills one.

    An ordinary large array begins 16 bytes past a page's start, where copies are slower (perf/README.md).
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < mmap.PAGESIZE:
        return np.zeros(shape, dtype)
    page = _HUGE_BYTES if nbytes >= _HUGE_BYTES else mmap.PAGESIZE
    mapping = mmap.mmap(-1, nbytes + page - mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if page > mmap.PAGESIZE:
        with contextlib.suppress(OSError):  # the kernel does not support large pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % page
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def as_float32(memory: Memory) -> np.ndarray[Any, Any]:
    """Return readable float32 memory as a flat, read-only array, without a copy."""
    return np.asarray(_ArraySource(memory, memory.count, "<f4", True))


def as_flat(memory: Memory, dtype: Dtype) -> np.ndarray[Any, Any]:
    """Return memory of elements of a dtype as a flat array, without a copy: writable only if the memory is."""
    return as_bytes(memory, dtype.itemsize).view(dtype.numpy)


def as_bytes(memory: Memory, itemsize: int) -> np.ndarray[Any, Any]:
    """Return memory of elements of that many bytes as a flat array of uint8, without a copy: writable only if
    the memory is.
    """
    return np.asarray(_ArraySource(memory, memory.count * itemsize, "|u1", False))


def scalar(value: Any, dtype: Dtype) -> np.ndarray[Any, Any] | None:
    """Return a number as one element of the dtype; None for other objects, and for integers out of an integer dtype's
    range.
    """
    try:
        if value is None or np.ma.is_masked(value):  # numpy would turn None into NaN
            return None
        given = np.asarray(value.item() if is_tensor(value) and value.dim() == 0 else value)
        if given.ndim == 0 and given.dtype == dtype.numpy:
            return given
        # numpy would take the real part, or parse the text
        if given.ndim != 0 or given.dtype.kind in ("mMSUV" if dtype.numpy.kind == "c" else "cmMSUV"):
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            element = given.astype(dtype.numpy)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: raised by torch for the meta device
        return None
    return None if dtype.numpy.kind in "iub" and element != given else element


def writable(out: Any, dtype: Dtype, count: int) -> Memory:
    """Return the memory of an array to write `count` elements to. Nothing is copied, except for a tensor whose negative
    or conjugate bit is set: the result has a `deliver` then.

    Raises InvalidArgumentError for another dtype or number of elements, and for an array that is read-only, masked or
    not contiguous.
    """
    if is_tensor(out):
        memory = _tensor_to_fill(_plain(out, dtype, out=True))
    elif hasattr(out, "__dlpack__") and not isinstance(out, np.ndarray):  # JAX arrays are immutable
        _check_device(out)
        raise InvalidArgumentError(f"out= is a {type(out).__name__}, which cannot be written to; pass a numpy array")
    else:
        array = unmasked(out) if isinstance(out, np.ndarray) else _view_of(out)
        if array.dtype != dtype.numpy:
            raise _wrong_out(str(array.dtype), dtype)
        if not array.flags.c_contiguous:
            raise InvalidArgumentError("out= is not contiguous in memory; pass a contiguous array")
        if not array.flags.writeable:
            raise InvalidArgumentError("out= is read-only; pass a writable array")
        memory = Memory(memory_of(array), array.size, array.shape, array)
    if memory.count != count:
        raise InvalidArgumentError(
            f"out= has {memory.count} elements but {count} are to be read; pass an array of {count}"
        )
    return memory


def _wrong_dtype(array: Any, given: str, dtype: Dtype) -> InvalidArgumentError:
    tensor = hasattr(array, "data_ptr")  # torch's
    how = f"tensor.to(torch.{dtype.name})" if tensor else f"array.astype({dtype.name!r})"
    how = "tensor.float()" if tensor and dtype.name == "float32" else how
    return InvalidArgumentError(
        f"the {'tensor' if tensor else 'array'} is {given} but the buffer is {dtype.name}; convert it first, e.g. with "
        f"{how}"
    )


def _wrong_out(given: str, dtype: Dtype) -> InvalidArgumentError:
    return InvalidArgumentError(f"out= is {given} but the buffer is {dtype.name}; pass an array of {dtype.name}")


def _as_numpy(array: Any, dtype: Dtype) -> np.ndarray[Any, Any]:
    if hasattr(array, "__array_interface__") or hasattr(array, "__array__"):
        return np.asarray(array)
    try:
        return _view_of(array)
    except InvalidArgumentError:
        pass
    refusal = f"{reprlib.repr(array)} cannot be converted to {dtype.name}"
    try:
        plain = np.asarray(array)
        # Whole numbers of more than 63 bits beside smaller ones are floats for numpy, which cannot hold them all.
        big = plain.dtype.kind == "f" and dtype.name == "uint64"
        exact = np.asarray(array, dtype.numpy) if big else plain
    # RuntimeError: raised by torch for tensors in a list
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgumentError(f"{refusal}: {error}") from error
    if plain.dtype.kind not in ("biufc" if dtype.numpy.kind == "c" else "biuf"):
        raise InvalidArgumentError(refusal)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = exact.astype(dtype.numpy)
    # A list of numbers means numbers of the buffer's type, if the type can represent them.
    if dtype.numpy.kind in "iub" and not np.array_equal(plain, converted):
        raise InvalidArgumentError(refusal)
    return converted


def _view_of(array: Any) -> np.ndarray[Any, Any]:
    """Return a numpy view of an object with the buffer protocol or __array_interface__."""
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    try:
        return np.asarray(memoryview(array))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"a {type(array).__name__} does not give access to its memory; pass a numpy array, a CPU tensor or a buffer"
        ) from error


def _plain(tensor: Any, dtype: Dtype, *, out: bool) -> Any:
    """Return a tensor outside of autograd. Raises InvalidArgumentError unless the tensor is dense, in this host's
    memory and of the dtype.
    """
    what = type(tensor).__name__
    if hasattr(tensor, "get_mask"):  # a tensor of torch.masked
        raise InvalidArgumentError(f"the {what} has a mask, which a buffer cannot hold; pass e.g. tensor.to_tensor(0)")
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_nested:
        raise InvalidArgumentError(
            f"the {what} is sparse, nested or quantized; pass a dense tensor, e.g. tensor.to_dense()"
        )
    if tensor.device.type == "meta":
        raise InvalidArgumentError(
            f"the {what} is on the meta device, which holds no values; pass a tensor with memory"
        )
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(_ELSEWHERE.format(what))
    given = str(tensor.dtype).removeprefix("torch.")
    if given != dtype.name:
        given = given if given in DTYPES else str(tensor.dtype)
        raise _wrong_out(given, dtype) if out else _wrong_dtype(tensor, given, dtype)
    try:
        plain = tensor.detach() if tensor.requires_grad else tensor
        held = plain.data_ptr() != 0 or plain.numel() == 0
    except (RuntimeError, TypeError):
        held = False
    if not held:
        raise InvalidArgumentError(
            f"the {what} wraps other tensors and has no memory of its own; pass a plain tensor, e.g. tensor.to_local()"
        )
    return plain


def _resolved(tensor: Any) -> Any:
    """Return a tensor whose memory holds its values; this is usually the tensor itself."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.resolve_conj() if tensor.is_conj() else tensor


def _of_tensor(tensor: Any, deliver: Callable[[], object] | None = None) -> Memory:
    return Memory(memory_at(tensor.data_ptr()), tensor.numel(), tuple(tensor.shape), tensor, deliver)


def _tensor_to_fill(tensor: Any) -> Memory:
    if not tensor.is_contiguous():
        raise InvalidArgumentError("out= is not contiguous in memory; pass a contiguous tensor")
    beside = _resolved(tensor)
    if beside is tensor:
        return _of_tensor(tensor)

    def deliver() -> None:
        # such a tensor can only be changed inside inference mode
        with sys.modules["torch"].inference_mode(tensor.is_inference()):
            tensor.copy_(beside)

    return _of_tensor(beside, deliver)


def _check_device(array: Any) -> None:
    if int(array.__dlpack_device__()[0]) not in _CPU_DEVICES:
        raise InvalidArgumentError(_ELSEWHERE.format(type(array).__name__))


def _of_dlpack(array: Any, dtype: Dtype) -> Memory:
    _check_device(array)
    try:
        capsule = array.__dlpack__()
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InvalidArgumentError(f"the {type(array).__name__} cannot be used through DLPack: {error}") from error
    address = _capsule_pointer(capsule, b"dltensor")
    tensor = _DLTensor.from_address(cast(int, address))
    bits = tensor.dtype.bits
    name = f"{_DLPACK_KINDS.get(tensor.dtype.code, 'unknown')}{bits}".replace("bool8", "bool")
    name = _DLPACK_FLOAT8.get(tensor.dtype.code, name)
    if name != dtype.name or tensor.dtype.lanes != 1:
        given = name if name in DTYPES else str(getattr(array, "dtype", name))
        raise _wrong_dtype(array, given, dtype)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if not _strides_are_dense(tensor, shape):
        raise InvalidArgumentError(f"the {type(array).__name__} is not contiguous in memory; copy it first")
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
        # The finalizer does not run at exit: other threads may still use the mapping then, and the end of the process
        # unmaps it anyway.
        weakref.finalize(self, unmap, address, nbytes).atexit = False
        self.__array_interface__ = {"version": 3, "shape": (length,), "typestr": "|u1", "data": (address, False)}


def mapped_array(
    address: int, mapped: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the memory of `mapped` bytes at `address` as an array. It is unmapped when the last reference to it is
    dropped.
    """
    length = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.asarray(_MappedMemory(address, mapped, length)).view(dtype).reshape(shape)
