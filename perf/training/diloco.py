"""DiLoCo beside BSP: bytes and accuracy at equal samples; also with workers that are killed and restarted."""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import smb
import smb.train
from perf.scaling.report import Answer, Column
from perf.training.digits import SIZE, Network, flat_images, initial_values
from smb.tools.demo.digits import Digits, load_digits

WORKERS = 4
EVERY = 50
BATCH = 32
SAMPLES = 80 * EVERY * BATCH  # each image about 89 times
LR = 0.1
LEASE_S = 1.5
KILL_POINTS = 10  # evenly over the samples; at each of them
KILL_SHARE = 0.3  # of the workers, drawn by chance, get SIGKILL, and are started again at once
SEEDS = (1, 2, 3)
DEADLINE_S = 600.0
_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    scheme: smb.train.Scheme
    kills: bool = False


CASES = (
    Case("BSP", smb.train.BSP()),
    Case(f"DiLoCo, H={EVERY}", smb.train.DiLoCo(every=EVERY)),
    Case(f"DiLoCo, H={EVERY}, kills", smb.train.DiLoCo(every=EVERY), kills=True),
)


def train(address: str, digits_file: str, scheme: smb.train.Scheme, seed: int, samples: int) -> None:
    """A worker's process: train units until none is left. A unit's batches are drawn from its number."""
    digits = Digits.load(Path(digits_file))
    images, _ = flat_images(digits)
    with smb.connect(address, timeout=30) as client:
        values = initial_values(seed)
        network = Network(values)
        claimed = client.create("claimed", 1, "int64", exist_ok=True)
        with (
            smb.train.join(client, "run", values, scheme, lease=LEASE_S) as worker,
            smb.train.WorkUnits(
                client, "run/units", samples, EVERY * BATCH, seed, epochs=1, lease=LEASE_S, worker=worker
            ) as units,
        ):
            for unit in units:
                random = np.random.default_rng([seed, unit.start])
                progress = min(1.0, claimed.fetch_add(0, unit.count) / samples)
                for _ in range(unit.count // BATCH):
                    chosen = random.integers(len(images), size=BATCH)
                    network.step(images[chosen], digits.train_labels[chosen], LR * (1 - 0.9 * progress))
                    worker.step(samples=BATCH)


def bytes_versus_accuracy(quick: bool) -> Answer:
    """Train each case with each seed."""
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # as many processes as there are share the cores
    digits, samples = load_digits(), SAMPLES // (8 if quick else 1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="smb-perf-") as directory:
        file = Path(directory) / "digits.npz"
        digits.save(file)
        for case in CASES:
            runs = []
            for seed in SEEDS[: 1 if quick else None]:
                runs.append(_run(case, seed, samples, file, digits))
                print(f"  {case.name}, seed {seed}: {runs[-1]}", file=sys.stderr, flush=True)
            row: dict[str, Any] = {"case": case.name, "runs": runs}
            for key in ("accuracy", "megabytes", "rounds", "seconds", "kills"):
                row[key] = statistics.fmean(run[key] for run in runs)
            rows.append(row)
    for row in rows:
        row["less"] = rows[0]["megabytes"] / row["megabytes"]
        row["points"] = 100 * (row["accuracy"] - rows[0]["accuracy"])
    return Answer(
        name="diloco",
        title=f"DiLoCo and BSP at equal samples, {WORKERS} workers",
        setup=(
            f"scikit-learn's digits, {SIZE} parameters in numpy, plain SGD, batches of {BATCH}, {samples} samples "
            f"handed out as work units; one memory server, over shared memory. Means of {len(rows[0]['runs'])} seeds; "
            f"bytes are those of data that workers wrote and read, the group's table and joining among "
            f"them. Kills: at {KILL_POINTS} points of the run {KILL_SHARE:.0%} of the workers, drawn by chance, get "
            f"SIGKILL and are started again."
        ),
        columns=[
            Column("case", "scheme"),
            Column("accuracy", "test accuracy", "{:.4f}"),
            Column("points", "points from BSP", "{:+.2f}"),
            Column("megabytes", "MB", "{:.1f}"),
            Column("less", "BSP's bytes / its", "{:.1f}"),
            Column("rounds", "rounds", "{:.0f}"),
            Column("kills", "kills", "{:.1f}"),
        ],
        rows=rows,
        limit=(
            f"DiLoCo moves 1/{EVERY} of BSP's bytes, and what joining takes: each start of a worker reads the model "
            f"once. With kills, what a worker had done since its last contribution is done again by another."
        ),
    )


def _run(case: Case, seed: int, samples: int, file: Path, digits: Digits) -> dict[str, float]:
    began, kills = time.monotonic(), 0
    random = np.random.default_rng(seed)
    with smb.LocalCluster(servers=1, capacity="128MiB") as cluster, smb.connect(cluster.address) as client:

        def start() -> Any:
            process = _context.Process(
                target=train, args=(cluster.address, str(file), case.scheme, seed, samples), daemon=True
            )
            process.start()
            return process

        workers = [start() for _ in range(WORKERS)]
        try:
            claimed = client.open("claimed", timeout=60)
            points = [samples * (point + 0.5) / KILL_POINTS for point in range(KILL_POINTS)] if case.kills else []
            while any(worker.is_alive() for worker in workers):
                assert time.monotonic() - began < DEADLINE_S, "the workers hang"
                if points and claimed.read()[0] >= points[0]:
                    points.pop(0)
                    for number in np.flatnonzero(random.random(WORKERS) < KILL_SHARE):
                        workers[number].kill()
                        workers[number].join()
                        workers[number] = start()
                        kills += 1
                time.sleep(0.02)
            assert all(worker.exitcode == 0 for worker in workers), "a worker failed"
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        network = Network(client.open("run").read())
        return {
            "accuracy": network.accuracy(flat_images(digits)[1], digits.test_labels),
            "megabytes": _server_bytes(cluster) / 1e6,
            "rounds": smb.train.status(client, "run").round,
            "seconds": time.monotonic() - began,
            "kills": kills,
        }


def _server_bytes(cluster: smb.LocalCluster) -> float:
    """Data that clients wrote and read: weights, deltas, and the group's table."""
    total = 0.0
    for server in cluster.servers:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5) as page:
            text = page.read().decode()
        found = re.findall(
            r'^smb_server_transferred_bytes_total{kind="(?:read|write|accumulate)",.*} (\S+)$', text, re.M
        )
        total += sum(map(float, found))
    return total
