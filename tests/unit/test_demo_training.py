from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from smb.demo.digits import Digits, load_digits, shifted_copies
from smb.demo.network import FlatParameters, accuracy, build_network
from smb.demo.seasgd import ElasticAveraging
from smb.demo.training import LEARNING_RATE, Trainer, learning_rate


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits()


class LocalBuffer:
    """The three operations of a buffer that elastic averaging uses, on an array of this process."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.values = values
        self.size = values.size

    def read(self, *, out: NDArray[np.float32]) -> NDArray[np.float32]:
        np.copyto(out, self.values)
        return out

    def accumulate(self, array: NDArray[np.float32]) -> None:
        self.values += array


def test_split_is_fixed_and_stratified(digits: Digits) -> None:
    """1437 digits to train and 360 to test, each class with its share, the same at every call, in 0 to 1."""
    assert digits.train_images.shape == (1437, 8, 8)
    assert digits.test_images.shape == (360, 8, 8)
    assert digits.train_images.dtype == np.float32
    assert 0.0 <= digits.train_images.min() < digits.train_images.max() <= 1.0
    assert np.ptp(np.bincount(digits.test_labels)) <= 2
    assert np.array_equal(load_digits().test_images, digits.test_images)


def test_shifted_copies_move_by_one_pixel() -> None:
    """The nine copies are the image moved by at most one pixel, with zeros moved in, the middle one untouched."""
    image = np.arange(1, 65, dtype=np.float32).reshape(1, 8, 8)
    copies = shifted_copies(image)
    assert copies.shape == (9, 1, 8, 8)
    assert np.array_equal(copies[4], image)
    assert np.array_equal(copies[0][0, 1:, 1:], image[0, :-1, :-1])
    assert not copies[0][0, 0].any()


def test_flat_parameters_are_the_network() -> None:
    """Values written into the flat vector are what the network computes with: zeros make all outputs zero."""
    network = build_network(seed=3)
    parameters = FlatParameters(network)
    assert parameters.count == sum(each.numel() for each in network.parameters()) == 38282
    images = torch.rand(2, 1, 8, 8)
    assert network(images).abs().sum() > 0
    parameters.values.numpy()[:] = 0.0
    assert network(images).abs().sum() == 0


def test_same_seed_same_network() -> None:
    """Workers of one run begin with equal parameters; another seed gives others."""
    first, again, other = (FlatParameters(build_network(seed)).values for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_training_learns(digits: Digits) -> None:
    """300 batches of one process bring the loss well down and the test accuracy well up."""
    torch.set_num_threads(1)
    trainer = Trainer(digits, network_seed=0, order_seed=0, batch_size=32)
    first = trainer.step(0.0)
    losses = [trainer.step(0.1) for _ in range(300)]
    assert np.mean(losses[-20:]) < 0.4 * first
    assert accuracy(trainer.network, digits.test_images, digits.test_labels) > 0.85


def test_learning_rate_falls_to_a_hundredth() -> None:
    """The step size starts at the full rate, falls steadily, and does not go below a hundredth after the end."""
    rates = [learning_rate(progress) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(LEARNING_RATE)
    assert rates[-1] == learning_rate(1.7) == pytest.approx(LEARNING_RATE / 100)


def test_exchange_is_the_published_formula() -> None:
    """d = alpha*(local - shared) leaves the worker and enters the shared model, so their sum stays the same."""
    shared = LocalBuffer(np.array([1.0, 2.0, 3.0], dtype=np.float32))
    local = np.array([5.0, 2.0, -1.0], dtype=np.float32)
    averaging = ElasticAveraging(shared, alpha=0.25)  # type: ignore[arg-type]
    averaging.exchange(local)
    assert local.tolist() == [4.0, 2.0, 0.0]
    assert shared.values.tolist() == [2.0, 2.0, 2.0]
    assert averaging.counters.exchanges == 1
    assert averaging.counters.bytes_moved == 2 * local.nbytes
    assert averaging.counters.seconds > 0.0


def test_a_latecomer_starts_from_the_shared_model() -> None:
    """Joining overwrites whatever the newcomer had."""
    shared = LocalBuffer(np.array([1.0, 2.0], dtype=np.float32))
    local = np.array([9.0, 9.0], dtype=np.float32)
    ElasticAveraging(shared, alpha=0.2).start_from_shared(local)  # type: ignore[arg-type]
    assert local.tolist() == [1.0, 2.0]
