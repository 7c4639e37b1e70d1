"""Checks the arguments of a buffer's operations, before any request is sent."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from smb import engine
from smb.arrays import memory as arrays
from smb.arrays.dtypes import ATOMIC, BITS, DTYPES, OPS, WIRES, Dtype
from smb.buffer_info import BufferInfo
from smb.engine import NOWHERE, Opcode, Request, address_of, memory_of
from smb.errors import InvalidArgumentError


class Arguments:
    """Checks the arrays, ranges, counters, ops and wires of one buffer's calls. `info` is the buffer's last known
    description.
    """

    def __init__(self, info: BufferInfo) -> None:
        self.info = info
        self.dtype: Dtype = DTYPES[info.dtype.name]
        # Cached: every call that is not direct needs these values.
        self.itemsize = self.dtype.itemsize
        self.default_wire = WIRES[info.wire]
        self.size = info.nbytes // self.itemsize
        self._any_scale = not self.dtype.storage and self.dtype.numpy.kind not in "iu"
        self.note: Callable[[Any], None] | None = None  # tells RDMA which arrays are transferred

    def asked(self, call: str) -> str:
        """Return the name of a call for messages."""
        return f"{call} of buffer {self.info.name!r}"

    def asked_by(self, request: Request) -> str:
        """Return the name for messages of the call that made this request."""
        return self.asked(request.opcode.name.lower())

    def elements(self, request: Request) -> range:
        """Return the elements of a request, from its first to its last."""
        return range(request.offset // self.itemsize, (request.offset + request.nbytes) // self.itemsize)

    def readable(self, array: Any, call: str) -> arrays.Memory:
        """Return the memory of an array of this dtype, copied if the array is not contiguous."""
        try:
            return arrays.readable(array, self.dtype)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self.asked(call)}: {error}") from error.__cause__

    def writable(self, out: Any, count: int, call: str, shape: tuple[int, ...] | None = None) -> arrays.Memory:
        """Return the memory of an array of `count` elements that can be filled in place. With `shape`, the array is
        flat or has that shape.
        """
        if self.note is not None:
            self.note(out)
        try:
            memory = arrays.writable(out, self.dtype, count)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self.asked(call)}: {error}") from error.__cause__
        if shape is not None and len(memory.shape) > 1 and memory.shape != shape:
            raise InvalidArgumentError(
                f"{self.asked(call)}: out= has the shape {memory.shape}; pass the shape {shape}, or a flat array"
            )
        if shape is None and count == self.size and len(self.info.shape) > 1:
            self.check_shape(memory.shape, call, "out=")
        return memory

    def source(self, array: Any, offset: int | None, call: str) -> tuple[Any, int, int, Any]:
        """Return (pointer, first element, count, owner of the memory) of an array to read from.

        The array stands for the elements from `offset` on, or for the whole buffer if `offset` is None. The owner keeps
        the memory alive and has the array's shape.
        """
        if self.note is not None:
            self.note(array)
        if type(array) is np.ndarray and array.dtype is self.info.dtype and array.flags.c_contiguous:
            return memory_of(array), *self.part(array.shape, array.size, offset, call), array
        memory = self.readable(array, call)
        return memory.pointer, *self.part(memory.shape, memory.count, offset, call), memory

    def part(self, shape: tuple[int, ...], count: int, offset: int | None, call: str) -> tuple[int, int]:
        """Return (offset, count) of the elements that an array of this shape stands for."""
        if shape != self.info.shape:
            self.check_shape(shape, call, "the array")
        if offset is not None:
            return self.range(offset, count, call)
        if count != self.size:
            raise InvalidArgumentError(
                f"{self.asked(call)}: the array has {count} elements but the buffer has {self.size}; pass all of them, "
                f"or pass offset= with the first element that a flat array is for"
            )
        return 0, count

    def check_shape(self, shape: tuple[int, ...], call: str, what: str) -> None:
        """Raise InvalidArgumentError for an array of two or more dimensions whose shape is not the buffer's.

        As flat elements, the rows of such an array would lie elsewhere than the caller expects.
        """
        if len(shape) > 1 and shape != self.info.shape:
            raise InvalidArgumentError(
                f"{self.asked(call)}: {what} has the shape {shape} but the buffer has {self.info.shape}; pass that "
                f"shape, or a flat array (reshape(-1))"
            )

    def range(self, offset: int, count: int | None, call: str) -> tuple[int, int]:
        """Return (offset, count) as Python integers: numpy integers could overflow when they are converted to bytes."""
        if type(offset) is type(count) is int and 0 <= offset <= self.size and 0 <= count <= self.size - offset:
            return offset, count
        try:
            offset = operator.index(offset)
            count = operator.index(count) if count is not None else self.size - offset
        except TypeError as error:
            raise InvalidArgumentError(
                f"{self.asked(call)}: offset and count must be integers, not {offset!r} and {count!r}"
            ) from error
        if not 0 <= offset <= self.size or not 0 <= count <= self.size - offset:
            raise InvalidArgumentError(
                f"{self.asked(call)}: {count} elements from element {offset} are not inside the buffer's {self.size} "
                "elements"
            )
        return offset, count

    def indices(self, indices: Any, call: str, *, rows: bool) -> tuple[Any, int]:
        """Return (flat int64 array of the indices of a sparse call, elements of each): 1, or the length of a row."""
        try:
            memory = arrays.readable(indices, DTYPES["int64"])
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self.asked(call)}: indices: {error}; pass int64") from error.__cause__
        if rows and not self.info.shape:
            raise InvalidArgumentError(f"{self.asked(call)}: the buffer is a single element and has no rows")
        count = self.info.shape[0] if rows else self.size
        where = arrays.as_flat(memory, DTYPES["int64"])
        if len(memory.shape) != 1 or (where.size and not 0 <= int(where.min()) <= int(where.max()) < count):
            what = "rows" if rows else "elements"
            raise InvalidArgumentError(
                f"{self.asked(call)}: indices must be a flat array of numbers of {what}, between 0 and {count - 1}"
            )
        return where, self.size // count if count else 0

    def atomic(self, call: str, index: int, *values: float) -> tuple[int, ...]:
        """Return the index and the values of fetch_add and compare_swap. A value is an element's bits, in the low bytes
        of a word.
        """
        dtype = self.dtype
        if dtype.name not in ATOMIC:
            raise InvalidArgumentError(
                f"{self.asked(call)}: it needs a buffer of {', '.join(ATOMIC[:-1])} or {ATOMIC[-1]}, and this one is "
                f"{dtype.name}"
            )
        index, _ = self.range(index, 1, call)
        whole = dtype.numpy.kind in "iu"
        try:
            numbers = [operator.index(value) if whole else value for value in values]  # type: ignore[arg-type]
        except TypeError as error:
            raise InvalidArgumentError(f"{self.asked(call)}: values must be integers, not {values}") from error
        elements = [arrays.scalar(number, dtype) for number in numbers]
        for number, element in zip(numbers, elements, strict=True):
            if element is None:
                raise InvalidArgumentError(
                    f"{self.asked(call)}: {number} does not fit into {8 * self.itemsize} bits of {dtype.name}"
                    if whole
                    else f"{self.asked(call)}: values must be numbers, not {number!r}"
                )
        words = [int.from_bytes(element.tobytes(), "little") for element in elements if element is not None]
        return index, *words

    def number(self, bits: int) -> Any:
        """Return an element, given as its bits in the low bytes of a word, as Python's number."""
        return np.frombuffer(bits.to_bytes(8, "little"), self.dtype.numpy, 1)[0].item()

    def wire(self, wire: str | None, call: str) -> int:
        """Return the number of a call's wire. None stands for the buffer's own wire."""
        if wire is None:
            return self.default_wire
        if wire not in WIRES:
            raise InvalidArgumentError(f"{self.asked(call)}: unknown wire {wire!r}; known are {', '.join(WIRES)}")
        if WIRES[wire] and self.dtype.name != "float32":
            raise InvalidArgumentError(
                f"{self.asked(call)}: wire={wire!r} is for float32 buffers, and this one is {self.dtype.name}"
            )
        return WIRES[wire]

    def op(self, op: str, scale: float, call: str) -> int:
        """Return an op's number. Raises InvalidArgumentError if the dtype does not have the op with this scale."""
        if type(scale) is float and self._any_scale and op in OPS and op not in BITS:
            return OPS[op]
        if op not in OPS:
            raise InvalidArgumentError(f"{self.asked(call)}: unknown op {op!r}; known are {', '.join(OPS)}")
        if np.ma.is_masked(scale):
            raise InvalidArgumentError(f"{self.asked(call)}: scale is a masked value; pass a number")
        try:
            accepted = engine.op_accepts(self.dtype.number, OPS[op], scale)
            # The scale travels as a double, so an integer beyond 2**53 may have been rounded.
            accepted = accepted and (self.dtype.numpy.kind not in "iu" or int(float(scale)) == scale)
        except (
            TypeError,
            ValueError,
            OverflowError,
            RuntimeError,
        ) as error:  # RuntimeError: raised by a tensor without memory
            raise InvalidArgumentError(f"{self.asked(call)}: scale must be a number, not {scale!r}") from error
        if not accepted and self.dtype.storage and (op not in BITS or self.dtype.numpy.kind not in "iub"):
            bits = ", 'band', 'bor' and 'bxor'" if self.dtype.numpy.kind in "iub" else ""
            raise InvalidArgumentError(
                f"{self.asked(call)}: there is no arithmetic on {self.dtype.name}, which is for storage; it takes "
                f"op='replace'{bits} with scale=1, and op={op!r} with scale={scale} was asked"
            )
        if not accepted and op in BITS:
            raise InvalidArgumentError(
                f"{self.asked(call)}: op={op!r} combines the bits of whole numbers and bool, with scale=1; this buffer "
                f"is {self.dtype.name}, and scale={scale} was asked"
            )
        if not accepted:
            raise InvalidArgumentError(
                f"{self.asked(call)}: scale={scale} does not fit {self.dtype.name}; integer buffers take integer "
                f"scales that a double holds exactly"
            )
        return OPS[op]

    def sink(self, offset: int, count: int | None, out: Any) -> tuple[int, int, Any, arrays.Memory]:
        """Return (offset, count, array to return, its memory) of a read."""
        whole = offset == 0 and count is None
        offset, count = self.range(offset, self.size if whole else count, "read")
        result = np.empty(self.info.shape if whole else (count,), self.info.dtype) if out is None else out
        return offset, count, result, self.writable(result, count, "read")

    def addition(
        self, array: Any, offset: int | None, op: str, scale: float, fetch: bool, out: Any, wire: str | None
    ) -> tuple[Request, Any, Any, Callable[[], object] | None]:
        """Return (request of an accumulate, array to return, owner of the array's memory, function to call then)."""
        number = self.op(op, scale, "accumulate")
        wires = self.wire(wire, "accumulate")
        pointer, offset, count, owner = self.source(array, offset, "accumulate")
        result, sink, deliver = None, NOWHERE, None
        if fetch or out is not None:
            result, sink, deliver = self.fetched(owner.shape, count, fetch, out)
        start, nbytes = offset * self.itemsize, count * self.itemsize
        if out is not None and abs(address_of(sink) - address_of(pointer)) < nbytes:
            # After a broken connection the answer would be sent in place of the array.
            raise InvalidArgumentError(f"{self.asked('accumulate')}: out= must not share memory with the array")
        request = Request(Opcode.ACCUMULATE, start, nbytes, pointer, sink, op=number, scale=scale, wire=wires)
        return request, result, owner, deliver

    def fetched(
        self, shape: tuple[int, ...], count: int, fetch: bool, out: Any
    ) -> tuple[Any, Any, Callable[[], object] | None]:
        """Return (array to return, its pointer, its `deliver`) for the values that fetch=True brings back."""
        if out is not None and not fetch:
            raise InvalidArgumentError(f"{self.asked('accumulate')}: out= needs fetch=True")
        if not fetch:
            return None, NOWHERE, None
        result = np.empty(shape, self.info.dtype) if out is None else out
        memory = self.writable(result, count, "accumulate")
        return result, memory.pointer, memory.deliver
