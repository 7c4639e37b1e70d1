"""Simulated steps: one worker's are the planner's, several share the links, a round waits for all."""

from __future__ import annotations

import random
import statistics

import pytest

from perf.simulated import Cluster, inequality_of, named, resnet_50, rounds_of, step_s
from smb.train.partition import Channel, Layer, predict
from smb.train.traits import FUSED, ROUNDS

UNIT = 10**6
EVEN = [Layer(UNIT, 0.1, 0.1)] * 10  # a second for each pass, and over 10 MB/s for each transfer
LINK = 10 * UNIT


def plans(layers: list[Layer], exchange: str, start_s: float = 0.0) -> list:  # type: ignore[type-arg]
    return predict(layers, Channel(LINK, LINK, start_s), exchange)


def test_one_workers_rounds_are_as_planned() -> None:
    """Whatever the layers, the schedule and the cut."""
    generator = random.Random(67)
    for _ in range(30):
        layers = [
            Layer(generator.randint(1, 4 << 20), generator.random() / 20, generator.random() / 10)
            for _ in range(generator.randint(1, 12))
        ]
        rate, start_s = 10 ** generator.uniform(6.5, 8), 10 ** generator.uniform(-4, -2)
        channel = Channel(rate, rate, start_s, start_s * generator.random())
        cluster = Cluster(1, rate, 1.5 * rate, start_s, channel.gap_s, closing_s=0.013)
        for plan in predict(layers, channel, ROUNDS, 0.013):
            assert step_s(layers, plan, ROUNDS, cluster, steps=3) == pytest.approx(plan.iteration_s), plan


def test_a_message_that_brings_values_back_waits_for_its_last_chunk() -> None:
    """Otherwise one worker's fused exchanges are as planned, too."""
    cluster = Cluster(1, LINK, LINK, 0.001)
    for plan in plans(EVEN, FUSED, 0.001):
        if plan.schedule not in ("none", "slices"):  # slices in flight wait for each other's last chunk, too
            chunk_s = 262144 / LINK
            took = step_s(EVEN, plan, FUSED, cluster, steps=3)
            assert plan.iteration_s - 1e-9 <= took <= plan.iteration_s + chunk_s * len(plan.pushes or plan.pulls or "1")


def test_workers_share_the_links() -> None:
    """Four that send at one time take four times as long; with four times the links, or as many servers, they don't."""
    without = named(plans(EVEN, ROUNDS), "none", "none")
    assert step_s(EVEN, without, ROUNDS, Cluster(4, LINK, LINK, 0.0)) == pytest.approx(2 + 2 * 4)
    assert step_s(EVEN, without, ROUNDS, Cluster(4, LINK, 4 * LINK, 0.0)) == pytest.approx(2 + 2)
    assert step_s(EVEN, without, ROUNDS, Cluster(4, LINK / 2, 4 * LINK, 0.0)) == pytest.approx(2 + 4)


def test_unequal_shares() -> None:
    """All bytes are through at the same moment as with equal shares, but the first flow ends sooner: who has its values
    goes on. An inequality that others measured is found again.
    """
    without = named(plans(EVEN, ROUNDS), "none", "none")
    equal, unequal = (
        statistics.fmean(
            step_s(EVEN, without, ROUNDS, Cluster(4, LINK, LINK, 0.0, inequality=each), steps=10, seed=seed)
            for seed in range(5)
        )
        for each in (0.0, 0.5)
    )
    assert equal == pytest.approx(10.0)
    assert 8.0 < unequal < 9.7
    assert inequality_of(1.0, 4) == pytest.approx(0.0, abs=1e-3)
    assert 0.2 < inequality_of(0.7, 4) < inequality_of(0.5, 4) < 1.5
    with pytest.raises(ValueError, match="where the servers' links alone"):
        Cluster(4, LINK, 2 * LINK, 0.0, inequality=0.1)


def test_jitter_costs_those_who_wait_for_each_other() -> None:
    """A round waits for its slowest worker; nobody else does. The same seed gives the same times."""
    cluster = Cluster(8, LINK, 8 * LINK, 0.0, jitter=0.3)
    rounds, alone = (
        step_s(EVEN, named(plans(EVEN, way), "none", name), way, cluster, steps=40, seed=1)
        for way, name in ((ROUNDS, "none"), (FUSED, "one message"))
    )
    assert rounds > 4.4
    assert alone == pytest.approx(2 + 1.03, abs=0.15)
    assert rounds == step_s(EVEN, named(plans(EVEN, ROUNDS), "none", "none"), ROUNDS, cluster, steps=40, seed=1)


def test_parts_that_close_by_themselves() -> None:
    """Where sending is all there is, pushes and pulls then use both directions at once."""
    layers = [Layer(UNIT, 1e-6, 1e-6)] * 20
    plan = named(predict(layers, Channel(LINK, LINK, 0.0), ROUNDS), "both", "layer by layer")
    cluster = Cluster(4, LINK, 4 * LINK, 0.0)
    usual, early = (step_s(layers, plan, ROUNDS, cluster, by_part=each) for each in (False, True))
    assert usual == pytest.approx(4.0, rel=0.01)
    assert early == pytest.approx(2.1, rel=0.01)


def test_both_of_iparts_figures_at_one_input() -> None:
    """ResNet-50 by tensors with a start-up of 3.5 ms for each second of transfer, 24 workers to be quick."""
    assert len(resnet_50()) == 161
    assert sum(nbytes for nbytes, _ in resnet_50()) == 4 * 25_557_032
    none, layerwise = rounds_of(0.0035, 0.0, workers=24)
    assert none == pytest.approx(0.965, abs=0.01)
    assert layerwise == pytest.approx(0.53, abs=0.02)
