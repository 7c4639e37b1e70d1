from __future__ import annotations

import numpy as np
import pytest
import torch

from smb.tools.demo.digits import Digits, load_digits, shifted_copies
from smb.tools.demo.network import FlatParameters, accuracy, build_network
from smb.tools.demo.training import LEARNING_RATE, Trainer, learning_rate


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits()


def test_split_is_fixed_and_stratified(digits: Digits) -> None:
    """1437 digits to train and 360 to test, each class with its share, the same at every call, in 0 to 1."""
    assert digits.train_images.shape == (1437, 8, 8)
    assert digits.test_images.shape == (360, 8, 8)
    assert digits.train_images.dtype == np.float32
    assert 0.0 <= digits.train_images.min() < digits.train_images.max() <= 1.0
    assert np.ptp(np.bincount(digits.test_labels)) <= 2
    assert np.array_equal(load_digits().test_images, digits.test_images)


def test_some_digits_are_trained_and_all_are_tested(digits: Digits) -> None:
    """A part has these rows to train with, in this order, and every digit of the test."""
    part = digits.some(np.array([7, 3]))
    assert np.array_equal(part.train_images, digits.train_images[[7, 3]])
    assert np.array_equal(part.train_labels, digits.train_labels[[7, 3]])
    assert np.array_equal(part.test_labels, digits.test_labels)


def test_a_pass_has_every_digit_once_whatever_the_batch(digits: Digits) -> None:
    """Five digits in batches of 32: after five batches each has been trained 32 times."""
    trainer = Trainer(digits.some(np.arange(5)), network_seed=0, order_seed=0, batch_size=32)
    trainer._labels = torch.arange(5)
    drawn = torch.cat([trainer._next_batch()[1] for _ in range(5)])
    assert torch.bincount(drawn).tolist() == [32] * 5


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
    network = build_network(3, 64)
    parameters = FlatParameters(network)
    assert parameters.count == sum(each.numel() for each in network.parameters()) == 38282
    images = torch.rand(2, 1, 8, 8)
    assert network(images).abs().sum() > 0
    parameters.values.numpy()[:] = 0.0
    assert network(images).abs().sum() == 0


def test_same_seed_same_network() -> None:
    """Workers of one run begin with equal parameters; another seed gives others."""
    first, again, other = (FlatParameters(build_network(seed, 64)).values for seed in (5, 5, 6))
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


def test_nesterov_momentum_is_pytorchs(digits: Digits) -> None:
    """With nesterov the trainer takes the steps of torch.optim.SGD(nesterov=True), times its factor."""
    torch.set_num_threads(1)
    trainer = Trainer(digits, network_seed=0, order_seed=0, batch_size=32, rate=0.5, nesterov=True)
    trainer.step(0.0)
    reference = torch.nn.Parameter(trainer.parameters.values.clone())
    optimizer = torch.optim.SGD([reference], lr=0.5 * LEARNING_RATE, momentum=0.9, nesterov=True)
    before = trainer.parameters.values.clone()
    velocity = trainer._velocity.clone()
    optimizer.state[reference]["momentum_buffer"] = velocity.clone()
    trainer.step(0.0)
    reference.grad = trainer._velocity - 0.9 * velocity  # the gradient that the trainer saw
    optimizer.step()
    assert not torch.equal(before, trainer.parameters.values)
    assert torch.allclose(reference.detach(), trainer.parameters.values, atol=1e-6)
