"""Plans how the exchange of a model is hidden behind the computation. Pure: seconds and bytes in, a plan out.

Layers are numbered 1 to L in the order of the forward pass. Layer l has n_l bytes, takes f_l to compute forward and b_l
backward. A message takes a seconds to start, then sends its bytes at W per second; c_l = n_l / W. Messages are sent one
after the other, and each is a run of whole layers. This gives two problems, each with an exact answer (the problems are
those of Wang et al. 2021, "Overlapping communication with computation in parameter server for scalable DL training",
iPart, which solves them by a greedy search; the recurrences are this project's):

    forward    parameters arrive in the order of the layers; C_i = c_1 + ... + c_i
               F[k][i] = min_j max(F[k-1][j], k a + C_i) + f(j+1..i)
               F[k][i]: when the first i layers are computed, if they came in k messages, the last one of layers j+1..i
    backward   gradients leave in backward order; R_i: when the first i layers of that order are computed
               G[i] = min_j max(G[j], R_i) + a + c(j+1..i)
               G[i]: when their gradients are sent

Both recurrences keep only the earliest end of a prefix. This is exact, because a later end of a prefix never makes
anything after it earlier.

Slices are not runs of layers: each layer is cut by size, the earliest waiting layer is sent first (P3: Jayarajan et al.
2019), and up to `credit_bytes` are in flight (ByteScheduler: Peng et al. 2019). There is no formula for slices, so they
are simulated. The start-ups of slices in flight overlap, except `gap_s` of each (g in LogGP: Alexandrov et al. 1995).

An exchange is one of two kinds. FUSED: a message brings the new values back in the same round trip (Buffer.accumulate
with fetch: ASP, SSP, R2SP). Pushing and pulling use the two directions of one link at once, so the slower direction
counts. ROUNDS: no worker pulls before all have pushed and the round is closed (BSP, local SGD, DiLoCo).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from smb.errors import InvalidArgumentError
from smb.train.traits import FUSED, ROUNDS

# overlap= of smb.torch.join: hide nothing, hide the exchange behind the forward pass, or behind both passes.
OVERLAPS = ("none", "forward", "both")
_SLICES_MAX = 2048  # slices that a prediction simulates; larger models are simulated with larger slices
_SLICE_BYTES = (128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20)
_CREDITS = (1, 2, 4, 16)  # slices in flight
MOVED = 0.2  # a plan is outdated if a measurement changes by more than this share


@dataclass(frozen=True)
class Layer:
    """A measured layer: bytes of its parameters, seconds of its computation."""

    nbytes: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Channel:
    """The measured link to the servers.

    push_per_s, pull_per_s: bytes of parameters sent and received per second; with wire="int8" four times what the link
    carries. start_s: seconds for a message of a few bytes, there and back, alone. gap_s: the part of start_s that each
    message takes even if many are in flight.
    """

    push_per_s: float
    pull_per_s: float
    start_s: float
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        rates = (self.push_per_s, self.pull_per_s)
        if not all(rate > 0 for rate in rates) or not 0 <= self.gap_s <= self.start_s < math.inf:
            raise InvalidArgumentError(f"{self}: rates must be above 0, and 0 <= gap_s <= start_s")

    @property
    def fused_per_s(self) -> float:
        """Bytes per second in messages that bring the new values back."""
        return min(self.push_per_s, self.pull_per_s)


@dataclass(frozen=True)
class Runs:
    """How layers are divided into messages. The sum of `sizes` is L; in the backward pass the first run has the last
    layers.
    """

    seconds: float
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Prediction:
    """The predicted iteration under one schedule.

    schedule: "none" (after computing, all is pushed, then pulled), "one message" (the same in one round trip), "layer
    by layer", "planned" or "slices". pushes, pulls: the number of layers in each message in the order of sending, for
    schedules of runs. slice_bytes, credit_bytes: for schedules of slices. exposed_s: the time that the exchange adds to
    computing.
    """

    overlap: str
    schedule: str
    iteration_s: float
    exposed_s: float
    pushes: tuple[int, ...] = ()
    pulls: tuple[int, ...] = ()
    slice_bytes: int = 0
    credit_bytes: int = 0


# ---- runs of layers


def forward_seconds(layers: Sequence[Layer], channel: Channel, sizes: Iterable[int]) -> float:
    """Return when the forward pass ends, in seconds since its first message began."""
    arrived = computed = 0.0
    rest = iter(layers)
    for run in _runs(rest, sizes):
        arrived += channel.start_s + sum(layer.nbytes for layer in run) / channel.pull_per_s
        computed = max(computed, arrived) + sum(layer.forward_s for layer in run)
    return computed


def backward_seconds(layers: Sequence[Layer], channel: Channel, sizes: Iterable[int]) -> float:
    """Return when the last gradient is sent, in seconds since the backward pass began."""
    computed = sent = 0.0
    rest = iter(reversed(layers))
    for run in _runs(rest, sizes):
        computed += sum(layer.backward_s for layer in run)
        sent = max(sent, computed) + channel.start_s + sum(layer.nbytes for layer in run) / channel.push_per_s
    return sent


def plan_forward(layers: Sequence[Layer], channel: Channel) -> Runs:
    """Return the runs with which the forward pass ends earliest. Exact. O(L^3) at most; less if start-ups are long."""
    count = len(layers)
    arrived = np.cumsum([0.0, *(layer.nbytes / channel.pull_per_s for layer in layers)])
    passed = np.cumsum([0.0, *(layer.forward_s for layer in layers)])
    best, best_end = math.inf, 0
    before = np.full(count + 1, math.inf)
    before[0] = 0.0
    choices: list[np.ndarray[tuple[int], np.dtype[np.intp]]] = []
    triangle = np.tri(count + 1, k=-1, dtype=bool)  # j < i
    for messages in range(1, count + 1):
        # The last layers cannot arrive earlier than this, so a plan of more messages can't beat the best plan so far.
        # Nor can computing end before the first layer has arrived and all layers are computed.
        least = max(
            messages * channel.start_s + arrived[-1] + layers[-1].forward_s,
            channel.start_s + arrived[1] + passed[-1],
        )
        if least >= best * (1 - 1e-12):
            break
        came = messages * channel.start_s + arrived
        ends = np.maximum(before[None, :], came[:, None]) - passed[None, :] + passed[:, None]
        ends[~triangle] = math.inf
        choice = ends.argmin(axis=1)
        choices.append(choice)
        before = ends[np.arange(count + 1), choice]
        if before[count] < best:
            best, best_end = float(before[count]), messages
    cuts, end = [], count
    for choice in reversed(choices[:best_end]):
        begin = int(choice[end])
        cuts.append(end - begin)
        end = begin
    return Runs(best, tuple(reversed(cuts)))


def plan_backward(layers: Sequence[Layer], channel: Channel) -> Runs:
    """Return the runs with which the last gradient is sent earliest. Exact. O(L^2)."""
    count = len(layers)
    ready = np.cumsum([0.0, *(layer.backward_s for layer in reversed(layers))])
    moved = np.cumsum([0.0, *(layer.nbytes / channel.push_per_s for layer in reversed(layers))])
    ends, choices = np.zeros(count + 1), [0]
    for i in range(1, count + 1):
        options = np.maximum(ends[:i], ready[i]) + channel.start_s + (moved[i] - moved[:i])
        choices.append(int(options.argmin()))
        ends[i] = options[choices[i]]
    cuts, end = [], count
    while end:
        cuts.append(end - choices[end])
        end = choices[end]
    return Runs(float(ends[count]), tuple(reversed(cuts)))


def _runs(layers: Iterable[Layer], sizes: Iterable[int]) -> Iterable[list[Layer]]:
    for size in sizes:
        yield list(itertools.islice(layers, size))


# ---- slices


def sliced_seconds(
    layers: Sequence[Layer],
    channel: Channel,
    per_s: float,
    ready_s: Sequence[float],
    slice_bytes: int,
    credit_bytes: int,
) -> list[float]:
    """Return when each layer has arrived, if all layers are cut into slices and the earliest waiting layer is sent
    first.

    per_s: bytes per second. The channel's start-up counts. ready_s: the time from which on each layer may be sent.
    """
    many = max(1, credit_bytes // slice_bytes)
    coming = sorted((ready, at) for at, ready in enumerate(ready_s))
    left = [layer.nbytes for layer in layers]
    there = list(ready_s)  # a layer without bytes has arrived as soon as it is ready
    waiting: list[int] = []
    under_way: deque[float] = deque()
    now, link, next_up = 0.0, 0.0, 0
    while next_up < len(coming) or waiting:
        while next_up < len(coming) and coming[next_up][0] <= now:
            if left[coming[next_up][1]]:
                heapq.heappush(waiting, coming[next_up][1])
            next_up += 1
        while under_way and under_way[0] <= now:
            under_way.popleft()
        if waiting and len(under_way) < many:
            at = waiting[0]
            nbytes = min(slice_bytes, left[at])
            left[at] -= nbytes
            if not left[at]:
                heapq.heappop(waiting)
            # The slice queues behind those in flight, so a large credit lets urgent slices wait.
            link = max(link, now) + channel.gap_s + nbytes / per_s
            there[at] = link + channel.start_s - channel.gap_s
            under_way.append(there[at])
        elif waiting:
            now = under_way[0]
        elif next_up < len(coming):
            now = coming[next_up][0]
    return there


def _computed(layers: Sequence[Layer], there_s: Sequence[float], begin_s: float) -> float:
    """Return when the forward pass ends if each layer waits for its values."""
    now = begin_s
    for layer, there in zip(layers, there_s, strict=True):
        now = max(now, there) + layer.forward_s
    return now


def _ready(layers: Sequence[Layer]) -> list[float]:
    """Return when each layer's gradient is ready, in seconds since the backward pass began."""
    return list(itertools.accumulate(layer.backward_s for layer in reversed(layers)))[::-1]


# ---- an iteration


def predict(
    layers: Sequence[Layer], channel: Channel, exchange: str = FUSED, closing_s: float = 0.0
) -> list[Prediction]:
    """Return an iteration's predicted time under each schedule. closing_s: seconds from the last push of a round to the
    first pull.

    An iteration begins with the backward pass and ends with the next forward pass. The last layer of the forward pass
    needs all values, so no part of an exchange is left over when an iteration ends. Raises InvalidArgumentError.
    """
    _check(layers, exchange, closing_s)
    return _fused(layers, channel) if exchange == FUSED else _rounds(layers, channel, closing_s)


def pick(predictions: Sequence[Prediction], overlap: str = "both") -> Prediction:
    """Return the fastest prediction with at most this overlap; of equally fast ones the first,
    which is the simplest.
    """
    allowed = OVERLAPS[: OVERLAPS.index(overlap) + 1]
    return min((each for each in predictions if each.overlap in allowed), key=lambda each: each.iteration_s)


def bound_s(layers: Sequence[Layer], channel: Channel, exchange: str = FUSED) -> float:
    """Return a lower bound of all schedules: the computation, or the transfer with its start-up."""
    computing = _passes(layers)
    total = _bytes(layers)
    start = channel.start_s if total else 0.0
    if exchange == FUSED:
        return max(sum(computing), start + total / channel.fused_per_s)
    push, pull = (start + total / rate for rate in (channel.push_per_s, channel.pull_per_s))
    return max(computing[1], push) + max(computing[0], pull)


def outdated(layers: Sequence[Layer], channel: Channel, now: Sequence[Layer], now_channel: Channel) -> bool:
    """Return True if a measurement has changed by more than MOVED since the plan was made, so that a new plan is
    needed.

    Compares the passes, the rates and the start-up. A change of the start-up by less than a thousandth of an iteration
    does not count.
    """
    if len(layers) != len(now):
        return True
    pairs = [*zip(_passes(layers), _passes(now), strict=True)]
    pairs += [(channel.push_per_s, now_channel.push_per_s), (channel.pull_per_s, now_channel.pull_per_s)]
    if abs(channel.start_s - now_channel.start_s) > sum(_passes(layers)) / 1000:
        pairs.append((channel.start_s, now_channel.start_s))
    return any(abs(after - before) > MOVED * before for before, after in pairs)


def _check(layers: Sequence[Layer], exchange: str, closing_s: float) -> None:
    if not layers:
        raise InvalidArgumentError("a plan needs at least one layer")
    if exchange not in (FUSED, ROUNDS):
        raise InvalidArgumentError(f"exchange must be {FUSED!r} or {ROUNDS!r}, not {exchange!r}")
    values = [value for layer in layers for value in (layer.nbytes, layer.forward_s, layer.backward_s)]
    if not all(0 <= value < math.inf for value in (*values, closing_s)):
        raise InvalidArgumentError("bytes and seconds must be finite numbers from 0 on")


def _passes(layers: Sequence[Layer]) -> tuple[float, float]:
    return sum(layer.forward_s for layer in layers), sum(layer.backward_s for layer in layers)


def _bytes(layers: Sequence[Layer]) -> int:
    return sum(layer.nbytes for layer in layers)


def _fused(layers: Sequence[Layer], channel: Channel) -> list[Prediction]:
    start, total = channel.start_s, _bytes(layers)
    apart = 2 * start + total / channel.push_per_s + total / channel.pull_per_s
    channel = replace(channel, push_per_s=channel.fused_per_s, pull_per_s=channel.fused_per_s)
    forward, backward = _passes(layers)
    each, computing = (1,) * len(layers), forward + backward
    found = [
        _made("none", "none", computing, computing + apart),
        _made("none", "one message", computing, computing + start + total / channel.push_per_s),
    ]
    # Behind the forward pass: all changes are complete when the optimizer has stepped.
    planned = plan_forward(layers, channel)
    by_layer = backward + forward_seconds(layers, channel, each)
    found.append(_made("forward", "layer by layer", computing, by_layer, pulls=each))
    found.append(_made("forward", "planned", computing, backward + planned.seconds, pulls=planned.sizes))
    found.append(_best_slices("forward", layers, channel, [backward] * len(layers)))
    # Behind both passes: in backward order the first layer's values arrive last, so the forward pass waits for all
    # values.
    planned = plan_backward(layers, channel)
    by_layer = backward_seconds(layers, channel, each) + forward
    found.append(_made("both", "layer by layer", computing, by_layer, pushes=each))
    found.append(_made("both", "planned", computing, planned.seconds + forward, pushes=planned.sizes))
    found.append(_best_slices("both", layers, channel, _ready(layers)))
    return found


def _best_slices(overlap: str, layers: Sequence[Layer], channel: Channel, ready_s: Sequence[float]) -> Prediction:
    forward, backward = _passes(layers)

    def seconds(slice_bytes: int, credit_bytes: int) -> float:
        there = sliced_seconds(layers, channel, channel.push_per_s, ready_s, slice_bytes, credit_bytes)
        return _computed(layers, there, backward)

    iteration_s, slice_bytes, credit_bytes = min((seconds(*pair), *pair) for pair in _cuts(layers))
    return _made(overlap, "slices", forward + backward, iteration_s, cut=(slice_bytes, credit_bytes))


def _rounds(layers: Sequence[Layer], channel: Channel, closing_s: float) -> list[Prediction]:
    start, total = channel.start_s, _bytes(layers)
    forward, backward = _passes(layers)
    each, computing = (1,) * len(layers), forward + backward
    push, pull = start + total / channel.push_per_s, start + total / channel.pull_per_s
    found = [_made("none", "none", computing, computing + push + closing_s + pull)]
    planned_pull, planned_push = plan_forward(layers, channel), plan_backward(layers, channel)
    by_layer = forward_seconds(layers, channel, each)
    before = backward + push + closing_s
    found.append(_made("forward", "layer by layer", computing, before + by_layer, pulls=each))
    found.append(_made("forward", "planned", computing, before + planned_pull.seconds, pulls=planned_pull.sizes))
    sliced = _slices_of_rounds(layers, channel)
    found.append(_made("forward", "slices", computing, before + sliced[1], cut=sliced[2:]))
    by_layer += backward_seconds(layers, channel, each) + closing_s
    found.append(_made("both", "layer by layer", computing, by_layer, pushes=each, pulls=each))
    seconds = planned_push.seconds + closing_s + planned_pull.seconds
    found.append(_made("both", "planned", computing, seconds, pushes=planned_push.sizes, pulls=planned_pull.sizes))
    seconds = sliced[0] + closing_s + sliced[1]
    found.append(_made("both", "slices", computing, seconds, cut=sliced[2:]))
    return found


def _slices_of_rounds(layers: Sequence[Layer], channel: Channel) -> tuple[float, float, int, int]:
    """Return when all is pushed, the time of the pull and the forward pass, and the sizes of slice and credit for which
    the sum is least.
    """

    def seconds(slice_bytes: int, credit_bytes: int) -> tuple[float, float]:
        cut = (slice_bytes, credit_bytes)
        pushed = sliced_seconds(layers, channel, channel.push_per_s, _ready(layers), *cut)
        pulled = sliced_seconds(layers, channel, channel.pull_per_s, [0.0] * len(layers), *cut)
        return max(pushed), _computed(layers, pulled, 0.0)

    _, times, pair = min((sum(times := seconds(*pair)), times, pair) for pair in _cuts(layers))
    return (*times, *pair)


def _cuts(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """Return the sizes of slices and credits to try, in bytes."""
    least = -(-_bytes(layers) // _SLICES_MAX)
    sizes = [size for size in _SLICE_BYTES if size >= least] or [least]
    return [(size, size * many) for size in sizes for many in _CREDITS]


def _made(
    overlap: str,
    schedule: str,
    computing_s: float,
    iteration_s: float,
    *,
    pushes: tuple[int, ...] = (),
    pulls: tuple[int, ...] = (),
    cut: tuple[int, int] = (0, 0),
) -> Prediction:
    return Prediction(overlap, schedule, iteration_s, iteration_s - computing_s, pushes, pulls, *cut)
