"""The model of cost: the time of an iteration, by scheme, overlap and number of workers. Pure.

C is a step's computing, S the model's bytes, w the share of them that a contribution has on the wire. There are N
workers and K memory servers; L and M are the rates of a worker's and a server's link, in each direction. a is one call
of a few bytes, H the steps from one exchange to the next. A worker alone moves V = min(L, P, K M, K B / round trip),
P what its process moves, B bytes under way to each server, over all connections to it.
If all move at one time, each moves U = min(V, K M / N). n is the number of calls that wait for each other (counted at a
server: tests/train/test_plan_calls.py), and one more in rounds for each four workers beyond three.

    bsp, localsgd, diloco, asyncdiloco   C + (n a + w S/U + combine + S/U) / H
    diloco in P fragments                C + max(0, P n a + w S/U + combine + v S/U - P d C) / H
    asp, ssp                             cycle(C + n a + e; S/V)                push and pull in one round trip
    r2sp                                 max(C + x, N x),  x = n a + e + S/V    one after the other (Chen et al. 2019)
    easgd                                cycle(H C + n a; w S/V, S/V) / H
    seasgd                               (max(H C, w S/U) + S/U + n a) / H      the addition hides (ShmCaffe, 2018)

v is the share of the model's bytes that DiLoCo's workers read: 1, or with step_wire less. Behind a delay of d steps the
exchange of a fragment hides.
combine is what servers do when a round is closed: S/K bytes of each buffer that a sum reads, at COMBINE_PER_S: each
contribution, and some for state. e is a chunk from each server at V: the last one comes back when it has arrived whole.
cycle(Z; D, ...) is a closed network of N workers that compute for Z and then take the servers' links for D each, shared
fairly: mean value analysis (Reiser, Lavenberg 1980), exact for processor sharing. Rounds and SEASGD are in step: all
send at one time. So is asyncdiloco, measured with workers of equal speed: who comes while a round is closed waits for
that. SSP's waits for the slowest are not in it, nor are unequal workers.

With overlap, smb.train.partition plans within a step. Its rates are those at which the exchange without overlap moves
its bytes, others' queueing included. No iteration is shorter than all workers' bytes take over the servers' links.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smb.errors import InvalidArgumentError
from smb.spi import SOURCES_MAX, connections_for
from smb.tools.plan.mesh import layers_of_rank, rank_of, sizes
from smb.tools.plan.network import CHUNK_BYTES, CONNECTION_BYTES, Network
from smb.tools.plan.spec import Spec
from smb.train import SCHEMES as ALL_SCHEMES
from smb.train import DiLoCo, Scheme, scheme_of
from smb.train.group import WIRE_BYTES
from smb.train.member_table import SLOTS
from smb.train.partition import OVERLAPS, Channel, pick, predict
from smb.train.scheme import by_traits
from smb.train.traits import EXACT, FUSED, ROUNDS

# Bytes of a buffer that one server takes into a sum in a second: 2e9 were measured for single additions over loopback,
# of which a source in a sum takes 0.6 of the time (docs/decisions.md, 0037).
COMBINE_PER_S = 3.3e9
# Each scheme states its costs in its traits (smb/train/traits.py).
SCHEMES = tuple(name for name, kind in by_traits() if kind.TRAITS.calls)
_SETTINGS = ("every", "fragments", "delay", "step_wire")  # settings of a Question, for the schemes that have them
_EFFICIENT = 0.95
_SERVERS_MAX = 1024
_ENOUGH = 1.05  # servers are enough if an iteration takes at most this many times as long as with any number of servers
COMPUTING, OWN_LINK, SERVERS, CALLING, COMBINING = "computing", "worker's link", "servers' links", "calls", "combining"
WINDOW, CLIENT, RANKS = "what connections hold", "worker's process", "activations"


def check_settings(
    servers: int | None,
    batch: int | None,
    global_batch: int | None,
    every: int,
    wire: str,
    fragments: int = 1,
    delay: int = 0,
    step_wire: str = "exact",
) -> None:
    """Raise InvalidArgumentError for settings that a Question cannot have."""
    for name, value in (("servers", servers), ("batch", batch), ("global batch", global_batch), ("every", every)):
        if value is not None and value < 1:
            raise InvalidArgumentError(f"{name} must be at least 1, not {value}")
    if wire not in WIRE_BYTES:
        raise InvalidArgumentError(f"wire must be one of {', '.join(WIRE_BYTES)}, not {wire!r}")
    if batch is not None and global_batch is not None:
        raise InvalidArgumentError("pass a worker's batch or the batch of all workers together, not both")
    DiLoCo(every=every, fragments=fragments, delay=delay, step_wire=step_wire)


@dataclass(frozen=True)
class Question:
    """The inputs.

    servers: None means one on each worker's host. batch: of one worker; global_batch: of all workers together, instead.
    every: for the schemes that have it. wire: the encoding of contributions. fragments, delay, step_wire: for DiLoCo.
    mesh: so many workers are the ranks of one member (smb/tools/plan/mesh.py); for schemes with rounds.
    """

    spec: Spec
    network: Network
    servers: int | None = 1
    batch: int | None = None
    global_batch: int | None = None
    every: int = 50
    wire: str = "exact"
    fragments: int = 1
    delay: int = 0
    step_wire: str = "exact"
    mesh: int = 1

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if name not in ("spec", "network", "mesh")}
        check_settings(**given)
        if self.mesh < 1:
            raise InvalidArgumentError(f"mesh must be at least 1, not {self.mesh}")

    def scheme(self, name: str) -> Scheme:
        """Return the scheme of that name, with those of these settings that it has."""
        fields = {each.name for each in dataclasses.fields(ALL_SCHEMES[name])}  # type: ignore[arg-type]
        return scheme_of(name, {each: getattr(self, each) for each in _SETTINGS if each in fields})

    def steps(self, name: str) -> int:
        """Return the steps from one exchange of a scheme to the next."""
        return 1 if ALL_SCHEMES[name].TRAITS.each_step else self.every

    def batch_of(self, workers: int) -> float:
        """Return the samples in a worker's step."""
        return self.global_batch / workers if self.global_batch else float(self.batch or self.spec.batch)

    def servers_of(self, workers: int) -> int:
        """Return the number of memory servers."""
        return workers if self.servers is None else self.servers


@dataclass(frozen=True)
class Row:
    """One prediction. Seconds and bytes are for a step of one worker; bound_by is the largest part of the iteration.

    speedup: samples a second, relative to one worker that exchanges nothing. efficiency: computing's fraction of the
    time. schedule: of the overlap. server_bytes: memory of all servers together. bytes_per_hour: over all workers'
    links, both directions. mesh: so many workers are the ranks of one member (smb.torch.join(mesh=)). members_max: a
    training of this scheme has at most so many members. over_limit: it refuses that many, so the row shows what the
    network would give.
    """

    workers: int
    mesh: int
    members_max: int
    over_limit: bool
    scheme: str
    overlap: str
    schedule: str
    every: int
    iteration_s: float
    computing_s: float
    speedup: float
    efficiency: float
    bound_by: str
    sent_bytes: float
    received_bytes: float
    bytes_per_hour: float
    server_bytes: int


@dataclass(frozen=True)
class Advice:
    """Conclusions for a number of workers.

    diloco_every: the least `every` with which DiLoCo spends 95 % of its time computing. servers_enough: by scheme, the
    least number with which an iteration is within 5 % of that with any number (None if servers are the workers' hosts).
    connections: at the server with most of them. connections_to_fill: those that one worker would need to one server to
    fill the narrower link over this round trip; a worker makes up to 8.
    """

    workers: int
    diloco_every: int
    servers_enough: dict[str, int] | None
    connections: int
    connections_to_fill: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Shares:
    """Rates in bytes a second: `alone` is V, `together` is U, `servers` is K M, `own` what reaches other workers.
    crossing: the fraction of bytes that cross a link at all. limit: what bounds `alone`.
    """

    own: float
    alone: float
    together: float
    servers: float
    crossing: float
    limit: str
    limit_together: str


def shares(question: Question, workers: int, *, fused: bool = False) -> Shares:
    """Return how fast a worker can move bytes."""
    network, count = question.network, question.servers_of(workers)
    own, server = network.worker_per_s, network.server_per_s
    crossing = 1.0
    if question.servers is None:
        # The host's link carries the bytes of its worker and of its server; a push and a pull at the same time share
        # it.
        crossing = 1 - 1 / workers
        own = server = min(own, server) / (2 if fused else 1)
    under_way = connections_for(network.rtt_s) * CONNECTION_BYTES
    window = under_way / network.rtt_s if network.rtt_s else math.inf
    rates = {OWN_LINK: own, SERVERS: count * server, WINDOW: count * window, CLIENT: network.client_per_s}
    limit = min(rates, key=lambda name: rates[name])
    alone = rates[limit]
    fair = count * server / workers
    own = min(network.worker_per_s, network.client_per_s)
    return Shares(own, alone, min(alone, fair), count * server, crossing, limit, limit if alone <= fair else SERVERS)


def cycle_s(think_s: float, alone_s: list[float], demands_s: list[float], workers: int) -> float:
    """Return the mean time from one exchange of a worker to the next.

    The worker computes for think_s, then uses each link for alone_s, of which demands_s is spent at the servers' side,
    where workers meet. Mean value analysis with a delay and a station for each link.
    """
    rest = think_s + sum(max(0.0, alone - demand) for alone, demand in zip(alone_s, demands_s, strict=True))
    queues = [0.0] * len(demands_s)
    total = rest
    for number in range(1, workers + 1):
        waits = [demand * (1 + queue) for demand, queue in zip(demands_s, queues, strict=True)]
        total = rest + sum(waits)
        queues = [number * wait / total for wait in waits] if total else queues
    return total


def parts_s(question: Question, scheme: str, workers: int) -> defaultdict[str, float]:
    """Return the parts of the time from one exchange to the next, without overlap, by purpose."""
    traits = question.scheme(scheme).traits
    if question.mesh > 1 and (traits.closing is None or workers % question.mesh):
        raise InvalidArgumentError(
            f"{workers} workers with {scheme} can't be meshes of {question.mesh}: "
            "ask for a scheme with rounds, and for a mesh that divides the workers"
        )
    every = question.steps(scheme)
    fused = traits.way == FUSED
    of = shares(question, workers, fused=fused)
    rank = rank_of(question.spec, question.batch_of(workers), question.mesh)
    pulled = rank.server_bytes * of.crossing
    pushed = pulled * _share(question.wire)
    computing = every * question.spec.compute.seconds(question.batch_of(workers))
    calls = traits.calls * question.network.call_s
    parts: defaultdict[str, float] = defaultdict(float, {COMPUTING: computing, CALLING: calls})

    if traits.closing is not None:
        state, each, terms = traits.closing
        members = workers // question.mesh
        summed = members + terms  # buffers of the largest sum
        further = math.ceil(max(0, summed - SOURCES_MAX) / (SOURCES_MAX - 1))  # calls that sum
        further += math.ceil(members / SLOTS) - 1  # calls that decide
        parts[CALLING] += further * question.network.call_s
        parts[CALLING] *= traits.fragments
        pulled *= _share(traits.step_wire)
        parts[COMBINING] += (
            (state + each * members) * question.spec.nbytes / question.servers_of(workers) / COMBINE_PER_S
        )
        parts[of.limit_together] += (pushed + pulled) / of.together
        if question.mesh > 1:
            parts[of.limit] += 2 * rank.summed_bytes / of.own
            parts[RANKS] += rank.activation_bytes / of.own + rank.exchanges * question.network.call_s
        if traits.delay:
            exchange_s = sum(parts.values()) - computing
            hidden_s = min(exchange_s, computing / every * traits.delay * traits.fragments)
            for name in parts.keys() - {COMPUTING}:
                parts[name] *= 1 - hidden_s / exchange_s
        return parts
    if fused:
        parts[of.limit] += min(pulled, CHUNK_BYTES * question.servers_of(workers)) / of.alone
    if traits.in_turn:
        parts[of.limit] += pulled / of.alone
        update = parts[CALLING] + parts[of.limit]
        parts[SERVERS] += max(0.0, workers * update - (computing + update))
    elif traits.hides:
        parts[of.limit_together] += max(0.0, pushed / of.together - computing) + pulled / of.together
    else:
        moved = [pulled] if fused else [pushed, pulled]
        alone, demands = [each / of.alone for each in moved], [each / of.servers for each in moved]
        think = sum(parts.values())
        parts[of.limit] += sum(alone)
        parts[SERVERS] += cycle_s(think, alone, demands, workers) - think - sum(alone)
    return parts


def rows(question: Question, workers: int, schemes: tuple[str, ...] = SCHEMES) -> list[Row]:
    """Return a row for each scheme; if layers are known and a scheme exchanges at each step, rows with overlap, too.

    If layers are fully connected, a scheme with rounds at each step has two more, without and with overlap: as meshes
    of as many ranks as are fastest without.
    """
    if workers < 1:
        raise InvalidArgumentError(f"workers must be at least 1, not {workers}")
    found: list[Row] = []
    for scheme in schemes:
        parts = parts_s(question, scheme, workers)
        every = question.steps(scheme)
        bound_by = max(parts, key=lambda name: parts[name])
        found.append(_row(question, scheme, workers, every, sum(parts.values()) / every, bound_by, "none", "-"))
        traits = ALL_SCHEMES[scheme].TRAITS
        if traits.plans_overlap and question.spec.by_layer:
            found += _overlapped(question, scheme, workers, parts)
            if traits.way == ROUNDS and question.spec.inputs and question.mesh == 1:
                found += _as_meshes(question, scheme, workers)
    return found


def _as_meshes(question: Question, scheme: str, workers: int) -> list[Row]:
    found = []
    for ranks in sizes(workers):
        asked = dataclasses.replace(question, mesh=ranks)
        parts = parts_s(asked, scheme, workers)
        bound_by = max(parts, key=parts.__getitem__)
        found.append((_row(asked, scheme, workers, 1, sum(parts.values()), bound_by, "none", "-"), asked, parts))
    if not found:
        return []
    best, asked, parts = min(found, key=lambda each: each[0].iteration_s)
    return [best, min(_overlapped(asked, scheme, workers, parts), key=lambda row: row.iteration_s)]


def _overlapped(question: Question, scheme: str, workers: int, parts: defaultdict[str, float]) -> list[Row]:
    way = ALL_SCHEMES[scheme].TRAITS.way
    fused = way == FUSED
    of = shares(question, workers, fused=fused)
    if not of.crossing:
        return []
    call_s = question.network.call_s
    nbytes = question.spec.nbytes
    rate = of.together / of.crossing
    if fused:
        rate = nbytes / (sum(parts.values()) - parts[COMPUTING] - parts[CALLING])
    channel = Channel(rate / _share(question.wire), rate, call_s, call_s - question.network.rtt_s)
    batch = question.batch_of(workers)
    layers = question.spec.layers_at(batch)
    if question.mesh > 1:
        layers = layers_of_rank(question.spec, batch, question.mesh, rate, of.own, call_s)
    # The calls that carry parameters are part of the channel.
    calls = parts[CALLING] - (1 if fused else 2) * call_s
    rest = calls + parts[COMBINING]
    predictions = predict(layers, channel, way, rest)
    found = []
    for overlap in OVERLAPS[1:]:
        best = pick([each for each in predictions if each.overlap == overlap], overlap)
        iteration_s = best.iteration_s
        if fused:
            iteration_s = max(iteration_s + rest, workers * nbytes * of.crossing / of.servers)
        exposed = {
            COMPUTING: parts[COMPUTING],
            CALLING: calls,
            COMBINING: parts[COMBINING],
            RANKS: parts[RANKS],
            of.limit_together: iteration_s - parts[COMPUTING] - rest - parts[RANKS],
        }
        bound_by = max(exposed, key=lambda name: exposed[name])
        found.append(_row(question, scheme, workers, 1, iteration_s, bound_by, overlap, best.schedule))
    return found


def _row(
    question: Question,
    scheme: str,
    workers: int,
    every: int,
    iteration_s: float,
    bound_by: str,
    overlap: str,
    schedule: str,
) -> Row:
    compute = question.spec.compute
    batch = question.batch_of(workers)
    computing_s = compute.seconds(batch)
    # As many samples in one process: the whole batch at once if it is divided among workers, otherwise the same batch.
    alone = question.global_batch or batch
    speedup = workers * batch / iteration_s * compute.seconds(alone) / alone
    rank = rank_of(question.spec, batch, question.mesh)
    sent = rank.server_bytes / every * _share(question.wire)
    received = rank.server_bytes / every
    asked = question.scheme(scheme)
    received *= _share(asked.traits.step_wire)
    if question.mesh > 1:
        between = 2 * rank.summed_bytes + rank.activation_bytes
        sent, received = sent + between, received + between
    footprint = asked.footprint()
    members = workers // question.mesh
    return Row(
        workers=workers,
        mesh=question.mesh,
        members_max=asked.MEMBERS_MAX,
        over_limit=members > asked.MEMBERS_MAX,
        scheme=scheme,
        overlap=overlap,
        schedule=schedule,
        every=every,
        iteration_s=iteration_s,
        computing_s=computing_s,
        speedup=speedup,
        efficiency=computing_s / iteration_s,
        bound_by=bound_by,
        sent_bytes=sent,
        received_bytes=received,
        bytes_per_hour=3600 / iteration_s * workers * (sent + received) * shares(question, workers).crossing,
        server_bytes=question.spec.nbytes * (footprint.group + members * footprint.worker),
    )


def _share(wire: str) -> float:
    return WIRE_BYTES[wire] / WIRE_BYTES[EXACT]


def advice(question: Question, workers: int, schemes: tuple[str, ...] = SCHEMES) -> Advice:
    """Return the conclusions for that many workers."""
    enough = None
    if question.servers is not None:
        enough = {scheme: _servers_enough(question, scheme, workers) for scheme in schemes}
    network = question.network
    fills = min(network.worker_per_s, network.client_per_s, network.server_per_s) * network.rtt_s / CONNECTION_BYTES
    return Advice(
        workers=workers,
        diloco_every=_efficient_every(question, workers),
        servers_enough=enough,
        # At the server that has the group's table: one more connection for waiting requests.
        connections=(connections_for(network.rtt_s) + 1) * workers,
        connections_to_fill=max(1, math.ceil(fills)),
    )


def _efficient_every(question: Question, workers: int) -> int:
    """Return the least `every` at which computing is 95 % of DiLoCo's time, and that fits its fragments and delay."""
    parts = parts_s(question, "diloco", workers)
    exposed = sum(parts.values()) - parts[COMPUTING]  # for `every` steps, whatever their number
    steps = math.ceil(exposed / (parts[COMPUTING] / question.every) * _EFFICIENT / (1 - _EFFICIENT))
    return max(steps, question.fragments, question.delay * question.fragments + 1)


def _servers_enough(question: Question, scheme: str, workers: int) -> int:
    def iteration_s(servers: int) -> float:
        return sum(parts_s(dataclasses.replace(question, servers=servers), scheme, workers).values())

    best = iteration_s(_SERVERS_MAX)
    return _least(lambda servers: iteration_s(servers) <= _ENOUGH * best, _SERVERS_MAX)


def _least(holds: Callable[[int], bool], most: int) -> int:
    """Return the least number, from 1 on, for which `holds` is true; it must be true for `most` and stay true once it
    is.
    """
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
