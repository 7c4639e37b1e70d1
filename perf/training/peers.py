"""Local SGD and data parallelism by PyTorch beside ours: bytes, steps and seconds to a loss; and one process alone.

All processes run in a network namespace of their own. The counter of its loopback has every byte that any of them
sends, headers and control included. Ours goes over TCP there, as between hosts. Needs root.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import smb
from perf.netlab import LabError
from perf.scaling.report import Answer, Column
from smb.tools.demo.digits import Digits, load_digits, shifted_copies

WORKERS = 2
HIDDEN = 2000  # 1,050,810 parameters
EVERY = 20  # steps from one exchange, and from one look at the loss, to the next
STEPS = 500  # of each worker at most
BATCH = 32
LR, MOMENTUM = 0.02, 0.9
LOSS = 0.15  # of the unseen digits
SEEDS = (1, 2, 3)
_CLONE_NEWNET = 0x40000000
_PORT = 29511
_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Case:
    """A row of the table; settings are smb.torch.join's, or none where it is not ours."""

    name: str
    kind: str
    workers: int = WORKERS
    settings: tuple[tuple[str, Any], ...] = ()


CASES = (
    Case("one process alone", "alone", 1),
    Case("torch DistributedDataParallel, gloo", "ddp"),
    Case("ours, BSP", "ours", settings=(("scheme", "bsp"),)),
    Case(f"torch PeriodicModelAverager, gloo, every {EVERY}", "averager"),
    Case(f"ours, local SGD, every {EVERY}", "ours", settings=(("scheme", "localsgd"), ("every", EVERY))),
    Case(f"ours, DiLoCo, every {EVERY}", "ours", settings=(("scheme", "diloco"), ("every", EVERY))),
)


def loopback_bytes() -> int:
    """Return what this namespace's loopback has carried."""
    found = subprocess.run(["ip", "-j", "-s", "link", "show", "lo"], capture_output=True, text=True, check=True)
    return int(json.loads(found.stdout)[0]["stats64"]["tx"]["bytes"])


def work(case: Case, rank: int, seed: int, digits_file: str, address: str, ready: Any, told: Any) -> None:
    """A worker's process: STEPS local steps; worker 0 tells (step, seconds, bytes, loss) at every EVERY of them."""
    import torch
    from torch import nn

    from smb.tools.demo.network import build_network

    torch.set_num_threads(1)
    digits = Digits.load(Path(digits_file))
    images = torch.from_numpy(shifted_copies(digits.train_images)).unsqueeze(2)
    labels = torch.from_numpy(digits.train_labels)
    tests = torch.from_numpy(digits.test_images).unsqueeze(1), torch.from_numpy(digits.test_labels)
    network: nn.Module = build_network(seed, HIDDEN)
    random, entropy = np.random.default_rng([seed, rank]), nn.CrossEntropyLoss()
    with _shared(case, network, rank, address) as (model, optimizer, exchange):
        ready.wait()
        began, before = time.monotonic(), loopback_bytes()
        for step in range(1, STEPS + 1):
            chosen = random.integers(len(labels), size=BATCH)
            optimizer.zero_grad()
            entropy(model(images[random.integers(9, size=BATCH), chosen]), labels[chosen]).backward()
            optimizer.step()
            exchange()
            if step % EVERY == 0 and rank == 0:
                with torch.inference_mode():
                    loss = float(entropy(network(tests[0]), tests[1]))
                told.put((step, time.monotonic() - began, loopback_bytes() - before, loss))
        ready.wait()  # nobody leaves while another looks


class _shared:  # noqa: N801 - used as a function
    """A case's form of a network: a model to call, its optimizer, and a function to call after each step."""

    def __init__(self, case: Case, network: Any, rank: int, address: str) -> None:
        self._case, self._network, self._rank, self._address = case, network, rank, address
        self._leave: Callable[[], object] = lambda: None

    def __enter__(self) -> tuple[Any, Any, Callable[[], object]]:
        import torch

        case, network = self._case, self._network
        optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=MOMENTUM)
        if case.kind == "alone":
            return network, optimizer, lambda: None
        if case.kind == "ours":
            import smb.torch

            client = smb.connect(self._address, transport="tcp", timeout=60)
            shared = smb.torch.join(network, optimizer, "run", client=client, **dict(case.settings))
            self._leave = shared.close
            return network, optimizer, lambda: None
        from torch.distributed import destroy_process_group, init_process_group

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        place = f"tcp://127.0.0.1:{_PORT}"
        init_process_group("gloo", init_method=place, rank=self._rank, world_size=case.workers)
        self._leave = destroy_process_group
        if case.kind == "ddp":
            return torch.nn.parallel.DistributedDataParallel(network), optimizer, lambda: None
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        averager = PeriodicModelAverager(period=EVERY, warmup_steps=EVERY - 1)
        return network, optimizer, lambda: averager.average_parameters(network.parameters())

    def __exit__(self, *error: object) -> None:
        self._leave()


def bytes_to_a_loss(quick: bool) -> Answer:
    """Train each case with each seed."""
    _enter_namespace()
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    rows = []
    with tempfile.TemporaryDirectory(prefix="smb-perf-") as directory:
        file = Path(directory) / "digits.npz"
        load_digits().save(file)
        for case in CASES:
            runs = [dict(_run(case, seed, file)) for seed in SEEDS[: 1 if quick else None]]
            print(f"  {case.name}: {runs}", file=sys.stderr, flush=True)
            row: dict[str, Any] = {"case": case.name, "workers": case.workers, "runs": runs}
            for key in ("steps", "seconds", "megabytes", "per_step", "last_loss"):
                row[key] = statistics.fmean(run[key] for run in runs)
            rows.append(row)
    return Answer(
        name="peers",
        title=f"To a loss of {LOSS}: PyTorch's data parallelism and local SGD beside ours",
        setup=(
            f"scikit-learn's digits, 1,050,810 parameters in PyTorch, SGD with momentum, batches of {BATCH} for each "
            f"worker, {WORKERS} workers with one thread each; one memory server for ours. Bytes are all that crossed "
            f"the loopback of their own network namespace until the loss of the unseen digits was {LOSS} or less, "
            f"looked at every {EVERY} steps: gloo's, or ours over TCP, with headers and control. Means of "
            f"{len(rows[0]['runs'])} seeds."
        ),
        columns=[
            Column("case", "case"),
            Column("workers", "workers", "{:.0f}"),
            Column("steps", "steps of each worker", "{:.0f}"),
            Column("seconds", "seconds", "{:.1f}"),
            Column("megabytes", "MB in all", "{:.1f}"),
            Column("per_step", "MB each step", "{:.2f}"),
            Column("last_loss", f"loss after {STEPS} steps", "{:.3f}"),
        ],
        rows=rows,
        limit=(
            "Steps compare the rules: they do not depend on the machine. Seconds do: two workers have a core each, "
            "and the seconds are of no use where other work runs beside them. Between two workers nothing moves less "
            "than a ring: one model each way for each exchange. A server takes one from each worker, and gives one to "
            "each: twice the bytes for two workers, as many for each worker whatever their number."
        ),
    )


def _run(case: Case, seed: int, file: Path) -> Iterator[tuple[str, float]]:
    """Yield what is known of one run."""
    with smb.LocalCluster(servers=1, capacity="256MiB") as cluster:
        ready, told = _context.Barrier(case.workers), _context.Queue()
        workers = [
            _context.Process(target=work, args=(case, rank, seed, str(file), cluster.address, ready, told), daemon=True)
            for rank in range(case.workers)
        ]
        for worker in workers:
            worker.start()
        seen = [told.get(timeout=300) for _ in range(STEPS // EVERY)]
        for worker in workers:
            worker.join(60)
            if worker.exitcode != 0:
                raise RuntimeError(f"{case.name}: a worker ended with {worker.exitcode}")
    reached = next((each for each in seen if each[3] <= LOSS), None)
    if reached is None:
        raise RuntimeError(f"{case.name}: {LOSS} was not reached: {seen[-1]}")
    yield "steps", reached[0]
    yield "seconds", reached[1]
    yield "megabytes", reached[2] / 1e6
    yield "per_step", seen[-1][2] / 1e6 / seen[-1][0]
    yield "last_loss", seen[-1][3]


def _enter_namespace() -> None:
    """Give this process and its children a network of their own, with a loopback that nobody else uses."""
    if os.geteuid() != 0 or ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise LabError("a network namespace of its own needs root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
