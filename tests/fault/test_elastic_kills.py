"""Elastic averaging under kills: the shared model is the sum of what was acknowledged, and of at most the one thing
that each killed worker was sending. float32 additions round: sums are compared within TOLERANCE, far less than any
difference that is sent.
"""

from __future__ import annotations

import operator
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.config.parse import TRAIN_HOST_VARIABLE
from smb.train.exchange.elastic_force import Elastic
from tests.fault.long import times
from tests.support.clients import in_process
from tests.support.daemons import wait_for
from tests.support.elastic import Values, check_sum, record_sent, recorded, train_and_record
from tests.support.training import together

HSGD = ["hsgd-taken", "hsgd-written", "hsgd-base-shared", "hsgd-sent"]

SIZE = times(300_000, 1_000_000)  # several chunks on each server
LEASE_S = 0.6
TOLERANCE = 2e-4
PATIENCE_S = 60


def usual_size(differences: list[Values]) -> float:
    """The median of what each adds to its elements: one too many, or too few, is off by that."""
    return float(np.median([np.abs(difference).min() for difference in differences]))


@pytest.fixture
def cluster() -> Iterator[smb.LocalCluster]:
    """Two servers: the tests here kill them."""
    with smb.LocalCluster(servers=2, capacity="128MiB") as running:
        yield running


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Values]:
    """What the workers of this process send, as it is sent."""
    monkeypatch.setattr(Elastic, "send", Elastic.send)  # put back at the end
    monkeypatch.setattr(Elastic, "finish", Elastic.finish)
    found: list[Values] = []
    record_sent(lambda _, difference: found.append(difference.copy()), lambda _: None)
    return found


def test_killed_workers(cluster: smb.LocalCluster, sent: list[Values], tmp_path: Path) -> None:
    """SEASGD: workers killed while they send. The others go on; nothing acknowledged is lost, nothing counts twice."""
    seed = 11
    print(f"seed {seed}")
    draw = random.Random(seed)
    with smb.connect(cluster.address, transport="tcp", timeout=30) as client:
        values = np.zeros(SIZE, np.float32)
        with smb.train.join(client, "run", values, smb.train.SEASGD(alpha=0.2), lease=LEASE_S) as worker:
            for number in (1, 2, 3):
                given = (cluster.address, number, str(tmp_path))
                with in_process(train_and_record, *given) as (process, messages):
                    assert messages.get(timeout=PATIENCE_S) == "joined"
                    for _ in range(draw.randint(2, 5)):
                        messages.get(timeout=PATIENCE_S)
                        values += 1
                        worker.step()
                    os.kill(process.pid, signal.SIGKILL)
                    for _ in range(3):
                        values += 1
                        worker.step()
            worker.flush()
            acknowledged, in_doubt = list(sent), []
            for number in (1, 2, 3):
                known, unknown = recorded(tmp_path, number, SIZE)
                acknowledged += known
                in_doubt += [unknown] if unknown is not None else []
            assert len(acknowledged) > len(sent) + 3
            assert usual_size(acknowledged) > 100 * TOLERANCE
            check_sum(worker.shared(), acknowledged, in_doubt, TOLERANCE)


@pytest.mark.parametrize("scheme", [smb.train.SEASGD(0.2), smb.train.EASGD(0.2, 1)])
@pytest.mark.parametrize("timeout", [30.0, 0.3])
def test_killed_servers(
    cluster: smb.LocalCluster, sent: list[Values], scheme: smb.train.Scheme, timeout: float
) -> None:
    """Servers killed and started again in the middle of additions: patient workers notice nothing, hasty ones get
    errors from step() and call it again; each contribution counts once.
    """
    stop = threading.Event()
    steps = [0, 0]
    errors = 0

    def train(number: int) -> None:
        nonlocal errors
        values = np.zeros(SIZE, np.float32)
        with smb.connect(cluster.address, transport="tcp", timeout=30) as client:
            # A difference grows while servers are away, and none is to be refused for that.
            guards = smb.train.Guards(norm_factor=None)
            worker = smb.train.join(client, "run", values, scheme, lease=30.0, guards=guards)
            client._session.timeout, client._session.timeout_ms = timeout, round(1000 * timeout)

            def insist(call: Callable[[], Any]) -> None:
                nonlocal errors
                while True:
                    try:
                        return call()
                    except (smb.UnavailableError, smb.TimeoutError):
                        errors += 1

            while not stop.is_set():
                values += 1 + number
                insist(worker.step)
                steps[number] += 1
            insist(worker.flush)
            client._session.timeout, client._session.timeout_ms = 30.0, 30000
            worker.close()

    def kill() -> None:
        try:
            for turn in range(4):
                goal = [taken + 3 for taken in steps]
                wait_for(lambda goal=goal: all(map(operator.ge, steps, goal)), "steps", PATIENCE_S)
                server = cluster.servers[turn % 2]
                server.kill()
                server.start()
        finally:
            stop.set()

    together(lambda: train(0), lambda: train(1), kill)
    with smb.connect(cluster.address, timeout=30) as client:
        shared = client.open("run").read()
        assert sum(w.contributions for w in smb.train.status(client, "run").workers) == len(sent)
    check_sum(shared, sent, [], TOLERANCE)
    assert usual_size(sent) > 100 * TOLERANCE
    print(f"{len(sent)} contributions, {errors} errors")


def _push(worker: smb.train.Worker, values: Values, by: float) -> None:
    values += by
    worker.step()


@pytest.mark.parametrize("point", HSGD)
def test_killed_root(
    cluster: smb.LocalCluster, sent: list[Values], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """HSGD: the root of a host killed at each point of an exchange. Another one of the host is root from then on, the
    other host notices nothing, and the sums are right.
    """
    with (
        smb.connect(cluster.address, timeout=30) as here,
        smb.connect(cluster.address, timeout=30) as there,
    ):
        monkeypatch.setenv(TRAIN_HOST_VARIABLE, "there")
        others = np.zeros(SIZE, np.float32)
        other = smb.train.join(there, "run", others, smb.train.HSGD(alpha=0.2), lease=LEASE_S)
        given = (cluster.address, 1, str(tmp_path), "here", point, 3)
        with in_process(train_and_record, *given) as (process, messages):
            assert messages.get(timeout=PATIENCE_S) == "joined"
            monkeypatch.setenv(TRAIN_HOST_VARIABLE, "here")
            values = np.zeros(SIZE, np.float32)
            worker = smb.train.join(here, "run", values, lease=LEASE_S)
            for _ in range(8):
                _push(worker, values, 1)
                _push(other, others, 1)
            process.join(PATIENCE_S)
            assert process.exitcode == -signal.SIGKILL
        assert worker.exchange.root
        worker.flush()
        other.flush()
        known, unknown = recorded(tmp_path, 1, SIZE)
        assert len(known) >= 2
        assert worker.status.contributions >= 3
        check_sum(worker.shared(), [*sent, *known], [unknown] if unknown is not None else [], TOLERANCE)
        host = worker.exchange._host
        np.testing.assert_array_equal(host.weights.read(), values)
        assert other.status.contributions == 8
        worker.close()
        other.close()


def test_stopped_root(cluster: smb.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root that is stopped in the middle of an exchange, past its lease, and goes on: it changes nothing of the
    host's model, joins again, and is no longer root.
    """
    with smb.connect(cluster.address, timeout=30) as client:
        client_values = np.zeros(SIZE, np.float32)
        monkeypatch.setenv(TRAIN_HOST_VARIABLE, "elsewhere")
        first = smb.train.join(client, "run", client_values.copy(), smb.train.HSGD(alpha=0.2), lease=LEASE_S)
        given = (cluster.address, 1, str(tmp_path), "here", "hsgd-taken", 2, signal.SIGSTOP)
        with in_process(train_and_record, *given) as (process, messages):
            assert messages.get(timeout=PATIENCE_S) == "joined"
            monkeypatch.setenv(TRAIN_HOST_VARIABLE, "here")
            values = client_values
            worker = smb.train.join(client, "run", values, lease=LEASE_S)
            for _ in range(4):
                _push(worker, values, 1)
            assert worker.exchange.root
            np.testing.assert_array_equal(worker.exchange._host.weights.read(), values)
            os.kill(process.pid, signal.SIGCONT)
            told = [messages.get(timeout=PATIENCE_S)]
            while told[-1][0] == 0:
                _push(worker, values, 1)
                told.append(messages.get(timeout=PATIENCE_S))
            assert told[-1][0] == 1
            contributions = told[-1][1]
            for _ in range(3):
                _push(worker, values, 1)
                told.append(messages.get(timeout=PATIENCE_S))
            assert told[-1] == (1, contributions)  # it takes part, and the other one is root
            process.kill()
            process.join()
        worker.close()
        first.close()
