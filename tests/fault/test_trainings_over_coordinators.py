"""Trainings under coordinators that go and come: the coordinator is killed and started again, workers are killed,
stopped and join, now and then a memory server is killed, too. Every step that returned is in the model, or counted as
dropped.

A long run has 100 rounds, a fresh training each, or SMB_ROUNDS.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.train import ASP, AsyncDiLoCo, DiLoCo, LocalSGD
from tests.fault.long import LIMIT_S, LONG, seed, times
from tests.support.clients import spawn
from tests.support.counted_steps import SIZE, STEPS, WORKERS, faults_of, log_of, stop, take_steps
from tests.support.daemons import wait_for
from tests.support.training import together

pytestmark = pytest.mark.timeout(LIMIT_S)

LEASE_S = 3.0  # a busy machine must not cost those who live their slots
ROUNDS = int(os.environ.get("SMB_ROUNDS") or times(1, 100))
ACTS = times(2, 6)  # of one round
PAUSE_S = 0.02  # at most, between two steps of a worker
LAST = WORKERS - 2  # the first of the two who close the last rounds
NESTEROV = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
SCHEMES = (
    AsyncDiLoCo(**NESTEROV),  # type: ignore[arg-type]
    AsyncDiLoCo(quorum=2, **NESTEROV),  # type: ignore[arg-type]
    LocalSGD(every=1, quorum=1),
    DiLoCo(quorum=1, **NESTEROV),  # type: ignore[arg-type]
    LocalSGD(every=1, quorum=2, grace=0.01),
    LocalSGD(every=1),
    ASP(),
)


class _Round:
    """One training, its workers and the faults. Numbers of workers are never used twice."""

    def __init__(self, cluster: smb.LocalCluster, scheme: smb.train.Scheme, directory: Path, number: int) -> None:
        self._cluster, self._scheme, self._directory = cluster, scheme, directory
        self._seed = number
        self._random = np.random.default_rng(number)
        self._never = threading.Event()
        self.workers: dict[int, Any] = {}  # those that run, by their numbers
        self.killed: set[int] = set()
        self.all: list[int] = []

    def start_worker(self) -> None:
        if len(self.all) == LAST:
            return
        number = len(self.all)
        self.all.append(number)
        transport = str(self._random.choice(["auto", "tcp"]))
        arguments = (self._cluster.address, transport, number, str(self._directory), PAUSE_S, self._seed)
        self.workers[number] = spawn(take_steps, *arguments)

    def act(self) -> None:
        """One fault, after a while."""
        self._pass(0.3)
        chance = self._random.random()
        if chance < 0.5:
            self._cluster.coordinator.kill()
            for other in (self._kill, self._stop, self.start_worker):
                self._pass(0.4)
                if self._random.random() < 0.4:
                    other()
            self._pass(1.0)
            self._cluster.coordinator.start()
        elif chance < 0.65:
            self._kill()
            self.start_worker()
        elif chance < 0.9:
            self._stop()
        else:
            server = self._cluster.servers[int(self._random.integers(len(self._cluster.servers)))]
            server.kill()
            self._pass(0.5)
            server.start()

    def _pass(self, most_s: float) -> None:
        self._never.wait(self._random.random() * most_s)

    def _one(self) -> int | None:
        """One that has not come to the end of its steps."""
        at_work = [number for number, process in self.workers.items() if process.is_alive()]
        return int(self._random.choice(at_work)) if at_work else None

    def _kill(self) -> None:
        if (number := self._one()) is not None:
            self.killed.add(number)
            process = self.workers.pop(number)
            process.kill()
            process.join()

    def _stop(self) -> None:
        """Longer than its lease, or not."""
        if (number := self._one()) is not None:
            process = self.workers[number]
            os.kill(process.pid, signal.SIGSTOP)
            self._pass(1.5 * LEASE_S)
            os.kill(process.pid, signal.SIGCONT)

    def end(self) -> None:
        """All leave."""
        stop(self._directory)
        for number, process in self.workers.items():
            process.join(90)
            assert process.exitcode == 0, f"worker {number} ended with {process.exitcode}"

    def take_down(self) -> None:
        for process in self.workers.values():
            with contextlib.suppress(ValueError, ProcessLookupError):
                process.kill()
                process.join()

    def close_rounds(self) -> None:
        """Two more close the rounds that wait for others: of those who left what was marked counts there."""
        values = [np.zeros(SIZE, np.float32) for _ in range(2)]
        clients = [smb.connect(self._cluster.address, timeout=30) for _ in values]
        both = [smb.train.join(client, "run", own) for client, own in zip(clients, values, strict=True)]

        def finish(place: int) -> None:
            for k in range(3):
                values[place][(LAST + place) * STEPS + k] += 1
                both[place].step()
            both[place].close()  # then the other one need not wait for it
            clients[place].close()

        together(lambda: finish(0), lambda: finish(1))

    def faults(self, model: np.ndarray) -> Iterator[str]:  # type: ignore[type-arg]
        for number in self.all:
            yield from faults_of(
                model,
                number,
                log_of(self._directory, number),
                killed=number in self.killed,
                may_lose_last=isinstance(self._scheme, AsyncDiLoCo),
            )


def _run(cluster: smb.LocalCluster, directory: Path, number: int) -> tuple[int, list[str]]:
    """One round; return how many steps returned, and what is wrong."""
    directory.mkdir()
    scheme = SCHEMES[number % len(SCHEMES)]
    with smb.connect(cluster.address, timeout=30) as client:
        smb.train.join(client, "run", np.zeros(SIZE, np.float32), scheme, lease=LEASE_S).close()
        round_ = _Round(cluster, scheme, directory, number)
        try:
            for _ in range(3):
                round_.start_worker()
            wait_for(lambda: sum("joined" in log_of(directory, each) for each in range(3)) == 3, "three workers", 60)
            for _ in range(ACTS):
                round_.act()
            round_.end()
        finally:
            round_.take_down()
        round_.close_rounds()
        found = list(round_.faults(smb.train.shared(client, "run")))
        smb.train.delete(client, "run")
        if left := [info.name for info in client.list()]:
            found.append(f"left after the deletion: {left}")
        steps = sum(log_of(directory, each).count("\n") for each in round_.all)
        return steps, [f"{scheme}: {each}" for each in found]


def test_every_step_counts_or_is_dropped(tmp_path: Path) -> None:
    """In the model, or in `dropped`, for each worker; and a deleted training leaves no buffer."""
    first, steps, failed = seed(), 0, []
    with smb.LocalCluster(servers=2, capacity="64MiB", session_lease=20) as cluster:
        for number in range(first, first + ROUNDS):
            returned, found = _run(cluster, tmp_path / str(number), number)
            steps += returned
            if found:
                failed.append((number, found))
            if LONG:
                print(
                    f"round {number - first + 1}, SMB_SEED={number}: {returned} steps, {found or 'right'}", flush=True
                )
    print(f"{ROUNDS} rounds, {steps} steps, {len(failed)} rounds failed")
    assert steps > 0
    assert not failed
