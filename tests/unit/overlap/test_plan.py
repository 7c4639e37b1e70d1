"""From measurements to parts: every element travels once, in the order that the schedule says."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from smb.overlap.parts import Part
from smb.overlap.plan import LayerRuns, Measured, cut_of, plan_of
from smb.train.ledger import Run
from smb.train.partition import Channel, Layer, Prediction
from smb.train.traits import FUSED, ROUNDS

CHANNEL = Channel(10e6, 10e6, 0.001, 0.0001)


def places_of(random_: random.Random, count: int) -> list[LayerRuns]:
    """Layers of several tensors, which lie in the vector in another order, at multiples of 16 elements."""
    tensors = [[random_.choice((1, 5, 16, 33, 700)) for _ in range(random_.randint(1, 3))] for _ in range(count)]
    order = [(layer, at) for layer in range(count) for at in range(len(tensors[layer]))]
    random_.shuffle(order)
    found: list[list[Run]] = [[] for _ in range(count)]
    here = 0
    for layer, at in order:
        found[layer].append(Run(here, here, tensors[layer][at]))
        here += -(-tensors[layer][at] // 16) * 16
    return [LayerRuns(tuple(sorted(runs, key=lambda run: run.here))) for runs in found]


def covered(parts: Sequence[Part]) -> dict[int, int]:
    """How often each element is in a part, and that runs of one lie in order."""
    times: dict[int, int] = {}
    for part in parts:
        assert all(one.here + one.count <= two.here for one, two in zip(part.runs, part.runs[1:], strict=False))
        for run in part.runs:
            for element in range(run.here, run.here + run.count):
                times[element] = times.get(element, 0) + 1
    return times


@pytest.mark.parametrize("exchange", [FUSED, ROUNDS])
def test_every_element_travels_once(exchange: str) -> None:
    """Whatever the schedule: an element of a tensor is in one part each way; one between tensors in one at most."""
    for seed in range(20):
        print("seed", seed)
        random_ = random.Random(seed)
        places = places_of(random_, random_.randint(1, 9))
        elements = {run.here + at for place in places for run in place.runs for at in range(run.count)}
        sizes = [1] * len(places) if seed % 2 else [len(places)]
        schedules = [
            Prediction("none", "one message", 1, 0),
            Prediction("forward", "planned", 1, 0, pulls=tuple(sizes)),
            Prediction("both", "planned", 1, 0, pushes=tuple(sizes), pulls=tuple(sizes) if exchange == ROUNDS else ()),
            Prediction("both", "slices", 1, 0, slice_bytes=random_.choice((4, 100, 1000)), credit_bytes=4000),
        ]
        for chosen in schedules:
            cut = cut_of(places, chosen, exchange)
            for parts in (cut.push, cut.pull):
                times = covered(parts)
                assert set(times.values()) == {1}
                assert elements <= set(times)
            if exchange == FUSED:
                assert cut.push is cut.pull
            if chosen.slice_bytes:
                assert all(part.nbytes <= chosen.slice_bytes for part in cut.push)
                assert cut.credit_bytes == 4000


def test_order() -> None:
    """Pulls come in the order of the forward pass, pushes in that of the backward pass; slices by their layer."""
    places = [LayerRuns((Run(16 * at, 16 * at, 16),)) for at in range(4)]
    cut = cut_of(places, Prediction("both", "planned", 1, 0, pushes=(1, 3), pulls=(2, 2)), ROUNDS)
    assert [part.runs for part in cut.push] == [(Run(48, 48, 16),), (Run(0, 0, 48),)]
    assert [part.runs for part in cut.pull] == [(Run(0, 0, 32),), (Run(32, 32, 32),)]
    assert all(one.urgency > two.urgency for one, two in (cut.push, cut.pull))
    assert cut.credit_bytes == 1  # one after the other, as predicted
    cut = cut_of(places, Prediction("both", "slices", 1, 0, slice_bytes=32, credit_bytes=64), FUSED)
    assert [part.urgency for part in cut.push] == [0, 0, -1, -1, -2, -2, -3, -3]


def test_the_best_that_is_allowed_is_picked() -> None:
    """With a slow link both passes hide an exchange; "forward" picks no more than that, "none" nothing."""
    places = [LayerRuns((Run(100_000 * at, 100_000 * at, 100_000),)) for at in range(6)]
    layers = [Layer(place.nbytes, 0.02, 0.04) for place in places]
    found = {overlap: plan_of(places, layers, CHANNEL, FUSED, 0.0, overlap) for overlap in ("none", "forward", "both")}
    assert [made.chosen.overlap for made in found.values()] == ["none", "forward", "both"]
    times = [made.chosen.iteration_s for made in found.values()]
    assert times[0] > times[1] > times[2]
    assert len(found["none"].cut.push) == 1
    assert all(made.without.iteration_s == times[0] for made in found.values())
    assert "overlap 'both'" in str(found["both"])


def measured(places: Sequence[LayerRuns], forward_s: float, rate: float) -> Measured:
    found = Measured(places, 0.001, 0.0001)
    for _ in range(9):
        found.computed([forward_s] * len(places), [2 * forward_s] * len(places), 0.03)
        found.moved(int(rate), 1.001, pull=False)
    return found


def test_medians_and_what_moved() -> None:
    """One disturbed step does not count; a plan is outdated from 20 % on. The optimizer's time is shared by bytes."""
    places = [LayerRuns((Run(0, 0, 100),)), LayerRuns((Run(112, 112, 200),))]
    found = measured(places, 0.1, 1e6)
    made = plan_of(places, found.layers(), found.channel(), FUSED, found.closing_s(), "both")
    assert [layer.backward_s for layer in found.layers()] == pytest.approx([0.21, 0.22])
    assert found.channel().push_per_s == pytest.approx(1e6)
    for _ in range(4):
        found.computed([9.0, 9.0], [9.0, 9.0], 9.0)
        found.moved(1000, 5.0, pull=False)
    assert not found.outdated(made)
    assert not measured(places, 0.115, 0.9e6).outdated(made)
    assert measured(places, 0.13, 1e6).outdated(made)
    assert measured(places, 0.1, 0.7e6).outdated(made)


def test_steps_with_overlap_and_without() -> None:
    """Medians of the latest nine each."""
    found = Measured([LayerRuns((Run(0, 0, 100),))], 0.001, 0.0001)
    for seconds in (5.0, 5.0, 0.1, 0.1, 0.1, 0.1, 0.1, 9.0, 9.0, 9.0, 9.0):
        found.stepped(seconds, overlapped=False)
    found.stepped(0.2, overlapped=True)
    assert found.step_s(overlapped=False) == 0.1
    assert found.step_s(overlapped=True) == 0.2
