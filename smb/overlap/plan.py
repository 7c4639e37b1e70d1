"""From the measurements of a training to the parts in which its exchange is hidden behind the passes. Pure.

smb/train/partition.py predicts every schedule. This file turns the chosen schedule into runs of the model's vector
(parts.py).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smb.overlap.parts import Cut, Part
from smb.train.ledger import Run
from smb.train.partition import Channel, Layer, Prediction, outdated, pick, predict
from smb.train.traits import FUSED

_WINDOW = 9  # number of measurements of which the median is used
_RATE_MAX, _START_MIN = 1e12, 1e-7  # bytes per second and seconds: limits of what clocks can measure


@dataclass(frozen=True)
class LayerRuns:
    """Where a layer's parameters lie in the vector: ascending runs with gaps between them."""

    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes, as float32."""
        return 4 * sum(run.count for run in self.runs)


@dataclass(frozen=True)
class ExchangePlan:
    """How to exchange: the chosen prediction, the prediction for an exchange without overlap, and the parts."""

    chosen: Prediction
    without: Prediction
    cut: Cut
    layers: tuple[Layer, ...]
    channel: Channel

    def __str__(self) -> str:
        computing = 1e3 * (self.chosen.iteration_s - self.chosen.exposed_s)
        count = max(len(self.cut.push), len(self.cut.pull))
        return (
            f"overlap {self.chosen.overlap!r}, {self.chosen.schedule}, {count} part{'' if count == 1 else 's'}; passes "
            f"{computing:.1f} ms, predicted {1e3 * self.chosen.iteration_s:.1f} ms, without overlap "
            f"{1e3 * self.without.iteration_s:.1f} ms; link {_shown(self.channel.push_per_s)} and "
            f"{_shown(self.channel.pull_per_s)}, start-up {1e3 * self.channel.start_s:.2f} ms"
        )


def _shown(rate: float) -> str:
    return f"{rate / 1e6:.1f} MB/s" if rate < _RATE_MAX else "no limit"


def whole(layer_runs: Sequence[LayerRuns]) -> Cut:
    """Return the cut into a single part."""
    part = (_part(layer_runs, 0),)
    return Cut(part, part)


def plan_of(layer_runs: Sequence[LayerRuns], layers: Sequence[Layer], channel: Channel, exchange: str, closing_s: float,
         overlap: str) -> ExchangePlan:  # fmt: skip
    """Return the best plan with at most this overlap. Runs and layers are in the order of the forward pass."""
    predictions = predict(layers, channel, exchange, closing_s)
    without = pick(predictions, "none")
    chosen = pick(predictions, overlap)
    return ExchangePlan(chosen, without, cut_of(layer_runs, chosen, exchange), tuple(layers), channel)


def cut_of(layer_runs: Sequence[LayerRuns], chosen: Prediction, exchange: str) -> Cut:
    """Return the parts of a schedule."""
    if chosen.overlap == "none":
        return whole(layer_runs)
    if chosen.slice_bytes:
        parts = tuple(_slices(layer_runs, chosen.slice_bytes))
        return Cut(parts, parts, chosen.credit_bytes)
    pushes = tuple(_of_runs(layer_runs, chosen.pushes, backward=True)) if chosen.pushes else ()
    pulls = tuple(_of_runs(layer_runs, chosen.pulls, backward=False)) if chosen.pulls else ()
    if exchange == FUSED:  # one message both pushes and pulls
        parts = pushes or pulls
        return Cut(parts, parts, 1)
    every = (_part(layer_runs, 0),)
    return Cut(pushes or every, pulls or every, 1)


def _of_runs(layer_runs: Sequence[LayerRuns], sizes: Iterable[int], *, backward: bool) -> Iterable[Part]:
    """Yield messages of whole layers, one after the other. In backward order the first message has the last layers."""
    order = list(range(len(layer_runs)))[:: -1 if backward else 1]
    at = 0
    for size in sizes:
        taken = sorted(order[at : at + size])
        yield _part([layer_runs[each] for each in taken], -at)
        at += size


def _slices(layer_runs: Sequence[LayerRuns], slice_bytes: int) -> Iterable[Part]:
    """Yield slices of each layer, cut by size. The earlier the layer, the more urgent its slices."""
    most = max(1, slice_bytes // 4)
    for number, place in enumerate(layer_runs):
        room, taken = most, list[Run]()
        for run in place.runs:
            here, there, left = run.here, run.there, run.count
            while left:
                count = min(left, room)
                taken.append(Run(here, there, count))
                here, there, left, room = here + count, there + count, left - count, room - count
                if not room:
                    yield Part(tuple(taken), -number)
                    room, taken = most, []
        if taken:
            yield Part(tuple(taken), -number)


def _part(layer_runs: Sequence[LayerRuns], urgency: int) -> Part:
    """Return some layers as one part. Runs that follow each other are joined, together with the gap between two
    tensors.
    """
    found: list[Run] = []
    for run in sorted((run for place in layer_runs for run in place.runs), key=lambda run: run.here):
        last = found[-1] if found else None
        gap = run.here - (last.here + last.count) if last else -1
        if last is not None and 0 <= gap < GAP_ELEMENTS and run.there - last.there == run.here - last.here:
            found[-1] = Run(last.here, last.there, last.count + gap + run.count)
        else:
            found.append(run)
    return Part(tuple(found), urgency)


GAP_ELEMENTS = 16  # tensors lie at multiples of 64 bytes (smb/tensors.py), so smaller gaps belong to no tensor


class Measured:
    """The times of the last steps, by layer, and the speed of the link. Medians are used, so that one disturbed step
    does not matter.
    """

    def __init__(self, layer_runs: Sequence[LayerRuns], start_s: float, gap_s: float) -> None:
        self.layer_runs = layer_runs
        self._start_s = max(start_s, _START_MIN)
        self._gap_s = min(max(gap_s, 0.0), self._start_s)
        self._forward: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in layer_runs]
        self._backward: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in layer_runs]
        self._optimizer: deque[float] = deque(maxlen=_WINDOW)
        self._push: deque[float] = deque(maxlen=_WINDOW)
        self._pull: deque[float] = deque(maxlen=_WINDOW)
        self._closing: deque[float] = deque(maxlen=_WINDOW)
        # By whether the step was overlapped.
        self._steps: dict[bool, deque[float]] = {each: deque(maxlen=_WINDOW) for each in (False, True)}

    def computed(self, forward_s: Sequence[float], backward_s: Sequence[float], optimizer_s: float) -> None:
        """Record a step's computing: by layer, and the optimizer's step as a whole."""
        for deques, values in ((self._forward, forward_s), (self._backward, backward_s)):
            for each, value in zip(deques, values, strict=True):
                each.append(value)
        self._optimizer.append(optimizer_s)

    def moved(self, nbytes: int, busy_s: float, *, pull: bool) -> None:
        """Record the bytes that a step moved in one direction, and the seconds with a message in flight."""
        if nbytes:
            rate = nbytes / max(busy_s - self._start_s, nbytes / _RATE_MAX)
            (self._pull if pull else self._push).append(min(rate, _RATE_MAX))

    def closed(self, seconds: float) -> None:
        """Record the seconds from a round's last push to its first pull."""
        self._closing.append(seconds)

    def stepped(self, seconds: float, *, overlapped: bool) -> None:
        """Record the seconds from one step to the next, everything included."""
        self._steps[overlapped].append(seconds)

    def step_s(self, *, overlapped: bool) -> float:
        """Return the median time of the latest steps with overlap, or without."""
        return statistics.median(self._steps[overlapped])

    @property
    def ready(self) -> bool:
        return bool(self._optimizer and self._push)

    def layers(self) -> list[Layer]:
        """Return the layers. The optimizer's step counts as a part of the backward pass, divided by bytes, because it
        may run there.
        """
        total = sum(place.nbytes for place in self.layer_runs) or 1
        optimizer_s = statistics.median(self._optimizer)
        return [
            Layer(
                place.nbytes,
                max(0.0, statistics.median(forward)),
                max(0.0, statistics.median(backward)) + optimizer_s * place.nbytes / total,
            )
            for place, forward, backward in zip(self.layer_runs, self._forward, self._backward, strict=True)
        ]

    def channel(self) -> Channel:
        """Return the measured link to the servers. If a message brings the values back, both directions have its one
        rate.
        """
        push = statistics.median(self._push)
        pull = statistics.median(self._pull) if self._pull else push
        return Channel(push, pull, self._start_s, self._gap_s)

    def closing_s(self) -> float:
        """Return how many seconds a round takes to close."""
        return statistics.median(self._closing) if self._closing else 0.0

    def outdated(self, made: ExchangePlan) -> bool:
        """Return True if these measurements differ from those with which a plan was made."""
        return outdated(made.layers, made.channel, self.layers(), self.channel())
