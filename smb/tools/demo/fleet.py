"""The training processes from the parent's side: start, reports, kill."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from smb.config.parse import TRAIN_HOST_VARIABLE
from smb.daemon.launch import python_m
from smb.errors import Error
from smb.tools.demo.config import WorkerTask

# A worker reports several times a second; the longest silence is the import of PyTorch on a busy machine.
SILENCE_SECONDS_MAX = 60.0
_READ_BYTES = 65536
_launch = subprocess.Popen


@dataclass
class DemoWorker:
    """One process and its last report. status: starting, ready, working, done, killed, failed."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    status: str = "starting"
    report: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.0
    partial_line: bytes = b""

    @property
    def running(self) -> bool:
        """True if further reports are expected."""
        return self.status in ("starting", "ready", "working")

    @property
    def samples(self) -> int:
        """Samples trained so far."""
        return int(self.report.get("samples", 0))

    def go(self) -> None:
        """Let a ready worker begin. If it has died in the meantime, listen() reports that."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            os.write(self.process.stdin.fileno(), b"go\n")
        self.status = "working"

    def kill(self) -> None:
        """Send SIGKILL: the worker cannot leave in order."""
        self.process.send_signal(signal.SIGKILL)
        self.status = "killed"
        self.rate = 0.0

    def last_words(self) -> str:
        """Return the last line that it wrote to stderr."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.returncode}"


class Fleet:
    """All training processes of a run. As a context manager it kills and reaps the running ones at the end."""

    def __init__(self, folder: Path) -> None:
        self.workers: list[DemoWorker] = []
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._heard_at = time.monotonic()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
            self._reap(worker)
        self._selector.close()

    def start(self, task: WorkerTask) -> DemoWorker:
        """Start one process, which reports `ready` when it waits for go()."""
        log = self._folder / f"{task.name}.log"
        with log.open("wb") as stderr:
            process = _launch(
                python_m("smb.tools.demo.worker", task.to_json()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | ({TRAIN_HOST_VARIABLE: task.host} if task.host else {}),
                # Ctrl-C is for the parent, which then ends its workers in order.
                start_new_session=True,
            )
        worker = DemoWorker(task.name, process, log)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        self.workers.append(worker)
        self._heard_at = time.monotonic()
        return worker

    def listen(self, timeout: float) -> list[tuple[DemoWorker, dict[str, Any]]]:
        """Wait up to `timeout` seconds for reports; return them, oldest first. Updates the workers' status and report.

        Raises Error if a running worker is expected to report and no worker has reported for SILENCE_SECONDS_MAX.
        """
        reports = []
        for key, _ in self._selector.select(timeout):
            worker: DemoWorker = key.data
            assert not isinstance(key.fileobj, int)
            reports += [(worker, report) for report in self._hear(worker, key.fileobj)]  # type: ignore[arg-type]
        if reports:
            self._heard_at = time.monotonic()
        elif time.monotonic() - self._heard_at > SILENCE_SECONDS_MAX and any(w.running for w in self.workers):
            silent = ", ".join(worker.name for worker in self.workers if worker.running)
            raise Error(f"no training process has reported for {SILENCE_SECONDS_MAX:.0f} s (waiting for {silent})")
        return reports

    def _hear(self, worker: DemoWorker, stdout: IO[bytes]) -> list[dict[str, Any]]:
        data = os.read(stdout.fileno(), _READ_BYTES)
        if not data:
            self._selector.unregister(stdout)
            self._reap(worker)
            if worker.running:
                worker.status = "failed"
                return [{"event": "failed"}]
            return []
        *lines, worker.partial_line = (worker.partial_line + data).split(b"\n")
        reports = [json.loads(line) for line in lines]
        for report in reports:
            _note(worker, report)
        return reports

    @staticmethod
    def _reap(worker: DemoWorker) -> None:
        worker.process.wait()
        for pipe in (worker.process.stdin, worker.process.stdout):
            if pipe is not None:
                pipe.close()


def _note(worker: DemoWorker, report: dict[str, Any]) -> None:
    if worker.status == "killed":  # reported before it died; it stays dead
        worker.report = report if "samples" in report else worker.report
        return
    status = {"ready": "ready", "done": "done"}
    worker.status = status.get(report["event"], "working")
    if "samples" not in report:
        return
    seconds = report["training_seconds"] - worker.report.get("training_seconds", 0.0)
    if seconds > 0.0:
        worker.rate = (report["samples"] - worker.samples) / seconds
    if report["loss"] is None:
        report["loss"] = worker.report.get("loss")
    worker.report = report
    if worker.status == "done":
        worker.rate = 0.0
