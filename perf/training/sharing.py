"""The simulation of perf/simulated.py beside measured steps: one, two and four workers that share a server's link.

Layers sleep in place of computing, so that processors bound nothing; what is measured is the exchange and its overlap,
by smb.torch.join(overlap=). The simulation gets the link's rate, and what the plan of one worker alone has measured:
the layers' times, a message's start-up, and how long a round takes to close. More is measured beside it: how long
computing takes and how much it varies from step to step, and how unequally bare sockets share the link.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import smb.train
from perf.scaling.fleet import LEAD_S, Fleet, Process
from perf.scaling.report import Answer, Column
from perf.simulated import Cluster, inequality_of, named, step_s
from perf.training.overlap import LEARNING, STEPS, runs_of
from smb.tools.plan.network import parse_rate, payload_per_s
from smb.tools.plan.spec import scaled
from smb.train.partition import Channel, Layer, Prediction, predict
from smb.train.traits import FUSED

RATE = "100mbit"
COUNTS = (1, 2, 4)
SCHEMES = ("asp", "bsp")
OVERLAPS = ("none", "both")
GOAL = 10.0  # per cent
TRANSFERS = 4  # in each direction, of bare sockets
NBYTES = 2_400_000  # as many as the network has
SEEDS = 15  # of a row's simulations


def how_near(quick: bool, rate: str = RATE, counts: Sequence[int] = COUNTS) -> Answer:
    """Both schemes, without overlap and with it, one to four workers."""
    rows: list[dict[str, Any]] = []
    with Fleet([rate]) as fleet:
        bare = fleet.bare()
        inequality = inequality_of(_first_by_last(bare, fleet.address(fleet.names[0]), counts[-1]), counts[-1])
        workers = [fleet.worker(module="perf.training.overlap_worker") for _ in range(counts[-1])]
        for scheme in SCHEMES:
            alone: dict[str, Any] = {}
            for count in counts[::2] if quick else counts:
                runs = runs_of(workers[:count], "sleeping", scheme, rate, OVERLAPS)
                alone = alone or runs[-1]["plan"]
                for row in runs:
                    # Without overlap no pass waits for values.
                    row["jitter"], row["computing_s"] = runs[0]["jitter"], runs[0]["computing_s"]
                    _add_simulated(row, alone, rate, inequality if count > 1 else 0.0)
                    print(row, flush=True)
                rows += runs
    errors = [abs(row["error"]) for row in rows]
    return Answer(
        name="simulated",
        title="Steps of workers that share a link: simulated beside measured",
        setup=" ".join(
            (
                "A network of six layers that sleep in place of computing (0.2 s forward, 0.4 s backward), 2.4 MB, by",
                f"smb.torch.join. One memory server behind a link of its own (tc tbf, {rate}, both directions, headers",
                f"counted), workers without a limit, all on this one machine. Medians of {STEPS} steps after",
                f"{LEARNING}. Simulated from the link's rate, and from what one worker alone measured: the layers'",
                "times, the start-up, and the closing of a round. Each run's computing is as it was without overlap:",
                "its mean, and the standard deviation of its logarithm, the jitter. Inequality: that of the weights of",
                f"shares with which {counts[-1]} bare sockets on the same link would end as they did, the first by the",
                f"last. Median of {SEEDS} seeds.",
            )
        ),
        columns=(
            Column("workers", "workers"),
            Column("scheme", "scheme"),
            Column("overlap", "overlap"),
            Column("picked", "picked"),
            Column("computing_s", "computing, s", "{:.2f}"),
            Column("jitter", "jitter", "{:.2f}"),
            Column("inequality", "inequality", "{:.2f}"),
            Column("measured_ms", "measured, ms", "{:.0f}"),
            Column("simulated_ms", "simulated", "{:.0f}"),
            Column("error", "error, %", "{:+.1f}"),
        ),
        rows=rows,
        limit=f"Errors: median {statistics.median(errors):.1f} %, at most {max(errors):.1f} % (the goal: {GOAL:g} %).",
    )


def _first_by_last(bare: Process, address: str, count: int) -> float:
    """Return when the first of so many equal transfers over the link ends, by when the last one does: the mean."""
    parts = []
    for operation in ("write", "read") * TRANSFERS:
        request = {"addresses": [address] * count, "operation": operation, "nbytes": NBYTES}
        seconds = bare.ask(do="move", start=time.monotonic() + LEAD_S, **request)["seconds"]
        parts.append(min(seconds) / max(seconds))
    return statistics.fmean(parts)


def _add_simulated(row: dict[str, Any], alone: dict[str, Any], rate: str, inequality: float) -> None:
    """Simulate what a row's workers did: their plan, or none."""
    way = smb.train.SCHEMES[row["scheme"]].TRAITS.way
    layers = scaled(tuple(Layer(**layer) for layer in alone["layers"]), row["computing_s"])
    channel = Channel(**alone["channel"])
    plan = row.pop("plan")
    if plan:
        chosen = Prediction(**plan["chosen"])
    else:
        chosen = named(predict(layers, channel, way), "none", "one message" if way == FUSED else "none")
    link = payload_per_s(parse_rate(rate))
    cluster = Cluster(
        row["workers"], link, link, channel.start_s, channel.gap_s, alone["closing"], row["jitter"], inequality
    )
    times = [step_s(layers, chosen, way, cluster, steps=LEARNING + STEPS, seed=seed) for seed in range(SEEDS)]
    row["inequality"] = inequality
    row["simulated_ms"] = 1e3 * statistics.median(times)
    row["error"] = 100 * (row["simulated_ms"] / row["measured_ms"] - 1)
