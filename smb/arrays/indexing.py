"""A buffer as an array: np.asarray(buffer), buffer[i:j] and assignment to it, by the buffer's read() and write()."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from smb.arrays.dtypes import DTYPES
from smb.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing import Protocol

    class _Readable(Protocol):
        name: str
        shape: tuple[int, ...]
        dtype: np.dtype[Any]

        def read(self, offset: int = ..., count: int | None = ...) -> np.ndarray[Any, Any]: ...

        def write(self, array: Any, offset: int | None = ...) -> None: ...


class Indexed:
    """What a class with shape, dtype, read() and write() needs to be used as an array.

    An index selects elements that lie side by side: integers for the first dimensions, then at most one slice without
    a step. buffer[2], buffer[2:5], buffer[0, 1:3] and buffer[...] are such indices. Each one is one read or one write.
    """

    __slots__ = ()

    def __getitem__(self: _Readable, index: Any) -> Any:
        offset, shape = _selected(self.name, self.shape, index)
        values = self.read(offset, math.prod(shape)).reshape(shape)
        return values if shape or index is Ellipsis else values[()]

    def __setitem__(self: _Readable, index: Any, value: Any) -> None:
        offset, shape = _selected(self.name, self.shape, index)
        if not hasattr(value, "data_ptr"):  # tensors go as they are: write() knows dtypes that numpy does not
            value = _spread(self.name, self.dtype, shape, value)
        elif tuple(value.shape) != shape:
            raise InvalidArgumentError(
                f"buffer {self.name!r}: a tensor of shape {tuple(value.shape)} does not fit into {shape}; expand() it"
            )
        else:
            value = value.reshape(-1)
        self.write(value, offset)

    def __len__(self: _Readable) -> int:
        if not self.shape:
            raise TypeError(f"buffer {self.name!r} is a single element and has no length")
        return self.shape[0]

    def __bool__(self) -> bool:
        return True  # as every object without a length: `if buffer:` asks for None

    def __iter__(self: _Readable) -> Iterator[Any]:
        if not self.shape:
            raise TypeError(f"buffer {self.name!r} is a single element; there is nothing to iterate over")
        return iter(self.read())

    def __array__(self: _Readable, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(
                f"buffer {self.name!r} cannot become an array without a copy; use buffer.view() on the servers' host"
            )
        values = self.read()
        return values if dtype is None else values.astype(dtype, copy=False)


def _selected(name: str, shape: tuple[int, ...], index: Any) -> tuple[int, tuple[int, ...]]:
    """Return the first element's offset and the shape of what an index selects."""
    parts = list(index) if isinstance(index, tuple) else [index]
    while parts and (parts[-1] is Ellipsis or (isinstance(parts[-1], slice) and parts[-1] == slice(None))):
        parts.pop()  # the last dimensions are selected whole anyway
    if len(parts) > len(shape):
        raise IndexError(f"buffer {name!r} has {len(shape)} dimensions, and the index has {len(parts)}")
    offset = 0
    for at, part in enumerate(parts):
        rest = shape[at + 1 :]
        if isinstance(part, slice) and part.step in (None, 1) and at == len(parts) - 1:
            first, end, _ = part.indices(shape[at])
            return offset + first * math.prod(rest), (max(0, end - first), *rest)
        try:
            row = operator.index(part)
        except TypeError:
            raise InvalidArgumentError(
                f"buffer {name!r}: the index {reprlib.repr(index)} does not select elements that lie side by side: use "
                f"integers, then one slice without a step; or index the array that read() returns"
            ) from None
        if not -shape[at] <= row < shape[at]:
            raise IndexError(f"buffer {name!r}: index {row} is out of range for dimension {at} of {shape[at]}")
        offset += row % shape[at] * math.prod(rest)
    return offset, shape[len(parts) :]


def _spread(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], value: Any) -> np.ndarray[Any, Any]:
    """Return a value as a flat array for elements of that shape, as numpy's assignment would spread it."""
    try:
        given = np.asarray(value)
        wanted = "biufc" if dtype.kind == "c" else "biuf"  # numpy would drop imaginary parts
        of_buffers = given.dtype.kind == "V" and given.dtype in [each.numpy for each in DTYPES.values()]
        if given.dtype.kind not in wanted and not of_buffers:
            kind = "numbers" if given.dtype.kind != "c" else f"numbers of {dtype}"
            raise InvalidArgumentError(f"buffer {name!r}: values are {kind}, not {reprlib.repr(value)}")
        whole = dtype.kind in "iub"
        values = given.astype(dtype) if not whole or given.dtype.kind in "iub" else None
        if values is None or (whole and not np.array_equal(values, given)):
            raise InvalidArgumentError(
                f"buffer {name!r}: these values of {given.dtype} would change as {dtype}; convert them first, e.g. "
                f"with array.astype({dtype.name!r})"
            )
        return np.ascontiguousarray(np.broadcast_to(values, shape)).reshape(-1)
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"buffer {name!r}: the value does not fit into {shape}: {error}") from error
