"""The network that is trained: handwritten digits, two hidden layers in numpy, its parameters one flat vector."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from smb.tools.demo.digits import CLASS_COUNT, IMAGE_SIDE, Digits

Values = NDArray[np.float32]
HIDDEN = 512
_SHAPES = ((IMAGE_SIDE**2, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CLASS_COUNT))
SIZE = sum(rows * columns + columns for rows, columns in _SHAPES)  # 301 066 parameters, 1.2 MB


class Network:
    """The network with its parameters in `values`, float32 (SIZE,): used, and never replaced."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self._gradient = np.zeros(SIZE, np.float32)
        self._layers = _layers(values)
        self._gradients = _layers(self._gradient)

    def step(self, images: Values, labels: NDArray[np.int64], lr: float) -> None:
        """Take one step of plain SGD down the mean loss of a batch: images (b, 64), labels (b,)."""
        inputs, outputs = self._forward(images)
        outputs[np.arange(len(labels)), labels] -= 1
        error = outputs / np.float32(len(labels))
        for at in reversed(range(len(self._layers))):
            weights, biases = self._gradients[at]
            np.matmul(inputs[at].T, error, out=weights)
            error.sum(axis=0, out=biases)
            if at:
                error = (error @ self._layers[at][0].T) * (inputs[at] > 0)
        self.values -= np.float32(lr) * self._gradient

    def loss(self, images: Values, labels: NDArray[np.int64]) -> float:
        """Return the mean cross-entropy."""
        _, outputs = self._forward(images)
        return float(-np.log(np.maximum(outputs[np.arange(len(labels)), labels], 1e-30)).mean())

    def accuracy(self, images: Values, labels: NDArray[np.int64]) -> float:
        """Return the share, 0 to 1, of images that are put into their class."""
        return float((self._forward(images)[1].argmax(axis=1) == labels).mean())

    def _forward(self, images: Values) -> tuple[list[Values], Values]:
        """Return the inputs of each layer, and the classes' probabilities (b, 10)."""
        inputs = [images]
        for weights, biases in self._layers[:-1]:
            inputs.append(np.maximum(inputs[-1] @ weights + biases, 0))
        weights, biases = self._layers[-1]
        scores = inputs[-1] @ weights + biases
        powers: Any = np.exp(scores - scores.max(axis=1, keepdims=True))
        return inputs, powers / powers.sum(axis=1, keepdims=True)


def initial_values(seed: int) -> Values:
    """Return parameters to start from (He et al. 2015), float32 (SIZE,)."""
    random = np.random.default_rng(seed)
    values = np.zeros(SIZE, np.float32)
    for weights, _ in _layers(values):
        weights[:] = random.standard_normal(weights.shape) * np.sqrt(2 / weights.shape[0])
    return values


def flat_images(digits: Digits) -> tuple[Values, Values]:
    """Return the training and the test images as (n, 64)."""
    return digits.train_images.reshape(-1, IMAGE_SIDE**2), digits.test_images.reshape(-1, IMAGE_SIDE**2)


def _layers(values: Values) -> list[tuple[Values, Values]]:
    """Return (weights, biases) of each layer as views."""
    layers: list[tuple[Values, Values]] = []
    at = 0
    for rows, columns in _SHAPES:
        end = at + rows * columns
        layers.append((values[at:end].reshape(rows, columns), values[end : end + columns]))
        at = end + columns
    return layers
