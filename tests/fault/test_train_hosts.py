"""Trainings whose model has two copies: hosts of it vanish one after the other, at moments drawn from a seed."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import smb
import smb.train
from smb.rpc import control_pb2 as pb
from smb.train import DiLoCo
from tests.fault.long import LIMIT_S, LONG, seed
from tests.support import second_copy
from tests.support.daemons import Daemon, Daemons, running_daemons, wait_for
from tests.support.training import COUNT, Crew, delta_of, nesterov_round, start

pytestmark = pytest.mark.timeout(LIMIT_S)

NAMES = ("a", "b", "c")
EVERY = 2
MEMBERS = 4
TIMEOUT_S = 60.0


class Hosts:
    """A coordinator and memory servers, whose hosts die."""

    def __init__(self, daemons: Daemons, *options: str) -> None:
        self._daemons = daemons
        self.coordinator = daemons.coordinator("127.0.0.1:0", None, *options)
        self._servers = {name: self._begin(name) for name in NAMES}

    def _begin(self, name: str) -> Daemon:
        server = self._daemons.memory_server(self.coordinator.address, name)
        assert server.address
        return server

    def connect(self) -> smb.Client:
        return smb.connect(self.coordinator.address, timeout=TIMEOUT_S)

    def lose(self, name: str) -> None:
        """The process, and its memory."""
        self._servers.pop(name).kill()
        second_copy.lose(self._daemons.memory, name)

    def replace(self, name: str) -> None:
        """Another host comes, and all that had one copy has two again."""
        self._servers[name] = self._begin(name)
        wait_for(lambda: self.coordinator.metric("smb_coordinator_degraded_segments") == 0, "two copies", TIMEOUT_S)

    def segments(self) -> list[str]:
        """Return the files of all segments that there are."""
        return [name for name in self._daemons.files() if name.endswith(".segment")]


def test_diloco_over_lost_hosts(tmp_path: Path) -> None:
    """Hosts of the model die, one or each in turn, while four workers exchange; another one fills in. After every round
    the model is the reference's, to the bit, and a worker that joins then has it.
    """
    rng = random.Random(seed())
    scheme = DiLoCo(every=EVERY, outer_lr=0.7, outer_momentum=0.9)
    weights, momentum, number, longest = start(), np.zeros(COUNT, np.float32), 0, 0.0
    with running_daemons(tmp_path) as daemons:
        hosts = Hosts(daemons)
        crew = Crew(hosts.connect, MEMBERS, scheme, replicas=2)
        watcher = hosts.connect()
        assert {info.replicas for info in watcher.list()} == {2}
        for name in NAMES * 10 if LONG else NAMES[:1]:  # the soak loses others in its short form
            dies = threading.Timer(rng.uniform(0.0, 0.1), hosts.lose, [name])
            dies.start()
            rounds = 0
            while rounds < 4 or dies.is_alive():
                began = time.monotonic()
                for _ in range(EVERY):
                    crew.step_all()
                longest = max(longest, time.monotonic() - began)
                steps = range(EVERY * number, EVERY * (number + 1))
                deltas = [(delta_of(weights, worker, steps), 1.0) for worker in range(MEMBERS)]
                weights, momentum = nesterov_round(weights, momentum, deltas, scheme.outer_lr, scheme.outer_momentum)
                number, rounds = number + 1, rounds + 1
                for worker, values in zip(crew.workers, crew.values, strict=True):
                    assert np.array_equal(values, weights), f"round {number}, {worker}"
            late = np.zeros(COUNT, np.float32)
            with hosts.connect() as client:
                smb.train.join(client, "run", late).close()
            assert np.array_equal(late, weights)
            hosts.replace(name)
        assert all(worker.status.rejoins == 0 for worker in crew.workers)
        crew.close()
        for client in (watcher, *crew.clients):
            client.close()
    print(f"{30 if LONG else 1} hosts died in {number} rounds, the longest of {longest:.2f} s")


def test_a_lock_by_itself_outlives_its_host(tmp_path: Path) -> None:
    """Its holder holds it on, nobody else gets it, its tokens go on; and it is freed on both hosts when it is idle."""
    with running_daemons(tmp_path) as daemons:
        hosts = Hosts(daemons, "--session-lease", "5", "--idle-names", "5")
        with hosts.connect() as client, hosts.connect() as other:
            held = client.lock("x/y", ttl=60.0, replicas=2)
            token = held.acquire().token
            tokens = [token]
            for name in NAMES:
                hosts.lose(name)
                held.check()
                with pytest.raises(smb.TimeoutError):
                    other.lock("x/y", timeout=0.2, replicas=2).acquire()
                held.release()
                with other.lock("x/y", timeout=TIMEOUT_S, replicas=2) as taken:
                    tokens.append(taken.token)
                tokens.append(held.acquire().token)
                hosts.replace(name)
            held.release()
            wait_for(lambda: hosts.coordinator.metric("smb_coordinator_locks") == 0, "end of an idle lock")
            wait_for(lambda: not hosts.segments(), "its memory's end")
            with client.lock("x/y", replicas=2) as again:
                tokens.append(again.token)
            assert tokens == sorted(set(tokens))
            with pytest.raises(smb.InvalidArgumentError, match="replicas must be 1 or 2, not 3"):
                client.lock("x/y", replicas=3)


def test_a_shared_lock_outlives_its_host(tmp_path: Path) -> None:
    """Two share it while each host is lost in turn: both hold it on under one token; a third has it after both."""
    with running_daemons(tmp_path) as daemons:
        hosts = Hosts(daemons, "--session-lease", "5")
        with hosts.connect() as one, hosts.connect() as two, hosts.connect() as third:
            tokens = [0]
            for name in NAMES:
                held = [each.lock("x/y", ttl=3.0, replicas=2, shared=True).acquire() for each in (one, two)]
                shared = held[0].token
                assert held[1].token == shared > tokens[-1]
                hosts.lose(name)
                for lock in held:
                    lock.check()
                with pytest.raises(smb.TimeoutError):
                    third.lock("x/y", timeout=0.2, replicas=2).acquire()
                for lock in held:
                    lock.release()
                with third.lock("x/y", timeout=TIMEOUT_S, replicas=2) as alone:
                    assert alone.token > shared
                    tokens.append(alone.token)
                hosts.replace(name)


def test_locks_of_a_training_are_made_anew_with_two_copies(tmp_path: Path) -> None:
    """The lock of joining is freed when it is idle. Who joins next does not say how many copies the training has."""
    with running_daemons(tmp_path) as daemons:
        hosts = Hosts(daemons, "--session-lease", "5", "--idle-names", "5")
        with hosts.connect() as client, hosts.connect() as other:
            values = [np.zeros(10, np.float32) for _ in range(2)]
            with smb.train.join(client, "run", values[0], DiLoCo(every=EVERY), replicas=2):
                wait_for(lambda: hosts.coordinator.metric("smb_coordinator_locks") == 1, "the worker's own lock alone")
                smb.train.join(other, "run", values[1]).close()
                found = client._coordinator.open_buffer("run/setup", 0.0, TIMEOUT_S, kind=pb.LOCK)
                assert found.layout.segments[0].backup
                with pytest.raises(smb.NotFoundError, match="there is no such training"):
                    smb.train.join(other, "walk", values[1])
                with pytest.raises(smb.NotFoundError):  # and has not made its lock
                    client._coordinator.open_buffer("walk/setup", 0.0, TIMEOUT_S, kind=pb.LOCK)
