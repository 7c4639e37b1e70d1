"""`smb plan` beside what it predicts: iterations of 1 and 2 workers over a shaped link, computing a sleep."""

from __future__ import annotations

import statistics
import time
from typing import Any

import smb.train
from perf.scaling.fleet import LEAD_S, Fleet, ask_all
from perf.scaling.report import Answer, Column
from smb.tools.plan.model import COMPUTING, Question, parts_s
from smb.tools.plan.network import given
from smb.tools.plan.spec import Compute, Spec
from smb.train.partition import Layer

RATE = "400mbit"
PARAMETERS = 1_000_000
COMPUTING_S = (0.05, 0.2)
STEPS = 12
EVERY = 2
SCHEMES = ("bsp", "asp", "r2sp", "easgd", "seasgd", "diloco", "asyncdiloco")


def question(computing_s: float, rate: str, parameters: int, every: int, servers: int = 1) -> Question:
    """Return the plan's question of workers without a limit, beside servers with links of that rate."""
    layer = Layer(4 * parameters, computing_s / 3, 2 * computing_s / 3)
    spec = Spec("sleep", 1, (layer,), Compute(computing_s, 0.0), by_layer=False)
    return Question(spec, given("100gbit", rate, "10us"), servers=servers, every=every)


def predicted_s(asked: Question, scheme: str, workers: int) -> float:
    """Return the seconds of a step."""
    return sum(parts_s(asked, scheme, workers).values()) / asked.steps(scheme)


def how_near(quick: bool) -> Answer:
    """Seven schemes, computing shorter and longer than sending. Workers start apart."""
    rows: list[dict[str, Any]] = []
    with Fleet([RATE]) as fleet:
        workers = [fleet.worker(module="perf.training.worker") for _ in range(2)]
        for count in (1, 2):
            for scheme in SCHEMES[:2] if quick else SCHEMES:
                for computing_s in COMPUTING_S:
                    rows.append(_row(workers[:count], scheme, computing_s))
                    print(rows[-1], flush=True)
    errors = [row["error"] for row in rows]
    alone = [row["error"] for row in rows if row["workers"] == 1]
    return Answer(
        name="predicted",
        title="smb plan beside measured iterations",
        setup=" ".join(
            (
                f"1 and 2 workers, {PARAMETERS:,} parameters, one memory server behind a link of its own (tc tbf,",
                f"{RATE}, both directions, headers counted), workers without a limit, all on this one machine.",
                f"Computing is a sleep. {STEPS} steps each, of two workers one begins half a step's computing before",
                f"the other; diloco and asyncdiloco exchange every {EVERY} steps, the others at each. Predicted from",
                "the link's rate and a round trip of 10 us; nothing is fitted.",
            )
        ),
        columns=(
            Column("workers", "workers"),
            Column("scheme", "scheme"),
            Column("computing_ms", "computing, ms", "{:.0f}"),
            Column("measured_ms", "measured, ms a step", "{:.0f}"),
            Column("predicted_ms", "predicted", "{:.0f}"),
            Column("error", "error, %", "{:+.1f}"),
        ),
        rows=rows,
        limit=(
            f"One worker: errors are at most {max(map(abs, alone)):.0f} %; all rows: median "
            f"{statistics.median(map(abs, errors)):.0f} %, largest {max(errors, key=abs):+.0f} %. SEASGD and "
            "asyncdiloco are predicted for workers in step, which two that start apart need not be."
        ),
    )


def _row(workers: list[Any], scheme: str, computing_s: float) -> dict[str, Any]:
    settings = {} if smb.train.SCHEMES[scheme].TRAITS.each_step else {"every": EVERY if "diloco" in scheme else 1}
    asked = question(computing_s, RATE, PARAMETERS, settings.get("every", 1))
    predicted = predicted_s(asked, scheme, len(workers))
    for worker in workers:
        worker.ask(do="join", name="run", elements=PARAMETERS, scheme=scheme, settings=settings)
    start = time.monotonic() + LEAD_S
    for number, worker in enumerate(workers):
        apart_s = number * parts_s(asked, scheme, 1)[COMPUTING] / len(workers)
        worker.tell(do="train", steps=STEPS, start=start + apart_s, compute_s=computing_s)
    answers = [worker.answer() for worker in workers]
    ask_all(workers, do="leave")
    workers[0].ask(do="delete")
    measured = statistics.fmean((answer["end"] - answer["start"]) / STEPS for answer in answers)
    return {
        "workers": len(workers),
        "scheme": scheme,
        "computing_ms": 1e3 * computing_s,
        "measured_ms": 1e3 * measured,
        "predicted_ms": 1e3 * predicted,
        "error": 100 * (predicted / measured - 1),
    }
