"""The network of the training experiments, and when a run counts as having reached a loss."""

from __future__ import annotations

import numpy as np
import pytest

from perf.training.digits import SIZE, Network, initial_values
from perf.training.divided import reached
from perf.training.r2sp import CASES, TARGET, Run, common_loss


def test_the_gradient_is_the_losss() -> None:
    """A step moves each parameter by its difference quotient."""
    seed = 3
    random = np.random.default_rng(seed)
    images, labels = random.random((8, 64), np.float32), random.integers(10, size=8)
    values = initial_values(seed)
    before = values.copy()
    Network(values).step(images, labels, 1.0)
    step = before - values
    for at in [*random.choice(SIZE, 5, replace=False), *np.argsort(np.abs(step))[-5:]]:
        losses = []
        for move in (1e-2, -1e-2):
            moved = before.copy()
            moved[at] += move
            losses.append(Network(moved).loss(images, labels))
        assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(step[at], abs=3e-3, rel=0.05), f"seed {seed}, {at}"


def test_learning() -> None:
    random = np.random.default_rng(4)
    images, labels = random.random((32, 64), np.float32), random.integers(10, size=32)
    network = Network(initial_values(4))
    first = network.loss(images, labels)
    for _ in range(60):
        network.step(images, labels, 0.1)
    assert network.loss(images, labels) < 0.5 * first
    assert network.accuracy(images, labels) > 0.5


def test_a_loss_is_reached_by_three_in_a_row() -> None:
    run = Run(0.1, [], [], [1.0, 2.0, 3.0, 4.0, 5.0], [0.9, 0.1, 0.5, 0.1, 0.1], 0.9, [])
    assert run.reached_s(0.3) == 4.0  # the mean of three; one that is low by chance does not count
    assert run.reached_s(0.05) is None


def test_short_runs_are_timed_to_a_loss_that_all_of_them_reach() -> None:
    """A ratio of times has a value for every run, however few steps it had (`--quick` printed nan)."""
    runs = [
        Run(0.1, [], [], [1.0, 2.0, 3.0, 4.0], losses, 0.9, [])
        for losses in ([2.2, 1.1, 0.9, 1.0], [2.0, 1.9, 1.8, 1.7], [2.0, 0.4, 0.1, 0.01])
    ]
    loss = common_loss(runs)
    assert loss == pytest.approx(1.8)
    assert [run.reached_s(loss) for run in runs] == [3.0, 4.0, 3.0]
    assert common_loss(runs[2:]) == pytest.approx(0.17)
    assert common_loss([Run(0.1, [], [], [1.0] * 3, [0.01] * 3, 0.9, [])]) == TARGET


def test_the_step_for_each_sample_is_the_same() -> None:
    """BSP takes the mean over the workers of what the others add up."""
    assert {case.lr for case in CASES if case.scheme == "bsp"} == {0.4}
    assert {case.lr for case in CASES if case.scheme != "bsp"} == {0.1}


def test_the_seconds_of_a_loss_are_of_three_looks_in_a_row() -> None:
    curve = [(5, 0.1, 0.9), (10, 0.2, 0.1), (15, 0.3, 0.3), (20, 0.4, 0.03), (25, 0.5, 0.03)]
    assert reached(curve) == (20, 0.4)
    assert reached(curve[:3]) is None
