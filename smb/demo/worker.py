"""One training process. Reports JSON lines on stdout; waits for a line on stdin before it touches the cluster.

It knows the coordinator's address and the names of two buffers, and nothing of the other workers: not who they are, how
many, or whether they are alive. Work is claimed from a shared counter, so whoever is there shares what is left to do.

    python -m smb.demo.worker TASK        TASK is a WorkerTask as JSON
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import smb
from smb.demo.config import WorkerTask
from smb.demo.digits import Digits
from smb.demo.network import accuracy
from smb.demo.seasgd import ElasticAveraging, ExchangeCounters
from smb.demo.training import Trainer

REPORT_INTERVAL_SECONDS = 0.25


class Reporter:
    """Writes what was done so far to stdout, at most every REPORT_INTERVAL_SECONDS unless it is news."""

    def __init__(self, counters: ExchangeCounters) -> None:
        self.steps = 0
        self.samples = 0
        self._counters = counters
        self._losses: list[float] = []
        self._started = self._reported = time.perf_counter()

    def count(self, losses: list[float], samples: int) -> None:
        """Add batches, by their losses, and their samples."""
        self.steps += len(losses)
        self.samples += samples
        self._losses += losses

    def due(self) -> bool:
        """Whether the last report is old enough for another."""
        return time.perf_counter() - self._reported >= REPORT_INTERVAL_SECONDS

    def report(self, event: str, **more: Any) -> None:
        """Write one line. Ends the process when nobody reads any more."""
        self._reported = time.perf_counter()
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses.clear()
        emit(
            event,
            steps=self.steps,
            samples=self.samples,
            loss=loss,
            exchanges=self._counters.exchanges,
            bytes_moved=self._counters.bytes_moved,
            communication_seconds=self._counters.seconds,
            training_seconds=self._reported - self._started,
            **more,
        )


def emit(event: str, **values: Any) -> None:
    """Write one JSON line to stdout at once."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


def train_shared(trainer: Trainer, task: WorkerTask) -> None:
    """Train together with whoever else holds the two buffers, until all samples are claimed."""
    parameters = trainer.parameters.values.numpy()
    round_samples = task.tau * task.batch_size
    with smb.connect(task.coordinator, transport=task.transport) as client:
        averaging = ElasticAveraging(client.open(task.weights), task.alpha)
        claimed = client.open(task.claimed)
        averaging.start_from_shared(parameters)
        reporter = Reporter(averaging.counters)
        reporter.report("joined")
        while (before := claimed.fetch_add(0, round_samples)) < task.samples:
            losses = [trainer.step(before / task.samples) for _ in range(task.tau)]
            averaging.exchange(parameters)
            reporter.count(losses, round_samples)
            if reporter.due():
                reporter.report("working")
        reporter.report("done")


def train_alone(trainer: Trainer, task: WorkerTask, digits: Digits) -> None:
    """Train all samples here, the same way but with nobody to average with; report the test accuracy as it grows."""

    def accuracy_now() -> float:
        return accuracy(trainer.network, digits.test_images, digits.test_labels)

    reporter = Reporter(ExchangeCounters())
    reporter.report("joined", accuracy=accuracy_now())
    while reporter.samples < task.samples:
        reporter.count([trainer.step(reporter.samples / task.samples)], task.batch_size)
        if reporter.due():
            reporter.report("working", accuracy=accuracy_now())
    reporter.report("done", accuracy=accuracy_now())


def main(arguments: list[str]) -> int:
    """Do the task given as JSON; 0 when all samples are trained."""
    task = WorkerTask.from_json(arguments[0])
    # As many processes as there are share the cores: threads of their own would only wait for each other.
    torch.set_num_threads(1)
    digits = Digits.load(Path(task.digits))
    trainer = Trainer(digits, network_seed=task.network_seed, order_seed=task.order_seed, batch_size=task.batch_size)
    emit("ready")
    if not sys.stdin.readline():
        return 1
    if task.coordinator is None:
        train_alone(trainer, task, digits)
    else:
        train_shared(trainer, task)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
