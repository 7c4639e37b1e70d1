"""R2SP beside BSP, ASP and SSP, on a server behind a link of its own: how evenly updates come, and how soon a loss is
reached, where computing takes as long as sending and where it does not; and workers of unequal speed.

The published figure (R2SP, 2019) is up to 25 % less time than BSP. Its model of an iteration, C computing, N workers of
S bytes over a link of bandwidth W: BSP C + 2 N S/W, R2SP max(C + 2 S/W, N S/W).
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perf.netlab import parse_rate
from perf.scaling.fleet import LEAD_S, Fleet, Process, ask_all, links_per_second
from perf.scaling.report import Answer, Column
from perf.training.digits import SIZE

RATE = "400mbit"
WORKERS = 4
BATCH = 32
LR = 0.1
STRIPE = "64KiB"  # of chunks, too: a sum comes back while later chunks are still on their way
STEPS = 60
TARGET = 0.15
SEEDS = (1, 2, 3)
SSP_BOUND = 3
WARMUP = 10
ADAPTIVE = "R2SP, batches by speed"
# Computing, by the time that all workers' updates take over the link: N S/W.
BALANCE = "balance"
POINTS = {BALANCE: 1.0, "network-bound": 0.25, "compute-bound": 3.0}
SPEEDS = (1.0, 1.0, 0.5, 0.25)  # of the unequal workers
JITTER = 0.5  # sigma of the log-normal factor on a step's computing, of mean 1
TIME_GOAL, ITERATION_GOAL = 0.8, 1.3


@dataclass(frozen=True)
class Case:
    """A scheme at a point. `slowness`: each worker's time for a sample, times the usual. `jitter`: of each step's.
    `computing`: another ratio than the point's.
    """

    point: str
    title: str
    scheme: str
    settings: dict[str, Any] = field(default_factory=dict)
    slowness: tuple[float, ...] = (1.0,) * WORKERS
    jitter: float = 0.0
    computing: float | None = None

    @property
    def ratio(self) -> float:
        """Computing, by the time that all workers' updates take over the link."""
        return POINTS.get(self.point, 1.0) if self.computing is None else self.computing

    @property
    def lr(self) -> float:
        """The rate of a local step. BSP takes the mean of what the others add up: N times theirs moves the model as
        far for each sample.
        """
        return LR * (WORKERS if self.scheme == "bsp" else 1)


@dataclass(frozen=True)
class Run:
    """The result of one run of a case. Times in seconds, from the common start."""

    iteration_s: float
    gaps_s: list[float]
    staleness: list[int]
    times_s: list[float]
    losses: list[float]
    accuracy: float
    batches: list[float]  # each worker's mean, over the second half

    def reached_s(self, loss: float) -> float | None:
        """When the mean of three losses in a row was there first; None: never."""
        times = zip(self.times_s[2:], self._means(), strict=True)
        return next((time_s for time_s, mean in times if mean <= loss), None)

    @property
    def least_loss(self) -> float:
        """The least mean of three losses in a row."""
        return min(self._means())

    def _means(self) -> list[float]:
        return [statistics.fmean(self.losses[at - 2 : at + 1]) for at in range(2, len(self.losses))]


def common_loss(runs: Iterable[Run], target: float = TARGET) -> float:
    """The loss to which runs are timed: target, or, where one of them stopped before that, what all of them reached."""
    return max(target, *(run.least_loss for run in runs))


_SCHEMES = (
    Case("", "BSP", "bsp"),
    Case("", "ASP", "asp"),
    Case("", f"SSP({SSP_BOUND})", "ssp", {"staleness": SSP_BOUND}),
    Case("", "R2SP", "r2sp"),
)
_SLOWNESS = tuple(1 / speed for speed in SPEEDS)
CASES = (
    *(replace(scheme, point=point) for point in POINTS for scheme in _SCHEMES),
    *(replace(scheme, point="jitter", jitter=JITTER) for scheme in _SCHEMES),
    Case("unequal", "BSP", "bsp", {}, _SLOWNESS),
    Case("unequal", "R2SP", "r2sp", {}, _SLOWNESS),
    Case("unequal", ADAPTIVE, "r2sp", {"batch_size": BATCH}, _SLOWNESS),
)


def how_even(
    quick: bool, rate: str = RATE, cases: Sequence[Case] = CASES, target: float = TARGET, steps: int = STEPS
) -> Answer:
    """Four workers, four schemes, at and off the balance of computing and sending; jitter; unequal workers."""
    from smb.tools.demo.digits import load_digits

    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the workers: as many as there are share the cores
    runs: dict[tuple[str, str], tuple[Case, list[Run]]] = {}
    with tempfile.TemporaryDirectory() as directory, Fleet([rate]) as fleet:
        file = Path(directory) / "digits.npz"
        load_digits().save(file)
        link = links_per_second(fleet.bare(), fleet, fleet.names, "write", int(0.8 * parse_rate(rate) / 8))[0]
        send_s = 4 * SIZE / link
        workers = [fleet.worker(module="perf.training.digits_worker") for _ in range(WORKERS)]
        ask_all(workers, do="load", file=str(file))
        for point in dict.fromkeys(case.point for case in cases):
            chosen = [case for case in cases if case.point == point]
            for seed in SEEDS if point == BALANCE and not quick else SEEDS[:1]:
                found = [train(workers, case, seed, send_s, steps // 4 if quick else steps) for case in chosen]
                for case, run in zip(chosen, found, strict=True):
                    runs.setdefault((point, case.title), (case, []))[1].append(run)
                    told = f"{1e3 * run.iteration_s:.0f} ms, loss {run.losses[-1]:.3f} after {run.times_s[-1]:.1f} s"
                    print(f"{point}, {case.title}, {seed}: {told}, accuracy {run.accuracy:.3f}", flush=True)
    goals = {
        point: common_loss((run for case, found in runs.values() if case.point == point for run in found), target)
        for point in dict.fromkeys(case.point for case, _ in runs.values())
    }
    rows = [_row(case, found, send_s, goals[case.point]) for case, found in runs.values()]
    for row in rows:
        bsp = next(r for r in rows if (r["point"], r["scheme"]) == (row["point"], "BSP"))
        row["iterations_bsp"] = bsp["iteration_ms"] / row["iteration_ms"]
        row["times_bsp"] = row["reached_s"] / bsp["reached_s"]
    return Answer(
        name="r2sp",
        title="R2SP beside BSP, ASP and SSP: gaps between updates, and time to a loss",
        setup=_setup(rate, link, send_s, target, steps),
        columns=(
            Column("point", "point"),
            Column("scheme", "scheme"),
            Column("compute_ms", "computing, ms", "{:.0f}"),
            Column("iteration_ms", "iteration, ms", "{:.0f}"),
            Column("predicted_ms", "model, ms", "{:.0f}"),
            Column("gap_ms", "gap: mean, ms", "{:.1f}"),
            Column("gap_sd_ms", "its standard deviation", "{:.1f}"),
            Column("staleness", "staleness: mean", "{:.2f}"),
            Column("staleness_max", "max"),
            Column("loss", "loss", "{:.3g}"),
            Column("reached_s", "reached after, s", "{:.1f}"),
            Column("times_bsp", "times BSP's", "{:.2f}"),
            Column("accuracy", "test accuracy", "{:.3f}"),
            Column("batches", "batches"),
        ),
        rows=rows,
        limit=_limit(rows) if cases is CASES else "",
        also={
            "link_bytes_per_second": link,
            "goals": {"times_bsp": TIME_GOAL, "iterations": ITERATION_GOAL},
            "curves": [
                {"point": case.point, "scheme": case.title, "times_s": run.times_s, "losses": run.losses}
                for case, found in runs.values()
                for run in found
            ],
        },
        draw=lambda path: _draw(path, list(runs.values())),
    )


def train(
    workers: list[Process],
    case: Case,
    seed: int,
    send_s: float,
    steps: int,
    servers: Sequence[str] | None = None,
) -> Run:
    """Let the workers train together, from the seed's model, each with samples of its own; on these servers, or all."""
    joining = {"name": "run", "scheme": case.scheme, "settings": case.settings, "seed": seed, "stripe": STRIPE}
    joining |= {"servers": servers} if servers else {}
    for worker in workers:
        worker.ask(do="join", **joining)
    sample_s = case.ratio * WORKERS * send_s / BATCH
    start = time.monotonic() + LEAD_S
    for number, (worker, slowness) in enumerate(zip(workers, case.slowness, strict=True)):
        worker.tell(
            do="train", start=start, steps=steps, batch=BATCH, sample_s=slowness * sample_s, lr=case.lr,
            seed=1000 * seed + number, keep=number == 0, jitter=case.jitter,
        )  # fmt: skip
    iterations = [worker.answer()["iterations"] for worker in workers]
    judged = workers[0].ask(do="losses")
    ask_all(workers, do="leave")
    workers[0].ask(do="delete")
    half = steps // 2
    # While all are at work, and past the first rotations, in which nothing is measured yet.
    first, last = max(its[WARMUP][1] for its in iterations), min(its[-1][1] for its in iterations)
    updates = sorted(ended for its in iterations for _, ended, _, _ in its if first <= ended <= last)
    return Run(
        iteration_s=statistics.fmean((its[-1][1] - its[half][1]) / (steps - 1 - half) for its in iterations),
        gaps_s=[later - sooner for sooner, later in itertools.pairwise(updates)],
        staleness=[staleness for its in iterations for _, ended, _, staleness in its if first <= ended <= last],
        times_s=[ended - start for _, ended, _, _ in iterations[0]],
        losses=judged["losses"],
        accuracy=judged["accuracy"],
        batches=[statistics.fmean(samples for _, _, samples, _ in its[half:]) for its in iterations],
    )


def _row(case: Case, runs: list[Run], send_s: float, goal: float) -> dict[str, Any]:
    compute_s = case.ratio * WORKERS * send_s
    slowest_s = compute_s * (len(SPEEDS) / sum(SPEEDS) if case.title == ADAPTIVE else max(case.slowness))
    gaps, staleness = ([value for run in runs for value in values(run)] for values in (_gaps, _staleness))
    row: dict[str, Any] = {
        "point": case.point,
        "scheme": case.title,
        "compute_ms": 1e3 * compute_s,
        "iteration_ms": 1e3 * statistics.median(run.iteration_s for run in runs),
        "gap_ms": 1e3 * statistics.fmean(gaps),
        "gap_sd_ms": 1e3 * statistics.pstdev(gaps),
        "staleness": statistics.fmean(staleness),
        "staleness_max": max(staleness),
        "accuracy": statistics.median(run.accuracy for run in runs),
        "final_loss": statistics.median(run.losses[-1] for run in runs),
        "batches": ", ".join(f"{size:.0f}" for size in runs[0].batches),
        "runs": len(runs),
    }
    if case.scheme == "bsp" and not case.jitter:
        row["predicted_ms"] = 1e3 * (slowest_s + 2 * WORKERS * send_s)
    if case.scheme == "r2sp" and not case.jitter:
        row["predicted_ms"] = 1e3 * max(slowest_s + 2 * send_s, WORKERS * send_s)
    times = [time_s for run in runs if (time_s := run.reached_s(goal)) is not None]  # all: goal is common
    return row | {"loss": goal, "reached_s": statistics.median(times)}


def _gaps(run: Run) -> list[float]:
    return run.gaps_s


def _staleness(run: Run) -> list[int]:
    return run.staleness


def _setup(rate: str, link: float, send_s: float, target: float, steps: int) -> str:
    speeds = ", ".join(f"{speed:g}" for speed in SPEEDS)
    return " ".join(
        (
            f"{WORKERS} workers train a network of {SIZE:,} parameters ({4 * SIZE / 1e6:.1f} MB) on handwritten",
            f"digits, {BATCH} samples a step, plain SGD, {steps} steps each. One memory server behind a link of its",
            f"own (tc tbf, {rate}, both directions, headers counted; bare sockets carry {link / 1e6:.1f} MB/s over it:",
            f"S/W = {1e3 * send_s:.1f} ms), workers without a limit, all on this one machine. Gradients are real;",
            "computing is made as long as the column says by a sleep. At the balance it takes as long as sending all",
            f"workers' updates, N S/W; off it {POINTS['network-bound']:g} and {POINTS['compute-bound']:g} times that.",
            f"Jitter: a step's computing, as at the balance, times a log-normal number of mean 1 and sigma {JITTER:g}.",
            f"Unequal: workers of speeds {speeds}, computing as at the balance for the fastest. Local steps of rate",
            f"{LR}; BSP, which takes the mean of what the others add up, {LR * WORKERS:g}: the same for each sample.",
            f"At the balance the median of {len(SEEDS)} runs with other models and samples, elsewhere one run; the",
            f"loss is over all training digits, mean of three steps, and the time is that to {target:g}, or where a",
            "run stopped before it, to the least loss that all runs of the point reached. A gap is between the ends of",
            f"two exchanges of any workers; gaps and staleness after {WARMUP} steps and while all are at work. Model:",
            "BSP C + 2 N S/W, R2SP max(C + 2 S/W, N S/W), C the slowest worker's.",
        )
    )


def _limit(rows: list[dict[str, Any]]) -> str:
    def row(point: str, scheme: str) -> dict[str, Any]:
        return next((r for r in rows if (r["point"], r["scheme"]) == (point, scheme)), {})

    def times(point: str, scheme: str) -> str:
        return f"{row(point, scheme)['times_bsp']:.2f}"

    ssp, balance, network = f"SSP({SSP_BOUND})", row(BALANCE, "R2SP"), row("network-bound", "R2SP")
    text = (
        f"At the balance R2SP reaches the loss in {times(BALANCE, 'R2SP')} of BSP's time (the goal was {TIME_GOAL}), "
        f"ASP in {times(BALANCE, 'ASP')}, {ssp} in {times(BALANCE, ssp)}. What all three gain is mostly one thing: an "
        f"exchange adds and fetches in one call, both directions of the link at once, where BSP's rounds use one after "
        f"the other. R2SP's own part is that nobody sends at the same time: its updates come {balance['gap_ms']:.1f} "
        f"ms apart with a standard deviation of {balance['gap_sd_ms']:.1f} (ASP: "
        f"{row(BALANCE, 'ASP')['gap_sd_ms']:.1f}), and each is exactly {balance['staleness']:g} stale. Since an "
        f"exchange takes S/W, and the model has 2 S/W, iterations are shorter than predicted. "
    )
    adaptive, plain = row("unequal", ADAPTIVE), row("unequal", "R2SP")
    if adaptive:
        text += (
            f"Bound by the network it is {times('network-bound', 'R2SP')} ({ssp}: {times('network-bound', ssp)}), a "
            f"turn with its hand-over taking {network['gap_ms']:.1f} ms; bound by computing "
            f"{times('compute-bound', 'R2SP')}; with jitter {times('jitter', 'R2SP')} (ASP: {times('jitter', 'ASP')}, "
            f"{ssp}: {times('jitter', ssp)}). In strict rotation the slowest worker sets the pace, as in BSP: "
            f"unequal workers reach the loss in {times('unequal', 'R2SP')} of BSP's time. Batches by speed make their "
            f"iterations {plain['iteration_ms'] / adaptive['iteration_ms']:.2f} times as fast (the goal was "
            f"{ITERATION_GOAL}), and they reach it in {times('unequal', ADAPTIVE)}."
        )
    return text.strip()


def _draw(path: Path, runs: list[tuple[Case, list[Run]]]) -> None:
    """Loss over time at the balance point, and how long the gaps are."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, gaps = figure.subplots(1, 2)
    for case, found in runs:
        if case.point == BALANCE:
            loss.plot(found[0].times_s, found[0].losses, label=case.title)
            lengths = sorted(1e3 * gap for run in found for gap in run.gaps_s)
            gaps.plot(lengths, [(at + 1) / len(lengths) for at in range(len(lengths))], label=case.title)
    loss.axhline(TARGET, color="grey", linewidth=0.8, linestyle="--")
    loss.set(xlabel="s", ylabel="training loss", yscale="log")
    loss.set_title("Loss at the balance of computing and sending (one run)", fontsize=10, loc="left")
    gaps.set(xlabel="ms between two updates", ylabel="share of gaps up to that", ylim=(0, 1))
    gaps.set_title("Gaps between updates", fontsize=10, loc="left")
    for axes in (loss, gaps):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)
    figure.savefig(path)
