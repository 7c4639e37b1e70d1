"""The gain in seconds from dividing one data set: N processes, each with a device's time for itself, to one loss.

The model is that of examples/stock_shared.py. Computing is as long as on a device of its own, by a sleep.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import smb
from perf.scaling.report import Answer, Column

PROCESSES = (1, 2, 4)
BATCH, EVERY = 8, 10
STEPS = 450  # of each process at most
LOOK = 5  # steps from one look at the unseen digits to the next
COMPUTE_S = 0.02  # of a step
LOSS = 0.15  # of the unseen digits, the mean of three looks
RATES = (0.01, 0.03, 0.1)
SEEDS = (1, 2, 3, 4, 5)
_context = multiprocessing.get_context("spawn")

Reached = tuple[int, float]  # step, seconds


def how_much_sooner(quick: bool) -> Answer:
    """Train with 1, 2 and 4 processes, with each learning rate and seed; each number of processes has its best rate."""
    cases = [(rate, seed) for rate in RATES[1 : 2 if quick else None] for seed in SEEDS[: 2 if quick else None]]
    rows: list[dict[str, Any]] = []
    for processes in PROCESSES:
        found = _run(processes, cases)
        rate = min({rate for rate, _ in cases}, key=lambda rate: _rank(found, rate))
        reached = [found[case] for case in cases if case[0] == rate]
        done = [each for each in reached if each is not None]
        row: dict[str, Any] = {"processes": processes, "rate": rate, "did": f"{len(done)} of {len(reached)}"}
        if done:
            row |= {"steps": _spread([step for step, _ in done], ".0f"), "s": _spread([s for _, s in done], ".1f")}
            row["median_s"] = statistics.median(s for _, s in done)
            row["sooner"] = rows[0].get("median_s", row["median_s"]) / row["median_s"] if rows else 1.0
        rows.append(row)
        print(row, flush=True)
    return Answer(
        name="divided",
        title="Processes that divide one data set, in seconds",
        setup=(
            f"The model of examples/stock_shared.py on 1,347 of scikit-learn's digits, {BATCH} rows a step, SGD with "
            f"momentum 0.9. Several processes divide the rows (shared.batches) in one training, local SGD, every "
            f"{EVERY} steps; one process alone is the same script without us. Each step computes for "
            f"{COMPUTE_S * 1e3:.0f} ms, as on a device of its own: gradients are real, and the rest of that time is a "
            f"sleep. Exchanges come on top. Seconds are from the common start until the loss of 450 unseen digits, "
            f"the mean of three looks of one process at its own model, is {LOSS}. Each number of processes has the "
            f"best of the learning rates {', '.join(map(str, RATES))}; {len(SEEDS)} seeds: the median, and the range. "
            f"Other programs ran on the two cores meanwhile."
        ),
        columns=[
            Column("processes", "processes"),
            Column("rate", "learning rate"),
            Column("did", "reached it"),
            Column("steps", "steps of each"),
            Column("s", "seconds"),
            Column("sooner", "times as soon", "{:.2f}"),
        ],
        rows=rows,
        limit=(
            "N processes do N times the work for it. A gradient of few rows is mostly noise, which the mean over "
            "processes takes out; a higher rate may hold then. With large batches the gain is smaller."
        ),
    )


def _rank(found: dict[tuple[float, int], Reached | None], rate: float) -> tuple[int, float]:
    """How often a rate did not get there, then its seconds: less is better."""
    of_it = [reached for (other, _), reached in found.items() if other == rate]
    times = [reached[1] for reached in of_it if reached is not None]
    return len(of_it) - len(times), statistics.median(times) if times else 0.0


def _spread(values: list[Any], shown: str) -> str:
    return f"{statistics.median(values):{shown}} ({min(values):{shown}} to {max(values):{shown}})"


def _run(processes: int, cases: list[tuple[float, int]]) -> dict[tuple[float, int], Reached | None]:
    with smb.LocalCluster(servers=1, capacity="64MiB") as cluster:
        told = _context.Queue()
        workers = [
            _context.Process(target=_work, args=(processes, rank, cases, cluster.address, told))
            for rank in range(processes)
        ]
        for worker in workers:
            worker.start()
        found = {case: told.get(timeout=120) for case in cases}
        for worker in workers:
            worker.join(60)
            if worker.exitcode != 0:
                raise RuntimeError(f"{processes} processes: one ended with {worker.exitcode}")
    return found


def _work(processes: int, rank: int, cases: list[tuple[float, int]], address: str, told: Any) -> None:
    """One process. Process 0 looks at the unseen digits, with its own model."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    torch.set_num_threads(1)
    parts = train_test_split(*load_digits(return_X_y=True), random_state=0)
    images, test_images = (torch.from_numpy(part / 16).float() for part in parts[:2])
    labels, test_labels = (torch.from_numpy(part) for part in parts[2:])
    with smb.connect(address) as client:
        for rate, seed in cases:
            curve = _learn(client, processes, rank, rate, seed, (images, labels), (test_images, test_labels))
            if rank == 0:
                told.put(reached(curve))


def reached(curve: list[tuple[int, float, float]]) -> Reached | None:
    """Return where the mean of three losses in a row was there first, of (step, seconds, loss)."""
    for at in range(2, len(curve)):
        if statistics.fmean(loss for _, _, loss in curve[at - 2 : at + 1]) <= LOSS:
            return curve[at][:2]
    return None


def _learn(
    client: smb.Client, processes: int, rank: int, rate: float, seed: int, rows: Any, unseen: Any
) -> list[tuple[int, float, float]]:
    import torch
    from torch import nn

    torch.manual_seed(seed)  # the same model in all of them
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    torch.manual_seed(1000 * seed + rank)
    curve = []
    with _batches(client, model, optimizer, processes, f"digits-{rate}-{seed}", len(rows[0])) as batches:
        start = time.monotonic()
        for step in range(1, STEPS + 1):
            began = time.monotonic()
            batch = next(batches)
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(model(rows[0][batch]), rows[1][batch])
            loss.backward()
            time.sleep(max(0.0, began + COMPUTE_S - time.monotonic()))
            optimizer.step()
            if rank == 0 and step % LOOK == 0:
                curve.append((step, time.monotonic() - start, _loss(model, *unseen)))
    return curve


@contextmanager
def _batches(
    client: smb.Client, model: Any, optimizer: Any, processes: int, name: str, rows: int
) -> Iterator[Iterator[Any]]:
    """Join the others and begin together, with a share of the rows; one process alone has all of them."""
    import torch

    if processes == 1:
        orders: Iterator[Any] = (torch.randperm(rows) for _ in range(STEPS))
        yield (batch for order in orders for batch in order.split(BATCH))
        return
    import smb.torch

    with smb.torch.join(model, optimizer, name, client=client, scheme="localsgd", every=EVERY) as shared:
        client.barrier(f"{name}/start", processes, timeout=300)
        yield iter(shared.batches(rows, BATCH, epochs=STEPS))


def _loss(model: Any, images: Any, labels: Any) -> float:
    import torch

    model.eval()
    with torch.inference_mode():
        loss = float(torch.nn.functional.cross_entropy(model(images), labels))
    model.train()
    return loss
