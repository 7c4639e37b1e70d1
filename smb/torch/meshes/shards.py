"""One rank's part of a model on a mesh, and its offsets in the group's buffers.

The group stores whole tensors, so members with different meshes, or without one, train one model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from smb.errors import InvalidArgumentError
from smb.tensors import TensorTable
from smb.torch.tensor_slices import TensorSlice, local_of, runs_of, slice_of
from smb.torch.training.model_parameters import ModelParameters, TensorEntry, check, lay_out
from smb.train.ledger import Run, Values

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.torch.ranks import Ranks

_READS_MAX = 16  # in flight at once, for a rank whose shards lie in many places


class ShardParameters(ModelParameters):
    """This rank's part of the trained parameters, and its offsets in the group's buffers.

    If several ranks have the same part, one of them reads and writes it, and gives it to the others. So all replicas of
    a part are equal, whatever other members write meanwhile.
    """

    def __init__(self, tensors: Mapping[tuple[str, ...], torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        local = {names: local_of(tensor) for names, tensor in tensors.items()}
        for names, tensor in local.items():
            if tensor.numel():
                check(names[0], tensor)
        whole = {names: torch.empty(tensor.shape, device="meta") for names, tensor in tensors.items()}
        self.whole: TensorTable = lay_out(whole)[0]
        self.verify = None
        self.set_tensors(local)
        # The tensors as the model has them, at their offsets in the group.
        self.given = tuple(
            TensorEntry(names, tensor, info.offset // 4)
            for (names, tensor), info in zip(tensors.items(), self.whole.values(), strict=True)
        )
        self.slices_here: list[TensorSlice | None] = [slice_of(names[0], tensor) for names, tensor in tensors.items()]
        self._runs: list[list[Run]] = [
            list(_runs(entry, part, info.shape, info.offset // 4))
            for entry, part, info in zip(self.entries, self.slices_here, self.whole.values(), strict=True)
        ]
        self.replicated = False
        self._owned = tuple(run for runs in self._runs for run in runs)
        self._gives: dict[int, list[slice]] = {}
        self._takes: dict[int, list[slice]] = {}

    def meet(self, ranks: Ranks) -> None:
        """Find out which ranks have the same parts as this one. With all ranks."""
        of_ranks = ranks.gather(self.slices_here)
        owned: list[Run] = []
        for number, (entry, runs) in enumerate(zip(self.entries, self._runs, strict=True)):
            everywhere = [each[number] for each in of_ranks if each[number] is not None]
            self.replicated |= len(everywhere) > len(set(everywhere))
            mine = self.slices_here[number]
            if mine is None:
                continue
            holders = [rank for rank, each in enumerate(of_ranks) if each[number] == mine]
            owner = holders[number % len(holders)]  # owners alternate, so that each rank sends its part
            taken = slice(entry.offset, entry.offset + entry.count)
            if owner != ranks.rank:
                self._takes.setdefault(owner, []).append(taken)
                continue
            owned += runs
            for holder in holders:
                if holder != owner:
                    self._gives.setdefault(holder, []).append(taken)
        self._owned = tuple(owned)

    @property
    def runs(self) -> Sequence[Run]:
        """The ranges that this rank reads and writes."""
        return self._owned

    @property
    def all_runs(self) -> Sequence[Run]:
        """The ranges that this rank has."""
        return [run for runs in self._runs for run in runs]

    def spread(self, ranks: Ranks, values: Values) -> None:
        """Give what this rank has read to the ranks that have the same parts. With all ranks."""
        ranks.swap(values, self._gives, self._takes)

    def refresh(self) -> None:
        """Look up the shards again, since FSDP2 may have moved them."""
        self.entries = tuple(
            TensorEntry(entry.names, local_of(tensor), entry.offset)
            for entry, tensor in zip(self.entries, self._tensors.values(), strict=True)
        )

    def of_tensors(self, values: Values) -> dict[str, torch.Tensor]:
        """Return a vector as tensors like the model's, sharded like them, under all their names."""
        found: dict[str, torch.Tensor] = {}
        for entry, given in zip(self.entries, self.given, strict=True):
            tensor = entry.of(torch.from_numpy(values)).to(given.tensor.dtype).to(entry.tensor.device)
            if isinstance(given.tensor, DTensor):
                whole = given.tensor
                mesh, placements, shape = whole.device_mesh, whole.placements, whole.shape
                tensor = DTensor.from_local(tensor, mesh, placements, shape=shape, stride=whole.stride())
            found |= dict.fromkeys(entry.names, tensor)
        return found

    def read(self, buffer: Buffer, out: Values) -> None:
        """Read this rank's elements."""
        under_way: deque[Future[Any]] = deque()
        try:
            for run in self._owned:
                if len(under_way) == _READS_MAX:
                    under_way.popleft().result()
                under_way.append(buffer.read_async(run.there, run.count, out=out[run.indices], wire="exact"))
            while under_way:
                under_way.popleft().result()
        finally:
            wait(under_way)  # until then the calls use the memory

    def parts(self, block: Values, begin: int) -> Iterator[tuple[Values, Run]]:
        """Yield the parts that this rank writes."""
        for run in self._owned:
            low, high = max(run.here, begin), min(run.here + run.count, begin + block.size)
            if low < high:
                yield block[low - begin : high - begin], Run(low, run.there + low - run.here, high - low)

    def store(self, weights: Buffer) -> None:
        """Write this rank's values exactly."""
        for begin, block in self.blocks():
            if not np.isfinite(block).all():
                raise InvalidArgumentError(
                    f"join of training {weights.name!r}: the initial values must be finite; some are NaN or infinite"
                )
            for part, run in self.parts(block, begin):
                weights.write(part, run.there, wire="exact")


def _runs(entry: TensorEntry, part: TensorSlice | None, shape: tuple[int, ...], start: int) -> Iterator[Run]:
    """Yield where a shard lies in the group's vector, in which its whole tensor begins at `start`."""
    for run in runs_of(part, shape) if part is not None else ():
        yield Run(entry.offset + run.here, start + run.there, run.count)
