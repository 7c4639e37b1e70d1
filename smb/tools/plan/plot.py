"""The picture of a plan: speed-up over the number of workers, with a line for each scheme."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from smb.errors import Error
from smb.tools.plan.model import Question, Row, rows

_POINTS = 24  # points of a line


def check_plotting() -> None:
    """Raise Error, with the command to run, if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise Error("a plot needs matplotlib, which is not installed: python -m pip install 'matplotlib>=3.8,<4'")


def draw(question: Question, most: int, schemes: Sequence[str], path: Path) -> None:
    """Write the picture for 1 to `most` workers to `path`, in the format of its suffix (png, svg, pdf).

    Raises OSError if the file cannot be written, ValueError for a suffix of an unknown format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({round(most ** (at / (_POINTS - 1))) for at in range(_POINTS)})
    lines: dict[tuple[str, str, bool], list[Row]] = {}
    for workers in counts:
        for row in rows(question, workers, tuple(schemes)):
            lines.setdefault((row.scheme, row.overlap, row.mesh > 1), []).append(row)
    figure = Figure(figsize=(8, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(counts, counts, color="0.7", linewidth=1, label="ideal")
    for (scheme, overlap, as_mesh), found in lines.items():
        style = {"none": "-", "forward": ":", "both": "--"}[overlap]
        label = scheme if overlap == "none" else f"{scheme}, overlap {overlap}"
        label += ", as meshes" if as_mesh else ""
        axes.plot([row.workers for row in found], [row.speedup for row in found], style, label=label)
    axes.set(xlabel="workers", ylabel="speed-up: samples/s beside one worker alone", ylim=(0, None))
    axes.set_title(f"{question.spec.name}: predicted\n{question.network.source}", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
