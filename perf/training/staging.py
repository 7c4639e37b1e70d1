"""Soft Memory Box I's way of updating beside one call of today: iterations of workers over one server's link.

In the first system (ShmCaffe, 2018) a worker writes its difference into a staging buffer of its own on the server, has
it added to the shared one while it holds a lock, and then reads that. Here one call adds and brings the sum back.
"""

from __future__ import annotations

from typing import Any

from perf.scaling.fleet import Fleet, ask_all, started_together
from perf.scaling.report import Answer, Column
from perf.training.staging_worker import FUSED, STAGED, WAYS

RATE = "100mbit"
WORKERS = (1, 4)
ELEMENTS = 1 << 20
STEPS = 4


def beside_one_call(
    quick: bool, rate: str = RATE, elements: int = ELEMENTS, workers: tuple[int, ...] = WORKERS
) -> Answer:
    """Three ways to update, one worker and four."""
    rows: list[dict[str, Any]] = []
    added = 0
    with Fleet([rate]) as fleet:
        processes = [fleet.worker(module="perf.training.staging_worker") for _ in range(max(workers))]
        for number, process in enumerate(processes):
            process.ask(do="join", number=number, elements=elements)
        for count in workers:
            found: dict[str, float] = {}
            for turn in range(1 if quick else 2):
                for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
                    answers = started_together(processes[:count], do="update", way=way, steps=STEPS)
                    added += count * STEPS
                    took = (max(each["end"] for each in answers) - min(each["start"] for each in answers)) / STEPS
                    found[way] = min(took, found.get(way, took))
                    totals = {each["total"] for each in ask_all(processes, do="total")}
                    if totals != {float(added * elements)}:
                        raise RuntimeError(f"{way}: the shared buffer has {totals}, not {added} additions")
            for way in WAYS:
                rows.append(
                    {
                        "workers": count,
                        "way": way,
                        "iteration_ms": 1e3 * found[way],
                        "times_fused": found[way] / found[FUSED],
                    }
                )
                print(rows[-1], flush=True)
    most = next(row for row in rows if (row["workers"], row["way"]) == (max(workers), STAGED))
    return Answer(
        name="staging",
        title="A staging buffer beside one call that adds and brings the sum back",
        setup=f"{' and '.join(map(str, workers))} workers update {4 * elements / 1e6:.1f} MB on one memory server "
        f"behind a link of its own (tc tbf, {rate}, both directions, headers counted), workers without a limit, all on "
        f"this one machine. {STEPS} iterations each, the better of {1 if quick else 2} turns; additions are counted.",
        columns=(
            Column("workers", "workers"),
            Column("way", "way"),
            Column("iteration_ms", "iteration, ms", "{:.0f}"),
            Column("times_fused", "times one call", "{:.2f}"),
        ),
        rows=rows,
        limit=f"With {most['workers']} workers the way by a staging buffer takes {most['times_fused']:.2f} times as "
        "long as one call: that uses both directions of the link at once, and holds no lock while it sends.",
    )
