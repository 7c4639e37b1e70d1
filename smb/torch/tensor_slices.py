"""The part of a whole tensor that a process has, given by a DTensor or by slices, and where it lies in the whole
tensor.

A slice has, for each dimension, the ranges (first, count) of the indices that it takes, in order. Usually there is one
range; a dimension that FSDP2 shards after tensor parallelism may have more.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch

from smb.errors import InvalidArgumentError
from smb.train.ledger import Run

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

TensorSlice: TypeAlias = "tuple[tuple[tuple[int, int], ...], ...]"


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return True if the tensor is a DTensor. Does not import that class, which takes half a second, if the program has
    not.
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharding_of(tensor: torch.Tensor) -> object:
    """Return what decides, with the tensor's shape, which part of it this process has; None if it has all."""
    if not is_sharded(tensor):
        return None
    mesh = tensor.device_mesh
    return tensor.placements, tuple(mesh.shape), mesh.get_coordinate()


def whole(shape: Sequence[int]) -> TensorSlice:
    return tuple(((0, extent),) for extent in shape)


def shape_of(part: TensorSlice) -> tuple[int, ...]:
    return tuple(sum(count for _, count in ranges) for ranges in part)


def slice_of(name: str, tensor: torch.Tensor) -> TensorSlice | None:
    """Return the part of a whole tensor that this process has; None if it has no elements. Raises
    InvalidArgumentError.
    """
    if not local_of(tensor).numel():
        return None
    if not is_sharded(tensor):
        return whole(tensor.shape)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = tensor.placements
    if not all(type(placement) in (Shard, Replicate, _StridedShard) for placement in placements):
        raise InvalidArgumentError(
            f"parameter {name!r} is placed as {placements}: only shards and replicas can be shared"
        )
    with torch.device("cpu"):  # torch computes with tensors here, which must not use the program's default device
        if any(type(placement) is _StridedShard for placement in placements):
            return tuple(_ranges(tensor, dim) for dim in range(tensor.dim()))
        shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    return tuple(((int(first), int(count)),) for first, count in zip(offsets, shape, strict=True))


def _ranges(tensor: DTensor, dim: int) -> tuple[tuple[int, int], ...]:
    """Return the indices of one dimension that this process has, found by sharding a vector of
    indices in the same way.
    """
    from torch.distributed.tensor import distribute_tensor

    placements = [_along(placement, dim) for placement in tensor.placements]
    indices = torch.arange(tensor.shape[dim])
    # Nothing is sent: each process takes its part of its own vector.
    mine = distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None).to_local().tolist()
    ranges: list[tuple[int, int]] = []
    for index in mine:
        if ranges and sum(ranges[-1]) == index:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + 1
        else:
            ranges.append((index, 1))
    return tuple(ranges)


def _along(placement: Any, dim: int) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, Replicate) or placement.dim != dim:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0)


def checked_slice(asked: str, name: str, slices: Any, shape: Sequence[int]) -> TensorSlice:
    """Return the part of a tensor that slices, one for each dimension, take. Raises InvalidArgumentError."""
    given = slices if isinstance(slices, tuple) else (slices,)
    if len(given) != len(shape) or not all(isinstance(each, slice) for each in given):
        raise InvalidArgumentError(
            f"{asked}: placements= has {slices!r} for {name!r} of shape {tuple(shape)}: give a slice for each dimension"
        )
    part = []
    for each, extent in zip(given, shape, strict=True):
        first, end, step = each.indices(extent)
        if step != 1 or any(bound is not None and not 0 <= bound <= extent for bound in (each.start, each.stop)):
            raise InvalidArgumentError(
                f"{asked}: placements= has {each} for a dimension of {extent} of {name!r}: "
                f"take 0 <= start <= stop <= {extent}, in steps of one"
            )
        part.append(((first, max(0, end - first)),))
    return tuple(part)


def runs_of(part: TensorSlice, shape: Sequence[int]) -> Iterator[Run]:
    """Yield where a slice's elements lie in the whole tensor: `here` in the slice, `there` in the whole tensor."""
    if not all(count for ranges in part for _, count in ranges):
        return
    # The last dimensions that are whole are contiguous in memory, together with one more that is cut.
    cut = len(shape)
    while cut > 0 and part[cut - 1] == ((0, shape[cut - 1]),):
        cut -= 1
    inner = math.prod(shape[cut:])
    if cut == 0:
        yield Run(0, 0, inner)
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(cut)]
    indices = [[at for first, count in ranges for at in range(first, first + count)] for ranges in part[: cut - 1]]
    here = 0
    for index in itertools.product(*indices):
        base = sum(at * stride for at, stride in zip(index, strides, strict=False))
        for first, count in part[cut - 1]:
            yield Run(here, base + first * inner, count * inner)
            here += count * inner
