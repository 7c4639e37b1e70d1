"""Plain training of one process: momentum SGD, one batch after the other. Independent of sharing."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from smb.tools.demo.digits import Digits, shifted_copies
from smb.tools.demo.network import FlatParameters, build_network

LEARNING_RATE = 0.05
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4


def learning_rate(progress: float) -> float:
    """Return the step size after `progress` (0 to 1) of all samples: half a cosine, down to a hundredth."""
    return LEARNING_RATE * (0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0))))


class Trainer:
    """A network, its momentum and an endless shuffled supply of slightly shifted training digits.

    `rate` is a factor of the learning rate. With `nesterov` the parameters are the look-ahead point, as in
    torch.optim.SGD.
    """

    def __init__(
        self,
        digits: Digits,
        *,
        network_seed: int,
        order_seed: int,
        batch_size: int,
        hidden: int = 64,
        rate: float = 1.0,
        nesterov: bool = False,
    ) -> None:
        self.network = build_network(network_seed, hidden)
        self.parameters = FlatParameters(self.network)
        self.batch_size = batch_size
        self._rate = rate
        self._nesterov = nesterov
        self._velocity = torch.zeros_like(self.parameters.values)
        self._images = torch.from_numpy(shifted_copies(digits.train_images)).unsqueeze(2)
        self._labels = torch.from_numpy(digits.train_labels)
        self._random = np.random.default_rng(order_seed)
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._loss = nn.CrossEntropyLoss()

    def step(self, progress: float) -> float:
        """Train on the next batch with the step size due at `progress` (0 to 1); return the batch's mean loss."""
        images, labels = self._next_batch()
        parameters = self.parameters
        parameters.gradients.zero_()
        loss = self._loss(self.network(images), labels)
        loss.backward()
        with torch.no_grad():
            gradient = parameters.gradients.add_(parameters.values, alpha=WEIGHT_DECAY)
            self._velocity.mul_(MOMENTUM).add_(gradient)
            step = gradient.add_(self._velocity, alpha=MOMENTUM) if self._nesterov else self._velocity
            parameters.values.add_(step, alpha=-self._rate * learning_rate(progress))
        return float(loss.detach())

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._order) < self.batch_size:
            self._order = np.concatenate([self._order, self._random.permutation(len(self._labels))])
        chosen, self._order = self._order[: self.batch_size], self._order[self.batch_size :]
        shifts = self._random.integers(len(self._images), size=self.batch_size)
        return self._images[shifts, chosen], self._labels[chosen]
