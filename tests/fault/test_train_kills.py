"""Members of a round are killed and stopped, the server under them too: each contribution counts once, or not at all,
and the weights are the reference's to the bit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import smb
import smb.train
from smb.train import DiLoCo
from smb.train.scheme import Values
from tests.fault.long import LIMIT_S, some
from tests.support.clients import in_process
from tests.support.daemons import wait_for
from tests.support.training import COUNT, LEASE_S, Crew, delta_of, nesterov_round, start, take_part, waiting

Connect = Callable[..., smb.Client]

pytestmark = pytest.mark.timeout(LIMIT_S)

SCHEME = DiLoCo(every=1, outer_lr=0.7, outer_momentum=0.9)
SENT = ["train-sent"]
CLOSING = [
    "train-marked",
    "train-claimed",
    "train-decided",
    "train-added:1",
    "train-added:2",
    "train-computed",
    "train-built",
    "train-copied",
    "train-committed",
]


class Reference:
    """Weights and momentum, round by round."""

    def __init__(self) -> None:
        self.weights, self.momentum = start(), np.zeros(COUNT, np.float32)

    def close(self, *contributions: tuple[int, int]) -> Values:
        """Close a round of these (worker, step), in the order of their slots; return the weights."""
        deltas = [(delta_of(self.weights, worker, [step]), 1.0) for worker, step in contributions]
        self.weights, self.momentum = nesterov_round(self.weights, self.momentum, deltas, 0.7, 0.9)
        return self.weights


@pytest.fixture
def crew(connect: Connect) -> Iterator[Crew]:
    """Two workers that do not die, on slots 0 and 1."""
    two = Crew(connect, 2, SCHEME, lease=LEASE_S)
    yield two
    two.close()


def _both(crew: Crew, expected: Values) -> None:
    for values in crew.values:
        assert np.array_equal(values, expected)


def _point(text: str) -> tuple[str, int]:
    name, _, count = text.partition(":")
    return name, int(count or 1)


@pytest.mark.parametrize("point", SENT + CLOSING)
def test_killed(cluster: smb.LocalCluster, crew: Crew, point: str) -> None:
    """The third member arrives last, so closes the round, and is killed at one step of that: the others finish the
    round, with its contribution if it had been marked, and go on alone."""
    reference, (name, count) = Reference(), _point(point)
    with in_process(take_part, cluster.address, 2, 1, name, count) as (process, messages):
        assert messages.get(timeout=60) == "joined"
        with waiting(lambda: crew.step(0)), waiting(lambda: crew.step(1)):
            wait_for(lambda: crew.marked() == {0, 1}, "the first two")
            crew.clients[0].create("go", 1)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    there = [(0, 0), (1, 0)] if point in SENT else [(0, 0), (1, 0), (2, 0)]
    _both(crew, reference.close(*there))
    crew.step_all()
    _both(crew, reference.close((0, 1), (1, 1)))
    assert [w.alive for w in smb.train.status(crew.clients[0], "run").workers] == [True, True, False]


@pytest.mark.parametrize(
    ("point", "later"),
    some(
        [*((point, 0) for point in CLOSING), *((point, 1) for point in ("train-sent", "train-marked", "train-built"))]
    ),
)
def test_stopped(cluster: smb.LocalCluster, crew: Crew, point: str, later: int) -> None:
    """As above, but stopped past its lease, and woken after the others have finished the round, and `later` more (what
    it writes to is in use again, or is not): what it still does changes nothing, and it joins again by itself."""
    reference, (name, count) = Reference(), _point(point)
    with in_process(take_part, cluster.address, 2, 1, name, count, signal.SIGSTOP) as (process, messages):
        assert messages.get(timeout=60) == "joined"
        with waiting(lambda: crew.step(0)), waiting(lambda: crew.step(1)):
            wait_for(lambda: crew.marked() == {0, 1}, "the first two")
            crew.clients[0].create("go", 1)
        there = [(0, 0), (1, 0)] if point in SENT else [(0, 0), (1, 0), (2, 0)]
        _both(crew, reference.close(*there))
        for number in range(1, 1 + later):
            crew.step_all()
            _both(crew, reference.close((0, number), (1, number)))
        assert messages.empty()
        os.kill(process.pid, signal.SIGCONT)
        rejoins, values = messages.get(timeout=60)
        assert rejoins == 1 or not later
        assert np.array_equal(values, reference.weights)
        assert np.array_equal(crew.workers[0].shared(), reference.weights)
        assert messages.get(timeout=60) == "left"
    for number in range(1 + later, 4):
        crew.step_all()
        _both(crew, reference.close((0, number), (1, number)))


@pytest.mark.parametrize("point", ["train-built", "train-copied"])
def test_the_last_member_killed(cluster: smb.LocalCluster, connect: Connect, point: str) -> None:
    """Nobody is left who would finish its round: who looks at the weights does it, and who joins goes on from there."""
    client, reference = connect(), Reference()
    smb.train.join(client, "run", start(), SCHEME, lease=LEASE_S).close()
    client.create("go", 1)
    with in_process(take_part, cluster.address, 0, 1, point) as (process, messages):
        assert messages.get(timeout=60) == "joined"
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    expected = reference.close((0, 0))
    assert np.array_equal(smb.train.shared(client, "run"), expected)
    values = np.zeros(COUNT, np.float32)
    with smb.train.join(client, "run", values):
        assert np.array_equal(values, expected)


def test_killed_server(connect: Connect) -> None:
    """The servers are killed, one after the other, and started again while members wait in mid-round and while others
    compute: the result is the same."""
    reference = Reference()
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster:
        clients: list[smb.Client] = []

        def join() -> smb.Client:
            clients.append(smb.connect(cluster.address, transport=["shm", "tcp"][len(clients) % 2], timeout=30))
            return clients[-1]

        # Longer than a server can need to come back beside load: nobody is lost here.
        crew = Crew(join, 2, SCHEME, lease=10.0)
        for number in range(4):
            server = cluster.servers[number % 2]
            with waiting(lambda: crew.step(0)):
                wait_for(lambda: crew.marked() == {0}, "the first one")
                server.kill()
                with waiting(lambda: crew.step(1)):
                    server.start()
            _both(crew, reference.close((0, number), (1, number)))
        crew.close()
        for client in clients:
            client.close()


def test_random_kills(cluster: smb.LocalCluster, crew: Crew) -> None:
    """A third member is killed at a random moment of its rounds, again and again: the two others agree to the bit after
    every round, and the weights stay finite."""
    random = np.random.default_rng(seed := int.from_bytes(os.urandom(4), "little"))
    print(f"seed {seed}")
    crew.clients[0].create("go", 1)
    for _ in range(3):
        with in_process(take_part, cluster.address, 2, 1000) as (process, messages):
            assert messages.get(timeout=60) == "joined"
            for _ in range(random.integers(1, 30)):
                crew.step_all()
                assert np.array_equal(*crew.values)
            process.kill()
            for _ in range(2):
                crew.step_all()
                assert np.array_equal(*crew.values)
    assert np.isfinite(crew.values[0]).all()
