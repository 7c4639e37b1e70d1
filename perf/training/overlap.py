"""Exchanges behind the passes of a step beside those after it: iterations of real networks over shaped links."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from perf.scaling.fleet import LEAD_S, Fleet, ask_all
from perf.scaling.report import Answer, Column
from smb.train.partition import OVERLAPS

LEARNING, STEPS = 6, 7  # the former are not counted: four without overlap, then the plan, then one more
RATES = ("100mbit", "400mbit", "1gbit")
COUNTS, COUNTS_RATE = (1, 2, 4), "400mbit"  # of workers; more than one at that rate alone
MODELS = ("transformer", "cnn")


def behind_the_passes(quick: bool) -> Answer:
    """Each network, scheme, overlap and number of workers, by rate."""
    rows: list[dict[str, Any]] = []
    counts = COUNTS[:2] if quick or (os.cpu_count() or 1) < COUNTS[-1] else COUNTS
    for rate in [COUNTS_RATE] if quick else RATES:
        with Fleet([rate]) as fleet:
            workers = [fleet.worker(module="perf.training.overlap_worker") for _ in range(counts[-1])]
            for count in counts if rate == COUNTS_RATE else counts[:1]:
                for model in MODELS[:1] if quick else MODELS:
                    for scheme in ("asp", "bsp"):
                        overlaps = OVERLAPS if model == MODELS[0] and count == 1 else OVERLAPS[::2]
                        found = rows_of(workers[:count], model, scheme, rate, overlaps)
                        print(*found, sep="\n", flush=True)
                        rows += found
    factors = [row["factor"] for row in rows if row["overlap"] == "both"]
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    return Answer(
        name="overlap",
        title="Exchanges behind the passes of a step",
        setup=" ".join(
            (
                "A transformer of 1.2 million parameters (3 layers) and a CNN of 1.1 million, real computing with one",
                "thread each, SGD with momentum. One memory server behind a link of its own (tc tbf, both directions,",
                f"headers counted), workers without a limit, all on this one machine. Medians of {STEPS} steps after",
                f"{LEARNING}. The bound is the planner's, from what was measured: of the passes and the transfer the",
                "longer one (in BSP for each direction). Passes are as measured beside the exchange; what is outside",
                "of them (making the batch, the loop) is in the measured time alone.",
            )
        ),
        columns=(
            Column("rate", "link"),
            Column("workers", "workers"),
            Column("model", "network"),
            Column("scheme", "scheme"),
            Column("overlap", "overlap"),
            Column("picked", "picked"),
            Column("passes_ms", "passes, ms", "{:.0f}"),
            Column("measured_ms", "iteration, ms", "{:.0f}"),
            Column("bound_ms", "bound", "{:.0f}"),
            Column("predicted_ms", "predicted", "{:.0f}"),
            Column("error", "error, %", "{:+.0f}"),
            Column("factor", "times as fast as none", "{:.2f}"),
        ),
        rows=rows,
        limit=(
            f'"both" is {min(factors):.2f} to {max(factors):.2f} times as fast as "none"; predictions are off by '
            f"{statistics.median(errors):.0f} % (median), {max(errors):.0f} % at most. The {os.cpu_count()} cores of "
            "this machine also carry the server, the links and other work. An iteration below its bound is one whose "
            "passes were measured in a busier moment."
        ),
    )


def rows_of(workers: list[Any], model: str, scheme: str, rate: str, overlaps: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each overlap, one run after the other."""
    found = runs_of(workers, model, scheme, rate, overlaps)
    base, plan = found[0], found[-1]["plan"]
    for row in found:
        del row["jitter"], row["computing_s"]  # passes that overlap wait for values, too
        own = row.pop("plan") or {**plan, "predicted": plan["without"]}
        row["passes_ms"] = 1e3 * own["passes"]
        row["bound_ms"] = 1e3 * own["bound"]
        row["predicted_ms"] = 1e3 * own["predicted"]
        row["error"] = 100 * (row["predicted_ms"] / row["measured_ms"] - 1)
        row["factor"] = base["measured_ms"] / row["measured_ms"]
    return found


def runs_of(workers: list[Any], model: str, scheme: str, rate: str, overlaps: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each overlap what was measured, and the first worker's plan."""
    found = []
    for overlap in overlaps:
        ask_all(workers, do="join", name="run", model=model, scheme=scheme, overlap=overlap)
        start = time.monotonic() + LEAD_S
        answers = ask_all(workers, do="train", steps=LEARNING + STEPS, start=start)
        ask_all(workers, do="leave")
        workers[0].ask(do="delete")
        seconds = statistics.median(each for answer in answers for each in answer["seconds"][LEARNING:])
        logs = [[math.log(each) for each in answer["computing"][1:]] for answer in answers]
        plan = answers[0]["plan"]
        found.append(
            {
                "rate": rate,
                "workers": len(workers),
                "model": model,
                "scheme": scheme,
                "overlap": overlap,
                "picked": f"{plan['overlap']}, {plan['schedule']}" if plan else "",
                "measured_ms": 1e3 * seconds,
                "plan": plan,
                "computing_s": statistics.fmean(each for answer in answers for each in answer["computing"][1:]),
                "jitter": statistics.fmean(map(statistics.pstdev, logs)),
            }
        )
    return found
