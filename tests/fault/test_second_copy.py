"""Buffers of two copies: a server and its memory vanish at a random moment, and nobody notices but by a short wait."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import smb
from tests.fault.long import LIMIT_S, LONG, PAUSE_AFTER, PAUSE_S, seed, times
from tests.support import second_copy
from tests.support.clients import in_process
from tests.support.daemons import Daemon, Daemons, running_daemons, stop, wait_for
from tests.support.history import count_notes

pytestmark = pytest.mark.timeout(LIMIT_S)

NAMES = ("a", "b", "c")
ROUNDS = 100


class Pool:
    """A coordinator, three servers, and clients that use buffers with `replicas` copies."""

    def __init__(
        self, daemons: Daemons, directory: Path, *options: str, certificates: Path | None = None, replicas: int = 2
    ) -> None:
        """`certificates`: with them, and tokens that are good for some seconds."""
        self._options = options
        self._replicas = replicas
        self._daemons, self._directory = daemons, directory
        self._certificates = certificates
        self.coordinator = self._start_coordinator()
        self.address = self.coordinator.address
        self.servers = {name: self._start(name) for name in NAMES}
        self._left = contextlib.ExitStack()
        self._clients: list[tuple[Any, Any]] = []
        self.histories: list[Path] = []
        self._round = 0

    def _start_coordinator(self, listen: str = "127.0.0.1:0") -> Daemon:
        lasting = ("--token-lifetime", "4") if self._certificates else ()
        return self._daemons.coordinator(listen, None, *self._shown("coordinator"), *lasting)

    def _shown(self, name: str) -> tuple[str, ...]:
        return ("--credentials", str(self._certificates / name)) if self._certificates else ()

    def _start(self, name: str) -> Daemon:
        server = self._daemons.memory_server(self.address, name, *self._options, *self._shown(name))
        assert server.address
        return server

    def begin(self, ways: tuple[str, ...]) -> None:
        """Make the buffers of a round and start a client for each way."""
        self._round += 1
        self._stop = self._directory / f"stop-{self._round}"
        with smb.connect(self.address) as client:
            wait_for(lambda: all(server.alive for server in client.servers()), "all servers")
            second_copy.make(client, self._replicas)
        self._left = contextlib.ExitStack()
        self.histories = [self._directory / f"history-{self._round}-{number}" for number in range(len(ways))]
        rounds = PAUSE_AFTER // second_copy.CHANGES
        self._clients = [
            self._left.enter_context(
                in_process(
                    second_copy.work, self.address, way, number, self.histories[number], self._stop, PAUSE_S, rounds
                )
            )
            for number, way in enumerate(ways)
        ]
        self.wait_for_work(60.0)

    def wait_for_work(self, deadline_s: float) -> float:
        """Every client ends some more calls; return how long that took."""
        began, before = time.monotonic(), [count_notes(path) for path in self.histories]

        def went_on() -> bool:
            for process, messages in self._clients:
                assert process.exitcode is None, messages.get(timeout=5)
            return all(
                count_notes(path) >= count + second_copy.TWO_ROUNDS
                for path, count in zip(self.histories, before, strict=True)
            )

        wait_for(went_on, "work of every client", deadline_s)
        return time.monotonic() - began

    def end(self) -> int:
        """Stop the clients, check all that they were told, and return how many segments still have two copies."""
        self._stop.touch()
        with self._left:
            told = sorted(messages.get(timeout=90) for _, messages in self._clients)
        assert not any(why for _, _, why in told), told
        with smb.connect(self.address) as client:
            second_copy.check(client, [done for _, done, _ in told], self.histories)
            compared = second_copy.check_copies(client, self._daemons.memory)
            second_copy.drop(client)
        return compared

    def wait_for_copies(self, deadline_s: float, without: str = "") -> float:
        """Every segment has two copies again, on other servers than `without`; return how long that took."""
        began = time.monotonic()
        with smb.connect(self.address) as client:
            wait_for(lambda: second_copy.are_whole(client, without), "two copies of each segment", deadline_s)
        return time.monotonic() - began

    def wait_for_copying(self, target: str) -> None:
        """A segment is being copied there."""
        with smb.connect(self.address) as client:
            wait_for(
                lambda: any(place.copying_to == target for info in client.list() for place in info.layout.segments),
                f"a copy on its way to {target}",
                30.0,
            )

    def kill(self, name: str) -> None:
        """A host dies: the process and its memory."""
        self.servers[name].kill()
        second_copy.lose(self._daemons.memory, name)

    def restart(self, name: str) -> None:
        """It comes back, with what it has in memory."""
        self.servers[name] = self._start(name)


@pytest.mark.skipif(not LONG, reason="each_host_dies has it; SMB_LONG=1")
@pytest.mark.parametrize("ways", [("auto", "tcp"), ("tcp", "tcp", "tcp")], ids="+".join)
def test_a_host_dies(tmp_path: Path, ways: tuple[str, ...]) -> None:
    """Whichever server dies, at whichever moment: nothing acknowledged is lost, doubled or torn, no read goes back, no
    call fails, and the copies that are left are equal.
    """
    rng = random.Random(seed())
    longest = 0.0
    with running_daemons(tmp_path) as daemons:
        pool = Pool(daemons, tmp_path)
        for _ in range(ROUNDS):
            pool.begin(ways)
            pass_a_moment(rng)
            name = rng.choice(NAMES)
            pool.kill(name)
            longest = max(longest, pool.wait_for_work(60.0))
            pool.end()
            pool.restart(name)
    print(f"{ROUNDS} hosts died; work went on within {longest:.2f} s")


def pass_a_moment(rng: random.Random) -> None:
    """Calls are at another step each time."""
    moment = time.monotonic() + rng.uniform(0.0, 0.2)
    while time.monotonic() < moment:
        pass


# More than 5 s: the host is away for a lease, and copied to again.
def test_each_host_dies_in_turn_with_credentials(tmp_path: Path, certificates: Path) -> None:
    """The same where servers feed each other inside TLS, and tokens are of an epoch and expire meanwhile."""
    each_host_dies(tmp_path, NAMES * 20 if LONG else NAMES[:1], certificates)


@pytest.mark.parametrize("rounds", [1, *([20] if LONG else [])])
# More than 5 s: each host in turn is away for a lease, and copied to again.
def test_each_host_dies_in_turn(tmp_path: Path, rounds: int) -> None:
    """Lost copies are made anew while clients work: then any other host may die. Nothing is lost, doubled or stale."""
    each_host_dies(tmp_path, NAMES * rounds)


def each_host_dies(tmp_path: Path, names: tuple[str, ...], certificates: Path | None = None) -> None:
    rng = random.Random(seed())
    with running_daemons(tmp_path) as daemons:
        pool = Pool(daemons, tmp_path, certificates=certificates)
        pool.begin(("tcp", "auto"))
        longest = copied = 0.0
        for name in names:
            pass_a_moment(rng)
            pool.kill(name)
            longest = max(longest, pool.wait_for_work(60.0))
            copied = max(copied, pool.wait_for_copies(60.0, without=name))
            pool.restart(name)
        assert pool.end() == second_copy.SEGMENTS
    print(f"{len(names)} hosts died; work went on within {longest:.2f} s, two copies within {copied:.2f} s")


def test_a_copy_is_interrupted(tmp_path: Path) -> None:
    """The server that is being copied to dies, or stands still: work goes on without it, and another one gets a copy.
    One that wakes up with a part of a copy is not taken for a backup.
    """
    with running_daemons(tmp_path) as daemons:
        pool = Pool(daemons, tmp_path, "--copy-rate", "128KiB")
        pool.begin(("tcp", "auto"))
        pool.restart("d")  # empty: it has the most room
        pool.kill("a")
        pool.wait_for_copying("d")
        pool.kill("d")
        pool.wait_for_work(20.0)
        pool.wait_for_copies(60.0)
        if LONG:
            pool.restart("d")
            pool.kill("b")
            pool.wait_for_copying("d")  # there is no other
            stop(pool.servers["d"].pid)
            pool.wait_for_work(20.0)
            os.kill(pool.servers["d"].pid, signal.SIGCONT)
            pool.wait_for_copies(60.0)
        assert pool.end() == second_copy.SEGMENTS


def test_a_server_is_killed_and_comes_back(tmp_path: Path) -> None:
    """With its memory: a backup goes on where it was, or was given up; a primary gives its place up."""
    rng = random.Random(seed())
    with running_daemons(tmp_path) as daemons:
        pool = Pool(daemons, tmp_path)
        for _ in range(times(1, 25)):
            pool.begin(("tcp", "auto"))
            name = rng.choice(NAMES)
            pool.servers[name].kill()
            pool.restart(name)
            pool.wait_for_work(60.0)
            pool.end()


@pytest.mark.skipif(not LONG, reason="waits for leases; SMB_LONG=1")
@pytest.mark.parametrize("what", [*NAMES, "coordinator"])
def test_a_stopped_process(tmp_path: Path, what: str) -> None:
    """A server, or the coordinator, stands still for 20 s and goes on: a deposed primary answers nothing stale."""
    with running_daemons(tmp_path) as daemons:
        pool = Pool(daemons, tmp_path)
        pool.begin(("tcp", "auto"))
        pid = pool.coordinator.pid if what == "coordinator" else pool.servers[what].pid
        stop(pid)
        end = time.monotonic() + 20
        if what == "coordinator":
            pool.wait_for_work(5.0)
        else:
            pool.wait_for_work(15.0)  # the lease
        while time.monotonic() < end:
            pool.wait_for_work(10.0)
        os.kill(pid, signal.SIGCONT)
        pool.wait_for_work(10.0)
        pool.end()


@pytest.mark.skipif(not LONG, reason="tests/api/test_second_copy.py has it; SMB_LONG=1")
def test_nobody_dies(tmp_path: Path) -> None:
    """All copies are equal at rest, and every segment has two."""
    with running_daemons(tmp_path) as daemons:
        pool = Pool(daemons, tmp_path)
        pool.begin(("tcp", "auto"))
        assert pool.end() == second_copy.SEGMENTS
