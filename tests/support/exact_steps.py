"""Local steps whose results are the same to the bit everywhere: in numpy and PyTorch, on whatever processor.

A step goes an eighth of the way to a goal. Goals and first values have few bits, and the rate is a power of two: so no
product is rounded, and it makes no difference whether a processor adds it in the same instruction.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from smb.train.scheme import Values

SHAPES = ((8, 6), (8,), (1, 8), (1,))  # those of tests.support.meshes.network
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


def start() -> Values:
    """The first values, (SIZE,)."""
    return ((np.arange(SIZE) * 29 % 127 - 63) / 32).astype(np.float32)


def goal_of(worker: int, step: int) -> Values:
    """Where a worker's step goes, (SIZE,)."""
    return ((np.arange(SIZE) * 37 + worker * 101 + step * 53) % 257 / 64 - 2).astype(np.float32)


def local_step(values: Values, worker: int, step: int) -> None:
    """Take a step, in place: what SGD with lr=0.125 does where the gradient is `values` less the goal."""
    values -= np.float32(0.125) * (values - goal_of(worker, step))


def shaped(values: Values) -> list[torch.Tensor]:
    """A vector as tensors of the network's shapes, in memory of their own."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    parts = torch.from_numpy(values.copy()).split(sizes)
    return [part.clone().reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def network() -> nn.Sequential:
    """The model that ranks of meshes train, with the first values."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), shaped(start()), strict=True):
            parameter.copy_(values)
    return model
