"""The demo itself: a cluster, workers that share one model, a death, a late arrival; a process alone; a reader."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import smb
import smb.train
from smb.errors import Error
from smb.tools.demo.config import PORTION_BATCHES, SHORT_HIDDEN, STRIPE_BYTES, DemoConfig, WorkerTask
from smb.tools.demo.digits import TRAIN_COUNT, Digits, load_digits
from smb.tools.demo.extras import check_extras
from smb.tools.demo.fleet import DemoWorker, Fleet
from smb.tools.demo.network import FlatParameters, accuracy, build_network
from smb.tools.demo.result import AccuracyPoint, DemoEvent, DemoResult, WorkerResult

GROUP, PUBLISHED = "demo", "demo-published"
CLAIMED = "demo-claimed-samples"
CAPACITY = "128MiB"
_POLL_SECONDS = 0.1
_EVALUATE_SECONDS = 0.4
_VICTIM = 2  # the number of the worker that is killed
_KILL_LATE = 0.2  # fraction of the samples: how late the kill may be


@dataclass
class DemoView:
    """The progress that a display shows while the demo runs.

    page: the address of the coordinator's page. share: fraction of the samples claimed so far, 0 to 1. generation: what
    the reader has loaded, 0 if nobody reads.
    """

    config: DemoConfig
    page: str
    phase: str = "starting"
    seconds: float = 0.0
    share: float = 0.0
    generation: int = 0
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
    with (
        tempfile.TemporaryDirectory(prefix="smb-demo-") as name,
        Fleet(Path(name)) as fleet,
        smb.LocalCluster(servers=config.servers, capacity=CAPACITY) as cluster,
        smb.connect(cluster.address, transport=config.transport) as client,
    ):
        stage = _Stage(config, load_digits(), Path(name), fleet, cluster, client, on_update or (lambda _: None))
        result = _train_together(stage)
        if config.compare and not result.stopped:
            result = _train_alone(stage, result)
        if config.compare and not result.stopped:
            result = _publish_to_a_reader(stage, result)
    if config.plot is not None:
        from smb.tools.demo.plot import draw

        draw(result, config.plot)
        result = replace(result, plot=str(config.plot))
    return result


@dataclass(frozen=True)
class _Stage:
    """What all parts of the demo use."""

    config: DemoConfig
    digits: Digits
    folder: Path
    fleet: Fleet
    cluster: smb.LocalCluster
    client: smb.Client
    show: Callable[[DemoView], None]

    def view(self, **more: Any) -> DemoView:
        return DemoView(self.config, f"http://{self.cluster.coordinator.metrics}/", **more)

    def digits_of(self, worker: int | None) -> str:
        """Return the file with the digits that this worker has (1 is the first one), or with those of all workers."""
        config = self.config
        rows = np.random.default_rng(config.seed).permutation(TRAIN_COUNT)[: config.all_digits]
        path = self.folder / f"digits-of-{worker or 'all'}.npz"
        if not path.exists():
            own = slice(None) if worker is None else slice((worker - 1) * config.digits, worker * config.digits)
            self.digits.some(rows[own]).save(path)
        return str(path)

    def task(self, name: str, work: str, worker: int | None, samples: int, **more: Any) -> WorkerTask:
        """Return the task of a process that has the digits of a worker, or of all of them."""
        config = self.config
        return WorkerTask(
            name=name,
            work=work,
            digits=self.digits_of(worker),
            network_seed=config.seed,
            order_seed=1000 * config.seed + (worker or 0),
            batch_size=config.batch_size,
            samples=samples,
            coordinator=self.cluster.address,
            transport=config.transport,
            hidden=config.hidden,
            **({"learning_rate": config.rate} | more),
        )


def _train_together(stage: _Stage) -> DemoResult:
    config, client, fleet = stage.config, stage.client, stage.fleet
    network = build_network(config.seed, config.hidden)
    parameters = FlatParameters(network)
    client.create(CLAIMED, (1,), "int64")

    def evaluate() -> float:
        with contextlib.suppress(smb.NotFoundError):  # before the first worker has joined
            smb.train.shared(client, GROUP, parameters.values.numpy())
        return accuracy(network, stage.digits.test_images, stage.digits.test_labels)

    training = _SharedTraining(stage, evaluate)
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

    def __init__(self, stage: _Stage, evaluate: Callable[[], float]) -> None:
        self.view = stage.view(workers=stage.fleet.workers)
        self.rates: dict[str, list[tuple[float, float]]] = {}
        self._stage = stage
        self._fleet = stage.fleet
        self._evaluate = evaluate
        self._claimed = stage.client.open(CLAIMED)
        self._samples = _samples(stage.config)
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
            self.view.share = min(1.0, int(self._claimed.read()[0]) / self._samples)
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
        task = self._stage.task(
            f"worker-{number}",
            "share",
            number,
            self._samples,
            group=GROUP,
            claimed=CLAIMED,
            servers=config.servers,
            scheme=config.scheme,
            settings=config.settings,
            stripe=STRIPE_BYTES if config.hidden <= SHORT_HIDDEN else None,
            learning_rate=config.rate * config.recipe.rate_for(config.workers),
            nesterov=config.recipe.nesterov,
            host=f"host-{number % hosts}" if hosts > 1 else "",
            waits_from=round((config.kill_at + _KILL_LATE) * self._samples) if number == _VICTIM else None,
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
        self._stage.show(self.view)

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


def _train_alone(stage: _Stage, result: DemoResult) -> DemoResult:
    """Train as many samples in one process, which has the digits of the first worker."""
    view = stage.view(phase="one process alone, with its own digits")
    stopped = _watch(stage, view, [stage.task("alone", "alone", 1, result.samples)])
    if not view.curve:
        return replace(result, stopped=stopped)
    last = view.curve[-1]
    return replace(
        result,
        stopped=stopped,
        alone_accuracy=last.accuracy,
        alone_seconds=last.seconds,
        alone_samples=last.samples,
        alone_curve=tuple(view.curve),
    )


def _publish_to_a_reader(stage: _Stage, result: DemoResult) -> DemoResult:
    """Train as many samples in one process, which has everybody's digits and publishes its model, beside a reader."""
    view = stage.view(phase="one process with everybody's digits publishes its model, and another one reads it")
    tasks = [
        stage.task(name, work, None, result.samples, group=PUBLISHED)
        for name, work in (("trainer", "publish"), ("reader", "read"))
    ]
    stopped = _watch(stage, view, tasks)
    if not view.curve:
        return replace(result, stopped=stopped)
    last = view.curve[-1]
    return replace(
        result,
        stopped=stopped,
        pooled_accuracy=last.accuracy,
        pooled_seconds=last.seconds,
        pooled_samples=last.samples,
        pooled_curve=tuple(view.curve),
        published=view.generation,
    )


def _watch(stage: _Stage, view: DemoView, tasks: Sequence[WorkerTask]) -> bool:
    """Run the tasks, begun together, and note the accuracies that they report; return True after a KeyboardInterrupt.

    Raises Error if one of them fails.
    """
    workers = view.workers = [stage.fleet.start(task) for task in tasks]
    try:
        while any(worker.running for worker in workers):
            for worker, report in stage.fleet.listen(_POLL_SECONDS):
                if report["event"] == "failed":
                    raise Error(f"the process {worker.name!r} failed: {worker.last_words()}")
                if "accuracy" in report:
                    view.curve.append(_point(report))
                view.generation = report.get("generation", view.generation)
            if all(worker.status == "ready" for worker in workers):
                for worker in workers:
                    worker.go()
            view.seconds = view.curve[-1].seconds if view.curve else 0.0
            view.share = min(1.0, workers[0].samples / tasks[0].samples)
            stage.show(view)
    except KeyboardInterrupt:
        return True
    return False


def _samples(config: DemoConfig) -> int:
    """Return the number of samples of a run: whole portions, at least one."""
    portion = PORTION_BATCHES * config.batch_size
    return max(1, round(config.epochs * config.all_digits / portion)) * portion


def _bytes_by_server(buffer: smb.Buffer) -> dict[str, int]:
    placed: dict[str, int] = {}
    for segment in buffer.layout.segments:
        placed[segment.server] = placed.get(segment.server, 0) + segment.nbytes
    return placed


def _point(report: dict[str, Any]) -> AccuracyPoint:
    return AccuracyPoint(report["training_seconds"], report["trained"], report["accuracy"])


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
