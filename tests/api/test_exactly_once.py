"""Calls count exactly once although servers are killed under them; what can't be known is called so, and found out."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import smb
from tests.support.daemons import add_over_kills
from tests.support.transports import EACH_WAY, FAR

SIZE = 300_001
ROUNDS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    """Two servers: the tests here restart them."""
    with smb.LocalCluster(servers=2, capacity="64MiB") as running:
        yield running


def delta() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(SIZE) % 251 + 1


@pytest.mark.parametrize("transport", EACH_WAY)
def test_additions_go_on_over_kills(cluster: smb.LocalCluster, transport: str) -> None:
    """kill -9 and restart of a server in the middle of additions: none fails, each counts once, over each transport."""
    with smb.connect(cluster.address, transport=transport, timeout=30) as client:
        buffer = client.create("w", SIZE, "int64", stripe="64KiB")
        done = add_over_kills(cluster, buffer, delta(), ROUNDS)
        np.testing.assert_array_equal(buffer.read(), done * delta())
        client.delete("w")


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_counters_give_each_number_once_over_kills(cluster: smb.LocalCluster, dtype: str) -> None:
    """fetch_add and compare_swap over a restart: every old value is given once, none is left out."""
    with smb.connect(cluster.address, transport=FAR, timeout=30) as client:
        counter = client.create("c", 8, dtype, servers=["server-0"])
        given: list[float] = []
        for _ in range(3):
            last = len(given) + 400
            killed = None
            while len(given) < last:
                given.append(counter.fetch_add(3, 1))
                if killed is None and len(given) == last - 200:
                    killed = threading.Thread(target=_restart, args=(cluster.servers[0],))
                    killed.start()
            assert killed is not None
            killed.join()  # it serves before it says so: the next kill would hit its start
            swapped = counter.compare_swap(3, len(given), len(given) + 5)
            assert swapped == len(given)
            counter.fetch_add(3, -5)
        assert given == list(range(len(given)))
        client.delete("c")


def _restart(server: object) -> None:
    server.kill()  # type: ignore[attr-defined]
    server.start()  # type: ignore[attr-defined]


def test_servers_combine_buffers_once_over_kills(cluster: smb.LocalCluster) -> None:
    """accumulate_from and accumulate(fetch=True), repeated after a lost connection, count once; the fetched is new
    enough.
    """
    with smb.connect(cluster.address, transport=FAR, timeout=30) as client:
        target = client.create("t", SIZE, "int64", stripe="64KiB")
        source = client.create("s", like=target)
        source.write(delta())
        for turn in range(1, 41):
            if turn % 10 == 5:
                threading.Thread(target=_restart, args=(cluster.servers[turn // 10 % 2],)).start()
            if turn % 2:
                target.accumulate_from(source)
            else:
                got = target.accumulate(delta(), fetch=True)
                np.testing.assert_array_equal(got, turn * delta())
        np.testing.assert_array_equal(target.read(), 40 * delta())
        for name in "ts":
            client.delete(name)


def test_what_became_of_a_failed_call_is_found_out(cluster: smb.LocalCluster) -> None:
    """A call that ran out of time with a server gone: settle says what it missed; that done again, it counts once."""
    with (
        smb.connect(cluster.address, transport=FAR, timeout=0.5) as hasty,
        smb.connect(cluster.address, transport=FAR, timeout=30) as patient,
    ):
        buffer = hasty.create("w", SIZE, "int64", stripe="64KiB", servers=2)
        buffer.write(np.zeros(SIZE, np.int64))
        cluster.servers[1].kill()
        with pytest.raises(smb.UnavailableError, match="settle") as caught:
            buffer.accumulate(delta())
        with pytest.raises(smb.InvalidArgumentError, match="nothing to settle"):
            buffer.settle(ValueError("something else"))
        cluster.servers[1].start()
        missing = buffer.settle(caught.value, timeout=20)
        assert missing
        for part in missing:
            patient.open("w").accumulate(delta()[part.start : part.stop], part.start)
        np.testing.assert_array_equal(patient.open("w").read(), delta())
        assert sum(len(part) for part in missing) < SIZE  # the server that lived had done its part
        hasty.delete("w")


def test_an_acknowledged_call_has_nothing_to_settle(cluster: smb.LocalCluster) -> None:
    """An error without a call of unknown outcome is refused; a call that was refused leaves nothing to find out."""
    with smb.connect(cluster.address, transport=FAR) as client:
        buffer = client.create("w", 10, "int64")
        with pytest.raises(smb.InvalidArgumentError) as caught:
            buffer.accumulate(np.zeros(11, np.int64))
        with pytest.raises(smb.InvalidArgumentError, match="nothing to settle"):
            buffer.settle(caught.value)
        client.delete("w")
