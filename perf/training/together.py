"""The gain from others' data: processes with few samples of their own train one model together.

The model and the optimizer are those of examples/stock_shared.py.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import smb
from perf.scaling.report import RESULTS, Answer, Column

PROCESSES = (1, 2, 4)
ROWS = 80  # of each process
BATCH, EVERY = 16, 10
STEPS = 300  # of each process
LOOK = 10  # steps from one look at the unseen digits to the next
ACCURACY = 0.9
SEEDS = (1, 2, 3, 4, 5)
_COLOURS = {1: "#c8803a", 2: "#8fbcc8", 4: "#1f6f8b"}
_context = multiprocessing.get_context("spawn")

Curve = list[tuple[int, float]]  # step, accuracy


def how_much_better(quick: bool) -> Answer:
    """Train with 1, 2 and 4 processes, with each seed."""
    seeds = SEEDS[: 1 if quick else None]
    curves = {processes: _run(processes, seeds) for processes in PROCESSES}
    rows = []
    for processes, found in curves.items():
        row: dict[str, Any] = {"processes": processes, "rows": ROWS * processes}
        reached = [next((step for step, accuracy in curve if accuracy >= ACCURACY), None) for curve in found]
        steps = [step for step in reached if step is not None]
        row["steps"] = _spread(steps, "{:.0f}") if len(steps) == len(found) else f"{len(steps)} of {len(found)} did"
        row["accuracy"] = _spread([100 * curve[-1][1] for curve in found], "{:.1f}")
        rows.append(row)
    if not quick:
        _draw(curves, RESULTS / "training-together.svg")
    return Answer(
        name="together",
        title="Processes that have few samples each",
        setup=(
            f"The model of examples/stock_shared.py on scikit-learn's digits. Each process has {ROWS} rows of its own, "
            f"drawn at random, and sees no others: {STEPS} steps of {BATCH} rows each. Two and four of them join one "
            f"training (local SGD, every {EVERY} steps). One process alone is the same script without us. Accuracy is "
            f"of 450 unseen digits, by one process's model after every {LOOK} of its steps. {len(seeds)} seeds: the "
            f"median, and the range."
        ),
        columns=[
            Column("processes", "processes"),
            Column("rows", "rows in all"),
            Column("steps", f"steps of each to {ACCURACY:.0%}"),
            Column("accuracy", "accuracy at the end, %"),
        ],
        rows=rows,
        limit=(
            "Steps are compared, not seconds: on two cores four processes take turns. What crosses between processes "
            "are weights, never rows."
        ),
    )


def _spread(values: list[Any], shown: str) -> str:
    middle, least, most = (shown.format(value) for value in (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def _run(processes: int, seeds: tuple[int, ...]) -> list[Curve]:
    """Return the curve of each seed."""
    with smb.LocalCluster(servers=1, capacity="64MiB") as cluster:
        told = _context.Queue()
        workers = [
            _context.Process(target=_work, args=(processes, rank, seeds, cluster.address, told))
            for rank in range(processes)
        ]
        for worker in workers:
            worker.start()
        curves: list[Curve] = told.get(timeout=500)
        for worker in workers:
            worker.join(60)
            if worker.exitcode != 0:
                raise RuntimeError(f"{processes} processes: one ended with {worker.exitcode}")
    return curves


def _work(processes: int, rank: int, seeds: tuple[int, ...], address: str, told: Any) -> None:
    """One process. Process 0 looks at the unseen digits, with its own model."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    torch.set_num_threads(1)
    parts = train_test_split(*load_digits(return_X_y=True), random_state=0)
    images, test_images = (torch.from_numpy(part / 16).float() for part in parts[:2])
    labels, test_labels = (torch.from_numpy(part) for part in parts[2:])
    curves = []
    with smb.connect(address) as client:
        for seed in seeds:
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
            own = order[rank * ROWS :][:ROWS]
            curves.append(_learn(client, processes, rank, seed, (images[own], labels[own]), (test_images, test_labels)))
    if rank == 0:
        told.put(curves)


def _learn(client: smb.Client, processes: int, rank: int, seed: int, own: Any, unseen: Any) -> Curve:
    import torch
    from torch import nn

    torch.manual_seed(seed)  # the same model in all of them
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(1000 * seed + rank)
    curve = [(0, _accuracy(model, *unseen))]
    with _shared(client, model, optimizer, processes, f"digits-{seed}"):
        for step in range(1, STEPS + 1):
            batch = torch.randperm(ROWS)[:BATCH]
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(model(own[0][batch]), own[1][batch])
            loss.backward()
            optimizer.step()
            if rank == 0 and step % LOOK == 0:
                curve.append((step, _accuracy(model, *unseen)))
    return curve


@contextmanager
def _shared(client: smb.Client, model: Any, optimizer: Any, processes: int, name: str) -> Iterator[None]:
    """Join the others, and begin together; one process alone has nobody to join."""
    if processes == 1:
        yield
        return
    import smb.torch

    with smb.torch.join(model, optimizer, name, client=client, scheme="localsgd", every=EVERY):
        client.barrier(f"{name}/start", processes, timeout=300)
        yield


def _accuracy(model: Any, images: Any, labels: Any) -> float:
    import torch

    model.eval()
    with torch.inference_mode():
        share = float((model(images).argmax(1) == labels).float().mean())
    model.train()
    return share


def _draw(curves: dict[int, list[Curve]], path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "perf", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for processes, found in curves.items():
            steps = [step for step, _ in found[0]]
            seen = [[100 * curve[at][1] for curve in found] for at in range(len(steps))]
            middle = [statistics.median(each) for each in seen]
            axes.fill_between(
                steps, [min(each) for each in seen], [max(each) for each in seen], color=_COLOURS[processes], alpha=0.2
            )
            axes.plot(steps, middle, color=_COLOURS[processes], lw=1.6)
            who = "1 process alone" if processes == 1 else f"{processes} processes"
            axes.annotate(
                who, (steps[-1], middle[-1]), xytext=(6, -3), textcoords="offset points", annotation_clip=False
            )
        axes.axhline(100 * ACCURACY, color="#888888", lw=0.8, ls="--")
        axes.set(xlabel="steps of each process", ylabel="unseen digits known, %", ylim=(60, 100), xlim=(0, STEPS))
        axes.set_title(f"Each process has {ROWS} rows of its own and sees no others", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
