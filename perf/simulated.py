"""Steps of many workers that share the servers' links, simulated: `python -m perf.simulated`.

smb.train.partition plans for one worker with a link of its own rate. Here N workers carry out such a plan at one time:
each message of each worker takes the servers' links, and those that are under way share them: fairly, or as unequally
as asked, since TCP's connections do not get equal shares of a link. A worker's computing varies from step to step, if
asked.

The inputs are the planner's own: its layers, and its predictions, which say how a step's exchange is cut. K servers of
rate M are one link of K M, because a model is striped over all of them; a worker moves at most V in each direction.
perf/training/simulated.py holds this beside measured steps of one, two and four workers.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from smb.tools.plan.network import CHUNK_BYTES
from smb.train.partition import Channel, Layer, Prediction, predict
from smb.train.traits import FUSED, ROUNDS

Callback = Callable[[], None]


@dataclass(frozen=True)
class Cluster:
    """Workers and the links that they share.

    worker_per_s: bytes of parameters a second that one worker moves at most, in each direction; servers_per_s: all
    servers' links together. start_s, gap_s: as of smb.train.partition.Channel. closing_s: from the last push of a round
    to the first pull. jitter: sigma of the log-normal factor, of mean 1, on a worker's computing in each step.
    inequality: sigma of the log-normal weight of each message's share; for workers whose own links are no limit.
    """

    workers: int
    worker_per_s: float
    servers_per_s: float
    start_s: float
    gap_s: float = 0.0
    closing_s: float = 0.0
    jitter: float = 0.0
    inequality: float = 0.0

    def __post_init__(self) -> None:
        if self.inequality and self.worker_per_s < self.servers_per_s:
            raise ValueError("shares are unequal only where the servers' links alone limit them")


def _log_normal(generator: random.Random, sigma: float) -> float:
    """Return a number of mean 1."""
    return generator.lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1.0


class _Clock:
    """What happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callback]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, call: Callback) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), call))

    def run(self) -> None:
        """Go on until nothing is due."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


class _SharedLink:
    """One direction of the servers' links: each flow has its weight's share of them, or a worker's most."""

    def __init__(self, clock: _Clock, cluster: Cluster) -> None:
        self._clock = clock
        # Where shares are unequal, a worker's own link is no limit, whatever its weight.
        self._most = math.inf if cluster.inequality else cluster.worker_per_s
        self._all = cluster.servers_per_s
        # Each by what a flow of weight 1 will have been given when it is through, and its weight.
        self._flows: list[tuple[float, int, float, Callback]] = []
        self._weights = 0.0
        self._numbers = itertools.count()
        self._given = self._since = 0.0
        self._turn = 0

    def rate(self) -> float:
        """Return what a flow of weight 1 is given."""
        return min(self._most, self._all / self._weights if self._flows else self._all)

    def fair(self) -> float:
        """Return a flow's share if all are equal."""
        return min(self._most, self._all / max(1, len(self._flows)))

    def carry(self, nbytes: float, weight: float, call: Callback) -> None:
        self._go_on()
        heapq.heappush(self._flows, (self._given + nbytes / weight, next(self._numbers), weight, call))
        self._weights += weight
        self._plan()

    def _go_on(self) -> None:
        self._given += self.rate() * (self._clock.now - self._since)
        self._since = self._clock.now

    def _plan(self) -> None:
        self._turn += 1
        if self._flows:
            turn = self._turn
            self._clock.after(max(0.0, self._flows[0][0] - self._given) / self.rate(), lambda: self._through(turn))

    def _through(self, turn: int) -> None:
        if turn != self._turn:
            return  # flows came or went: another end is planned
        self._go_on()
        _, _, _, call = heapq.heappop(self._flows)
        self._weights = sum(flow[2] for flow in self._flows)  # no difference, which would leave a rounding error
        self._plan()
        call()


class _Sender:
    """A worker's messages in one direction: the earliest waiting one first, so many in flight, their bytes in turn."""

    def __init__(
        self, clock: _Clock, link: _SharedLink, cluster: Cluster, many: int, generator: random.Random, *, fused: bool
    ) -> None:
        self._clock, self._link, self._cluster, self._many = clock, link, cluster, many
        self._fused = fused
        self._waiting: list[tuple[int, int, float, Callback]] = []
        self._numbers = itertools.count()
        self._in_flight = 0
        self._busy = False
        self._random = generator

    def add(self, place: int, nbytes: float, there: Callback) -> None:
        heapq.heappush(self._waiting, (place, next(self._numbers), nbytes, there))
        self._go_on()

    def _go_on(self) -> None:
        if self._busy or not self._waiting or self._in_flight >= self._many:
            return
        self._busy = True
        self._in_flight += 1
        _, _, nbytes, there = heapq.heappop(self._waiting)
        gap_s = self._cluster.gap_s
        weight = _log_normal(self._random, self._cluster.inequality)
        self._clock.after(gap_s, lambda: self._link.carry(nbytes, weight, lambda: self._sent(nbytes, there)))

    def _sent(self, nbytes: float, there: Callback) -> None:
        self._busy = False
        # The last chunk comes back when the server has it whole.
        back_s = min(nbytes, CHUNK_BYTES) / self._link.fair() if self._fused else 0.0
        self._clock.after(self._cluster.start_s - self._cluster.gap_s + back_s, lambda: self._there(there))
        self._go_on()

    def _there(self, there: Callback) -> None:
        self._in_flight -= 1
        there()
        self._go_on()


@dataclass
class _Message:
    """A run of layers, or a slice of one: it may go when the last of its layers is ready."""

    place: int
    layers: tuple[int, ...]
    nbytes: float


def _messages(layers: Sequence[Layer], sizes: Sequence[int], cut: tuple[int, int], *, backward: bool) -> list[_Message]:
    """Return a direction's messages: runs of so many layers each, or slices of cut[0] bytes; without either one."""
    order = range(len(layers))
    if cut[0]:
        found = []
        for at in order:
            left = layers[at].nbytes
            while left > 0:
                found.append(_Message(at, (at,), min(left, cut[0])))
                left -= cut[0]
        return found
    numbers = iter(reversed(order) if backward else order)
    runs = (tuple(itertools.islice(numbers, size)) for size in (sizes or (len(layers),)))
    return [_Message(place, run, sum(layers[at].nbytes for at in run)) for place, run in enumerate(runs)]


class _Round:
    """What closes when all workers have pushed: all of it, or with `by_part` each message by itself."""

    def __init__(self, clock: _Clock, cluster: Cluster) -> None:
        self._clock, self._cluster = clock, cluster
        self._missing: dict[tuple[int, int], int] = {}
        self._calls: dict[tuple[int, int], list[Callback]] = {}

    def pushed(self, key: tuple[int, int]) -> None:
        left = self._missing.get(key, self._cluster.workers) - 1
        self._missing[key] = left
        if not left:
            self._clock.after(self._cluster.closing_s, lambda: self._close(key))

    def when_closed(self, key: tuple[int, int], call: Callback) -> None:
        if self._missing.get(key) == -1:
            call()
        else:
            self._calls.setdefault(key, []).append(call)

    def _close(self, key: tuple[int, int]) -> None:
        self._missing[key] = -1
        for call in self._calls.pop(key, ()):
            call()


@dataclass
class _Worker:
    """One worker: the backward pass, the exchange, the forward pass, again and again."""

    layers: Sequence[Layer]
    plan: Prediction
    cluster: Cluster
    clock: _Clock
    up: _Sender
    down: _Sender
    round: _Round | None  # of the members in step; None: an exchange brings the values back
    by_part: bool
    random: random.Random
    steps: int
    ends_s: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """A step begins with the backward pass, as the planner's does."""
        self._factor = _log_normal(self.random, self.cluster.jitter)
        count = len(self.layers)
        cut = (self.plan.slice_bytes, self.plan.credit_bytes)
        behind_both = self.plan.overlap == "both"
        whole = self.plan.schedule in ("none", "one message")
        pushed_by = cut if behind_both and not whole else (0, 0)
        # What is pushed after the backward pass goes in forward order if the values come back with it.
        in_order = self.round is None and self.plan.overlap == "forward"
        sizes = self.plan.pulls if in_order else self.plan.pushes
        self._pushes = _messages(self.layers, sizes, cut if in_order else pushed_by, backward=not in_order)
        pulled_by = cut if not whole else (0, 0)
        self._pulls = (
            self._pushes if self.by_part else _messages(self.layers, self.plan.pulls, pulled_by, backward=False)
        )
        self._unready = [len(message.layers) for message in self._pushes]
        self._pushes_of: list[list[int]] = [[] for _ in range(count)]
        for place, message in enumerate(self._pushes):
            for at in message.layers:
                self._pushes_of[at].append(place)
        self._left = len(self._pushes)
        coming = self._pushes if self.round is None else self._pulls
        self._missing = [0] * count
        for message in coming:
            for at in message.layers:
                self._missing[at] += 1
        self._computed, self._waits = 0, False
        self._early = behind_both
        self._backward(count - 1)

    def _backward(self, at: int) -> None:
        if at < 0:
            self._passed()
        else:
            self.clock.after(self._factor * self.layers[at].backward_s, lambda: self._ready(at))

    def _ready(self, at: int) -> None:
        if self._early:
            for place in self._pushes_of[at]:
                self._unready[place] -= 1
                if not self._unready[place]:
                    self._push(place)
        self._backward(at - 1)

    def _passed(self) -> None:
        if not self._early:
            for place in range(len(self._pushes)):
                self._push(place)
        if self.round is not None:
            if self.by_part:
                for place in range(len(self._pulls)):
                    self.round.when_closed((len(self.ends_s), place), lambda place=place: self._pull(place))  # type: ignore[misc]
            else:
                self.round.when_closed((len(self.ends_s), -1), self._pull_all)
        self._forward()

    def _push(self, place: int) -> None:
        message = self._pushes[place]
        self.up.add(message.place, message.nbytes, lambda: self._pushed(place))

    def _pushed(self, place: int) -> None:
        if self.round is None:
            self._came(self._pushes[place])
        elif self.by_part:
            self.round.pushed((len(self.ends_s), place))
        else:
            self._left -= 1
            if not self._left:
                self.round.pushed((len(self.ends_s), -1))

    def _pull_all(self) -> None:
        for place in range(len(self._pulls)):
            self._pull(place)

    def _pull(self, place: int) -> None:
        message = self._pulls[place]
        first = min(message.layers) if self.by_part else message.place
        self.down.add(first, message.nbytes, lambda: self._came(message))

    def _came(self, message: _Message) -> None:
        for at in message.layers:
            self._missing[at] -= 1
        if self._waits:
            self._forward()

    def _forward(self) -> None:
        at = self._computed
        if at == len(self.layers):
            self.ends_s.append(self.clock.now)
            if len(self.ends_s) < self.steps:
                self.begin()
            return
        self._waits = bool(self._missing[at])
        if not self._waits:
            self._computed = at + 1
            self.clock.after(self._factor * self.layers[at].forward_s, self._forward)


def step_s(
    layers: Sequence[Layer],
    plan: Prediction,
    exchange: str,
    cluster: Cluster,
    *,
    steps: int = 8,
    seed: int = 0,
    by_part: bool = False,
    apart: bool = False,
) -> float:
    """Return the seconds of a step: the workers' mean, over the second half of `steps`.

    exchange: FUSED or ROUNDS, as smb.train.partition.predict takes it, of which `plan` is a prediction. by_part: a
    round closes message by message, and is read as it closes. apart: workers begin at random moments of a step.
    """
    clock = _Clock()
    up, down = (_SharedLink(clock, cluster) for _ in range(2))
    rounds = None if exchange == FUSED else _Round(clock, cluster)
    many = max(1, plan.credit_bytes // plan.slice_bytes) if plan.slice_bytes else 1
    generator = random.Random(seed)
    workers = []
    for _ in range(cluster.workers):
        own = random.Random(generator.random())
        pusher, puller = (_Sender(clock, link, cluster, many, own, fused=rounds is None) for link in (up, down))
        worker = _Worker(layers, plan, cluster, clock, pusher, puller, rounds, by_part, own, steps)
        workers.append(worker)
        clock.after(generator.random() * plan.iteration_s if apart else 0.0, worker.begin)
    clock.run()
    half = steps // 2
    return statistics.fmean((worker.ends_s[-1] - worker.ends_s[half - 1]) / (steps - half) for worker in workers)


def named(predictions: Iterable[Prediction], overlap: str, schedule: str) -> Prediction:
    """Return one of the planner's predictions."""
    return next(each for each in predictions if (each.overlap, each.schedule) == (overlap, schedule))


def inequality_of(first_by_last: float, flows: int) -> float:
    """Return the inequality with which, of so many equal transfers that begin together, the first one ends after this
    part of the time of the last one, in the mean.
    """

    def part(sigma: float) -> float:
        generator = random.Random(0)
        parts = []
        for _ in range(200):
            weights = [generator.lognormvariate(0, sigma) for _ in range(flows)]
            parts.append(sum(weights) / max(weights) / flows)  # the last one ends when all bytes are through
        return statistics.fmean(parts)

    low, high = 0.0, 3.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if part(middle) > first_by_last else (low, middle)
    return low


# ---- 72 workers, as iPart's

NODES = 72
START_S = (0.001, 0.002, 0.0035, 0.0038, 0.005)
JITTER = (0.0, 0.02, 0.1)
_SPARE = 4.0  # a worker's own link by its share of the servers'
RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_SHARE_PER_S = 100e6  # a worker's fair share of the servers' links; times are relative to it


def resnet_50() -> list[tuple[int, int]]:
    """Return bytes and operations of an image's forward pass, of each tensor: 161, two of three of batch norms."""
    found: list[tuple[int, int]] = []

    def convolution(taken: int, given_back: int, kernel: int, width: int) -> None:
        weights = kernel * kernel * taken * given_back
        found.extend(((4 * weights, 2 * weights * width * width), (4 * given_back, 0), (4 * given_back, 0)))

    convolution(3, 64, 7, 112)
    taken = 64
    for count, inner, width in ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)):
        for block in range(count):
            convolution(taken, inner, 1, width)
            convolution(inner, inner, 3, width)
            convolution(inner, 4 * inner, 1, width)
            if not block:
                convolution(taken, 4 * inner, 1, width)
            taken = 4 * inner
    return [*found, (4 * 2048 * 1000, 2 * 2048 * 1000), (4 * 1000, 0)]


def layers_of(tensors: Sequence[tuple[int, int]], forward_s: float, backward_s: float) -> list[Layer]:
    """Return layers whose passes take so long together, divided by operations."""
    total = sum(work for _, work in tensors)
    return [Layer(nbytes, forward_s * work / total, backward_s * work / total) for nbytes, work in tensors]


def rounds_of(start_s: float, jitter: float, backward: float = 1.0, workers: int = NODES) -> tuple[float, float]:
    """Return how much faster a planned overlap is in BSP than none, and than layer by layer: ResNet-50 by tensors.

    Forward takes as long as a worker's share of the servers' links needs for all parameters, in each direction.
    start_s: by that time. backward: its time by forward's.
    """
    tensors = resnet_50()
    unit_s = sum(nbytes for nbytes, _ in tensors) / _SHARE_PER_S
    layers = layers_of(tensors, unit_s, backward * unit_s)
    channel = Channel(_SHARE_PER_S, _SHARE_PER_S, start_s * unit_s)
    cluster = Cluster(workers, _SHARE_PER_S, workers * _SHARE_PER_S, channel.start_s, jitter=jitter)
    predictions = predict(layers, channel, ROUNDS)
    none, layerwise, planned = (
        step_s(layers, named(predictions, *each), ROUNDS, cluster, steps=6 if jitter else 2)
        for each in (("none", "none"), ("both", "layer by layer"), ("both", "planned"))
    )
    return none / planned - 1, layerwise / planned - 1


def reading_early(ratio: float, jitter: float, workers: int = NODES) -> float:
    """Return how much faster the best overlap of BSP would be if a round closed, and were read, part by part.

    60 equal layers; ratio as of `pays`. The parts are those of the layer-by-layer schedule.
    """
    layers, start_s = _even(ratio, 2)
    predictions = predict(layers, Channel(_SHARE_PER_S, _SHARE_PER_S, start_s), ROUNDS)
    cluster = Cluster(workers, _SHARE_PER_S, workers * _SHARE_PER_S, start_s, jitter=jitter)
    steps = 6 if jitter else 2
    usual = min(
        step_s(layers, named(predictions, "both", each), ROUNDS, cluster, steps=steps)
        for each in ("planned", "layer by layer")
    )
    early = step_s(layers, named(predictions, "both", "layer by layer"), ROUNDS, cluster, steps=steps, by_part=True)
    return usual / early - 1


def _even(ratio: float, transfers: int) -> tuple[list[Layer], float]:
    """Return 60 equal layers, and a message's start-up: a ten-thousandth of the time of so many transfers."""
    count, nbytes = 60, 1 << 20
    moving_s = transfers * count * nbytes / _SHARE_PER_S
    return [Layer(nbytes, ratio * moving_s / 3 / count, 2 * ratio * moving_s / 3 / count)] * count, 1e-4 * moving_s


def pays(ratio: float, exchange: str, spare: float = 1.0, *, apart: bool = False, workers: int = NODES) -> float:
    """Return how much faster the best overlap by runs of layers is than none, 60 equal layers.

    ratio: both passes' time by that of all transfers at a worker's share of the servers' links. spare: a worker's own
    link by that share. apart: workers begin at random moments.
    """
    layers, start_s = _even(ratio, 1 if exchange == FUSED else 2)
    rate = _SHARE_PER_S if not apart else spare * _SHARE_PER_S
    predictions = predict(layers, Channel(rate, rate, start_s), exchange)
    cluster = Cluster(workers, spare * _SHARE_PER_S, workers * _SHARE_PER_S, start_s)
    without = named(predictions, "none", "one message" if exchange == FUSED else "none")
    runs = [each for each in predictions if each.overlap == "both" and not each.slice_bytes]
    found = [step_s(layers, plan, exchange, cluster, steps=12, apart=apart) for plan in (without, *runs)]
    return found[0] / min(found[1:]) - 1


def tables(*, quick: bool = False) -> str:
    """Return both tables; quick: fewer rows. Takes minutes, quick half a minute."""
    lines = ["| start-up | jitter | planned beside none | beside layer by layer |", "| --- | --- | --- | --- |"]
    for start_s in START_S[2:3] if quick else START_S:
        for jitter in JITTER[:2] if quick else JITTER:
            told = " | ".join(map(_shown, rounds_of(start_s, jitter)))
            lines.append(f"| {1e3 * start_s:g} ms | {jitter:g} | {told} |")
    lines += [
        "",
        "| computing by transfers | BSP | BSP, read as it closes | ASP | ASP, apart, spare links |",
        "| --- | --- | --- | --- | --- |",
    ]
    for ratio in RATIOS[2:5] if quick else RATIOS:
        gains = (
            pays(ratio, ROUNDS),
            reading_early(ratio, 0.0),
            pays(ratio, FUSED),
            pays(ratio, FUSED, _SPARE, apart=True),
        )
        lines.append(f"| {ratio:g} | {' | '.join(map(_shown, gains))} |")
    return "\n".join(lines)


def _shown(gain: float) -> str:
    return f"{round(100 * gain):+d} %"


def main() -> None:
    """Print the tables."""
    print(tables())


if __name__ == "__main__":
    main()
