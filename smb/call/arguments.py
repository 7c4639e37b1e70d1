"""Checks the arguments of a buffer's operations, before any request is sent."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from smb import engine
from smb.arrays import memory as arrays
from smb.arrays.dtypes import DTYPES, OPS, WIRES, Dtype
from smb.buffer_info import BufferInfo
from smb.engine import memory_of
from smb.errors import InvalidArgumentError

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


class Arguments:
    """Checks the arrays, ranges, counters, ops and wires of one buffer's calls. `info` is what was last heard of it."""

    def __init__(self, info: BufferInfo) -> None:
        self.info = info
        self.dtype: Dtype = DTYPES[info.dtype.name]
        # Kept, as they are looked up at every call that is not direct.
        self.itemsize = self.dtype.itemsize
        self.default_wire = WIRES[info.wire]
        self.size = info.nbytes // self.itemsize
        self.note: Callable[[Any], None] | None = None  # RDMA wants to know which arrays are moved

    def asked(self, call: str) -> str:
        """Return how messages name a call."""
        return f"{call} of buffer {self.info.name!r}"

    def readable(self, array: Any, call: str) -> arrays.Memory:
        """Return an array's memory, of this dtype and contiguous; a copy where it is not."""
        try:
            return arrays.readable(array, self.dtype)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self.asked(call)}: {error}") from error.__cause__

    def writable(self, out: Any, count: int, call: str) -> arrays.Memory:
        """Return the memory of an array of `count` elements that can be filled in place."""
        if self.note is not None:
            self.note(out)
        try:
            return arrays.writable(out, self.dtype, count)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self.asked(call)}: {error}") from error.__cause__

    def source(self, array: Any, call: str) -> tuple[Any, int, Any]:
        """Return (place, elements, what keeps it alive and has its shape) of an array to be read from."""
        if self.note is not None:
            self.note(array)
        if type(array) is np.ndarray and array.dtype is self.info.dtype and array.flags.c_contiguous:
            return memory_of(array), array.size, array
        memory = self.readable(array, call)
        return memory.place, memory.count, memory

    def range(self, offset: int, count: int | None, call: str) -> tuple[int, int]:
        """Return (offset, count) as Python's integers: numpy's would wrap around when they become bytes."""
        if type(offset) is type(count) is int and 0 <= offset <= self.size and 0 <= count <= self.size - offset:
            return offset, count
        try:
            offset = operator.index(offset)
            count = operator.index(count) if count is not None else self.size - offset
        except TypeError as error:
            raise InvalidArgumentError(
                f"{self.asked(call)}: {count!r} elements from element {offset!r}: these are not whole numbers"
            ) from error
        if not 0 <= offset <= self.size or not 0 <= count <= self.size - offset:
            raise InvalidArgumentError(
                f"{self.asked(call)}: {count} elements from element {offset} are not inside its {self.size} elements"
            )
        return offset, count

    def counter(self, call: str, index: int, *values: int) -> tuple[int, ...]:
        """Return index and values as Python's integers."""
        if self.dtype.name != "int64":
            raise InvalidArgumentError(f"{self.asked(call)}: it is {self.dtype.name}; counters need an int64 buffer")
        index, _ = self.range(index, 1, call)
        try:
            integers = tuple(operator.index(value) for value in values)
        except TypeError as error:
            raise InvalidArgumentError(f"{self.asked(call)}: {values} are not whole numbers") from error
        for value in integers:
            if not _LOWEST <= value <= _HIGHEST:
                raise InvalidArgumentError(f"{self.asked(call)}: {value} does not fit 64 bits")
        return index, *integers

    def wire(self, wire: str | None, call: str) -> int:
        """Return the number of a call's wire; None: the buffer's own."""
        if wire is None:
            return self.default_wire
        if wire not in WIRES:
            raise InvalidArgumentError(f"{self.asked(call)}: there is no wire {wire!r}; there are {', '.join(WIRES)}")
        if WIRES[wire] and self.dtype.name != "float32":
            raise InvalidArgumentError(
                f"{self.asked(call)}: wire={wire!r} is for float32 buffers, and it is {self.dtype.name}"
            )
        return WIRES[wire]

    def op(self, op: str, scale: float, call: str) -> int:
        """Return an op's number, where the dtype has it with this scale."""
        if type(scale) is float and self.dtype.numpy.kind not in "iu" and op in OPS:
            return OPS[op]
        if op not in OPS:
            raise InvalidArgumentError(f"{self.asked(call)}: there is no op {op!r}; there are {', '.join(OPS)}")
        try:
            accepted = engine.op_accepts(self.dtype.number, OPS[op], scale)
            # It travels as a double: beyond 2**53 an integer may have been rounded.
            accepted = accepted and (self.dtype.numpy.kind not in "iu" or int(float(scale)) == scale)
        except (TypeError, OverflowError) as error:
            raise InvalidArgumentError(f"{self.asked(call)}: scale={scale!r} is no number") from error
        if not accepted:
            raise InvalidArgumentError(
                f"{self.asked(call)}: scale={scale} is no {self.dtype.name}; integer buffers take integer scales "
                f"that a double holds exactly"
            )
        return OPS[op]
