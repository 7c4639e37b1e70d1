"""The published range: between which parts of the limit each of our cells was, over several whole runs.

    python -m perf.ranges RESULTS.json RESULTS.json RESULTS.json [...]     # into perf/results/ranges.json

Kept are ratios, ours / limit, since those of one run travel and speeds do not: the lowest and the highest of the runs'
medians. `perf.run --quick` says of each cell that it measures whether it lies inside. A look has one short round, so a
cell that is outside in one look says little; one that is outside on the same side in three does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.contender import Case
from perf.results import ROOT, Results
from perf.tables import size_name

PATH = ROOT / "perf" / "results" / "ranges.json"
RUNS_MIN = 3

Key = tuple[str, str, int, int]  # of a case, whatever its seconds: transport, operation, nbytes, clients


def key_of(case: Case) -> Key:
    return case.transport, case.operation, case.nbytes, case.clients


@dataclass(frozen=True)
class Range:
    """Ours / limit of one cell: lowest and highest of the medians of `runs` runs."""

    lowest: float
    highest: float
    runs: int

    def place(self, ratio: float) -> str:
        """ "inside", "below" or "above", of the ratio as it is written."""
        shown = round(ratio, 2)
        return "below" if shown < round(self.lowest, 2) else "above" if shown > round(self.highest, 2) else "inside"


Ranges = dict[Key, Range]


def merge(runs: Sequence[Results]) -> Ranges:
    """Return the range of each cell that at least RUNS_MIN runs have.

    ValueError where the runs are too few, or not of one commit and one processor: they would not be of one thing.
    """
    if len(runs) < RUNS_MIN:
        raise ValueError(f"a range is of at least {RUNS_MIN} runs, and these are {len(runs)}")
    for what, values in (
        ("commit", {run.commit for run in runs}),
        ("processor", {str(run.machine.get("cpu")) for run in runs}),
    ):
        if len(values) > 1:
            raise ValueError(f"runs of one range have the same {what}; these have {', '.join(sorted(values))}")
    ratios: dict[Key, list[float]] = {}
    for run in runs:
        for case in run.cases():
            ratio = run.ratio(case, run.best(case))
            if ratio is not None:
                ratios.setdefault(key_of(case), []).append(ratio)
    return {key: Range(min(seen), max(seen), len(seen)) for key, seen in ratios.items() if len(seen) >= RUNS_MIN}


def to_json(ranges: Ranges, runs: Sequence[Results]) -> dict[str, Any]:
    cells = [
        {"transport": t, "operation": o, "nbytes": n, "clients": c, **vars(found)}
        for (t, o, n, c), found in ranges.items()
    ]
    about = {"commit": runs[0].commit, "machine": runs[0].machine, "when": [run.when for run in runs]}
    return {**about, "commands": [run.command for run in runs], "cells": cells}


def load(path: Path = PATH) -> Ranges | None:
    """Return what is published; None where nothing is."""
    if not path.exists():
        return None
    return {
        (cell["transport"], cell["operation"], cell["nbytes"], cell["clients"]): Range(
            cell["lowest"], cell["highest"], cell["runs"]
        )
        for cell in json.loads(path.read_text())["cells"]
    }


def report(results: Results, ranges: Ranges | None) -> str:
    """Say of each cell that has one beside its limit whether it lies inside the published range."""
    if ranges is None:
        return "No range is published yet (perf/ranges.py): these cells are beside none.\n"
    lines, places = [], []
    for case in results.cases():
        ratio = results.ratio(case, results.best(case))
        if ratio is None:
            continue
        found = ranges.get(key_of(case))
        place = found.place(ratio) if found else "not published"
        shown = f"[{found.lowest:.2f}, {found.highest:.2f}]" if found else ""
        about = f"{case.transport:14} {case.operation:10} {size_name(case.nbytes):>8} {case.clients:3}"
        lines.append(f"{about}  {ratio:6.2f}  {shown:14} {place}")
        places.append(place)
    counts = ", ".join(f"{places.count(place)} {place}" for place in ("inside", "below", "above", "not published"))
    head = f"{'transport':14} {'operation':10} {'size':>8} {'cl.':>3}  {'ours':>6}  {'published':14}"
    return "\n".join(["Ours / limit, beside the published range:", "", head, *lines, "", counts]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        "python -m perf.ranges", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RESULTS.json")
    parser.add_argument("--output", type=Path, default=PATH)
    asked = parser.parse_args(arguments)
    runs = [Results.load(path) for path in asked.runs]
    try:
        ranges = merge(runs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    asked.output.write_text(json.dumps(to_json(ranges, runs), indent=1) + "\n")
    print(f"{len(ranges)} cells of {len(runs)} runs are in {asked.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
