"""A model's trained parameters, for overlap=: their parts can be made and set separately."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from smb.overlap.parts import ByParts, Cut, Part, PartFlow, PartsMover
from smb.torch.training.model_parameters import ModelParameters, VectorSlice
from smb.train.exchange.mover import Mover
from smb.train.group import Group
from smb.train.ledger import Run, Values


class PartParameters(ModelParameters, ByParts):
    """The parameters with their flow. Uses three host arrays of the model's size, or four with lossy wires."""

    def __init__(
        self, tensors: Mapping[tuple[str, ...], torch.Tensor], verify: Callable[[], None] | None = None
    ) -> None:
        super().__init__(tensors, verify)
        self.copies = None
        self._blocks_by_part: dict[Part, tuple[VectorSlice, ...]] = {}
        whole = (Part((Run(0, 0, self.size),), 0),)
        self.flow = PartFlow(self, Cut(whole, whole))
        self._group: Group | None = None

    def seated(self, group: Group) -> None:
        """Take note of the group, which says whether its worker's steps go on."""
        self._group = group
        self.flow.client = group.client

    def give_up(self) -> None:
        """Let the flow wait for no further part."""
        self.flow.give_up()

    def mover(self, group: Group, way: str, arrived: Callable[[], object] | None) -> Mover:  # noqa: ARG002
        """Return the mover that moves the parameters in parts, for rounds and for sums."""
        return PartsMover(self.flow, group.weights, group.sent_bytes, self._go_on)

    def delta(self, part: Part, base: Values, out: Values) -> None:
        """Copy block by block, from the device if the parameters are on one."""
        with torch.no_grad():
            for begin, delta in self.deltas_of(self._blocks_of(part), base):
                out[begin : begin + delta.size] = delta

    def put(self, part: Part, values: Values) -> None:
        """Copy block by block."""
        with torch.no_grad():
            self.fill_blocks(self._blocks_of(part), values)

    def recut(self) -> None:
        """Forget the blocks of parts that are not used any more."""
        self._blocks_by_part.clear()

    def _blocks_of(self, part: Part) -> tuple[VectorSlice, ...]:
        found = self._blocks_by_part.get(part)
        if found is None:
            found = tuple(block for run in part.runs for block in self.blocks_of(run.here, run.here + run.count))
            self._blocks_by_part[part] = found
        return found

    def _go_on(self) -> None:
        if self._group is not None:
            self._group.go_on()
