"""The network of the demo, with all its parameters in one flat vector."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from smb.tools.demo.digits import CLASS_COUNT, IMAGE_SIDE


def build_network(seed: int, hidden: int) -> nn.Sequential:
    """Return a freshly initialised convolutional network with `hidden` hidden units; the same for the same seed.

    It has 38,282 float32 parameters with 64 hidden units, 272,586 with 512. It has no batch normalisation, whose
    running statistics would be state outside the shared parameters.
    """
    torch.manual_seed(seed)
    pooled_side = IMAGE_SIDE // 2
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * pooled_side * pooled_side, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASS_COUNT),
    )


class FlatParameters:
    """A network's parameters and gradients as two flat float32 vectors that share the network's memory.

    The network computes with the memory of `values`: reading a shared buffer into `values` needs no copy.
    """

    def __init__(self, network: nn.Module) -> None:
        parameters = list(network.parameters())
        self.values = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.gradients = torch.zeros_like(self.values)
        offset = 0
        for parameter in parameters:
            end = offset + parameter.numel()
            parameter.data = self.values[offset:end].view_as(parameter)
            parameter.grad = self.gradients[offset:end].view_as(parameter)
            offset = end

    @property
    def count(self) -> int:
        return self.values.numel()


def accuracy(network: nn.Module, images: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """Return the fraction, 0 to 1, of images (n, 8, 8) that the network assigns to the class in labels (n,)."""
    with torch.inference_mode():
        answers = network(torch.from_numpy(images).unsqueeze(1)).argmax(dim=1)
    return float((answers.numpy() == labels).mean())
