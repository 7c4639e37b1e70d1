"""States of which few bits change from one generation to the next, and their shards over a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support.devices import DEVICE

# No dimension is a multiple of a usual number of ranks, so ranks have elements of the same words of eight bytes.
SHAPES = {"embed.weight": (257, 101), "norm.bias": (13,), "head.weight": (64, 333), "scale": (), "count": (3,)}
DENSE_EVERY = 9  # such a generation changes everything


def state_of(number: int) -> dict[str, torch.Tensor]:
    """The state of generation `number`: bfloat16 with any bits, NaNs too, of which 2 % are other ones than in the state
    before; and a counter.
    """
    random = np.random.default_rng(7 if number % DENSE_EVERY else number)
    state: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        bits = random.integers(0, 65536, int(np.prod(shape)), np.uint16)
        changed = np.unique((number * 1201 + np.arange(max(1, len(bits) // 50)) * 53) % len(bits))
        bits[changed] += np.uint16(number)
        state[name] = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(shape)
    state["count"] = torch.tensor([number, 0, 7])
    return state


def shards_of(state: dict[str, torch.Tensor], mesh: Any, kind: str) -> dict[str, torch.Tensor]:
    """Shard a state over a mesh: by "rows"; by "columns", whose shards do not follow each other in memory; or "mixed",
    where some tensors are on each rank. The counter is a plain tensor.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(state.items()):
        if name == "count":
            found[name] = tensor.clone()
            continue
        dim = tensor.dim() - 1 if kind == "columns" else 0
        whole = tensor.dim() == 0 or (kind == "mixed" and number % 2)
        placement = Replicate() if whole else Shard(dim)
        found[name] = distribute_tensor(tensor.to(DEVICE), mesh, [placement], src_data_rank=None)
    return found


def equal(found: Any, number: int, parts: dict[str, tuple[slice, ...]] | None = None) -> bool:
    """Whether a state, or parts of it, are those of generation `number`, to the bit."""
    wanted = state_of(number)
    if parts is not None:
        wanted = {name: wanted[name][index] if index else wanted[name] for name, index in parts.items()}
    return list(found) == list(wanted) and all(
        found[name].dtype == tensor.dtype
        and found[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
        for name, tensor in wanted.items()
    )
