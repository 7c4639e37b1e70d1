"""A run's results as pictures: bandwidth over size, latency of 8 bytes, scaling over clients."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot

from perf.contender import ACCUMULATE, OPERATIONS, OURS, PEER, READ, WRITE, Case
from perf.results import Cell, Results
from perf.tables import size_name

_ARRAYS = (WRITE, READ, ACCUMULATE)
_SCALING_BYTES = 64 << 20
_LATENCY_BYTES = 8
_LIMIT_NAME = "limit"
_STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "tab:red", "linewidth": 2.2, "marker": "o", "zorder": 3},
    _LIMIT_NAME: {"color": "black", "linewidth": 1.6, "linestyle": "--", "marker": ".", "zorder": 2},
    PEER: {"linewidth": 1.0, "marker": ".", "alpha": 0.8},
}


def draw(results: Results, folder: Path) -> None:
    """Write bandwidth-<transport>.svg, scaling-<transport>.svg and latency.svg, those for which there is anything."""
    with pyplot.rc_context({"font.size": 8, "svg.hashsalt": "perf", "svg.fonttype": "none"}):
        for transport in sorted({case.transport for case in results.cases()}):
            _lines(results, transport, folder / f"bandwidth-{transport}.svg", over_clients=False)
            _lines(results, transport, folder / f"scaling-{transport}.svg", over_clients=True)
        _latencies(results, folder / "latency.svg")


def _found(results: Results, case: Case) -> Iterable[tuple[str, str, Cell]]:
    """(name, style, cell) of all that a plot shows of a case."""
    for cell in results.of(case, PEER):
        yield cell.contender, PEER, cell
    limit = results.best(case)
    if limit is not None:
        yield _LIMIT_NAME, _LIMIT_NAME, limit
    for cell in results.of(case, OURS):
        yield cell.contender, OURS, cell


def _lines(results: Results, transport: str, path: Path, *, over_clients: bool) -> None:
    """One picture for each operation: speed over the size with the fewest clients, or over clients at one size."""
    cases = [case for case in results.cases() if case.transport == transport and case.operation in _ARRAYS]
    if not cases:
        return
    if over_clients:
        size = min((case.nbytes for case in cases), key=lambda nbytes: abs(nbytes - _SCALING_BYTES))
        cases = [case for case in cases if case.nbytes == size]
    else:
        fewest = min(case.clients for case in cases)
        cases = [case for case in cases if case.clients == fewest]
    at = {case: case.clients if over_clients else case.nbytes for case in cases}
    if len(set(at.values())) < 2:
        return
    operations = [operation for operation in _ARRAYS if any(case.operation == operation for case in cases)]
    figure, axes = pyplot.subplots(1, len(operations), figsize=(3.6 * len(operations), 3.4), squeeze=False)
    for axis, operation in zip(axes[0], operations, strict=True):
        lines: dict[str, tuple[str, list[tuple[int, float]]]] = {}
        for case in (case for case in cases if case.operation == operation):
            for name, style, cell in _found(results, case):
                if cell.speed:
                    lines.setdefault(name, (style, []))[1].append((at[case], cell.speed / 1e9))
        for name, (style, points) in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), label=name, **_STYLES[style])
        axis.set_xscale("log", base=2)
        if not over_clients:
            axis.set_yscale("log")
        ticks = sorted(set(at.values()))
        axis.set_xticks(ticks, [str(tick) if over_clients else size_name(tick) for tick in ticks])
        axis.tick_params(axis="x", rotation=0 if over_clients else 60)
        if over_clients:
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
        axis.set_title(f"{transport} {operation}" + (f", {size_name(cases[0].nbytes)}" if over_clients else ""))
        axis.set_xlabel("clients on one array" if over_clients else "")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("GB/s, all clients")
    _finish(figure, axes[0], path)


def _latencies(results: Results, path: Path) -> None:
    """Bars: the median call of one client on 8 bytes, for each transport a picture."""
    cases = [case for case in results.cases() if case.nbytes == _LATENCY_BYTES and case.clients == 1]
    transports = sorted({case.transport for case in cases})
    if not cases:
        return
    figure, axes = pyplot.subplots(1, len(transports), figsize=(5.4 * len(transports), 3.4), squeeze=False)
    for axis, transport in zip(axes[0], transports, strict=True):
        mine = [case for case in cases if case.transport == transport]
        mine.sort(key=lambda case: OPERATIONS.index(case.operation))
        names = list(dict.fromkeys(name for case in mine for name, _, _ in _found(results, case)))
        names.sort(key=lambda name: {OURS: 0, PEER: 2}.get(results.kinds.get(name, ""), 1))
        width = 0.8 / len(names)
        for index, name in enumerate(names):
            points = []
            for place, case in enumerate(mine):
                found = {name: (style, cell) for name, style, cell in _found(results, case)}
                p50 = found[name][1].median("p50_seconds") if name in found else None
                if p50:
                    points.append((place + (index - (len(names) - 1) / 2) * width, p50 * 1e6))
            style = {OURS: "tab:red"}.get(results.kinds.get(name, ""), "black" if name == _LIMIT_NAME else None)
            axis.bar([x for x, _ in points], [y for _, y in points], width, label=name, color=style)
        axis.set_yscale("log")
        axis.set_xticks(range(len(mine)), [case.operation for case in mine])
        axis.set_title(f"{transport}, {_LATENCY_BYTES} bytes")
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("median call, µs")
    _finish(figure, axes[0], path)


def _finish(figure: Any, axes: Iterable[Any], path: Path) -> None:
    labels = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=5, frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
