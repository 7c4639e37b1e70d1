"""A contribution made in the background counts once for each element, whatever fails under it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import smb
from smb.train.exchange.mover import ArrayMover
from smb.train.parameters import ArrayParameters
from smb.train.traits import ELASTIC
from tests.support.transports import FAR

SIZE = 300_001


class Contribution(ArrayMover):
    """What adds a difference to a buffer, with one that is given to it."""

    def __init__(self, buffer: smb.Buffer) -> None:
        super().__init__(buffer, ArrayParameters(np.zeros(buffer.size, np.float32), "a test"), ELASTIC)

    def add_of(self, delta: np.ndarray) -> None:
        """Begin to add it."""
        if not self.under_way:
            self.difference[:] = delta
        self.start()


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    """Two servers: the tests here restart them."""
    with smb.LocalCluster(servers=2, capacity="64MiB") as running:
        yield running


@pytest.fixture
def delta() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Whole numbers: their sums in float32 are exact."""
    return (np.arange(SIZE) % 251 + 1).astype(np.float32)


def test_it_counts_once(cluster: smb.LocalCluster, delta: np.ndarray) -> None:
    """Several in turn: the sum is theirs, and nothing is under way after wait()."""
    with smb.connect(cluster.address) as client:
        buffer = client.create("w", SIZE)
        contribution = Contribution(buffer)
        contribution.wait()  # of nothing
        for _ in range(3):
            contribution.add_of(delta)
            assert contribution.under_way
            contribution.wait()
            assert not contribution.under_way
        np.testing.assert_array_equal(buffer.read(), 3 * delta)
        client.delete("w")


def test_a_second_one_waits_for_the_first(cluster: smb.LocalCluster, delta: np.ndarray) -> None:
    """Two at a time are refused, and the second is not sent."""
    with smb.connect(cluster.address) as client:
        buffer = client.create("w", SIZE)
        contribution = Contribution(buffer)
        contribution.add_of(delta)
        with pytest.raises(smb.InvalidArgumentError, match="not finished"):
            contribution.add_of(delta)
        contribution.wait()
        np.testing.assert_array_equal(buffer.read(), delta)
        client.delete("w")


def test_a_lost_server_surfaces_and_still_each_element_counts_once(
    cluster: smb.LocalCluster, delta: np.ndarray
) -> None:
    """A server is away for longer than the client waits: wait() raises as often as it is asked, and once the server
    is back, finishes; what the other server had got does not count twice.
    """
    with (
        smb.connect(cluster.address, transport=FAR, timeout=0.5) as hasty,
        smb.connect(cluster.address, transport=FAR, timeout=30) as patient,
    ):
        buffer = hasty.create("w", SIZE, stripe="64KiB")
        buffer.read(0, 1)
        contribution = Contribution(buffer)
        cluster.servers[1].kill()
        contribution.add_of(delta)
        for _ in range(2):
            with pytest.raises((smb.UnavailableError, smb.TimeoutError)):
                contribution.wait()
            assert contribution.under_way
        cluster.servers[1].start()
        watched = patient.open("w")
        watched.read()  # its server serves again
        for _ in range(50):
            try:
                contribution.wait()
                break
            except (smb.UnavailableError, smb.TimeoutError):
                continue  # the hasty client has not found it yet
        np.testing.assert_array_equal(watched.read(), delta)
        hasty.delete("w")


def test_a_restart_in_the_middle_is_not_noticed(cluster: smb.LocalCluster, delta: np.ndarray) -> None:
    """kill -9 and restart of each server under contributions that follow one another: none fails, each counts."""
    with smb.connect(cluster.address, transport=FAR, timeout=30) as client:
        buffer = client.create("w", SIZE, stripe="64KiB")
        contribution = Contribution(buffer)
        for turn in range(24):
            restart = None
            if turn % 8 == 3:
                server = cluster.servers[turn // 8 % 2]
                restart = threading.Thread(target=lambda server=server: (server.kill(), server.start()))
                restart.start()
            contribution.add_of(delta)
            contribution.wait()
            if restart is not None:
                restart.join()
        np.testing.assert_array_equal(buffer.read(), 24 * delta)
        client.delete("w")


def test_what_nobody_can_take_surfaces(cluster: smb.LocalCluster, delta: np.ndarray) -> None:
    """A deleted buffer, a closed client: wait() says so each time, and abandon() forgets it."""
    with smb.connect(cluster.address) as client:
        buffer = client.create("w", SIZE)
        buffer.read(0, 1)
        contribution = Contribution(buffer)
        client.delete("w")
        contribution.add_of(delta)
        for _ in range(2):
            with pytest.raises(smb.NotFoundError):
                contribution.wait()
        contribution.abandon()
        contribution.wait()
        contribution = Contribution(client.create("w", SIZE))
        contribution.add_of(delta)
        contribution.wait()
        client.delete("w")
    with pytest.raises(smb.Error, match="closed"):
        contribution.add_of(delta)
