"""One training process. Reports JSON lines on stdout; waits for a line on stdin before it uses the cluster.

It knows the coordinator's address and the names of a group and of a counter, but nothing about the other workers:
neither which there are, nor how many, nor whether they are alive. Work is claimed from the counter, so all live workers
share the rest.

    python -m smb.tools.demo.worker TASK        TASK is a WorkerTask as JSON
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.tools.demo.config import LEASE_S, PORTION_BATCHES, WorkerTask
from smb.tools.demo.digits import Digits
from smb.tools.demo.network import accuracy
from smb.tools.demo.training import Trainer

REPORT_INTERVAL_SECONDS = 0.25
_READER_PATIENCE_S = 60.0  # as long as the parent's: a publication comes several times a second


class Reporter:
    """Writes the progress to stdout, at most every REPORT_INTERVAL_SECONDS unless it is an event."""

    def __init__(self, worker: smb.train.Worker | None) -> None:
        self.steps = 0
        self.samples = 0
        self.communication_seconds = 0.0
        self._worker = worker
        self._losses: list[float] = []
        self._started = self._reported = time.perf_counter()

    def count(self, losses: list[float], samples: int) -> None:
        """Count batches, given their losses, and their samples."""
        self.steps += len(losses)
        self.samples += samples
        self._losses += losses

    def due(self) -> bool:
        """Return True if the last report is old enough for another."""
        return time.perf_counter() - self._reported >= REPORT_INTERVAL_SECONDS

    def report(self, event: str, **more: Any) -> None:
        """Write one line. Ends the process if the reader is gone."""
        self._reported = time.perf_counter()
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses.clear()
        emit(
            event,
            steps=self.steps,
            samples=self.samples,
            loss=loss,
            exchanges=self._worker.contributions if self._worker else 0,
            bytes_moved=self._worker.status.bytes if self._worker else 0,
            communication_seconds=self.communication_seconds,
            training_seconds=self._reported - self._started,
            **more,
        )


def emit(event: str, **values: Any) -> None:
    """Write one JSON line to stdout at once."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


def train_shared(trainer: Trainer, task: WorkerTask) -> None:
    """Train together with the other workers of the group, until all samples are claimed."""
    portion = PORTION_BATCHES * task.batch_size
    with smb.connect(task.coordinator, transport=task.transport) as client:
        claimed = client.open(task.claimed)
        with smb.train.join(
            client,
            task.group,
            trainer.parameters.values.numpy(),
            smb.train.scheme_of(task.scheme, task.settings),
            lease=LEASE_S,
            servers=task.servers,
            stripe=task.stripe,
        ) as worker:
            reporter = Reporter(worker)
            reporter.report("joined")
            while (before := claimed.fetch_add(0, portion)) < task.samples:
                if task.waits_from is not None and before + portion >= task.waits_from:
                    sys.stdin.read()  # until SIGKILL, or until the parent ends
                    return
                losses = []
                for _ in range(PORTION_BATCHES):
                    losses.append(trainer.step(before / task.samples))
                    stepped = time.perf_counter()
                    worker.step(task.batch_size)
                    reporter.communication_seconds += time.perf_counter() - stepped
                reporter.count(losses, portion)
                if reporter.due():
                    reporter.report("working")
            worker.flush()
            reporter.report("done")


def train_alone(trainer: Trainer, task: WorkerTask, digits: Digits) -> None:
    """Train all samples here, in the same way but shared with nobody; report the test accuracy as it grows."""

    def accuracy_now() -> float:
        return accuracy(trainer.network, digits.test_images, digits.test_labels)

    reporter = Reporter(None)
    reporter.report("joined", trained=0, accuracy=accuracy_now())
    while reporter.samples < task.samples:
        reporter.count([trainer.step(reporter.samples / task.samples)], task.batch_size)
        if reporter.due():
            reporter.report("working", trained=reporter.samples, accuracy=accuracy_now())
    reporter.report("done", trained=reporter.samples, accuracy=accuracy_now())


def train_and_publish(trainer: Trainer, task: WorkerTask) -> None:
    """Train all samples here; publish the model after each portion, as one generation."""
    with smb.connect(task.coordinator, transport=task.transport) as client:
        publisher = smb.torch.Publisher(client, task.group, trainer.network)
        reporter = Reporter(None)
        reporter.report("joined")
        while reporter.samples < task.samples:
            losses = [trainer.step(reporter.samples / task.samples) for _ in range(PORTION_BATCHES)]
            reporter.count(losses, PORTION_BATCHES * task.batch_size)
            publisher.publish()
            if reporter.due():
                reporter.report("working")
        reporter.report("done")


def read(network: nn.Module, task: WorkerTask, digits: Digits) -> None:
    """Load the latest generation whenever there is a newer one, up to the last; report the test accuracy of each."""
    portion = PORTION_BATCHES * task.batch_size
    reporter = Reporter(None)
    with smb.connect(task.coordinator, transport=task.transport) as client:
        follower = smb.torch.follow(client, task.group, timeout=_READER_PATIENCE_S)
        reporter.report("joined")
        while follower.generation * portion < task.samples:
            follower.wait(timeout=_READER_PATIENCE_S)
            generation = follower.load(network)
            known = accuracy(network, digits.test_images, digits.test_labels)
            reporter.report("working", generation=generation, trained=generation * portion, accuracy=known)
        reporter.report("done")


def main(arguments: list[str]) -> int:
    """Do the task given as JSON; return 0 when all samples are trained."""
    task = WorkerTask.from_json(arguments[0])
    # There are enough processes for all cores, so further threads would only wait for each other.
    torch.set_num_threads(1)
    digits = Digits.load(Path(task.digits))
    trainer = Trainer(
        digits,
        network_seed=task.network_seed,
        order_seed=task.order_seed,
        batch_size=task.batch_size,
        hidden=task.hidden,
        rate=task.learning_rate,
        nesterov=task.nesterov,
    )
    emit("ready")
    if not sys.stdin.readline():
        return 1
    if task.work == "alone":
        train_alone(trainer, task, digits)
    elif task.work == "publish":
        train_and_publish(trainer, task)
    elif task.work == "read":
        read(trainer.network, task, digits)
    else:
        train_shared(trainer, task)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
