"""What callers pass to a buffer's operations, checked before anything is asked of anybody."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from smb import engine
from smb.arrays import memory as arrays
from smb.arrays.dtypes import DTYPES, OPS, WIRES, Dtype
from smb.buffer_info import BufferInfo
from smb.engine import Place, memory_of
from smb.errors import InvalidArgumentError

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


class Arguments(Place):
    """A buffer's name, type and size, and what is asked of its arrays, ranges, counters, ops and wires."""

    def __init__(self, info: BufferInfo) -> None:
        self._info = info
        self._dtype: Dtype = DTYPES[info.dtype.name]
        # Kept, as they are looked up at every call that is not direct.
        self._itemsize = self._dtype.itemsize
        self._wire = WIRES[info.wire]
        self._size = info.nbytes // self._itemsize
        self._note: Callable[[Any], None] | None = None  # RDMA wants to know which arrays are moved

    def _asked(self, call: str) -> str:
        return f"{call} of buffer {self._info.name!r}"

    def _readable(self, array: Any, call: str) -> arrays.Memory:
        try:
            return arrays.readable(array, self._dtype)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self._asked(call)}: {error}") from error.__cause__

    def _writable(self, out: Any, count: int, call: str) -> arrays.Memory:
        if self._note is not None:
            self._note(out)
        try:
            return arrays.writable(out, self._dtype, count)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self._asked(call)}: {error}") from error.__cause__

    def _source(self, array: Any, call: str) -> tuple[Any, int, Any]:
        """Return (place, elements, what keeps it alive and has its shape) of an array to be read from."""
        if self._note is not None:
            self._note(array)
        if type(array) is np.ndarray and array.dtype is self._info.dtype and array.flags.c_contiguous:
            return memory_of(array), array.size, array
        memory = self._readable(array, call)
        return memory.place, memory.count, memory

    def _range(self, offset: int, count: int | None, call: str) -> tuple[int, int]:
        """Return (offset, count) as Python's integers: numpy's would wrap around when they become bytes."""
        if type(offset) is type(count) is int and 0 <= offset <= self._size and 0 <= count <= self._size - offset:
            return offset, count
        try:
            offset = operator.index(offset)
            count = operator.index(count) if count is not None else self._size - offset
        except TypeError as error:
            raise InvalidArgumentError(
                f"{self._asked(call)}: {count!r} elements from element {offset!r}: these are not whole numbers"
            ) from error
        if not 0 <= offset <= self._size or not 0 <= count <= self._size - offset:
            raise InvalidArgumentError(
                f"{self._asked(call)}: {count} elements from element {offset} are not inside its {self._size} elements"
            )
        return offset, count

    def _counter(self, call: str, index: int, *values: int) -> tuple[int, ...]:
        """Return index and values as Python's integers."""
        if self._dtype.name != "int64":
            raise InvalidArgumentError(f"{self._asked(call)}: it is {self._dtype.name}; counters need an int64 buffer")
        index, _ = self._range(index, 1, call)
        try:
            integers = tuple(operator.index(value) for value in values)
        except TypeError as error:
            raise InvalidArgumentError(f"{self._asked(call)}: {values} are not whole numbers") from error
        for value in integers:
            if not _LOWEST <= value <= _HIGHEST:
                raise InvalidArgumentError(f"{self._asked(call)}: {value} does not fit 64 bits")
        return index, *integers

    def _wire_of(self, wire: str, call: str) -> int:
        if wire not in WIRES:
            raise InvalidArgumentError(f"{self._asked(call)}: there is no wire {wire!r}; there are {', '.join(WIRES)}")
        if WIRES[wire] and self._dtype.name != "float32":
            raise InvalidArgumentError(
                f"{self._asked(call)}: wire={wire!r} is for float32 buffers, and it is {self._dtype.name}"
            )
        return WIRES[wire]

    def _op(self, op: str, scale: float, call: str) -> int:
        if type(scale) is float and self._dtype.numpy.kind not in "iu" and op in OPS:
            return OPS[op]
        if op not in OPS:
            raise InvalidArgumentError(f"{self._asked(call)}: there is no op {op!r}; there are {', '.join(OPS)}")
        try:
            accepted = engine.op_accepts(self._dtype.number, OPS[op], scale)
            # It travels as a double: beyond 2**53 an integer may have been rounded.
            accepted = accepted and (self._dtype.numpy.kind not in "iu" or int(float(scale)) == scale)
        except (TypeError, OverflowError) as error:
            raise InvalidArgumentError(f"{self._asked(call)}: scale={scale!r} is no number") from error
        if not accepted:
            raise InvalidArgumentError(
                f"{self._asked(call)}: scale={scale} is no {self._dtype.name}; integer buffers take integer scales "
                f"that a double holds exactly"
            )
        return OPS[op]
