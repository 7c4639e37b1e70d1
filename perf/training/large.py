"""A GPT of 100 million parameters on three hosts behind 1 Gbit/s: memory, bytes and seconds of an exchange, with one
copy and with two, and the share of the time that exchanges take.

Each host is a network namespace of the laboratory (perf/netlab.py) with a memory server, and two of them have a
trainer. Needs root, and 16 GiB of memory.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from perf.scaling.fleet import Fleet, Process, ask_all, started_together
from perf.scaling.report import Answer, Column
from perf.training.race import link_bytes

RATE = "1gbit"
HOSTS, TRAINERS = 3, 2
EVERY = 3  # steps from one exchange to the next
EXCHANGES = 3  # of which the first is not counted: what it allocates is used again
CASES: dict[str, dict[str, Any]] = {
    "float32, one copy": {"replicas": 1},
    "float32, two copies": {"replicas": 2},
    "bfloat16, two copies": {"replicas": 2, "wire": "bfloat16"},
}


def memory_bytes_seconds(quick: bool) -> Answer:
    """Train each case once."""
    rows: list[dict[str, Any]] = []
    parameters = 0
    for case, settings in list(CASES.items())[: 1 if quick else None]:
        with Fleet([RATE] * HOSTS, capacity="4GiB") as fleet:
            row = _run(fleet, settings)
        parameters = row.pop("parameters")
        rows.append({"case": case, **row})
        print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    return Answer(
        name="large",
        title=f"{parameters / 1e6:.0f} million parameters behind {RATE}",
        setup=(
            f"A GPT of {parameters / 1e6:.1f} million parameters, AdamW, {TRAINERS} trainers with one thread each, "
            f"DiLoCo with an exchange each {EVERY} steps. {HOSTS} hosts in network namespaces with {RATE} in each "
            f"direction (tc tbf), each with a memory server; the trainers are on two of them. An exchange sends a "
            f"contribution and takes the new model. Its seconds are those by which the optimizer's step took longer "
            f"than one without an exchange: sending, waiting for the other trainer, the outer step, reading. "
            f"{EXCHANGES - 1} exchanges of each trainer count. Bytes crossed the links, headers and second copies "
            f"included. A trainer's memory is its largest, PyTorch included; the servers' is that of all three."
        ),
        columns=(
            Column("case", "rule"),
            Column("joining", "first join, s", "{:.1f}"),
            Column("step_s", "a step's computing, s", "{:.1f}"),
            Column("exchange_s", "an exchange, s", "{:.1f}"),
            Column("share", "share of the time", "{:.0%}"),
            Column("megabytes", "MB over the links, each exchange", "{:,.0f}"),
            Column("trainer", "memory of a trainer, MB", "{:,.0f}"),
            Column("servers", "memory of the servers, MB", "{:,.0f}"),
        ),
        rows=rows,
        limit=(
            "One run of each case. Trainers and servers share this machine's cores, so servers' work lengthens steps "
            "and exchanges. Real trainers make more steps between exchanges: the share falls in proportion."
        ),
    )


def _run(fleet: Fleet, settings: dict[str, Any]) -> dict[str, Any]:
    trainers = [fleet.worker(module="perf.training.large_worker", host=fleet.names[rank]) for rank in range(TRAINERS)]
    asked = {"scheme": "diloco", "every": EVERY, "lease": 120.0, **settings}
    joins = [trainer.ask(do="join", settings=asked, rank=rank) for rank, trainer in enumerate(trainers)]
    ask_all(trainers, do="train", start=0.0, steps=EVERY)
    before = link_bytes(fleet)
    trained = started_together(trainers, do="train", steps=EVERY * (EXCHANGES - 1))
    moved = link_bytes(fleet) - before
    servers = sum(fleet.server_resident_bytes(name) for name in fleet.names)
    _end(trainers)
    steps = [step for each in trained for step in each["steps"]]
    usual = statistics.median(step["optimizer"] for step in steps if not step["exchanged"])
    exchanges = [step["optimizer"] - usual for step in steps if step["exchanged"]]
    total = sum(step["computing"] + step["optimizer"] for step in steps)
    return {
        "parameters": joins[0]["parameters"],
        "joining": joins[0]["seconds"],
        "step_s": statistics.median(step["computing"] for step in steps),
        "exchange_s": statistics.fmean(exchanges),
        "share": sum(exchanges) / total,
        "megabytes": moved / 1e6 / len(exchanges) * TRAINERS,
        "trainer": max(each["resident"] for each in trained) / 1e6,
        "servers": servers / 1e6,
    }


def _end(trainers: list[Process]) -> None:
    for number, trainer in enumerate(trainers, 1):
        trainer.ask(do="end", delete=number == len(trainers))
