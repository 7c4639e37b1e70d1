"""One client's calls of every kind, while the segments of its buffers move from server to server: each does exactly
what it does elsewhere. tests/fault/test_drain.py has several clients, and kills.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

import smb
from smb.rpc.coordinator_client import Coordinator
from tests.fault.long import seed, times
from tests.support.daemons import wait_for

COUNT = 60_000  # several chunks on each server
ROUNDS = times(3, 60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=3, capacity="32MiB") as made:
        yield made


class Shadowed:
    """Two buffers, and arrays that get the same changes."""

    def __init__(self, client: smb.Client, number: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.buffer = client.create(f"w{number}", COUNT, "float32", stripe="16KiB")
        self.source = client.create(f"s{number}", like=self.buffer)
        self.array = rng.integers(0, 100, COUNT).astype(np.float32)
        self.added = rng.integers(0, 100, COUNT).astype(np.float32)
        self.buffer.write(self.array)
        self.source.write(self.added)
        self.calls = 0

    def part(self) -> tuple[int, np.ndarray]:
        """Return where a part of it begins, and values for it."""
        first, last = sorted(self.rng.integers(0, COUNT + 1, 2))
        return int(first), self.rng.integers(0, 50, last - first).astype(np.float32)

    def write(self) -> None:
        """A part."""
        at, values = self.part()
        self.buffer.write(values, at)
        self.array[at : at + len(values)] = values

    def add(self) -> None:
        """To a part, and take the new values."""
        at, values = self.part()
        found = self.buffer.accumulate(values, at, fetch=True)
        self.array[at : at + len(values)] += values
        assert found is not None
        assert np.array_equal(found, self.array[at : at + len(values)])

    def add_sparse(self) -> None:
        """To some elements."""
        where = np.flatnonzero(self.rng.random(COUNT) < 0.01)
        self.buffer.accumulate_sparse(where, np.ones(len(where), np.float32))
        self.array[where] += 1

    def add_narrow(self) -> None:
        """As bfloat16, in which these numbers are exact."""
        at, values = self.part()
        self.buffer.accumulate(values, at, wire="bfloat16")
        self.array[at : at + len(values)] += values

    def fill(self) -> None:
        """All of it."""
        self.buffer.fill(float(self.calls % 7))
        self.array[:] = self.calls % 7

    def add_the_other(self) -> None:
        """Where the memory is, as long as both are on the same servers."""
        self.buffer.accumulate_from(self.source)
        self.array += self.added

    def step(self) -> None:
        """By a rule without a state."""
        self.buffer.apply("sgd", self.source, lr=1.0)
        self.array -= self.added

    def add_async(self) -> None:
        """Several at once, on the same elements."""
        at, values = self.part()
        futures = [self.buffer.accumulate_async(values, at) for _ in range(3)]
        for future in futures:
            future.result()
        self.array[at : at + len(values)] += 3 * values

    def read(self) -> None:
        """A part, and compare."""
        at, values = self.part()
        assert np.array_equal(self.buffer.read(at, len(values)), self.array[at : at + len(values)])

    def use(self) -> None:
        """Make one call."""
        calls: list[Callable[[], None]] = [
            self.write, self.add, self.add_sparse, self.add_narrow, self.fill, self.add_the_other, self.step,
            self.add_async, self.read, self.read,
        ]  # fmt: skip
        calls[self.rng.integers(len(calls))]()
        self.calls += 1


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_calls_while_their_segments_move(cluster: smb.LocalCluster, transport: str) -> None:
    """Each buffer is made anew before a move, so that each call may be the first that its old server sends away."""
    number = seed()
    rng = np.random.default_rng(number)
    with smb.connect(cluster.address, transport=transport) as client, closing(Coordinator(cluster.address)) as asked:
        for round_ in range(ROUNDS):
            shadowed = Shadowed(client, round_, rng)
            server = f"server-{rng.integers(3)}"
            moved = threading.Event()

            def move(server: str = server, moved: threading.Event = moved) -> None:
                asked.drain_server(server, 10.0)
                wait_for(lambda: not asked.drain_server(server, 10.0).segment_count, f"{server} empty", 20.0)
                moved.set()

            for _ in range(20):
                shadowed.use()
            mover = threading.Thread(target=move)
            mover.start()
            end = time.monotonic() + 30.0
            after = 20
            while after:
                shadowed.use()
                after -= moved.is_set()
                assert time.monotonic() < end, f"{server} is not empty"
            mover.join()
            assert not any(place.server == server for place in client.open(f"w{round_}").layout.segments)
            assert np.array_equal(shadowed.buffer.read(), shadowed.array)
            asked.drain_server(server, 10.0, undo=True)
            for name in (f"w{round_}", f"s{round_}"):
                client.delete(name)
