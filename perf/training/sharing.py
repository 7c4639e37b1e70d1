"""The simulation of perf/simulated.py beside measured steps: one, two and four workers that share a server's link.

Layers sleep in place of computing, so that processors bound nothing; what is measured is the exchange and its overlap,
by smb.torch.join(overlap=). The simulation gets the link's rate, and what the plan of one worker alone has measured:
the layers' times, a message's start-up, and how long a round takes to close.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import smb.train
from perf.scaling.fleet import Fleet
from perf.scaling.report import Answer, Column
from perf.simulated import Cluster, named, step_s
from perf.training.overlap import LEARNING, STEPS, runs_of
from smb.tools.plan.network import parse_rate, payload_per_s
from smb.train.partition import Channel, Layer, Prediction, predict
from smb.train.traits import FUSED

RATE = "100mbit"
COUNTS = (1, 2, 4)
SCHEMES = ("asp", "bsp")
OVERLAPS = ("none", "both")
GOAL = 10.0  # per cent


def how_near(quick: bool, rate: str = RATE, counts: Sequence[int] = COUNTS) -> Answer:
    """Both schemes, without overlap and with it, one to four workers."""
    rows: list[dict[str, Any]] = []
    with Fleet([rate]) as fleet:
        workers = [fleet.worker(module="perf.training.overlap_worker") for _ in range(counts[-1])]
        for scheme in SCHEMES:
            alone: dict[str, Any] = {}
            for count in counts[::2] if quick else counts:
                for run in runs_of(workers[:count], "sleeping", scheme, rate, OVERLAPS):
                    if count == counts[0] and run["plan"]:
                        alone = run["plan"]
                    rows.append(run)
            for row in (row for row in rows if row["scheme"] == scheme):
                _add_simulated(row, alone, rate)
                print(row, flush=True)
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
                "times, the start-up, and the closing of a round.",
            )
        ),
        columns=(
            Column("workers", "workers"),
            Column("scheme", "scheme"),
            Column("overlap", "overlap"),
            Column("picked", "picked"),
            Column("measured_ms", "measured, ms", "{:.0f}"),
            Column("simulated_ms", "simulated", "{:.0f}"),
            Column("error", "error, %", "{:+.1f}"),
        ),
        rows=rows,
        limit=f"Errors: median {statistics.median(errors):.1f} %, at most {max(errors):.1f} % (the goal: {GOAL:g} %).",
    )


def _add_simulated(row: dict[str, Any], alone: dict[str, Any], rate: str) -> None:
    """Simulate what a row's workers did: their plan, or none."""
    way = smb.train.SCHEMES[row["scheme"]].TRAITS.way
    layers = [Layer(**layer) for layer in alone["layers"]]
    channel = alone["channel"]
    plan = row.pop("plan")
    if plan:
        chosen = Prediction(**plan["chosen"])
    else:
        chosen = named(predict(layers, Channel(**channel), way), "none", "one message" if way == FUSED else "none")
    link = payload_per_s(parse_rate(rate))
    cluster = Cluster(row["workers"], link, link, channel["start_s"], channel["gap_s"], alone["closing"])
    row["simulated_ms"] = 1e3 * step_s(layers, chosen, way, cluster)
    row["error"] = 100 * (row["simulated_ms"] / row["measured_ms"] - 1)
