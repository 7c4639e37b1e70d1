"""Named tensors inside a buffer: which name stands for which elements.

The table is in the buffer's metadata, under METADATA_KEY (keys that begin with "smb." are reserved): name -> {"dtype",
"shape", "offset"}, in the order given. Offsets are bytes from the buffer's start, multiples of 64, ascending, without
overlap. Bytes between two tensors belong to no tensor, and are 0 unless somebody wrote them. If all tensors have one
element type with arithmetic, the buffer has that type and can be added to. Otherwise it is a buffer of bytes (uint8),
which can only be read and written.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np

from smb.arrays import memory as arrays
from smb.arrays.dtypes import DTYPES, Dtype, name_of
from smb.config.limits import BYTES_MAX, DIMENSIONS_MAX
from smb.config.untrusted import is_encodable, quoted, shortened
from smb.errors import Error, InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.feedback import ErrorFeedback
    from smb.lock import Lock

Array = np.ndarray[Any, np.dtype[Any]]

METADATA_KEY = "smb.tensors"
ALIGNMENT_BYTES = 64  # a cache line; also the alignment for vector instructions, DLPack and memory-mapped readers

# Element types of a tensor: those of buffers, and further ones that only travel as bytes.
ELEMENTS: dict[str, Dtype] = DTYPES | {
    np.dtype(numpy).name: Dtype(np.dtype(numpy).name, 0, np.dtype(numpy).itemsize)
    for numpy in (
        np.complex128, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a table. `offset` is bytes from the buffer's start."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of elements; 0 if an extent is 0."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize


class TensorTable(Mapping[str, TensorInfo]):
    """Name -> TensorInfo, in the order of their offsets. Immutable."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self._infos = dict(infos)

    @classmethod
    def of(cls, tensors: Mapping[str, Any], asked: str = "tensors") -> TensorTable:
        """Lay out tensors one after the other, each at a multiple of 64 bytes.

        A value is a pair (shape, dtype), or anything that has both (a numpy array, a torch tensor of any device, a
        TensorInfo); data is not looked at. Raises InvalidArgumentError, whose message begins with `asked`.
        """
        if not isinstance(tensors, Mapping) or not tensors:
            raise InvalidArgumentError(
                f"{asked}: tensors must be a non-empty mapping of names to tensors, not {quoted(tensors)}"
            )
        infos: dict[str, TensorInfo] = {}
        end = 0
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not name:
                raise InvalidArgumentError(f"{asked}: a tensor's name must be a non-empty str, not {quoted(name)}")
            if not is_encodable(name):
                raise InvalidArgumentError(
                    f"{asked}: a tensor's name must not contain half of a surrogate pair: {quoted(name)}"
                )
            offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            infos[name] = info = TensorInfo(*_form(f"{asked}: tensor {quoted(name)}", tensor), offset)
            end = offset + info.nbytes
            if end > BYTES_MAX:
                raise InvalidArgumentError(
                    f"{asked}: tensor {quoted(name)} ends at {end} bytes, but a buffer has at most {BYTES_MAX}"
                )
        return cls(infos)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], dtype: np.dtype[Any], nbytes: int) -> TensorTable:
        """Return the table of a buffer of that dtype, bytes and metadata; empty if it has none.

        Raises Error for a table that this module cannot have written: other programs may store anything there.
        """
        stored = metadata.get(METADATA_KEY, {})
        if not isinstance(stored, Mapping):
            raise Error("its table of tensors cannot be read: it is not a JSON object")
        try:
            infos = {
                name: TensorInfo(
                    ELEMENTS[entry["dtype"]].numpy, _extents(entry["shape"]), operator.index(entry["offset"])
                )
                for name, entry in stored.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Error(f"its table of tensors cannot be read: {shortened(repr(error))}") from error
        end = 0
        for name, info in infos.items():
            if info.offset < end or info.offset % ALIGNMENT_BYTES or info.offset + info.nbytes > nbytes:
                raise Error(
                    f"its table of tensors is invalid: {quoted(name)} at byte {info.offset}, {info.nbytes} bytes, "
                    f"overlaps another, is not at a multiple of {ALIGNMENT_BYTES}, or lies outside the "
                    f"buffer's {nbytes} bytes"
                )
            if info.dtype != dtype != np.uint8:
                raise Error(
                    f"its table of tensors is invalid: {quoted(name)} is {info.dtype} but the buffer is {dtype}"
                )
            end = info.offset + info.nbytes
        return cls(infos)

    def to_metadata(self) -> dict[str, Any]:
        """Return the metadata that from_metadata parses."""
        return {
            METADATA_KEY: {
                name: {"dtype": info.dtype.name, "shape": list(info.shape), "offset": info.offset}
                for name, info in self._infos.items()
            }
        }

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the start to the last tensor's end."""
        return max((info.offset + info.nbytes for info in self._infos.values()), default=0)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The element type of a buffer that holds these tensors: their common type, if it has arithmetic, or uint8."""
        names = {info.dtype.name for info in self._infos.values()}
        only = DTYPES.get(names.pop()) if len(names) == 1 else None
        return np.dtype(np.uint8) if only is None or only.storage else only.numpy

    @property
    def size(self) -> int:
        """Elements of such a buffer."""
        return self.nbytes // self.dtype.itemsize

    def views(self, memory: Array) -> dict[str, Array]:
        """Return each tensor as a view of `memory`, a contiguous array of such a buffer's dtype and size."""
        if memory.nbytes != self.nbytes or not memory.flags.c_contiguous:
            raise InvalidArgumentError(
                f"the memory must be contiguous and of {self.nbytes} bytes, as the tensors are; it has {memory.nbytes}"
            )
        flat = memory.reshape(-1).view(np.uint8)
        return {
            name: flat[info.offset : info.offset + info.nbytes].view(info.dtype).reshape(info.shape)
            for name, info in self._infos.items()
        }

    def differences(self, other: TensorTable) -> list[str]:
        """Return the differences to another table, as "name: difference".

        Offsets count only if nothing else differs: after one tensor of another size all offsets differ.
        """
        found = [f"{name}: only in one" for name in self._infos.keys() ^ other._infos.keys()]
        moved = []
        for name in self._infos.keys() & other._infos.keys():
            ours, theirs = self[name], other[name]
            if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
                found.append(f"{name}: {_describe(ours)}, not {_describe(theirs)}")
            elif ours != theirs:
                moved.append(f"{name}: at byte {ours.offset}, not {theirs.offset}")
        return sorted(found or moved)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)


class Tensor:
    """One named tensor of a buffer. Made by Buffer.tensor.

    ```python
    model = client.create("model", tensors={"weight": ((300, 200), "float32"), "bias": ((300,), "float32")})
    model.tensor("bias").accumulate(np.ones(300, np.float32))
    ```

    Its calls block, raise and promise what the buffer's do, for its own elements. If the buffer's tensors have several
    element types, the buffer is one of bytes, and accumulate() is refused.
    """

    def __init__(self, buffer: Buffer, name: str, info: TensorInfo) -> None:
        self.buffer = buffer
        self.name = name
        self._info = info

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        return self._info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; () for a single element."""
        return self._info.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._info.size

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._info.nbytes

    @property
    def offset(self) -> int:
        """The position of its first element, in elements of the buffer."""
        return self._info.offset // self.buffer.dtype.itemsize

    def __repr__(self) -> str:
        return f"<smb.Tensor {self.name!r} {self.dtype.name}{list(self.shape)} of buffer {self.buffer.name!r}>"

    def read(self, *, out: Any = None, wire: str | None = None) -> Array:
        """Return the tensor's values, in its shape, or fill `out`: contiguous, of its dtype and size, flat or of its
        shape.

        See Buffer.read.

        ```python
        bias = client.create("model", tensors={"bias": ((3,), "float32")}).tensor("bias")
        bias.read()  # array([0., 0., 0.], dtype=float32)
        ```
        """
        result = np.empty(self.shape, self.dtype) if out is None else out
        asked = self._asked("read")
        try:
            memory = arrays.writable(result, ELEMENTS[self.dtype.name], self.size)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{asked}: {error}") from error.__cause__
        if len(self.shape) > 1:
            self._check_shape(memory, asked, "out=")
        if self.size:
            flat = self._flat(memory)
            self.buffer.read(self.offset, flat.size, out=flat, wire=wire)
        if memory.deliver is not None:
            memory.deliver()
        return cast(Array, result)

    def write(self, array: Any, *, fence: Lock | None = None, wire: str | None = None) -> None:
        """Replace the tensor's values by an array of its dtype and size, flat or of its shape. See Buffer.write.

        ```python
        bias = client.create("model", tensors={"bias": ((3,), "float32")}).tensor("bias")
        bias.write(np.ones(3, np.float32))
        bias.read()  # array([1., 1., 1.], dtype=float32)
        ```
        """
        memory = self._source(array, "write")
        if self.size:
            self.buffer.write(self._flat(memory), self.offset, fence=fence, wire=wire)

    def accumulate(
        self,
        array: Any,
        *,
        op: str = "sum",
        scale: float = 1.0,
        fetch: bool = False,
        fence: Lock | None = None,
        wire: str | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> Array | None:
        """Combine the tensor's values with an array of its size, flat or of its shape, where the memory is.

        See Buffer.accumulate. Raises InvalidArgumentError if the buffer is one of bytes.

        ```python
        bias = client.create("model", tensors={"bias": ((3,), "float32")}).tensor("bias")
        bias.accumulate(np.ones(3, np.float32), scale=0.5, fetch=True)  # array([0.5, 0.5, 0.5], dtype=float32)
        ```
        """
        if self._as_bytes:
            raise InvalidArgumentError(
                f"{self._asked('accumulate')}: the buffer's tensors have several element types, or one that can only "
                "be stored, so the buffer can only be read and written; put e.g. float32 tensors into a buffer of "
                "their own"
            )
        memory = self._source(array, "accumulate")
        flat = self._flat(memory) if self.size else np.empty(0, self.dtype)
        found = self.buffer.accumulate(
            flat, self.offset, op=op, scale=scale, fetch=fetch, fence=fence, wire=wire, feedback=feedback
        )
        return None if found is None else found.reshape(memory.shape)

    @property
    def _as_bytes(self) -> bool:
        return self.dtype != self.buffer.dtype

    def _asked(self, call: str) -> str:
        return f"{call} of tensor {self.name!r} of buffer {self.buffer.name!r}"

    def _source(self, array: Any, call: str) -> arrays.Memory:
        try:
            memory = arrays.readable(array, ELEMENTS[self.dtype.name])
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self._asked(call)}: {error}") from error
        if memory.count != self.size:
            raise InvalidArgumentError(
                f"{self._asked(call)}: the array has {memory.count} elements but the tensor has {self.size}"
            )
        self._check_shape(memory, self._asked(call), "the array")
        return memory

    def _check_shape(self, memory: arrays.Memory, asked: str, what: str) -> None:
        if len(memory.shape) > 1 and memory.shape != self.shape:
            raise InvalidArgumentError(
                f"{asked}: {what} has the shape {memory.shape} but the tensor has {self.shape}; pass that shape, "
                f"or a flat array (reshape(-1))"
            )

    def _flat(self, memory: arrays.Memory) -> Array:
        """Return memory of the tensor's elements in the type that the buffer takes, without a copy. It must not be
        empty.
        """
        return (
            arrays.as_flat(memory, DTYPES[self.buffer.dtype.name])
            if not self._as_bytes
            else arrays.as_bytes(memory, self.dtype.itemsize)
        )


def tensor_of(buffer: Buffer, table: TensorTable, name: str) -> Tensor:
    """Return the buffer's tensor of that name. Raises NotFoundError, which suggests names with a similar spelling."""
    info = table.get(name)
    if info is not None:
        return Tensor(buffer, name, info)
    if not table:
        raise NotFoundError(f"buffer {buffer.name!r} has no named tensors: it was created without tensors=")
    alike = difflib.get_close_matches(str(name), list(table), 3, 0.4) or list(table)[:3]
    raise NotFoundError(
        f"buffer {buffer.name!r} has no tensor {name!r}; it has {len(table)}: {', '.join(map(quoted, alike))}, ..."
    )


def _form(asked: str, tensor: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return (dtype, shape)."""
    if isinstance(tensor, tuple) and len(tensor) == 2:
        shape, dtype = tensor
    elif hasattr(tensor, "shape") and hasattr(tensor, "dtype"):
        shape, dtype = tensor.shape, tensor.dtype
    else:
        raise InvalidArgumentError(f"{asked}: pass an array or a pair (shape, dtype), not {quoted(tensor)}")
    try:
        extents = _extents(shape)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{asked}: invalid shape {quoted(shape)}: {error}") from error
    try:
        name = name_of(dtype)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{asked}: {error}") from None
    if name not in ELEMENTS:
        raise InvalidArgumentError(f"{asked}: unsupported dtype {quoted(name)}; supported are {', '.join(ELEMENTS)}")
    return ELEMENTS[name].numpy, extents


def _extents(shape: int | Sequence[int]) -> tuple[int, ...]:
    extents = tuple(map(operator.index, (shape,) if isinstance(shape, int) else shape))
    if len(extents) > DIMENSIONS_MAX or any(not 0 <= extent <= BYTES_MAX for extent in extents):
        raise ValueError(f"each extent must be from 0 to {BYTES_MAX}, and there may be at most {DIMENSIONS_MAX}")
    return extents


def _describe(info: TensorInfo) -> str:
    return f"{info.dtype.name}{list(info.shape)}"
