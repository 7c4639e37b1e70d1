"""A model's tensors as flat float32 vectors, which is what schemes and buffers work on.

Tensors lie in a vector as smb/tensors.py lays them out (each at a multiple of 64 bytes, zeros between them), so that
the vector's buffer has each by its name.

`Trained` is the parameters that are trained: float32 ones become views of the vector, in place, so nothing is copied
at any step. Bfloat16 ones become views of a bfloat16 vector beside it, and the float32 vector is their master: `absorb`
adds to it what the optimizer did to them (a difference of bfloat16 numbers, in float32), `spread` sets them to its
values, rounded to nearest, ties to even. Before the first exchange that leaves them as they are, bit for bit (a step
that makes one 2**16 times smaller aside); what an exchange moves by less than a bfloat16 can show stays in the master,
and shows once it is enough, or the parameter has become small. What the optimizer itself loses to rounding in bfloat16
is lost, as it is without the adapter.

`Untrained` is what else a state_dict holds: frozen parameters and floating-point buffers such as batch normalisation's
running statistics, copied to and fro. Integers (num_batches_tracked) and float64 stay with each process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from smb.errors import Error, InvalidArgumentError
from smb.tensors import TensorTable

DTYPES = (torch.float32, torch.bfloat16)
UNTRAINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PIECE_ELEMENTS = 1 << 20  # of a bfloat16 model converted at once: bounds the temporary memory


@dataclass(frozen=True)
class Entry:
    """A tensor's place in a vector: `names` are all it has in the state_dict (tied ones have several; the first one is
    in the table), `offset` and `count` are in elements.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    offset: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.tensor.numel()

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """Return its part of a vector, in its shape; a view."""
        return vector[self.offset : self.offset + self.count].view(self.tensor.shape)


@dataclass(frozen=True)
class _Stretch:
    """Neighbours of the vector whose parameters are bfloat16: the master's part, and the memory they are views of."""

    master: torch.Tensor
    rounded: torch.Tensor


class Trained:
    """The parameters that are trained, as one vector. Not to be used by two threads at once."""

    def __init__(self, parameters: Mapping[tuple[str, ...], torch.nn.Parameter]) -> None:
        """Move the parameters into the vector. Raises InvalidArgumentError, and then has moved nothing."""
        for names, parameter in parameters.items():
            _check(names[0], parameter)
        _check_apart(parameters)
        self.table, self.entries = _lay_out(parameters)
        self.vector = torch.zeros(self.table.size, dtype=torch.float32)
        self.values: NDArray[np.float32] = self.vector.numpy()
        self._stretches: list[_Stretch] = []
        for low_precision, entries in _runs(self.entries):
            self._move(entries, low_precision)
        self._addresses = [(entry.tensor, entry.tensor.data_ptr(), entry.names[0]) for entry in self.entries]

    def _move(self, entries: list[Entry], low_precision: bool) -> None:
        begin, end = entries[0].offset, entries[-1].offset + entries[-1].count
        memory = self.vector[begin:end]
        if low_precision:
            memory = torch.zeros(end - begin, dtype=torch.bfloat16)
            self._stretches.append(_Stretch(self.vector[begin:end], memory))
        for entry in entries:
            view = memory[entry.offset - begin : entry.offset - begin + entry.count].view(entry.tensor.shape)
            view.copy_(entry.tensor.detach())
            entry.of(self.vector).copy_(view)
            # The Parameter object stays the one that the optimizer and its state know; only its memory moves.
            entry.tensor.data = view

    def check(self) -> None:
        """Raise Error where a parameter is no longer in the vector."""
        for parameter, address, name in self._addresses:
            if parameter.data_ptr() != address or parameter.dtype not in DTYPES:
                raise Error(
                    f"parameter {name!r} was given other memory after smb.torch.join (by .to(), .half(), .data = or "
                    f"load_state_dict(assign=True)): what is trained there would be shared with nobody. Do such things "
                    f"before joining; load_state_dict() without assign is fine"
                )

    def check_holds(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise Error where the optimizer has a parameter that is not in the vector."""
        ours = {id(entry.tensor) for entry in self.entries}
        if strangers := len({id(each) for group in optimizer.param_groups for each in group["params"]} - ours):
            raise Error(
                f"the optimizer was given {strangers} further parameters after smb.torch.join (by add_param_group): "
                f"they would be trained and shared with nobody. Give it all of them before joining"
            )

    def absorb(self) -> None:
        """Take over into the vector what was done to bfloat16 parameters since spread()."""
        for master, rounded in self._pieces():
            master += rounded.float() - master.bfloat16().float()

    def spread(self) -> None:
        """Set bfloat16 parameters to the vector's values."""
        for master, rounded in self._pieces():
            rounded.copy_(master)

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for stretch in self._stretches:
            for begin in range(0, len(stretch.master), _PIECE_ELEMENTS):
                piece = slice(begin, begin + _PIECE_ELEMENTS)
                yield stretch.master[piece], stretch.rounded[piece]


class Untrained:
    """Frozen parameters and floating-point buffers, as one vector of copies. Buffers come first: [0, averaged)."""

    def __init__(
        self, buffers: Mapping[tuple[str, ...], torch.Tensor], frozen: Mapping[tuple[str, ...], torch.nn.Parameter]
    ) -> None:
        self.table, self.entries = _lay_out({**buffers, **frozen})
        averaged = self.entries[: len(buffers)]
        self.averaged = averaged[-1].offset + averaged[-1].count if averaged else 0
        self.vector = torch.zeros(self.table.size, dtype=torch.float32)
        self.values: NDArray[np.float32] = self.vector.numpy()
        self._frozen = [entry for entry in self.entries if isinstance(entry.tensor, torch.nn.Parameter)]

    def check(self) -> None:
        """Raise Error where a frozen parameter is trained by now."""
        for entry in self._frozen:
            if entry.tensor.requires_grad:
                raise Error(
                    f"parameter {entry.names[0]!r} was frozen at smb.torch.join and requires gradients now: it would "
                    f"be trained and shared with nobody. Give it to the optimizer before joining, then it is shared"
                )

    def collect(self, count: int | None = None) -> None:
        """Copy the model's values, the first `count` elements of them, into the vector."""
        for entry in self.entries:
            if count is None or entry.offset < count:
                entry.of(self.vector).copy_(entry.tensor.detach())

    def spread(self) -> None:
        """Copy the vector into the model."""
        with torch.no_grad():
            for entry in self.entries:
                entry.tensor.detach().copy_(entry.of(self.vector))


def split(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Trained, Untrained]:
    """Divide what model.state_dict() holds into what is trained and what is not, and move the former into a vector.

    Trained is what the optimizer has or what requires gradients. Raises InvalidArgumentError where the model can't be
    shared; then nothing was moved.
    """
    named: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):  # get_extra_state() may be anything
            named.setdefault(id(tensor), ([], tensor))[0].append(name)
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = {id(parameter) for parameter in model.parameters()}
    if strangers := len(optimized - known):
        raise InvalidArgumentError(
            f"the optimizer trains {strangers} tensors that are no parameters of the model: they would be shared with "
            f"nobody. Join with a module that holds them all (torch.nn.ModuleList)"
        )
    trained: dict[tuple[str, ...], torch.nn.Parameter] = {}
    frozen: dict[tuple[str, ...], torch.nn.Parameter] = {}
    buffers: dict[tuple[str, ...], torch.Tensor] = {}
    for identity, (names, tensor) in named.items():
        if isinstance(tensor, torch.nn.Parameter) and (tensor.requires_grad or identity in optimized):
            trained[tuple(names)] = tensor
        elif tensor.dtype not in UNTRAINED_DTYPES or tensor.device.type != "cpu" or tensor.numel() == 0:
            continue
        elif isinstance(tensor, torch.nn.Parameter):
            frozen[tuple(names)] = tensor
        else:
            buffers[tuple(names)] = tensor
    kept = {id(parameter) for parameter in trained.values()}
    for name, parameter in model.named_parameters():
        if (parameter.requires_grad or id(parameter) in optimized) and id(parameter) not in kept:
            raise InvalidArgumentError(
                f"parameter {name!r} is trained, but not in the model's state_dict() (does a hook take it out, or copy "
                f"it?): it would be shared with nobody. Freeze it, or join with the module inside that has it"
            )
    if not trained:
        raise InvalidArgumentError("the model has no parameter that requires gradients: there is nothing to share")
    return Trained(trained), Untrained(buffers, frozen)


def _lay_out(tensors: Mapping[tuple[str, ...], torch.Tensor]) -> tuple[TensorTable, tuple[Entry, ...]]:
    """Lay the tensors out as float32, under their first names."""
    if not tensors:
        return TensorTable({}), ()
    table = TensorTable.of({names[0]: (tuple(tensor.shape), "float32") for names, tensor in tensors.items()})
    places = zip(tensors.items(), table.values(), strict=True)
    return table, tuple(Entry(names, tensor, place.offset // 4) for (names, tensor), place in places)


def _runs(entries: Iterable[Entry]) -> Iterator[tuple[bool, list[Entry]]]:
    """Neighbours that are bfloat16, or are not."""
    run: list[Entry] = []
    for entry in entries:
        if run and entry.tensor.dtype != run[0].tensor.dtype:
            yield run[0].tensor.dtype == torch.bfloat16, run
            run = []
        run.append(entry)
    if run:
        yield run[0].tensor.dtype == torch.bfloat16, run


def _check(name: str, parameter: torch.Tensor) -> None:
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        raise InvalidArgumentError(f"parameter {name!r} has no shape yet: run the model once before smb.torch.join")
    if parameter.device.type != "cpu":
        raise InvalidArgumentError(
            f"parameter {name!r} is on {parameter.device}: smb.torch.join takes models in host memory so far. "
            f"Join with a copy on the CPU, or share by hand: smb.train.join with an array, copied after each step"
        )
    if parameter.layout != torch.strided:
        raise InvalidArgumentError(f"parameter {name!r} is {parameter.layout}: only dense ones can be shared")
    if parameter.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"parameter {name!r} is {parameter.dtype}: float32 and bfloat16 can be shared; model.float() makes it so"
        )
    if parameter.numel() == 0:
        raise InvalidArgumentError(f"parameter {name!r} has no elements, shape {tuple(parameter.shape)}")


def _check_apart(parameters: Mapping[tuple[str, ...], torch.nn.Parameter]) -> None:
    """Tied by one Parameter object is fine, that is one entry; by memory alone the tie would be cut in silence."""
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for names, parameter in parameters.items():
        begin = int(parameter.storage_offset())
        # From the first to the last element in memory, whatever the strides.
        extent = 1 + sum((size - 1) * int(step) for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        spans = taken.setdefault(parameter.untyped_storage().data_ptr(), [])
        for other_begin, other_end, other in spans:
            if begin < other_end and other_begin < begin + extent:
                raise InvalidArgumentError(
                    f"parameters {other!r} and {names[0]!r} share memory without being one Parameter: moved, they "
                    f"would part. Tie them by the object: module.weight = other.weight"
                )
        spans.append((begin, begin + extent, names[0]))
