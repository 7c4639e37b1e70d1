"""Members that are far from the memory server: how much of their step rate DiLoCo and its streaming form cost them.

Two hosts in network namespaces and a link with a delay between them (perf/far.py, needs root). The server is on the one
and two members are on the other. Computing is a sleep.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from perf.far import Link
from perf.scaling.fleet import Process, ask_all, started_together
from perf.scaling.report import Answer, Column

ROUND_TRIPS_MS = (20, 200)
RATE = "1gbit"
PARAMETERS = 1_000_000
COMPUTING_S = 0.05
EVERY = 500
WARM = 250  # steps: the first exchange of half of the fragments
STREAMING = {"fragments": 4, "delay": 110}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("DiLoCo", {}),
    ("streaming", STREAMING),
    ("streaming, steps int8", STREAMING | {"step_wire": "int8"}),
)


def rate_lost(quick: bool) -> Answer:
    """Measure each case at each round trip."""
    rows: list[dict[str, Any]] = []
    for round_trip_ms in ROUND_TRIPS_MS[1 if quick else 0 :]:
        with Link(round_trip_ms / 2, RATE, 0.0) as link:
            coordinator = link.serve()
            workers = [_worker(link) for _ in range(2)]
            ask_all(workers, do="connect", coordinator=coordinator)
            for name, settings in CASES:
                rows.append({"round_trip": round_trip_ms, "case": name, **_exposed(workers, settings)})
                print(rows[-1], flush=True)
            for worker in workers:
                worker.end()
    worst = max(row["exposed"] for row in rows if row["case"] != "DiLoCo")
    return Answer(
        name="distant",
        title="Members that are far away",
        setup=(
            f"One memory server, and two members with {PARAMETERS:,} parameters behind a link of {RATE} with a delay, "
            f"as perf/far.py makes it. every={EVERY}; streaming has fragments={STREAMING['fragments']} and "
            f"delay={STREAMING['delay']}. Computing is a sleep of {1e3 * COMPUTING_S:.0f} ms. Lost is the share of the "
            f"time that is spent in the scheme's steps, over {EVERY} steps after the first {WARM}."
        ),
        columns=(
            Column("round_trip", "round trip, ms"),
            Column("case", "rule"),
            Column("exposed", "of the step rate lost, %", "{:.1f}"),
            Column("longest_s", "longest step, s", "{:.2f}"),
        ),
        rows=rows,
        limit=(
            f"The goal was 10 % for members at 20 and 200 ms. Streaming lost {worst:.1f} % at most. An exchange that "
            "takes longer than `delay` steps is waited for."
        ),
    )


def _worker(link: Link) -> Process:
    command = [sys.executable, "-m", "perf.training.worker"]
    return Process(
        link.lab.popen("client", command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True), "worker"
    )


def _exposed(workers: list[Process], settings: dict[str, Any]) -> dict[str, float]:
    for worker in workers:
        worker.ask(
            do="join", name="run", elements=PARAMETERS, scheme="diloco", settings={"every": EVERY, **settings},
            wire="exact",
        )  # fmt: skip
    started_together(workers, do="train", steps=WARM, compute_s=COMPUTING_S)
    began = time.monotonic()
    answers = started_together(workers, do="train", steps=EVERY, compute_s=COMPUTING_S)
    took = time.monotonic() - began
    ask_all(workers, do="leave")
    workers[0].ask(do="delete")
    spent = max((answer["spent"][:-1] for answer in answers), key=sum)
    return {"exposed": 100 * sum(spent) / took, "longest_s": max(spent)}
