"""smb drain, undrain and rebalance on a cluster: what they say, and what follows. tests/fault/test_drain.py does it
under load.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from typer.testing import CliRunner

import smb
from smb.tools.cli.main import app
from tests.support import second_copy
from tests.support.daemons import tidy, wait_for

COUNT = 500_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=3, capacity="8MiB") as made:
        yield made


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(cluster, 20.0) as made:
        yield made


def run(cluster: smb.LocalCluster, *words: str, fails: bool = False) -> str:
    answer = CliRunner().invoke(app, [*words, "--coordinator", cluster.address])
    assert (answer.exit_code != 0) == fails, answer.output
    return answer.output + (str(answer.exception) if fails else "")


def used(client: smb.Client) -> dict[str, int]:
    return {server.name: server.used for server in client.servers()}


def test_a_server_is_emptied_and_filled_again(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """Nothing new comes to it, statuses show it, and rebalance brings its share back. Bytes stay as they are."""
    buffer = client.create("w", COUNT, replicas=2)
    buffer.write(np.arange(COUNT, dtype=np.float32))
    assert "server-1 is empty" in run(cluster, "drain", "server-1", "--wait")
    assert "0 segments, 0 B left" in run(cluster, "drain", "server-1")
    assert "stays on server-1" not in cluster.coordinator.log.read_text(), "a copy leaves once the other one confirms"
    assert not any("server-1" in (place.server, place.backup) for place in client.open("w").layout.segments)
    assert "alive, draining" in run(cluster, "status")
    assert [server["draining"] for server in json.loads(run(cluster, "status", "--json"))["servers"]] == [0, 1, 0]
    assert "server-1" not in {place.server for place in client.create("v", 1000).layout.segments}
    with pytest.raises(smb.UnavailableError, match="is being drained"):
        client.create("u", 1000, servers=["server-1"])
    assert "gets new segments again" in run(cluster, "undrain", "server-1")
    wait_for(lambda: used(client)["server-1"] == 0, "an empty server")
    assert "would move" in (shown := run(cluster, "rebalance", "--dry-run"))
    assert 'buffer "w"' in shown
    assert "move from now on" in run(cluster, "rebalance")
    wait_for(lambda: used(client)["server-1"] > 0, "a copy on it")
    # Once copies have moved, their roles may switch.
    wait_for(lambda: "Nothing to move" in run(cluster, "rebalance"), "nothing left to move")
    wait_for(lambda: second_copy.are_whole(client), "two copies of each segment")
    assert np.array_equal(buffer.read(), np.arange(COUNT, dtype=np.float32))
    assert second_copy.check_copies(client, cluster.memory_directory) == len(buffer.layout.segments)


def test_a_buffer_with_one_copy_moves(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """Who has it mapped goes on through its new server: arrays, locks, versions, async calls. It has no view then."""
    buffer = client.create("one", 60_000, servers=["server-2"])
    news = client.create("news", 1000, versions=2, servers=["server-2"])
    buffer.fill(3)
    assert news.publish(np.ones(1000, np.float32)) == 1
    with buffer.lock(ttl=30.0) as lock:
        assert "server-2 is empty" in run(cluster, "drain", "server-2", "--wait")
        buffer.accumulate(np.ones(60_000, np.float32), fence=lock)
    buffer.accumulate(np.full(60_000, 2, np.float32))
    assert (buffer.read() == 6).all()
    assert news.version == 1
    assert news.publish(np.full(1000, 2, np.float32)) == 2
    assert (news.read() == 2).all()
    assert buffer.read_async().result().tolist() == buffer.read().tolist()
    place = client.open("one").layout.segments[0]
    assert (place.server != "server-2", place.backup) == (True, "")
    with pytest.raises(smb.InvalidArgumentError, match=r"or has moved to another server.*use read"):
        buffer.view()
    run(cluster, "undrain", "server-2")


def test_buffers_with_one_copy_even_servers_out(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """Not unless that is asked, since local clients stop mapping them. One of which there is a view stays."""
    buffers = [client.create(f"one/{number}", 200_000, servers=["server-0"]) for number in range(6)]
    for number, buffer in enumerate(buffers):
        buffer.fill(number)
    view = buffers[0].view()
    assert "with one copy could move, too" in run(cluster, "rebalance")
    assert "would move" in (shown := run(cluster, "rebalance", "--dry-run", "--single-copies"))
    assert "could move, too" not in shown
    assert "move from now on" in run(cluster, "rebalance", "--single-copies")

    def places() -> dict[str, str]:
        return {info.name: info.layout.segments[0].server for info in client.list() if info.name.startswith("one/")}

    wait_for(lambda: set(places().values()) == {"server-0", "server-1", "server-2"}, "a share on each server")
    wait_for(
        lambda: not any(place.backup or place.copying_to for info in client.list() for place in info.layout.segments),
        "an end of all moves",
    )
    assert places()["one/0"] == "server-0"
    assert (view == 0).all()
    for number, buffer in enumerate(buffers):
        assert (buffer.read() == number).all()
        buffer.accumulate(np.ones(200_000, np.float32))
        assert (buffer.read() == number + 1).all()


def drained(cluster: smb.LocalCluster, name: str) -> None:
    assert f"{name} is empty" in run(cluster, "drain", name, "--wait")
    run(cluster, "undrain", name)


def test_a_reader_that_was_idle_over_a_move(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """It has mapped the old memory, and does not take what it finds there for the latest version."""
    news = client.create("news", 1000, versions=2, servers=["server-2"])
    plain = client.create("plain", 1000, servers=["server-2"])
    assert news.publish(np.ones(1000, np.float32)) == plain.publish(np.ones(1000, np.float32)) == 1
    with smb.connect(cluster.address) as reader:
        theirs = [reader.open(name) for name in ("news", "plain")]
        assert [buffer.version for buffer in theirs] == [1, 1]
        drained(cluster, "server-2")
        assert news.publish(np.full(1000, 2, np.float32)) == plain.publish(np.full(1000, 2, np.float32)) == 2
        assert [buffer.version for buffer in theirs] == [2, 2]
        assert all((buffer.read() == 2).all() for buffer in theirs)


def test_those_who_wait_for_a_lock_over_a_move(cluster: smb.LocalCluster) -> None:
    """For longer than their client's timeout: nobody fails, and who came first is first."""
    with smb.connect(cluster.address, timeout=1.0) as client:
        buffer = client.create("turns", 1000, servers=["server-2"])
        order: list[int] = []

        def take(number: int) -> None:
            with client.open("turns").lock(timeout=None):
                order.append(number)

        threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
        with buffer.lock(ttl=30.0):
            for thread in threads:
                thread.start()
                passed(0.3)  # so that its request comes before the next one's
            passed(1.0)
            drained(cluster, "server-2")
        for thread in threads:
            thread.join(20.0)
        assert order == [0, 1, 2, 3]
        client.delete("turns")


def passed(seconds: float) -> None:
    end = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > end, f"{seconds} s")


def test_what_cannot_leave_is_named(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """A buffer of which there is a view stays, and is served, and so do those that a rule changes with their state;
    --wait ends with an error.
    """
    buffer = client.create("one", 1000, servers=["server-2"])
    view = buffer.view()
    with smb.connect(cluster.address, transport="shm") as alone:
        client.create("mapped", 1000, servers=["server-2"])
        alone.open("mapped").fill(1)
    weights, gradient, momentum = (client.create(name, 1000, servers=["server-2"]) for name in ("w", "g", "m"))
    weights.apply("momentum", gradient, momentum, lr=0.1, mu=0.9)
    shown = run(cluster, "drain", "server-2", "--wait", fails=True)
    for name in ("one", "w", "m", "mapped"):
        assert f'stays: buffer "{name}"' in shown
    assert "a view of it was taken, a rule with state changes it" in shown
    assert "server-2 is not empty" in shown
    assert client.open("g").layout.segments[0].server != "server-2"
    weights.apply("momentum", gradient, momentum, lr=0.1, mu=0.9)  # its gradient has moved
    buffer.fill(3)
    assert (view == 3).all()
    for name in ("one", "w", "m", "mapped"):
        client.delete(name)
    assert "server-2 is empty" in run(cluster, "drain", "server-2", "--wait")
    run(cluster, "undrain", "server-2")


def test_no_copy_is_made_anew_during_maintenance(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """A server is stopped, worked on, and started again: its copies wait for the maintenance's end. What is wrong about
    the command is said.
    """
    buffer = client.create("w", 1000, replicas=2, servers=["server-0"])
    lost = client.open("w").layout.segments[0].backup
    number = int(lost.rpartition("-")[2])
    assert f"until then lost copies are not made anew while {lost} is away" in run(
        cluster, "maintenance", lost, "--for", "30m"
    )
    before = len(cluster.coordinator.log.read_text())
    cluster.servers[number].kill()
    buffer.fill(3)
    wait_for(lambda: client.open("w").info.degraded, "the loss of a copy")
    (shown,) = [each for each in json.loads(run(cluster, "status", "--json"))["servers"] if each["name"] == lost]
    assert 0 < shown["maintenance_until"] - time.time() < 1801
    assert "gone, maintenance for" in run(cluster, "status")
    assert 'a segment of buffer "w" is being copied to' not in cluster.coordinator.log.read_text()[before:]
    cluster.servers[number].start()
    wait_for(lambda: second_copy.are_whole(client), "two copies again, once the server is back")
    assert "lost copies are made anew" in run(cluster, "maintenance", lost, "--end")
    assert (client.open("w").read() == 3).all()
    assert "name one memory server, or say --all" in run(cluster, "maintenance", fails=True)
    assert "name one memory server, or say --all" in run(cluster, "maintenance", lost, "--all", fails=True)
    assert "a duration must be a number and a unit" in run(cluster, "maintenance", lost, "--for", "soon", fails=True)
    assert "must last from 1 to 604800 seconds" in run(cluster, "maintenance", "--all", "--for", "8d", fails=True)
    assert "no memory server has that name" in run(cluster, "maintenance", "server-9", fails=True)


def test_what_is_refused(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """An unknown server, no room elsewhere, no other server. It is not being drained then."""
    client.create("w", 2_200_000, replicas=2)
    assert "no memory server has that name" in run(cluster, "drain", "server-9", fails=True)
    assert 'no room for copies of buffer "w"' in run(cluster, "drain", "server-0", fails=True)
    client.delete("w")
    run(cluster, "drain", "server-0")
    run(cluster, "drain", "server-1")
    assert "no other live memory server" in run(cluster, "drain", "server-2", fails=True)
    assert [server.draining for server in client.servers()] == [True, True, False]
    for name in ("server-0", "server-1"):
        run(cluster, "undrain", name)
