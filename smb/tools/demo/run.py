"""The demo itself: a cluster, workers that share one model, a death, a late arrival, and a process alone."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import smb
import smb.train
from smb.errors import Error
from smb.tools.demo.config import PORTION_BATCHES, SHORT_HIDDEN, STRIPE_BYTES, DemoConfig, WorkerTask
from smb.tools.demo.digits import Digits, load_digits
from smb.tools.demo.extras import check_extras
from smb.tools.demo.fleet import DemoWorker, Fleet
from smb.tools.demo.network import FlatParameters, accuracy, build_network
from smb.tools.demo.result import AccuracyPoint, DemoEvent, DemoResult, WorkerResult

GROUP = "demo"
CLAIMED = "demo-claimed-samples"
CAPACITY = "128MiB"
_POLL_SECONDS = 0.1
_EVALUATE_SECONDS = 0.4
_VICTIM = 2  # the number of the worker that is killed
_KILL_LATE = 0.2  # fraction of the samples: how late the kill may be


@dataclass
class DemoView:
    """The progress that a display shows while the demo runs. share: fraction of the samples claimed so far, 0 to 1."""

    config: DemoConfig
    phase: str = "starting"
    seconds: float = 0.0
    share: float = 0.0
    workers: Sequence[DemoWorker] = ()
    curve: list[AccuracyPoint] = field(default_factory=list)
    events: list[DemoEvent] = field(default_factory=list)


def run_demo(config: DemoConfig, on_update: Callable[[DemoView], None] | None = None) -> DemoResult:
    """Run the whole demo and return its result. Blocks for as long as DemoConfig says; starts real processes.

    on_update is called several times a second. This process evaluates the shared model with one thread
    (torch.set_num_threads(1) stays set). Missing the target is not an error: see DemoResult.passed. A KeyboardInterrupt
    after training has begun ends the demo, and the result has the progress so far: see DemoResult.stopped.

    Raises Error if packages are missing or all workers fail; smb's errors if the cluster cannot start.
    """
    check_extras(plot=config.plot is not None)
    torch.set_num_threads(1)
    digits = load_digits()
    with tempfile.TemporaryDirectory(prefix="smb-demo-") as name, Fleet(Path(name)) as fleet:
        digits_path = Path(name) / "digits.npz"
        digits.save(digits_path)
        show = on_update or (lambda _: None)
        result = _train_together(config, digits, digits_path, fleet, show)
        if config.compare and not result.stopped:
            result = _train_alone(result, digits_path, fleet, show)
    if config.plot is not None:
        from smb.tools.demo.plot import draw

        draw(result, config.plot)
        result = replace(result, plot=str(config.plot))
    return result


def _train_together(
    config: DemoConfig, digits: Digits, digits_path: Path, fleet: Fleet, show: Callable[[DemoView], None]
) -> DemoResult:
    network = build_network(config.seed, config.hidden)
    parameters = FlatParameters(network)
    with (
        smb.LocalCluster(servers=config.servers, capacity=CAPACITY) as cluster,
        smb.connect(cluster.address, transport=config.transport) as client,
    ):
        claimed = client.create(CLAIMED, (1,), "int64")

        def evaluate() -> float:
            with contextlib.suppress(smb.NotFoundError):  # before the first worker has joined
                smb.train.shared(client, GROUP, parameters.values.numpy())
            return accuracy(network, digits.test_images, digits.test_labels)

        task = WorkerTask(
            name="",
            digits=str(digits_path),
            network_seed=config.seed,
            order_seed=0,
            batch_size=config.batch_size,
            samples=_samples(config, digits),
            coordinator=cluster.address,
            transport=config.transport,
            group=GROUP,
            claimed=CLAIMED,
            servers=config.servers,
            scheme=config.scheme,
            settings=config.settings,
            hidden=config.hidden,
            stripe=STRIPE_BYTES if config.hidden <= SHORT_HIDDEN else None,
            learning_rate=config.rate * config.recipe.rate_for(config.workers),
            nesterov=config.recipe.nesterov,
        )
        training = _SharedTraining(config, task, fleet, evaluate, lambda: int(claimed.read()[0]), show)
        stopped = False
        try:
            seconds = training.run()
        except KeyboardInterrupt:
            if not training.view.curve:
                raise
            seconds, stopped = training.view.seconds, True
        weights = client.open(GROUP)
        return DemoResult(
            config=config,
            transports=tuple(weights.transports),
            parameters=parameters.count,
            bytes_by_server=_bytes_by_server(weights),
            accuracy=training.view.curve[-1].accuracy,
            seconds=seconds,
            samples=sum(worker.samples for worker in fleet.workers),
            curve=tuple(training.view.curve),
            events=tuple(training.view.events),
            workers=tuple(_worker_result(worker, training.rates[worker.name]) for worker in fleet.workers),
            stopped=stopped,
        )


class _SharedTraining:
    """Drives the workers through one training: all ready, start, one killed, one late, done."""

    def __init__(
        self,
        config: DemoConfig,
        task: WorkerTask,
        fleet: Fleet,
        evaluate: Callable[[], float],
        samples_claimed: Callable[[], int],
        show: Callable[[DemoView], None],
    ) -> None:
        self.view = DemoView(config, workers=fleet.workers)
        self.rates: dict[str, list[tuple[float, float]]] = {}
        self._task = task
        self._fleet = fleet
        self._evaluate = evaluate
        self._samples_claimed = samples_claimed
        self._show = show
        self._began = self._evaluated = 0.0

    def run(self) -> float:
        """Return the seconds from the common start until the last worker was done."""
        # The latecomer is started, too, so that it has imported PyTorch when its turn comes; it knows no cluster until
        # then.
        *workers, latecomer = [self._start_worker() for _ in range(self.view.config.workers + 1)]
        while any(worker.status == "starting" for worker in self._fleet.workers):
            self._listen()
        self._raise_if_all_failed()
        self._began = time.monotonic()
        self.view.phase = "training together"
        self._note_accuracy()
        for worker in workers:
            worker.go()
        while any(worker.running for worker in self._fleet.workers):
            self._listen()
            self.view.share = min(1.0, self._samples_claimed() / self._task.samples)
            self._kill_and_join(workers[_VICTIM - 1], latecomer)
            if time.monotonic() - self._evaluated >= _EVALUATE_SECONDS:
                self._note_accuracy()
        seconds = time.monotonic() - self._began
        self._raise_if_all_failed()
        self._note_accuracy()
        return seconds

    def _start_worker(self) -> DemoWorker:
        number = len(self._fleet.workers) + 1
        config, hosts = self.view.config, self.view.config.recipe.hosts
        task = replace(
            self._task,
            name=f"worker-{number}",
            order_seed=1000 * config.seed + number,
            host=f"host-{number % hosts}" if hosts > 1 else "",
            waits_from=round((config.kill_at + _KILL_LATE) * self._task.samples) if number == _VICTIM else None,
        )
        self.rates[task.name] = []
        return self._fleet.start(task)

    def _kill_and_join(self, victim: DemoWorker, latecomer: DemoWorker) -> None:
        share, config = self.view.share, self.view.config
        if victim.running and share >= config.kill_at:
            victim.kill()
            self._event(victim, "killed")
        alone = not any(worker.running for worker in self._fleet.workers if worker is not latecomer)
        if latecomer.status == "ready" and (share >= config.join_at or alone):
            latecomer.go()

    def _listen(self) -> None:
        reports = self._fleet.listen(_POLL_SECONDS)
        self.view.seconds = time.monotonic() - self._began if self._began else 0.0
        for worker, report in reports:
            if report["event"] == "failed":
                self._event(worker, f"failed: {worker.last_words()}")
            elif report["event"] in ("joined", "done"):
                self._event(worker, report["event"])
            if worker.rate:
                self.rates[worker.name].append((self.view.seconds, worker.rate))
        self._show(self.view)

    def _event(self, worker: DemoWorker, what: str) -> None:
        self.view.events.append(DemoEvent(self.view.seconds, worker.name, what))

    def _note_accuracy(self) -> None:
        samples = sum(worker.samples for worker in self._fleet.workers)
        self._evaluated = time.monotonic()
        point = AccuracyPoint(self._evaluated - self._began, samples, self._evaluate())
        self.view.curve.append(point)

    def _raise_if_all_failed(self) -> None:
        workers = self._fleet.workers
        if all(worker.status in ("failed", "killed") for worker in workers):
            words = next((w.last_words() for w in workers if w.status == "failed"), "all were killed")
            raise Error(f"all training processes failed; the first one said: {words}")


def _train_alone(result: DemoResult, digits_path: Path, fleet: Fleet, show: Callable[[DemoView], None]) -> DemoResult:
    config = result.config
    task = WorkerTask(
        name="alone",
        digits=str(digits_path),
        network_seed=config.seed,
        order_seed=1000 * config.seed,
        batch_size=config.batch_size,
        samples=result.samples,
        hidden=config.hidden,
        learning_rate=config.rate,
    )
    worker = fleet.start(task)
    view = DemoView(config, phase="starting a process alone", workers=[worker])
    try:
        while worker.running:
            for _, report in fleet.listen(_POLL_SECONDS):
                if report["event"] == "ready":
                    worker.go()
                    view.phase = "training alone"
                if "accuracy" in report:
                    view.curve.append(_point(report))
            view.seconds = view.curve[-1].seconds if view.curve else 0.0
            view.share = min(1.0, worker.samples / task.samples)
            show(view)
    except KeyboardInterrupt:
        result = replace(result, stopped=True)
        if not view.curve:
            return result
    if worker.status == "failed":
        raise Error(f"the process that trains alone failed: {worker.last_words()}")
    last = view.curve[-1]
    return replace(
        result,
        alone_accuracy=last.accuracy,
        alone_seconds=last.seconds,
        alone_samples=last.samples,
        alone_curve=tuple(view.curve),
    )


def _samples(config: DemoConfig, digits: Digits) -> int:
    """Return the number of samples of a run: whole portions, at least one."""
    portion = PORTION_BATCHES * config.batch_size
    return max(1, round(config.epochs * len(digits.train_labels) / portion)) * portion


def _bytes_by_server(buffer: smb.Buffer) -> dict[str, int]:
    placed: dict[str, int] = {}
    for segment in buffer.layout.segments:
        placed[segment.server] = placed.get(segment.server, 0) + segment.nbytes
    return placed


def _point(report: dict[str, Any]) -> AccuracyPoint:
    return AccuracyPoint(report["training_seconds"], report["samples"], report["accuracy"])


def _worker_result(worker: DemoWorker, rates: list[tuple[float, float]]) -> WorkerResult:
    report = worker.report
    return WorkerResult(
        name=worker.name,
        status=worker.status,
        steps=report.get("steps", 0),
        samples=worker.samples,
        exchanges=report.get("exchanges", 0),
        bytes_moved=report.get("bytes_moved", 0),
        training_seconds=report.get("training_seconds", 0.0),
        communication_seconds=report.get("communication_seconds", 0.0),
        rates=tuple(rates),
    )
