"""The arithmetic of the elastic schemes by itself."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import torch

from smb.config.parse import TRAIN_HOST_VARIABLE
from smb.train.elastic import nesterov_step
from smb.train.exchange.elastic_force import moving_rate
from smb.train.exchange.mover import take_difference
from smb.train.rare.hsgd import host_name
from tests.support.elastic import gradient


@pytest.mark.parametrize("size", [1, (1 << 16) - 1, 1 << 16, (1 << 17) + 5])
def test_the_difference(size: int) -> None:
    """alpha * (w - W), rounded to float32 after each operation, at every size around the blocks it is taken in."""
    random = np.random.default_rng(3)
    values, shared = (random.standard_normal(size).astype(np.float32) for _ in range(2))
    wanted = np.float32(0.3) * (values - shared)
    take_difference(values, shared, 0.3)
    np.testing.assert_array_equal(shared, wanted)


def test_the_moving_rate() -> None:
    """0.9 by the number of workers, unless it is given."""
    assert moving_rate(None, 4) == pytest.approx(0.225)
    assert moving_rate(None, 0) == 0.9  # alone, and not in the table yet
    assert moving_rate(0.2, 4) == 0.2


def test_nesterov_as_optimizers_have_it() -> None:
    """torch's parameters are EAMSGD's look-ahead point w + mu*v, step by step, to float32's rounding, and not w."""
    rate, momentum, size = 0.05, 0.9, 1000
    values, velocity = np.ones(size, np.float32), np.zeros(size, np.float32)
    theta = torch.ones(size, requires_grad=True)
    optimizer = torch.optim.SGD([theta], lr=rate, momentum=momentum, nesterov=True)
    apart = 0.0
    for _ in range(30):
        theta.grad = torch.from_numpy(gradient(1, theta.detach().numpy()))
        optimizer.step()
        nesterov_step(values, velocity, lambda at: gradient(1, at), rate, momentum)
        np.testing.assert_allclose(theta.detach().numpy(), values + np.float32(momentum) * velocity, atol=1e-5)
        apart = max(apart, float(np.abs(theta.detach().numpy() - values).max()))
    assert apart > 0.1


def test_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's name, or what the variable says, as a part of a buffer's name."""
    assert host_name() == socket.gethostname()
    monkeypatch.setenv(TRAIN_HOST_VARIABLE, "rack 7/left")
    assert host_name() == "rack-7-left"
