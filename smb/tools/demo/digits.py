"""The data of the demo: scikit-learn's handwritten digits, in a fixed split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

IMAGE_SIDE = 8
CLASS_COUNT = 10
TEST_SHARE = 0.2
TRAIN_COUNT = 1437
# The split is part of the task, so it does not depend on the run's seed.
SPLIT_SEED = 1797


@dataclass(frozen=True)
class Digits:
    """Images as float32 in [0, 1], shape (n, 8, 8); labels as int64, shape (n,)."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write all four arrays to one .npz file, so that workers need no scikit-learn."""
        np.savez(path, a=self.train_images, b=self.train_labels, c=self.test_images, d=self.test_labels)

    def some(self, rows: NDArray[np.int64]) -> Digits:
        """Return these rows of the training digits, and all test digits."""
        return replace(self, train_images=self.train_images[rows], train_labels=self.train_labels[rows])

    @classmethod
    def load(cls, path: Path) -> Digits:
        with np.load(path) as arrays:
            return cls(arrays["a"], arrays["b"], arrays["c"], arrays["d"])


def load_digits() -> Digits:
    """Return the 1797 digits: 1437 for training, 360 for testing, every class in the same share on both sides."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    pixels, labels = load(return_X_y=True)
    images = (pixels.reshape(-1, IMAGE_SIDE, IMAGE_SIDE) / 16.0).astype(np.float32)
    split = train_test_split(
        images, labels.astype(np.int64), test_size=TEST_SHARE, stratify=labels, random_state=SPLIT_SEED
    )
    train_images, test_images, train_labels, test_labels = split
    return Digits(train_images, train_labels, test_images, test_labels)


def shifted_copies(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return images (n, 8, 8) moved by -1, 0 or 1 pixel in both directions, as (9, n, 8, 8); copy 4 is the original."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    rows, columns = images.shape[1:]
    return np.stack([padded[:, y : y + rows, x : x + columns] for y in range(3) for x in range(3)])
