"""Answers as files: JSON for programs, a table and a sentence for readers, a plot."""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf.results import commit

RESULTS = Path(__file__).parents[1] / "results"
RAW = Path(__file__).parents[2] / "build" / "perf" / "results"


@dataclass(frozen=True)
class Column:
    """A key of the rows, its title, and how a value is shown."""

    key: str
    title: str
    shown: str = "{}"


@dataclass(frozen=True)
class Line:
    """A curve of the plot: y over x of the rows that `where` takes."""

    label: str
    x: str
    y: str
    where: Callable[[dict[str, Any]], bool] = lambda _: True


@dataclass(frozen=True)
class Answer:
    """The findings of an experiment. `setup` says what it ran on, `limit` in a sentence or two what bounds the
    figures."""

    name: str
    title: str
    setup: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]
    limit: str
    lines: Sequence[Line] = ()
    y_title: str = ""
    log_y: bool = False
    also: dict[str, Any] = field(default_factory=dict)  # for the JSON only
    draw: Callable[[Path], None] | None = None  # makes the plot where lines can't: draws into a .png

    def table(self) -> str:
        """Return the rows as markdown."""
        lines = ["| " + " | ".join(column.title for column in self.columns) + " |"]
        lines.append("| " + " | ".join("---" for _ in self.columns) + " |")
        for row in self.rows:
            cells = (column.shown.format(row[column.key]) if column.key in row else "" for column in self.columns)
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def markdown(self, command: str) -> str:
        """Return the whole page."""
        return "\n\n".join((f"# {self.title}", self.setup, self.table(), self.limit, _origin(command))) + "\n"


def save(answer: Answer, command: str, group: str = "scaling") -> None:
    """Write GROUP-NAME.md, .png where matplotlib is there, and every row as .json: of trainings into build/perf."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{group}-{answer.name}"
    whole = {
        "name": answer.name,
        "title": answer.title,
        "setup": answer.setup,
        "command": command,
        "commit": commit(),
        "machine": _machine(),
        "rows": list(answer.rows),
        "limit": answer.limit,
        **answer.also,
    }
    raw = (RESULTS if group == "scaling" else RAW) / f"{path.name}.json"  # perf/model.py reads those of scaling
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text(json.dumps(whole, indent=1) + "\n")
    path.with_suffix(".md").write_text(answer.markdown(command))
    draw = answer.draw or (functools.partial(_plot, answer) if answer.lines else None)
    if draw:
        try:
            draw(path.with_suffix(".png"))
        except ImportError:
            print("(no plot: matplotlib is not installed)")


def _plot(answer: Answer, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line in answer.lines:
        rows = [row for row in answer.rows if line.where(row) and line.y in row]
        axes.plot([row[line.x] for row in rows], [row[line.y] for row in rows], marker="o", label=line.label)
    xs = sorted({row[line.x] for line in answer.lines for row in answer.rows if line.where(row)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.minorticks_off()
    if answer.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    title = next(column.title for column in answer.columns if column.key == answer.lines[0].x)
    axes.set_xlabel(title)
    axes.set_ylabel(answer.y_title)
    axes.set_title(answer.title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.savefig(path)


def _origin(command: str) -> str:
    machine = _machine()
    return (
        f"`{command}` at {commit()}, on {machine['processor']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"with a load of {machine['load']:.1f} (the last 15 minutes). Only ratios within one run travel."
    )


def _machine() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": os.getloadavg()[2],
    }
