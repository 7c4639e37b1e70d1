"""The picture of a run: accuracy over time, the work of each worker, and the comparison with single processes."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from smb.tools.demo.result import AccuracyPoint, DemoResult

Floats = NDArray[np.floating[Any]]

_SHARED = "#1f6f8b"
_ALONE = "#c8803a"
_POOLED = "#8a8a8a"
_KILL = "#b3272d"
_JOIN = "#2e7d32"
_WORKER_COLOURS = ("#1f6f8b", "#8fbcc8", "#5b9aad", "#b9d5dc", "#7ab27c", "#d9b38c", "#a08bb5", "#c9c9c9")
_ACCURACY_MIN = 0.0


def draw(result: DemoResult, path: Path) -> None:
    """Write the picture of a run to `path`, in the format of its suffix (png, svg, pdf). A link there is replaced.

    Raises OSError if the file cannot be written, ValueError for a suffix of an unknown format.
    """
    # The object interface: no global state, no window, whatever backend the user has configured.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(3.4, 1), height_ratios=(1.5, 1))
    accuracy = figure.add_subplot(grid[0, 0])
    rates = figure.add_subplot(grid[1, 0], sharex=accuracy)
    _draw_accuracy(accuracy, result)
    _draw_rates(rates, result)
    _draw_comparison(figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1]), result)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(result), fontsize=12, x=0.01, ha="left")
    path = path if path.suffix else path.with_suffix(".png")
    # unlike `path`, a name that other users cannot guess
    staged = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with staged.open("xb") as file:
            figure.savefig(file, format=path.suffix[1:])
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _title(result: DemoResult) -> str:
    config = result.config
    transports = " and ".join(result.transports)
    settings = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in config.settings.items()
    ]
    stopped = ", stopped before its end" if result.stopped else ""
    return (
        f"{config.workers} processes, with {config.digits} digits each that no other has, train one model of "
        f"{result.parameters:,} parameters on {config.servers} memory servers{stopped}\n"
        f"{', '.join([config.scheme, *settings])}, over {transports}"
    )


def _draw_accuracy(axes: Axes, result: DemoResult) -> None:
    each, everybodys = result.config.digits, result.config.all_digits
    if result.pooled_curve:
        label = f"for comparison, one process with the {everybodys} digits of all: {result.pooled_accuracy:.1%}"
        _draw_curve(axes, result.pooled_curve, _POOLED, label, style=":")
    if result.alone_curve:
        label = f"one process alone, with its own {each} digits: {result.alone_accuracy:.1%}"
        _draw_curve(axes, result.alone_curve, _ALONE, label)
    _draw_curve(axes, result.curve, _SHARED, f"the model that they share: {result.accuracy:.1%}")
    axes.set_ylim(_ACCURACY_MIN, 1.004)
    axes.set_yticks(np.arange(_ACCURACY_MIN, 1.001, 0.1))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("unseen digits that it knows")
    axes.grid(axis="y", alpha=0.25)
    _mark_events(axes, result, labels=True)
    axes.legend(loc="lower right", frameon=False)


def _draw_curve(axes: Axes, curve: tuple[AccuracyPoint, ...], colour: str, label: str, style: str = "-") -> None:
    seconds, accuracies = [p.seconds for p in curve], [p.accuracy for p in curve]
    axes.plot(seconds, accuracies, style, color=colour, linewidth=2, label=label)
    axes.plot(curve[-1].seconds, curve[-1].accuracy, "o", color=colour)


def _mark_events(axes: Axes, result: DemoResult, *, labels: bool) -> None:
    latecomer = result.workers[-1].name
    for event in result.events:
        if event.what == "killed":
            colour, text, side = _KILL, f"{event.worker} is killed ", "right"
        elif event.what == "joined" and event.worker == latecomer:
            colour, text, side = _JOIN, f" {event.worker} joins", "left"
        else:
            continue
        axes.axvline(event.seconds, color=colour, linewidth=1.2, linestyle="--")
        if labels:
            axes.text(event.seconds, _ACCURACY_MIN + 0.02, text, color=colour, fontsize=9, ha=side)


def _draw_rates(axes: Axes, result: DemoResult) -> None:
    times = np.linspace(0.0, result.seconds, 200)
    rates = [_rate_over_time(worker.rates, times) for worker in result.workers]
    colours = [_WORKER_COLOURS[i % len(_WORKER_COLOURS)] for i in range(len(rates))]
    axes.stackplot(
        times, rates, labels=[w.name for w in result.workers], colors=colours, edgecolor="white", linewidth=0.6
    )
    _mark_events(axes, result, labels=False)
    axes.set_ylabel("who trains: samples/s")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("seconds since training began")
    axes.legend(loc="upper right", frameon=False, fontsize=8)


def _rate_over_time(rates: tuple[tuple[float, float], ...], times: Floats) -> Floats:
    """Return samples/s at each time, from the report that covers it; 0 before the first report and after the last."""
    if not rates:
        return np.zeros_like(times)
    ends = np.array([end for end, _ in rates])
    values = np.append([rate for _, rate in rates], 0.0)
    spacing = np.median(np.diff(ends)) if len(ends) > 1 else 0.0
    covered = values[np.searchsorted(ends, times)]
    return np.where(times < ends[0] - spacing, 0.0, covered)


def _draw_comparison(speed: Axes, communication: Axes, result: DemoResult) -> None:
    bars = [("shared", result.samples_per_second, _SHARED)]
    if result.alone_samples_per_second is not None:
        bars.append(("alone", result.alone_samples_per_second, _ALONE))
    if result.pooled_samples_per_second is not None:
        bars.append(("all digits", result.pooled_samples_per_second, _POOLED))
    drawn = speed.bar([b[0] for b in bars], [b[1] for b in bars], color=[b[2] for b in bars], width=0.6)
    speed.bar_label(drawn, [f"{b[1]:,.0f}" for b in bars], fontsize=9, padding=2)
    speed.set_title("samples/s", fontsize=10)
    speed.set_yticks([])
    speed.spines["left"].set_visible(False)
    share = result.communication_share
    communication.bar(["workers' time"], [1 - share], color="0.85", width=0.4, label=f"computing {1 - share:.1%}")
    communication.bar(
        ["workers' time"], [share], bottom=[1 - share], color=_SHARED, width=0.4, label=f"sharing {share:.1%}"
    )
    communication.set_title(f"{result.bytes_moved / 1e9:.2f} GB moved", fontsize=10)
    communication.set_yticks([])
    communication.set_xlim(-0.6, 0.6)
    communication.spines["left"].set_visible(False)
    communication.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False, fontsize=8)
