"""The planner beside every plan that there is, each played through event by event by a simulator of its own.

The simulator counts whole ticks and knows no formula: a processor does its tasks in order, a link its messages, and a
task or message begins when all that it needs is done.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from smb.errors import InvalidArgumentError
from smb.train.partition import (
    FUSED,
    ROUNDS,
    Channel,
    Layer,
    backward_seconds,
    bound_s,
    forward_seconds,
    outdated,
    pick,
    plan_backward,
    plan_forward,
    predict,
    sliced_seconds,
)

SEED = 27


def compositions(count: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide layers into runs."""
    for cuts in itertools.product((False, True), repeat=count - 1):
        sizes, size = [], 1
        for cut in cuts:
            if cut:
                sizes.append(size)
                size = 0
            size += 1
        yield (*sizes, size)


def play(lanes: list[list[tuple[str, int, tuple[str, ...]]]]) -> dict[str, int]:
    """When each job ends: a lane does its jobs (name, ticks, needs) in order, one at a time; time goes tick by tick."""
    ended: dict[str, int] = {}
    queues = [list(lane) for lane in lanes]
    doing: list[tuple[str, int] | None] = [None] * len(lanes)
    for now in itertools.count():
        moved = True
        while moved:
            moved = False
            for at, queue in enumerate(queues):
                job = doing[at]
                if job is not None and job[1] == now:
                    ended[job[0]] = now
                    doing[at], moved = None, True
                if doing[at] is None and queue and all(need in ended for need in queue[0][2]):
                    name, ticks, _ = queue.pop(0)
                    doing[at], moved = (name, now + ticks), True
        if not any(queues) and not any(doing):
            return ended
    raise AssertionError


def forward_played(layers: list[Layer], start: int, sizes: tuple[int, ...]) -> int:
    runs = [list(run) for run in _split(range(len(layers)), sizes)]
    link = [(f"m{at}", start + sum(layers[each].nbytes for each in run), ()) for at, run in enumerate(runs)]
    computing = [(f"f{each}", int(layers[each].forward_s), (f"m{at}",)) for at, run in enumerate(runs) for each in run]
    return max(play([link, computing]).values())


def backward_played(layers: list[Layer], start: int, sizes: tuple[int, ...]) -> int:
    order = list(reversed(range(len(layers))))
    runs = [list(run) for run in _split(order, sizes)]
    computing = [(f"b{each}", int(layers[each].backward_s), ()) for each in order]
    link = [
        (f"m{at}", start + sum(layers[each].nbytes for each in run), tuple(f"b{each}" for each in run))
        for at, run in enumerate(runs)
    ]
    return max(play([computing, link]).values())


def _split(items: range | list[int], sizes: tuple[int, ...]) -> Iterator[list[int]]:
    rest = iter(items)
    for size in sizes:
        yield list(itertools.islice(rest, size))


def sliced_played(
    layers: list[Layer], gap: int, flight: int, ready: list[int], slice_bytes: int, many: int
) -> list[int]:
    """When each layer is there. At each tick: slices arrive, gradients come, free places go to the earliest layers."""
    left = [layer.nbytes for layer in layers]
    line: list[tuple[int, int]] = []  # layer, ticks of the link still to come, in the order of sending
    flying: list[tuple[int, int]] = []  # layer, when it is there
    there = list(ready)
    for now in itertools.count():
        for at, when in [each for each in flying if each[1] == now]:
            flying.remove((at, when))
            there[at] = now
        while len(line) + len(flying) < many:
            waiting = [at for at in range(len(layers)) if left[at] and ready[at] <= now]
            if not waiting:
                break
            nbytes = min(slice_bytes, left[waiting[0]])
            left[waiting[0]] -= nbytes
            line.append((waiting[0], gap + nbytes))
        if not line and not flying and not any(left):
            return there
        if line:
            at, ticks = line[0]
            line[0] = (at, ticks - 1)
            if ticks == 1:
                line.pop(0)
                flying.append((at, now + 1 + flight))
    raise AssertionError


def nets(count: int, layers_max: int) -> Iterator[tuple[list[Layer], int]]:
    """Random networks in whole ticks: one byte a tick; some layers without bytes or computing; start-ups 0 to 9."""
    dice = random.Random(SEED)
    for _ in range(count):
        size = dice.randint(1, layers_max)
        made = [
            Layer(dice.choice((0, dice.randint(0, 9), dice.randint(0, 30))), dice.randint(0, 9), dice.randint(0, 15))
            for _ in range(size)
        ]
        yield made, dice.choice((0, 1, dice.randint(0, 9)))


def test_formulas_are_what_is_played_through() -> None:
    """Of every plan of 60 random networks."""
    for layers, start in nets(60, 5):
        channel = Channel(1.0, 1.0, start)
        for sizes in compositions(len(layers)):
            assert forward_seconds(layers, channel, sizes) == forward_played(layers, start, sizes), (
                layers,
                start,
                sizes,
            )
            assert backward_seconds(layers, channel, sizes) == backward_played(layers, start, sizes), (
                layers,
                start,
                sizes,
            )


def test_plans_are_the_best_of_all() -> None:
    """Of 400 random networks with up to 9 layers; and what is said of a plan is what it takes."""
    for layers, start in nets(400, 9):
        channel = Channel(1.0, 1.0, start)
        forward, backward = plan_forward(layers, channel), plan_backward(layers, channel)
        every = list(compositions(len(layers)))
        assert forward.seconds == min(forward_seconds(layers, channel, sizes) for sizes in every), (layers, start)
        assert backward.seconds == min(backward_seconds(layers, channel, sizes) for sizes in every), (layers, start)
        assert forward_seconds(layers, channel, forward.sizes) == forward.seconds
        assert backward_seconds(layers, channel, backward.sizes) == backward.seconds


@pytest.mark.parametrize("seed", range(3))
def test_slices_are_what_is_played_through(seed: int) -> None:
    """Priority, credit, start-ups side by side: when each layer is there, to the tick."""
    dice = random.Random(SEED + seed)
    for layers, start in nets(40, 5):
        gap = dice.randint(0, start)
        ready = [dice.randint(0, 30) for _ in layers]
        size, many = dice.randint(1, 12), dice.randint(1, 4)
        channel = Channel(1.0, 1.0, start, gap)
        found = sliced_seconds(layers, channel, 1.0, ready, size, size * many)
        assert found == sliced_played(layers, gap, start - gap, ready, size, many), (layers, start, gap, ready, size)


@pytest.mark.parametrize("exchange", [FUSED, ROUNDS])
def test_predictions_of_a_network(exchange: str) -> None:
    """In order: the planned runs are never worse than layer by layer, more overlap helps, nothing beats the bound."""
    for layers, start in nets(60, 7):
        layers = [replace(layer, nbytes=layer.nbytes << 18) for layer in layers]
        channel = Channel(2 * 2.0**18, 2.0**18, start, min(start, 0.1))
        found = {(each.overlap, each.schedule): each for each in predict(layers, channel, exchange, 0.5)}
        least = bound_s(layers, channel, exchange)
        for overlap in ("forward", "both"):
            assert found[overlap, "planned"].iteration_s <= found[overlap, "layer by layer"].iteration_s + 1e-9
            assert found["both", "planned"].iteration_s <= found["forward", "planned"].iteration_s + 1e-9 or (
                exchange == FUSED  # what is pushed in backward order is there too late for the forward pass
            )
        assert all(each.iteration_s >= least - 1e-9 for each in found.values())
        best = pick(list(found.values()))
        assert best.iteration_s == min(each.iteration_s for each in found.values())
        assert pick(list(found.values()), "none").overlap == "none"
        assert best.exposed_s == pytest.approx(best.iteration_s - sum(x.forward_s + x.backward_s for x in layers))


def test_one_layer_by_hand() -> None:
    """3 MiB at 1 MiB/s out and 3 MiB/s in, 0.5 s to start, 2 s forward, 4 s backward, 0.25 s to close a round."""
    layers, channel = [Layer(3 << 20, 2.0, 4.0)], Channel(2.0**20, 3 * 2.0**20, 0.5)
    fused = {(each.overlap, each.schedule): each.iteration_s for each in predict(layers, channel, FUSED)}
    assert fused["none", "none"] == 6 + 3.5 + 1.5
    assert fused["none", "one message"] == fused["forward", "planned"] == fused["both", "planned"] == 6 + 3.5
    rounds = {(each.overlap, each.schedule): each.iteration_s for each in predict(layers, channel, ROUNDS, 0.25)}
    assert rounds["none", "none"] == rounds["both", "planned"] == 6 + 3.5 + 0.25 + 1.5


def test_slices_meet_the_bound_where_it_can_be_met() -> None:
    """VGG-like at the balance of computing and sending: the last layers have the parameters, the first the work."""
    counts = (40_000, 80_000, 150_000, 300_000, 300_000, 600_000, 600_000, 600_000, 1_600_000, 500_000)
    times = (0.020, 0.020, 0.020, 0.018, 0.016, 0.016, 0.012, 0.010, 0.006, 0.002)
    layers = [Layer(4 * count, time, 2 * time) for count, time in zip(counts, times, strict=True)]
    channel = Channel(47.8e6, 47.8e6, 0.0005, 0.00005)
    found = predict(layers, channel, FUSED)
    best = pick(found)
    assert (best.overlap, best.schedule) == ("both", "slices")
    assert best.iteration_s <= 1.06 * bound_s(layers, channel)
    assert found[1].iteration_s > 1.75 * best.iteration_s  # today's: one message after computing


def test_long_networks_are_planned_in_time() -> None:
    """300 layers, start-ups of nearly nothing: the case in which most messages pay."""
    dice = random.Random(SEED)
    layers = [Layer(dice.randint(1, 10**6), dice.random() / 1000, dice.random() / 500) for _ in range(300)]
    channel = Channel(1e9, 1e9, 1e-6)
    assert plan_forward(layers, channel).seconds <= forward_seconds(layers, channel, [1] * 300)
    assert plan_backward(layers, channel).seconds <= backward_seconds(layers, channel, [1] * 300)


def test_outdated_by_a_fifth() -> None:
    """What moved by more than 20 % counts; a start-up that is nothing beside an iteration does not."""
    layers, channel = [Layer(1000, 0.1, 0.2)] * 3, Channel(1e6, 1e6, 1e-5)
    assert not outdated(layers, channel, [Layer(1000, 0.119, 0.2)] * 3, replace(channel, start_s=1e-4))
    assert outdated(layers, channel, [Layer(1000, 0.121, 0.2)] * 3, channel)
    assert outdated(layers, channel, layers, replace(channel, pull_per_s=0.79e6))
    assert outdated(layers, channel, layers, replace(channel, start_s=1e-3))
    assert outdated(layers, channel, layers[1:], channel)


def test_what_is_no_measurement_is_refused() -> None:
    for bad in (
        {"push_per_s": 0.0},
        {"start_s": -1.0},
        {"gap_s": 2.0},
        {"start_s": math.nan},
        {"pull_per_s": math.nan},
    ):
        with pytest.raises(InvalidArgumentError, match="rates must be above 0"):
            Channel(**{"push_per_s": 1.0, "pull_per_s": 1.0, "start_s": 1.0} | bad)
    channel = Channel(1.0, 1.0, 0.0)
    for layers, exchange in (([], FUSED), ([Layer(1, 1.0, 1.0)], "other"), ([Layer(-1, 1.0, 1.0)], FUSED)):
        with pytest.raises(InvalidArgumentError):
            predict(layers, channel, exchange)
