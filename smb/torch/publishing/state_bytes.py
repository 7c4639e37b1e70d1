"""A state_dict, or a part of one, in this process's memory: as bytes, and as tensors that are views of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch

from smb.engine import Runs, address_of, memory_at, memory_of
from smb.errors import InvalidArgumentError, NotFoundError
from smb.spi import versions_of
from smb.tensors import ALIGNMENT_BYTES, TensorInfo
from smb.torch.page_lock import page_lock
from smb.torch.tensor_slices import TensorSlice, local_of, runs_of, shape_of, sharding_of
from smb.torch.tensor_values import lasting, plain

if TYPE_CHECKING:
    from smb.buffer import Buffer

ReadBytes: TypeAlias = "Callable[[int, np.ndarray[Any, Any]], None]"  # (first byte in the buffer, destination)
Allocate: TypeAlias = "Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]]"  # (bytes) -> memory


class _StateMemory:
    """Bytes that hold a state, or a part of one."""

    # A generation's sum is over the whole state. Parts have no sum, but each part of a delta has a checksum.
    is_whole: ClassVar[bool]
    bytes: np.ndarray[Any, np.dtype[np.uint8]]
    tensors: dict[str, torch.Tensor]
    # What sharding_of returns for each tensor, if a rank must always have the same elements of it.
    shardings: Mapping[str, object] = {}
    _name: str  # of the state's buffer
    # Deltas compare two states bit for bit, in elements of `width` bytes. The width is the size of the smallest element
    # of any tensor (1, 2, 4 or 8), so that an element of a delta never covers two elements of a tensor.
    width: int
    count: int  # elements of that width in the whole state
    _times = 0  # number of copies between this memory and a device so far, counted up to 2

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let CUDA copy from and to this memory directly (page_lock.py) if tensors on a device use it for the second
        time. Locking takes longer than a single copy.
        """
        if self._times > 1 or all(tensor.device.type == "cpu" for tensor in tensors):
            return
        self._times += 1
        unlock = page_lock(self.bytes) if self._times > 1 else None
        if unlock is not None:
            weakref.finalize(self.bytes, unlock)

    def bytes_of(self, names: Iterable[str]) -> int:
        """Return the size of these tensors, as far as they lie in this memory."""
        return sum(self.tensors[name].nbytes for name in names if name in self.tensors)

    def take(self, given: Mapping[str, torch.Tensor]) -> int:
        """Copy tensors of the state into this memory, as far as they lie in it. Return the number of bytes."""
        self.hold(given.values())
        with torch.no_grad():
            for name, tensor in given.items():
                if name in self.tensors:
                    self.tensors[name].copy_(self._local(name, tensor))
        return self.bytes_of(given)

    def host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's values, which `take` also accepts, in host memory as they lie in this memory. A tensor
        that is like this already is not copied.
        """
        return plain(self._local(name, tensor).to("cpu", self.tensors[name].dtype))

    def _local(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        here, wanted, sharding = local_of(tensor), self.tensors[name].shape, sharding_of(tensor)
        if here.shape != wanted or self.shardings.get(name, sharding) != sharding:
            raise InvalidArgumentError(
                f"publish {self._name!r}: this rank has {tuple(here.shape)} of {name}, and had {tuple(wanted)} at the "
                f"first time, or had other elements; shard the state as it was then"
            )
        return here


class StateBytes(_StateMemory):
    """A whole state: as bytes, padded to whole words, and as elements of its buffer."""

    is_whole = True

    def __init__(self, buffer: Buffer, allocate: Allocate | None = None) -> None:
        """`allocate` gives the memory, zeros or a state that another process keeps there."""
        self._name = buffer.name
        self.nbytes = buffer.nbytes
        padded = -(-max(buffer.nbytes, 1) // 8) * 8
        # Bytes between tensors are zero, too.
        self.bytes = np.zeros(padded, np.uint8) if allocate is None else allocate(padded)
        self.elements = self.bytes[: buffer.nbytes].view(buffer.dtype)
        self.width, self.count = _units(buffer.table)
        self.runs: Runs = np.array([[0, 0, self.count]])  # of the state's elements in `bytes`
        self._infos = buffer.table
        self.tensors = {
            name: as_torch(self.bytes[info.offset : info.offset + info.nbytes], info.dtype, info.shape)
            for name, info in self._infos.items()
        }

    def runs_of(self, name: str) -> Runs:
        """Return which elements of the state lie where in a tensor."""
        info = self._infos[name]
        return np.array([[info.offset // self.width, 0, info.nbytes // self.width]])

    def read(self, buffer: Buffer, version: int | None = None) -> int:
        """Read a version (default: the latest) from the buffer, or from a mirror of it. Return the version's number."""
        if buffer.nbytes != self.nbytes:  # otherwise the read would write beyond this memory
            raise NotFoundError(
                f"{buffer.name!r} has {buffer.nbytes} bytes, not {self.nbytes}: another state has taken its name; "
                f"follow it again"
            )
        return versions_of(buffer).read(0, buffer.size, memory_of(self.elements), 0, version)

    def read_one(self, name: str, read: ReadBytes) -> torch.Tensor:
        """Read one tensor into new memory."""
        info = self._infos[name]
        memory = np.empty(info.nbytes, np.uint8)
        if info.nbytes:
            read(info.offset, memory)
        return as_torch(memory, info.dtype, info.shape)


class PartBytes(_StateMemory):
    """Parts of a state's tensors, and where they lie in its buffer."""

    is_whole = False

    def __init__(self, buffer: Buffer, slices: Mapping[str, TensorSlice]) -> None:
        table = buffer.table
        self.tensors = {}
        self._name = buffer.name
        self.width, self.count = _units(table)
        self._table = table
        self._slices: dict[str, slice] = {}  # by tensor: its place in `bytes`
        # By tensor: (first byte in the buffer, bytes, first byte in the part).
        self._runs: dict[str, list[tuple[int, int, int]]] = {}
        end = 0
        for name, part in slices.items():
            itemsize = table[name].dtype.itemsize
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            end = start + math.prod(shape_of(part)) * itemsize
            self._slices[name] = slice(start, end)
            self._runs[name] = [
                (table[name].offset + run.there * itemsize, run.count * itemsize, run.here * itemsize)
                for run in runs_of(part, table[name].shape)
            ]
        self.nbytes: int = sum(part.stop - part.start for part in self._slices.values())
        self.bytes = np.zeros(end, np.uint8)
        for name, part in slices.items():
            self.tensors[name] = as_torch(self.bytes[self._slices[name]], table[name].dtype, shape_of(part))

    def runs_of(self, name: str) -> Runs:
        """Return which elements of the state lie where in the part of a tensor."""
        runs = np.array(self._runs[name], np.int64).reshape(-1, 3)[:, [0, 2, 1]] // self.width
        return np.ascontiguousarray(runs[np.argsort(runs[:, 0])])

    @cached_property
    def runs(self) -> Runs:
        """Which elements of the state lie where in `bytes`."""
        found = [np.empty((0, 3), np.int64)]
        for name, part in self._slices.items():
            found.append(self.runs_of(name) + np.array([0, part.start // self.width, 0]))
        runs = np.concatenate(found)
        return np.ascontiguousarray(runs[np.argsort(runs[:, 0])])

    @property
    def ranges(self) -> Iterator[tuple[int, int, Any]]:
        """Yield (first byte in the buffer, bytes, local memory) for each contiguous piece."""
        base = address_of(memory_of(self.bytes)) if self.bytes.size else 0
        for name, runs in self._runs.items():
            for there, nbytes, here in runs:
                yield there, nbytes, memory_at(base + self._slices[name].start + here)

    def read(self, buffer: Buffer, version: int | None = None) -> int:
        """Read all parts from one version (default: the latest) of the buffer. Return the version's number."""
        itemsize = buffer.dtype.itemsize
        ranges = [(there // itemsize, nbytes // itemsize, memory) for there, nbytes, memory in self.ranges]
        return versions_of(buffer).read_ranges(ranges, 0, version)

    def read_one(self, name: str, read: ReadBytes) -> torch.Tensor:
        """Read the part of one tensor into new memory."""
        tensor = self.tensors[name]
        memory = np.empty(tensor.nbytes, np.uint8)
        for there, nbytes, here in self._runs[name]:
            read(there, memory[here : here + nbytes])
        return as_torch(memory, self._table[name].dtype, tuple(tensor.shape))


def _units(table: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """Return the width of a state's elements for deltas, and their number."""
    infos = [info for info in table.values() if info.nbytes]
    sizes = [info.dtype.itemsize for info in infos]
    width = min((size for size in sizes if size in (2, 4, 8)), default=1) if min(sizes, default=1) > 1 else 1
    return width, max((info.offset + info.nbytes for info in infos), default=0) // width


@lasting
def as_torch(memory: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Return bytes as a tensor, without a copy."""
    kind = getattr(torch, dtype.name)
    return (
        torch.from_numpy(memory).view(kind).view(shape) if memory.size else torch.empty(shape, dtype=kind, device="cpu")
    )
