"""SEASGD on 1 to 8 memory servers, each behind a link of its own: how long an iteration takes for real networks.

The published figure (Soft Memory Box II, 2020) is five networks that train up to 2.4 times as fast on 8 servers as on
one. Here the parameters' bytes are real and computing is a sleep: what is measured is the exchange, and how much of it
hides behind computing.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.netlab import parse_rate
from perf.scaling.fleet import Fleet, Process, ask_all, links_per_second, started_together
from perf.scaling.report import Answer, Column, Line
from perf.training import r2sp
from perf.training.digits import SIZE

RATE = "1gbit"  # eight of them, in one direction at a time, are what two cores move
PAYLOAD = 0.95  # of a link's rate, the rest is headers
SERVERS = (1, 2, 4, 8)
WORKERS = 4
ALPHA = 0.2  # the paper's, and exchanges after every step
# Seconds of computing for each second that all workers' accumulates take over one server's link. An eighth is bound by
# communication up to 8 servers, where the two are equal; 1 is where one server's accumulates are just hidden.
BOUND, BALANCED = 1 / 8, 1.0
RATIOS = (BOUND, 0.5, 0.71, BALANCED, 2.0)
GOAL = 2.4
MEASURE_S = 10.0  # about so many seconds of iterations, two of them at least
WHOLE_CURVE = ("ResNet-50",)  # at all ratios
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Network:
    """A network's number of trainable parameters, and who counted them."""

    name: str
    parameters: int
    source: str

    @property
    def nbytes(self) -> int:
        return 4 * self.parameters


NETWORKS = (
    Network("Inception-v1", 6_624_904, "torchvision, GoogLeNet_Weights.IMAGENET1K_V1 num_params (no auxiliary heads)"),
    Network(
        "MiniLM-L6 (transformer)",
        22_713_216,
        "sentence-transformers/all-MiniLM-L6-v2: vocabulary 30522, width 384, 6 layers, inner width 1536, pooler",
    ),
    Network("ResNet-50", 25_557_032, "torchvision, ResNet50_Weights.IMAGENET1K_V1 num_params"),
    Network("Inception-ResNet-v2", 55_843_464, "imgclsmob's inceptionresnetv2, which asserts it; timm: 55.84 M"),
    Network("VGG-16", 138_357_544, "torchvision, VGG16_Weights.IMAGENET1K_V1 num_params"),
)


def how_many_servers(quick: bool) -> Answer:
    """1 to 8 servers, five networks, four workers: seconds for an iteration."""
    networks = NETWORKS[:1] if quick else NETWORKS
    rows, link = measured(RATE, networks, SERVERS[::3] if quick else SERVERS, MEASURE_S)
    order = {network.name: place for place, network in enumerate(networks)}
    return answer_of(sorted(rows, key=lambda row: (row["ratio"], order[row["network"]], row["servers"])), link)


def measured(
    rate: str, networks: Sequence[Network], servers: Sequence[int], measure_s: float
) -> tuple[list[dict[str, Any]], float]:
    """Return a row for each number of servers, network and ratio, and the bytes a second of a link of that rate."""
    capacity = 2 * max(network.nbytes for network in networks)
    rows: list[dict[str, Any]] = []
    link = 0.0
    for count in servers:
        with Fleet([rate] * count, capacity=f"{capacity // count + (64 << 20)}") as fleet:
            workers = [fleet.worker(module="perf.training.worker") for _ in range(WORKERS)]
            link = link or link_of(fleet, rate)
            for network in reversed(networks):
                ratios = RATIOS if network.name in WHOLE_CURVE else (BOUND,)
                rows += curve(fleet, workers, count, network, ratios, rate, link, measure_s)
    add_times(rows)
    return rows, link


def link_of(fleet: Fleet, rate: str) -> float:
    """Return the bytes a second that bare sockets carry over one of the fleet's links. Blocks most of a second."""
    return links_per_second(fleet.bare(), fleet, fleet.names[:1], "write", int(0.8 * parse_rate(rate) / 8))[0]


def curve(
    fleet: Fleet,
    workers: list[Process],
    count: int,
    network: Network,
    ratios: Sequence[float],
    rate: str,
    link: float,
    measure_s: float,
) -> list[dict[str, Any]]:
    """Train on the fleet's first `count` servers; return a row for each ratio."""
    rows = []
    _join(fleet.names[:count], workers, network)
    for ratio in ratios:
        rows.append(_measure(count, workers, network, ratio, rate, link, measure_s))
        print(json.dumps(rows[-1]), flush=True)
    ask_all(workers, do="leave")
    workers[0].ask(do="delete")
    return rows


def add_times(rows: Sequence[dict[str, Any]]) -> None:
    """Say in each row how many times as fast it is as the one of one server."""
    for row in rows:
        one = next(r for r in rows if (r["network"], r["ratio"], r["servers"]) == (row["network"], row["ratio"], 1))
        row["times_one"] = one["iteration_s"] / row["iteration_s"]


def to_a_loss(fleet: Fleet, rate: str, servers: Sequence[int], ratio: float, steps: int) -> list[tuple[float, float]]:
    """Train the digits' network by SEASGD with four workers, on so many of the fleet's servers.

    Returns for each number the seconds after which a loss was reached, and the loss: the least that all runs reached.
    Computing is `ratio` times the time that all workers' accumulates take over one link.
    """
    from smb.tools.demo.digits import load_digits

    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the workers: they share the cores
    send_s = 4 * SIZE / (PAYLOAD * parse_rate(rate) / 8)
    case = r2sp.Case(r2sp.BALANCE, "SEASGD", "seasgd", {"alpha": ALPHA, "every": 1}, computing=ratio)
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "digits.npz"
        load_digits().save(file)
        workers = [fleet.worker(module="perf.training.digits_worker") for _ in range(WORKERS)]
        ask_all(workers, do="load", file=str(file))
        for count in servers:
            run = r2sp.train(workers, case, 1, send_s, steps, servers=fleet.names[:count])
            print(f"{count} servers: {1e3 * run.iteration_s:.0f} ms, loss {run.losses[-1]:.3f}", flush=True)
            runs.append(run)
    loss = max(run.least_loss for run in runs)
    return [(run.reached_s(loss) or math.inf, loss) for run in runs]


def answer_of(rows: list[dict[str, Any]], link: float) -> Answer:
    """Return what the measurements say; `link` is what bare sockets carry over one link, bytes per second."""
    bound = [row for row in rows if row["ratio"] == BOUND]
    servers = max(row["servers"] for row in rows)
    most = [row for row in bound if row["servers"] == servers]
    lowest, highest = (pick(row["times_one"] for row in most) for pick in (min, max))
    limit = (
        f"Bound by communication, {servers} servers make an iteration {lowest:.2f} to {highest:.2f} times as fast "
        f"as one (the goal was {GOAL}). An iteration reads and adds all parameters of each worker, and one server's "
        "link carries all of that: the time goes down as links are added, until computing, which the accumulate hides "
        "behind, is as long as the accumulate. From there on only the read gets shorter."
    )
    longer = [row for row in rows if row["ratio"] != BOUND and row["servers"] == servers]
    if longer:
        told = ", ".join(f"{row['times_one']:.2f} at {row['ratio']:g}" for row in longer)
        limit += f" Computing that takes longer, by one server's accumulates, leaves {told}: computing gets no faster."
    return Answer(
        name="seasgd",
        title="SEASGD on 1 to 8 memory servers: time of an iteration",
        setup=f"{WORKERS} workers, alpha={ALPHA}, an exchange after every step; every server behind a link of its own "
        f"(tc tbf, {RATE}, both directions, headers counted; bare sockets carry {link / 1e6:.0f} MB/s over one), "
        "workers without a limit, all on this one machine. Real bytes: every worker reads all parameters and adds all "
        "of its differences in each iteration, float32 and exact; the sum over workers and shared model is checked. "
        "Computing is a sleep: its ratio is to the time that all workers' accumulates take over one server's link. "
        "All in step: max(computing, write + accumulate) + read at the links' bare rate, if all workers read at one "
        "time and add at another; workers that are not in step read while others add, in the links' other direction. "
        "Parameters: "
        + "; ".join(f"{network.name} {network.parameters:,} ({network.source})" for network in NETWORKS)
        + ".",
        columns=(
            Column("network", "network"),
            Column("mb", "MB", "{:.1f}"),
            Column("ratio", "computing / accumulates on 1", "{:.3g}"),
            Column("compute_s", "computing, s", "{:.2f}"),
            Column("servers", "servers"),
            Column("iterations", "iterations"),
            Column("iteration_s", "iteration, s", "{:.2f}"),
            Column("in_step_s", "all in step, s", "{:.2f}"),
            Column("times_one", "times one server", "{:.2f}"),
        ),
        rows=rows,
        limit=limit,
        lines=[
            Line(
                f"{network}, computing {ratio:.3g}",
                "servers",
                "times_one",
                lambda row, key=(network, ratio): (row["network"], row["ratio"]) == key,  # type: ignore[misc]
            )
            for network, ratio in dict.fromkeys((row["network"], row["ratio"]) for row in rows)
        ],
        y_title="iterations per second, times one server",
        also={"link_bytes_per_second": link, "goal": GOAL},
    )


def _join(servers: Sequence[str], workers: list[Process], network: Network) -> None:
    for number, worker in enumerate(workers):
        settings = {"alpha": ALPHA, "every": 1}
        joined = worker.ask(
            do="join", name="run", elements=network.parameters, scheme="seasgd", settings=settings, servers=servers
        )
        if joined["servers"] != len(servers):
            raise RuntimeError(f"parameters lie on {joined['servers']} servers, not on all {len(servers)}")
        worker.ask(do="compute", value=number + 1.0)


def _measure(
    count: int, workers: list[Process], network: Network, ratio: float, rate: str, link: float, measure_s: float
) -> dict[str, Any]:
    """Let the workers train together on so many servers, and check that no byte was lost."""
    alone_s = WORKERS * network.nbytes / (PAYLOAD * parse_rate(rate) / 8)  # all accumulates, or reads, over one link
    compute_s = ratio * alone_s
    links_s = WORKERS * network.nbytes / (link * count)  # the same over all links, at their bare rate
    in_step_s = max(compute_s, links_s) + links_s
    steps = max(2, min(20, round(measure_s / in_step_s)))
    # Every iteration is whole: the first one's read begins at the start, the last one's addition ends with the
    # flush.
    answers = started_together(workers, do="train", steps=steps, compute_s=compute_s)
    start = min(answer["start"] for answer in answers)
    _check(workers, network.parameters)
    return {
        "network": network.name,
        "parameters": network.parameters,
        "mb": network.nbytes / 1e6,
        "ratio": ratio,
        "compute_s": compute_s,
        "servers": count,
        "iterations": steps,
        "iteration_s": (max(answer["end"] for answer in answers) - start) / steps,
        "in_step_s": in_step_s,
        "spent_s": [[round(spent, 3) for spent in answer["spent"]] for answer in answers],
    }


def _check(workers: list[Process], parameters: int) -> None:
    """A worker takes from its own model what it gives to the shared one: the sum over all models does not change."""
    totals = [*ask_all(workers, do="total", of="values"), workers[0].ask(do="total", of="shared")]
    found = sum(total["total"] for total in totals)
    wanted = parameters * WORKERS * (WORKERS + 1) / 2
    if abs(found - wanted) > TOLERANCE * wanted:
        raise RuntimeError(f"workers and shared model add up to {found!r}, not to {wanted!r}: bytes were lost")
