"""Counters and locks whose clients and servers are killed: what everybody saw, and when, is a history that one counter
and one lock can have.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from tests.fault.long import LIMIT_S, LONG, seed, times
from tests.support.checkers import Run, check_locks, check_tickets, search_lock_order
from tests.support.clients import in_process
from tests.support.daemons import Daemon, Daemons, running_daemons, wait_for
from tests.support.history import (
    LockHistory,
    count_notes,
    draw_tickets,
    read_notes,
    take_turns,
    tickets_of,
)

pytestmark = pytest.mark.timeout(LIMIT_S)

EPOCHS = times(1, 25)  # each with a cluster and a history of its own, so that the search stays short
ROUNDS = times(5, 8)
CLIENTS = 3
NOTES_A_ROUND = 30


class Crowd:
    """Clients, each in a process of its own, that are killed and replaced, and the two servers that they use."""

    def __init__(self, daemons: Daemons, directory: Path, work: Callable[..., None], ways: tuple[str, ...]) -> None:
        self._daemons, self._directory, self._work, self._ways = daemons, directory, work, ways
        self.address = daemons.coordinator().address
        self._servers = [daemons.memory_server(self.address, name) for name in ("a", "b")]
        assert all(server.address for server in self._servers)
        self._stop = directory / "stop"
        self._left = contextlib.ExitStack()
        self._present: list[tuple[Any, Path]] = []
        self.histories: list[Path] = []

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Start them; afterwards let each end its call and leave, without a failure."""
        with self._left:
            for _ in range(CLIENTS):
                self._start()
            yield
            self._stop.touch()
            for process, _ in self._present:
                process.join(60)
                assert process.exitcode == 0, f"a client ended with {process.exitcode}"

    def wait_until_all_got_on(self) -> None:
        """Each that is there makes some more notes."""
        before = {path: count_notes(path) for _, path in self._present}

        def all_got_on() -> bool:
            for process, _ in self._present:
                assert process.exitcode is None, f"a client ended with {process.exitcode}"
            return all(count_notes(path) >= count + NOTES_A_ROUND for path, count in before.items())

        wait_for(all_got_on, "progress of every client", 60)

    def kill_a_server(self, rng: random.Random) -> None:
        """And start it again at once."""
        index = rng.randrange(len(self._servers))
        self._servers[index].kill()
        self._servers[index] = self._back("ab"[index])

    def kill_a_client(self, rng: random.Random) -> None:
        """And start another one in its place."""
        process, _ = self._present.pop(rng.randrange(len(self._present)))
        process.kill()
        process.join()
        assert process.exitcode == -9
        self._start()

    def _back(self, name: str) -> Daemon:
        server = self._daemons.memory_server(self.address, name)
        assert server.address
        return server

    def _start(self) -> None:
        number = len(self.histories)
        path = self._directory / f"{number}.history"
        way = self._ways[number % len(self._ways)]
        process, _ = self._left.enter_context(in_process(self._work, self.address, way, path, self._stop))
        self._present.append((process, path))
        self.histories.append(path)


def go_through_kills(crowd: Crowd, rng: random.Random) -> None:
    """Clients and servers are killed in turn, at random moments."""
    fired = 0
    with crowd.at_work():
        crowd.wait_until_all_got_on()
        began = time.monotonic()
        before = sum(map(count_notes, crowd.histories))
        crowd.wait_until_all_got_on()
        done, warm_up_s = sum(map(count_notes, crowd.histories)) - before, time.monotonic() - began
        for turn in range(ROUNDS):
            moment = time.monotonic() + rng.uniform(0.0, 0.1)
            while time.monotonic() < moment:
                pass
            (crowd.kill_a_server, crowd.kill_a_client)[turn % 2](rng)
            fired += 1
            crowd.wait_until_all_got_on()
    Run(done, warm_up_s, ROUNDS, fired, last_operation_succeeded=True).check(rate_min=10)


@pytest.mark.parametrize("ways", [*([("tcp",)] if LONG else []), ("tcp", "shm")], ids="+".join)
def test_counters(tmp_path: Path, ways: tuple[str, ...]) -> None:
    """What fetch_add(1) gave is unique, without a gap that nobody can have taken, and never against real time."""
    rng = random.Random(seed())
    for epoch in range(EPOCHS):
        directory = tmp_path / str(epoch)
        directory.mkdir()
        with running_daemons(directory) as daemons:
            crowd = Crowd(daemons, directory, draw_tickets, ways)
            with smb.connect(crowd.address, transport="tcp", timeout=60) as client:
                counter = client.create("counter", 8, "int64")
                go_through_kills(crowd, rng)
                last = counter.fetch_add(0, 1)
            tickets = [ticket for path in crowd.histories for ticket in tickets_of(read_notes(path))]
            check_tickets(tickets, 0, last)
            unknown = sum(ticket.value is None for ticket in tickets)
            print(f"{ROUNDS} kills, {len(tickets)} tickets of which {unknown} unknown, {last} counted: 0 bad")


def test_locks(tmp_path: Path) -> None:
    """Nobody held the lock while another did, tokens grew, and nothing was written under a lock that was lost."""
    rng = random.Random(seed())
    for epoch in range(EPOCHS):
        directory = tmp_path / str(epoch)
        directory.mkdir()
        with running_daemons(directory) as daemons:
            crowd = Crowd(daemons, directory, take_turns, ("tcp", "shm"))
            with smb.connect(crowd.address, transport="tcp", timeout=60) as client:
                buffer = client.create("locked", 40_000, "int64", stripe="64KiB")
                go_through_kills(crowd, rng)
                with buffer.lock(timeout=60) as lock:
                    buffer.write(np.full(buffer.size, lock.token), fence=lock)
                    assert (buffer.read() == lock.token).all()
            history = LockHistory()
            for number, path in enumerate(crowd.histories):
                history.add(number, read_notes(path))
            check_locks(history.holdings, history.writes)
            search_lock_order(history.events, seconds=60)
            lost = sum(event.kind == "lost" for event in history.events)
            print(f"{ROUNDS} kills, {len(history.events)} acquires and releases, {lost} lost: 0 bad")
