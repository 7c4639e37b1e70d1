"""A transformer that two workers train over 100 Mbit/s: bytes and loss after equal steps, PyTorch's own ways and ours.

Each worker has a host of its own in the network laboratory, whose link is shaped. Ours has a memory server on each of
the two hosts, each with half of the model. So the link carries half of what a worker sends and reads.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from perf.scaling.fleet import Fleet, Process, ask_all, started_together
from perf.scaling.report import Answer, Column
from perf.training.race_worker import BATCH, CONTEXT, INTERFACE

RATE = "100mbit"
EVERY = 50
STEPS = 200
PACE_STEPS = 8  # after so many, DDP's pace is known: its other steps go over an open link
SEEDS = (1, 2, 3)
GOAL_BYTES, GOAL_LOSS = 60, 0.003
_PORT = 29531


@dataclass(frozen=True)
class Case:
    """A row of the table. `rule` is race_worker's."""

    name: str
    rule: dict[str, Any]
    opens: bool = False  # the link, when its pace is known


DDP = Case("torch DistributedDataParallel, gloo", {"kind": "ddp"}, opens=True)
AVERAGER = Case("torch PeriodicModelAverager, gloo", {"kind": "averager", "every": EVERY})
_OURS = {"kind": "ours", "scheme": "diloco", "every": EVERY, "lease": 60.0}
PLAIN = Case("DiLoCo", _OURS)
INT8 = Case("DiLoCo, int8 with error feedback", _OURS | {"wire": "int8"})
CASES = (DDP, AVERAGER, PLAIN, INT8)


def bytes_and_loss(quick: bool, steps: int = STEPS) -> Answer:
    """Train each case with each seed. `steps` is a multiple of EVERY."""
    steps = EVERY if quick else max(EVERY, steps - steps % EVERY)
    rows: list[dict[str, Any]] = []
    parameters = 0
    with Fleet([RATE, RATE], capacity="256MiB") as fleet:
        for case in CASES:
            runs = []
            for seed in SEEDS[: 1 if quick else None]:
                runs.append(_run(fleet, case, seed, steps))
                print(f"  {case.name}, seed {seed}: {runs[-1]}", file=sys.stderr, flush=True)
            parameters = runs[0]["parameters"]
            row: dict[str, Any] = {"case": case.name, "seeds": len(runs), "runs": runs}
            for key in ("megabytes", "joining", "loss", "step_s"):
                row[key] = statistics.fmean(run[key] for run in runs)
            rows.append(row)
    return answer_of(rows, parameters, steps)


def answer_of(rows: list[dict[str, Any]], parameters: int, steps: int) -> Answer:
    """Return what the measurements say."""
    of = {row["case"]: row for row in rows}
    ddp, plain, int8 = of[DDP.name], of[PLAIN.name], of[INT8.name]
    for row in rows:
        row["less"] = ddp["megabytes"] / row["megabytes"]
        # Seed by seed: runs of one seed see the same text in the same order.
        pairs = zip(row["runs"], plain["runs"], strict=False)
        row["beside_plain"] = 100 * statistics.fmean(run["loss"] / other["loss"] - 1 for run, other in pairs)
    met = int8["less"] >= GOAL_BYTES and abs(int8["beside_plain"]) <= 100 * GOAL_LOSS
    return Answer(
        name="race",
        title=f"A transformer over {RATE}: bytes and loss after {steps} steps of two workers",
        setup=(
            f"{parameters:,} parameters, AdamW, {BATCH} rows of {CONTEXT} bytes of Python's own library for each "
            f"worker and step, one thread each. Two hosts of the network laboratory, with {RATE} in each direction "
            f"(tc tbf). An exchange every {EVERY} steps, but for DDP. Ours has a memory server on each of the hosts; "
            f"what a worker reads of the model is float32. Bytes are all that crossed the link while they trained, "
            f"headers and control included, and once more for joining. The loss is that of rank 0's model at the end, "
            f"of text that no one has trained. DDP's seconds are those of its first {PACE_STEPS} steps; for the others "
            f"its link is opened, which changes neither bytes nor loss. Means over the seeds."
        ),
        columns=(
            Column("case", "rule"),
            Column("seeds", "seeds"),
            Column("megabytes", "MB over the link", "{:.1f}"),
            Column("less", "DDP's bytes / its", "{:.1f}"),
            Column("joining", "MB to join", "{:.1f}"),
            Column("loss", "loss", "{:.4f}"),
            Column("beside_plain", "beside DiLoCo, %", "{:+.2f}"),
            Column("step_s", "seconds a step", "{:.2f}"),
        ),
        rows=rows,
        limit=(
            f"DiLoCo with int8 and error feedback moves 1/{int8['less']:.0f} of DDP's bytes (the goal was "
            f"1/{GOAL_BYTES}), {int8['beside_plain']:+.2f} % of uncompressed DiLoCo's loss (the goal was "
            f"{100 * GOAL_LOSS:.1f} %): the goal is {'met' if met else 'not met'}. Seconds are of this machine, two "
            f"workers and all daemons on its cores; what other work ran beside them is in them."
        ),
    )


def _run(fleet: Fleet, case: Case, seed: int, steps: int) -> dict[str, Any]:
    """Train once, in processes of its own: gloo's are of one case alone."""
    workers = [fleet.worker(module="perf.training.race_worker", host=name) for name in fleet.names]
    try:
        return _measured(fleet, workers, case, seed, steps)
    finally:
        for worker in workers:
            worker.end()
        _shape(fleet, RATE)


def _measured(fleet: Fleet, workers: list[Process], case: Case, seed: int, steps: int) -> dict[str, Any]:
    began = link_bytes(fleet)
    for rank, worker in enumerate(workers):
        worker.tell(
            do="begin",
            rule=case.rule,
            rank=rank,
            seed=seed,
            address=f"{fleet.address(fleet.names[0])}:{_PORT}",
        )
        if case.rule["kind"] == "ours":
            worker.answer()  # the first one makes the group
    if case.rule["kind"] != "ours":
        for worker in workers:  # gloo's meet
            worker.answer()
    joined = link_bytes(fleet)
    pace = PACE_STEPS if case.opens else 0
    paced_s = _train(workers, pace) if pace else 0.0
    if case.opens:
        _shape(fleet, None)
    rest_s = _train(workers, steps - pace)
    trained = link_bytes(fleet)
    found = workers[0].ask(do="loss")
    ask_all(workers, do="end")
    if case.rule["kind"] == "ours":
        workers[0].ask(do="delete")
    return {
        "parameters": found["parameters"],
        "megabytes": (trained - joined) / 1e6,
        "joining": (joined - began) / 1e6,
        "loss": found["loss"],
        "step_s": paced_s / pace if pace else rest_s / steps,
    }


def _train(workers: list[Process], steps: int) -> float:
    seconds: list[float] = [answer["seconds"] for answer in started_together(workers, do="train", steps=steps)]
    return max(seconds)


def _shape(fleet: Fleet, rate: str | None) -> None:
    assert fleet.lab
    for name in fleet.names:
        fleet.lab.set_rate(name, rate)


def link_bytes(fleet: Fleet) -> int:
    """The bytes that the workers' hosts have sent so far, each byte once."""
    assert fleet.lab
    total = 0
    for name in fleet.names:
        found = fleet.lab.run(name, ["ip", "-j", "-s", "link", "show", INTERFACE], capture_output=True, text=True)
        total += int(json.loads(found.stdout)[0]["stats64"]["tx"]["bytes"])
    return total
