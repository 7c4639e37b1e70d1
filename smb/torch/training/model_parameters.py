"""A model's trained parameters in their own memory: on any device, float32, bfloat16 or float16.

Schemes see the parameters as one float32 vector, laid out by smb/tensors.py: each tensor at a multiple of 64 bytes,
with zeros between them. So the group's buffer has each tensor by its name. Parameters are copied only when a scheme
exchanges, and then block by block (staging.py). Only the scheme uses host memory that grows with the model.

Low precision. The group's values are float32. A scheme keeps the values that it has put into the parameters. A delta is
the parameter less the *rounded* base, so that a rounding error does not count as a change by the optimizer. Elastic
schemes subtract amounts that may be smaller than the parameters' type can show. For these schemes `keep_exact` keeps
the rounding error beside each parameter, in its type and on its device.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from smb.errors import InvalidArgumentError
from smb.tensors import TensorTable
from smb.torch.page_lock import page_lock
from smb.torch.tensor_slices import is_sharded
from smb.torch.tensor_values import is_expanded, lasting
from smb.torch.training.staging import Staging
from smb.train.parameters import BLOCK_ELEMENTS, ArrayParameters, Copies, Parameters, Values, scratch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 1 << 19


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's place in a vector. `names` are all its names in the state_dict (tied tensors have several; the first
    name is in the table). `offset` and `count` are in elements.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    offset: int

    @property
    def count(self) -> int:
        return self.tensor.numel()

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """Return this tensor's part of a vector, in the tensor's shape; a view."""
        return vector[self.offset : self.offset + self.count].view(self.tensor.shape)


@dataclass(frozen=True)
class _Part:
    """Elements [low, high) of a tensor. They lie in a block from `at` on."""

    entry: int
    low: int
    high: int
    at: int

    @property
    def here(self) -> slice:
        return slice(self.at, self.at + self.high - self.low)


@dataclass(frozen=True)
class VectorSlice:
    """Elements [begin, begin + count) of the vector, and the tensors in this range. `gaps` belong to no tensor and are
    zero.
    """

    begin: int
    count: int
    parts: tuple[_Part, ...]
    gaps: tuple[slice, ...]

    @property
    def here(self) -> slice:
        """The slice's place in the vector."""
        return slice(self.begin, self.begin + self.count)


_HOST = torch.device("cpu")
# The arrays that smb.torch.place has made, by address, as long as they live: a tensor in one keeps it alive.
_placements: weakref.WeakValueDictionary[int, Values] = weakref.WeakValueDictionary()
_Found: TypeAlias = "tuple[_Part, torch.Tensor, torch.Tensor | None]"  # values, and what rounding left out of them
_Change: TypeAlias = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], None]


class ModelParameters(Parameters):
    """The trained parameters, for a scheme. `verify` is called before an exchange, which raises its errors."""

    table: TensorTable

    def __init__(
        self, tensors: Mapping[tuple[str, ...], torch.Tensor], verify: Callable[[], None] | None = None
    ) -> None:
        """Raises InvalidArgumentError for parameters that can't be shared."""
        for names, tensor in tensors.items():
            check(names[0], tensor)
        self.verify = verify
        self.copies: Copies | None = Copies()
        self.set_tensors(tensors)

    def set_tensors(self, tensors: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        self.table, self.entries = lay_out(tensors)
        self.size = self.table.size
        self._blocks = self.blocks_of(0, self.size)
        self._staging = Staging(self.size)
        self._scratch: list[torch.Tensor] = []
        self._residuals: dict[int, torch.Tensor] = {}  # entry -> what rounding left out, in the parameter's type
        self._exact = False
        self._locked: set[int] = set()  # addresses of arrays from which devices copy directly
        self._in_place: ArrayParameters | None = None  # the array that has all of them, as of the last look
        self._on_device: bool | None = None  # whether deltas are computed on the device; None: not measured yet

    def blocks_of(self, begin: int, end: int) -> tuple[VectorSlice, ...]:
        """Return the blocks in which a range of the vector is copied."""
        return tuple(_blocks_of(self.entries, begin, end))

    @property
    def array(self) -> Values | None:
        """The array in which smb.torch.place has put the parameters, if they still lie there. Looks at each tensor."""
        placed = self._placed()
        return None if placed is None else placed.array

    @property
    def placed(self) -> bool:
        """True if smb.torch.place has put them into one array, and they lay there at the last exchange."""
        return self._in_place is not None

    def _placed(self) -> ArrayParameters | None:
        address = address_of(self.entries)
        if address is None:
            self._in_place = None
        elif self._in_place is None or self._in_place.array.ctypes.data != address:
            self._in_place = ArrayParameters(array_of(self.entries, self.size), "placed parameters")
        return self._in_place

    def blocks(self) -> Iterator[tuple[int, Values]]:
        """Yield the values, including what keep_exact kept: copies, or parts of the array if they lie in one."""
        if self.verify is not None:
            self.verify()
        if (placed := self._placed()) is not None:
            yield from placed.blocks()
            return
        for block, found, room in self._walk(self._blocks):
            for part, values, residual in found:
                room[part.here].copy_(values)
                if residual is not None:
                    room[part.here].add_(residual)
            yield block.begin, room[: block.count].numpy()

    def deltas(self, base: Values, out: Values | None = None) -> Iterator[tuple[int, Values]]:
        """Yield the optimizer's changes: parameter - base, both rounded to the parameter's type."""
        if self.verify is not None:
            self.verify()
        if (placed := self._placed()) is not None:
            yield from placed.deltas(base, out)
        else:
            yield from self.deltas_of(self._blocks, base, out)

    def deltas_of(
        self, blocks: Sequence[VectorSlice], base: Values, out: Values | None = None
    ) -> Iterator[tuple[int, Values]]:
        """Yield the changes in some blocks."""
        if self._on_device is None and self._devices:
            self._on_device = self._device_is_faster(base)
        yield from self._deltas(base, on_device=bool(self._on_device), blocks=blocks, out=out)

    def _device_is_faster(self, base: Values) -> bool:
        """Compute one block on the host and one on the device, and compare the times. Both are computed once before,
        because the first time takes memory. The results are the same bit for bit.
        """
        seconds = []
        for on_device in (False, True) * 2:
            for turn in range(2):
                self._staging.wait(turn)
            deltas = self._deltas(base, on_device=on_device)
            if len(self._blocks) > 1:
                next(deltas)  # the first call fetches two blocks, each later call one
            started = time.perf_counter()
            next(deltas, None)
            seconds.append(time.perf_counter() - started)
        return seconds[3] < seconds[2]

    def _deltas(
        self,
        base: Values,
        *,
        on_device: bool,
        blocks: Sequence[VectorSlice] | None = None,
        out: Values | None = None,
    ) -> Iterator[tuple[int, Values]]:
        whole, result = torch.from_numpy(base), None if out is None else torch.from_numpy(out)
        for block, found, room in self._walk(
            self._blocks if blocks is None else blocks,
            residuals=False,
            base=whole if on_device else None,
            out=result,
        ):
            ours = whole[block.here]
            for part, values, _ in found:
                before = ours[part.here]
                if on_device and self.entries[part.entry].tensor.device != _HOST:
                    room[part.here].copy_(values)
                elif values.dtype == torch.float32:
                    torch.sub(values, before, out=room[part.here])
                else:
                    _narrow_delta(values, before, room[part.here])
            yield block.begin, room[: block.count].numpy()

    def fill(self, values: Values) -> None:
        """Copy the values, rounded to nearest, ties to even."""
        if (placed := self._placed()) is not None:
            placed.fill(values)
        else:
            self.fill_blocks(self._blocks, values)

    def fill_blocks(self, blocks: Sequence[VectorSlice], values: Values) -> None:
        """Copy some blocks of `values`, (n,)."""
        self._put(blocks, torch.from_numpy(values), _set)

    def subtract(self, difference: Values) -> None:
        """Subtract on the parameters' own device, in float32."""
        self._put(self._blocks, torch.from_numpy(difference), _subtract)

    def keep_exact(self) -> None:
        """Keep what rounding leaves out. It costs nothing for float32."""
        self._exact = True

    def part(self, offset: int, count: int) -> ModelParameters:
        """Return the tensors in that range. They share memory for blocks with these parameters. The range must not cut
        a tensor.
        """
        inside = {entry.names: entry.tensor for entry in self.entries if offset <= entry.offset < offset + count}
        part = ModelParameters(inside, self.verify)
        part.origin, part.copies = offset, self.copies
        part._staging, part._scratch = self._staging, self._scratch_memory()
        part._locked = self._locked
        return part

    def hold(self, values: Values) -> None:
        """Let the device copy from this array directly, if it can: see page_lock.py."""
        if not self._devices:
            return
        unlock = page_lock(values)
        if unlock is not None:
            address = int(values.ctypes.data)
            self._locked.add(address)
            weakref.finalize(values, _let_go, self._locked, address, unlock)

    # ---- inside

    @lasting
    def _scratch_memory(self) -> list[torch.Tensor]:
        if not self._scratch:
            self._scratch = [torch.from_numpy(memory) for memory in scratch(self.size)]
        return self._scratch

    @property
    def _devices(self) -> set[torch.device]:
        return {entry.tensor.device for entry in self.entries} - {_HOST}

    def _walk(
        self,
        blocks: Sequence[VectorSlice],
        *,
        residuals: bool = True,
        base: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Iterator[tuple[VectorSlice, list[_Found], torch.Tensor]]:
        """Yield each block, its tensors' values in host memory, and room for the float32 values that are made of them:
        the block's part of `out` if that is given. Meanwhile the next block is fetched. With `base`, values on a device
        are fetched as their delta, in float32.
        """
        if not blocks:
            return  # a rank without any part
        if out is None:
            self._scratch_memory()
        flat = _Flat(self.entries)
        self._staging.begin(self._devices)
        coming: list[list[_Found]] = []

        def fetch(turn: int) -> None:
            found = []
            self._staging.wait(turn)  # work before this walk may still copy from the room, on another device
            for part in blocks[turn].parts:
                residual = self._residuals.get(part.entry) if residuals else None
                before = None if base is None else base[blocks[turn].here][part.here]
                found.append(self._fetch(turn, part, flat, residual, before))
            coming.append(found)

        fetch(0)
        for turn, block in enumerate(blocks):
            if turn + 1 < len(blocks):
                fetch(turn + 1)
            self._staging.wait(turn)
            room = self._scratch[turn % len(self._scratch)] if out is None else out[block.here]
            for gap in block.gaps:
                room[gap] = 0.0
            yield block, coming.pop(0), room

    def _fetch(
        self, turn: int, part: _Part, flat: _Flat, residual: torch.Tensor | None, before: torch.Tensor | None
    ) -> _Found:
        device, count = self.entries[part.entry].tensor.device, part.high - part.low
        rest = None if residual is None else residual[part.low : part.high]
        if device == _HOST:
            return part, flat.part(part), rest
        with self._staging.on(device, turn):
            values = flat.part(part)
            if before is not None:
                rounded = self._staging.room(turn, part.at, count, values.dtype)
                rounded.copy_(before)
                there = rounded.to(device, non_blocking=True)
                # The same place, used in order after `rounded`.
                room = self._staging.room(turn, part.at, count, torch.float32)
                room.copy_(values.float() - there.float(), non_blocking=True)
                return part, room, None
            # A value of 16 bits and its residual lie side by side in the place of one of 32 bits.
            room = self._staging.room(turn, part.at, count if rest is None else 2 * count, values.dtype)
            room[:count].copy_(values, non_blocking=True)
            if rest is not None:
                room[count:].copy_(rest, non_blocking=True)
        return part, room[:count], None if rest is None else room[count:]

    def _put(self, blocks: Sequence[VectorSlice], vector: torch.Tensor, change: _Change) -> None:
        """Change the parameters by a float32 vector, block by block, each on its own device."""
        staging = self._staging
        straight = vector.data_ptr() in self._locked
        last = {part.entry: part for block in blocks for part in block.parts}
        for number in last:
            self._residual(number)  # made before `begin`, so that later work waits for it
        staging.begin(self._devices)
        try:
            self._put_blocks(blocks, vector, change, last, straight)
        finally:
            staging.end(self._devices)
            if straight:  # the caller may change the vector as soon as this returns
                for turn in range(2):
                    staging.wait(turn)

    def _put_blocks(
        self,
        blocks: Sequence[VectorSlice],
        vector: torch.Tensor,
        change: _Change,
        last: Mapping[int, _Part],
        straight: bool,
    ) -> None:
        staging, flat = self._staging, _Flat(self.entries)
        for turn, block in enumerate(blocks):
            staging.wait(turn)
            for part in block.parts:
                ends = last[part.entry] is part
                tensor, given = self.entries[part.entry].tensor, vector[block.here][part.here]
                residual = self._residual(part.entry)
                rest = None if residual is None else residual[part.low : part.high]
                if tensor.device == _HOST:
                    change(flat.part(part), given, rest)
                    flat.changed(part, ends=ends)
                    continue
                narrow = change is _set and rest is None
                # Rounding first halves the copied bytes.
                if straight and not (narrow and tensor.dtype != torch.float32):
                    room = given
                else:
                    room = staging.room(turn, part.at, len(given), tensor.dtype if narrow else torch.float32)
                    room.copy_(given)
                with staging.on(tensor.device, turn):
                    change(flat.part(part), room if narrow else room.to(tensor.device, non_blocking=True), rest)
                    flat.changed(part, ends=ends)

    @lasting
    def _residual(self, entry: int) -> torch.Tensor | None:
        tensor = self.entries[entry].tensor
        if not self._exact or tensor.dtype == torch.float32:
            return None
        if entry not in self._residuals:
            self._residuals[entry] = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return self._residuals[entry]


def _narrow_delta(values: torch.Tensor, base: torch.Tensor, out: torch.Tensor) -> None:
    """Set `out` to values - base, both rounded to the type of `values`. Computes in blocks, because the temporary
    memory of a whole vector would cost more than the arithmetic.
    """
    for at in range(0, len(values), _BLOCK):
        here = slice(at, at + _BLOCK)
        torch.sub(values[here].float(), base[here].to(values.dtype).float(), out=out[here])


def _let_go(locked: set[int], address: int, unlock: Callable[[], object]) -> None:
    locked.discard(address)
    unlock()


class _Flat:
    """Tensors as one-dimensional views. A tensor that is not contiguous is copied while its parts are used."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        self._entries = entries
        self._copied = -1
        self._copy: torch.Tensor | None = None

    def part(self, part: _Part) -> torch.Tensor:
        tensor = self._entries[part.entry].tensor.detach()
        if tensor.is_contiguous():
            return tensor.view(-1)[part.low : part.high]
        if self._copied != part.entry or self._copy is None:
            self._copied, self._copy = part.entry, tensor.reshape(-1)
        return self._copy[part.low : part.high]

    def changed(self, part: _Part, *, ends: bool) -> None:
        """Note that the result of `part` was changed; `ends`: no further part of this tensor will be."""
        entry = self._entries[part.entry]
        if self._copied == part.entry and self._copy is not None and ends:
            entry.tensor.detach().copy_(self._copy.view(entry.tensor.shape))
            self._copied, self._copy = -1, None


def _set(target: torch.Tensor, given: torch.Tensor, residual: torch.Tensor | None) -> None:
    target.copy_(given, non_blocking=True)
    if residual is not None:
        residual.copy_(given - target.float())


def _subtract(target: torch.Tensor, given: torch.Tensor, residual: torch.Tensor | None) -> None:
    if target.dtype == torch.float32:
        target.sub_(given)
        return
    exact = target.float() - given if residual is None else target.float() + residual.float() - given
    target.copy_(exact)
    if residual is not None:
        residual.copy_(exact - target.float())


def lay_out(tensors: Mapping[tuple[str, ...], torch.Tensor]) -> tuple[TensorTable, tuple[TensorEntry, ...]]:
    """Lay tensors out as float32, under their first names."""
    if not tensors:
        return TensorTable({}), ()
    for names, tensor in tensors.items():
        if is_expanded(tensor):
            raise InvalidArgumentError(
                f"{names[0]!r} is expanded: several of its elements share one place in memory, so they can't be set "
                f"separately; call .contiguous() on it before smb.torch.join"
            )
    table = TensorTable.of({names[0]: (tuple(tensor.shape), "float32") for names, tensor in tensors.items()})
    infos = zip(tensors.items(), table.values(), strict=True)
    return table, tuple(TensorEntry(names, tensor, info.offset // 4) for (names, tensor), info in infos)


def note_placement(values: Values) -> None:
    """Take note of an array in which smb.torch.place puts tensors, zero between them."""
    _placements[values.ctypes.data] = values


def address_of(entries: Sequence[TensorEntry]) -> int | None:
    """Return the address of the one float32 array in host memory in which all tensors lie, each at its offset, as
    smb.torch.place puts them; None if they don't.

    Tensors that lie like this in memory of the user's own don't count: something else may lie between them, which an
    exchange of the whole array would change.
    """
    if not entries:
        return None
    first = entries[0].tensor
    address = first.data_ptr() - 4 * entries[0].offset
    for entry in entries:
        tensor = entry.tensor
        if (
            tensor.device != _HOST
            or tensor.dtype != torch.float32
            or tensor.data_ptr() != address + 4 * entry.offset
            or not tensor.is_contiguous()
        ):
            return None
    memory = first.untyped_storage().data_ptr()
    together = all(entry.tensor.untyped_storage().data_ptr() == memory for entry in entries)
    return address if together and memory <= address and _placements.get(memory) is not None else None


def array_of(entries: Sequence[TensorEntry], size: int) -> Values:
    """Return the array in which all tensors lie: see address_of. It keeps the memory alive."""
    first = entries[0]
    begin = first.tensor.storage_offset() - first.offset
    values: Values = first.tensor.detach().as_strided((size,), (1,), begin).numpy()
    return values


def _blocks_of(entries: Sequence[TensorEntry], start: int, stop: int) -> Iterator[VectorSlice]:
    first = 0
    for begin in range(start, stop, BLOCK_ELEMENTS):
        end = min(begin + BLOCK_ELEMENTS, stop)
        parts, gaps, at = [], [], 0
        for index in range(first, len(entries)):
            entry = entries[index]
            if entry.offset >= end:
                break
            low, high = max(begin - entry.offset, 0), min(end - entry.offset, entry.count)
            if high <= low:  # the tensor ended in an earlier block
                first = index + 1
                continue
            part = _Part(index, low, high, entry.offset + low - begin)
            if part.at > at:
                gaps.append(slice(at, part.at))
            parts.append(part)
            at = part.here.stop
        if at < end - begin:
            gaps.append(slice(at, end - begin))
        yield VectorSlice(begin, end - begin, tuple(parts), tuple(gaps))


def check(name: str, parameter: torch.Tensor) -> None:
    """Raise InvalidArgumentError if a trained parameter can't be shared."""
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        raise InvalidArgumentError(f"parameter {name!r} has no shape yet: run the model once before smb.torch.join")
    if parameter.is_inference():
        raise InvalidArgumentError(
            f"parameter {name!r} was made in torch.inference_mode(), so it can't be trained: make the model outside of "
            f"it"
        )
    if parameter.device.type == "meta":
        raise InvalidArgumentError(
            f"parameter {name!r} is on the meta device, without values: load or initialise the model before "
            f"smb.torch.join (model.to_empty(device=...), then its weights)"
        )
    if is_sharded(parameter):
        raise InvalidArgumentError(
            f"parameter {name!r} is a DTensor: join a sharded model (fully_shard, parallelize_module) with mesh="
        )
    if parameter.layout != torch.strided:
        raise InvalidArgumentError(
            f"parameter {name!r} has the layout {parameter.layout}: only dense parameters can be shared"
        )
    if parameter.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"parameter {name!r} is {parameter.dtype}: float32, bfloat16 and float16 can be shared; model.float() "
            f"makes it float32"
        )
    if parameter.numel() == 0:
        raise InvalidArgumentError(
            f"parameter {name!r} has no elements, shape {tuple(parameter.shape)}: freeze it, or remove it"
        )


def check_apart(parameters: Mapping[tuple[str, ...], torch.Tensor]) -> None:
    """Raise InvalidArgumentError if two parameters share memory. Parameters that are tied as one Parameter are one
    entry, but if they are tied only by memory, a change of one would count twice.
    """
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for names, parameter in parameters.items():
        begin = int(parameter.storage_offset())
        # The range from the first to the last element in memory, whatever the strides are.
        extent = 1 + sum((size - 1) * int(step) for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        spans = taken.setdefault(parameter.untyped_storage()._cdata, [])
        for other_begin, other_end, other in spans:
            if begin < other_end and other_begin < begin + extent:
                raise InvalidArgumentError(
                    f"parameters {other!r} and {names[0]!r} share memory without being one Parameter, so a change of "
                    f"one would count twice. Tie them as one object: module.weight = other.weight"
                )
        spans.append((begin, begin + extent, names[0]))
