"""Buffers with two copies: what they do, what they refuse, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from typer.testing import CliRunner

import smb
from smb.tools.cli.main import app
from tests.support import second_copy
from tests.support.daemons import tidy, wait_for


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2, capacity="32MiB") as made:
        yield made


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(cluster, 20.0) as made:
        yield made


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_every_call_changes_both_copies(cluster: smb.LocalCluster, client: smb.Client, way: str) -> None:
    """Reads, writes, additions in every form, fills and the 64-bit operations; the copies are equal at rest."""
    count = 100_003
    buffer = client.create("floats", count, replicas=2)
    numbers = client.create("numbers", 100, "int64", replicas=2)
    with smb.connect(cluster.address, transport=way) as other:
        ours = other.open("floats")
        ours.write(np.arange(count, dtype=np.float32))
        ours.accumulate(np.ones(count, np.float32), scale=2.0)
        assert ours.accumulate(np.ones(10, np.float32), 5, fetch=True).tolist() == [8.0 + i for i in range(10)]
        ours.accumulate(np.ones(count, np.float32), wire="bfloat16")
        ours.accumulate_sparse([1, 90_000], [1.0, 2.0])
        expected = np.arange(count, dtype=np.float32) + 3
        expected[5:15] += 1
        expected[[1, 90_000]] += [1.0, 2.0]
        assert np.array_equal(ours.read(), expected)
        assert np.array_equal(buffer.read(), expected)
        whole = other.open("numbers")
        whole.fill(7)
        assert whole.fetch_add(3, 5) == 7
        assert whole.compare_swap(3, 12, 1) == 12
        assert [future.result() for future in (whole.write_async([2], 4), whole.read_async(4, 1))][1].tolist() == [2]
        assert set(ours.transports) == {"unix" if way == "auto" else "tcp"}
    assert numbers.read(2, 3).tolist() == [7, 1, 2]
    assert second_copy.check_copies(client, cluster.memory_directory) == len(buffer.layout.segments) + 1


@pytest.mark.parametrize("way", ["auto", "tcp"])
@pytest.mark.parametrize("versions", [1, 2, 3])
def test_versions_of_two_copies(cluster: smb.LocalCluster, client: smb.Client, way: str, versions: int) -> None:
    """What is published is waited for, read, pinned and read by its number, as with one copy."""
    count = 50_000
    buffer = client.create("news", count, "int64", stripe="64KiB", replicas=2, versions=versions)
    with smb.connect(cluster.address, transport=way) as other:
        theirs = other.open("news")
        assert theirs.version == 0
        for version in range(1, 5):
            assert buffer.publish(np.full(count, version)) == version
            assert theirs.wait(version) == theirs.version == version
            assert (theirs.read() == version).all()
        with pytest.raises(smb.TimeoutError):
            theirs.wait(5, timeout=0.01)
        if versions > 1:
            with theirs.pin() as pin:
                buffer.publish(np.full(count, 5))
                assert (pin.version, pin.read(0, 2).tolist()) == (4, [4, 4])
        if versions > 2:
            assert (theirs.read(version=4) == 4).all()
            with pytest.raises(smb.NotFoundError, match="was overwritten"):
                theirs.read(version=2)
    assert second_copy.check_copies(client, cluster.memory_directory) == len(buffer.layout.segments)


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_locks_of_two_copies(cluster: smb.LocalCluster, client: smb.Client, way: str) -> None:
    """One holder at a time, tokens that grow, and a change of a former holder that is refused."""
    buffer = client.create("w", 50_000, "int64", stripe="64KiB", replicas=2)
    ones = np.ones(50_000, np.int64)
    with smb.connect(cluster.address, transport=way) as other:
        theirs = other.open("w")
        former = theirs.lock(ttl=0.05).acquire()
        other._session.renewals.remove(former)
        lock = buffer.lock(timeout=20).acquire()
        assert lock.token > former.token
        with pytest.raises(smb.LockLostError):
            theirs.accumulate(ones, fence=former)
        buffer.accumulate(ones, fence=lock)
        with pytest.raises(smb.TimeoutError, match="another holds it"):
            theirs.lock(timeout=0.01).acquire()
        lock.release()
        with theirs.lock(timeout=20) as later:
            assert later.token > former.token + 2
            theirs.accumulate(ones, fence=later)
    assert (buffer.read() == 2).all()


def test_what_is_not_there_yet_is_refused_with_a_sentence(cluster: smb.LocalCluster, client: smb.Client) -> None:
    """Nothing is accepted and ignored."""
    buffer = client.create("w", 1000, replicas=2)
    like = client.create("v", 1000, like=buffer)
    assert (buffer.info.replicas, like.info.replicas) == (2, 1)
    for call in (
        lambda: buffer.view(),
        lambda: buffer.accumulate_from(like),
        lambda: like.accumulate_from(buffer),
        lambda: buffer.apply("sgd", like, lr=0.1),
    ):
        with pytest.raises(smb.InvalidArgumentError, match="has two copies"):
            call()
    with smb.connect(cluster.address, transport="shm") as other, pytest.raises(smb.TransportError, match="two copies"):
        other.open("w").read()
    with pytest.raises(smb.AlreadyExistsError, match="replicas 2, not 1"):
        client.create("w", 1000, exist_ok=True)


def test_a_buffer_that_is_deleted_is_gone_for_its_users(cluster: smb.LocalCluster, client: smb.Client) -> None:
    """They are told so at once, and not only when their time is over."""
    client.create("w", 1000, replicas=2).write(np.ones(1000, np.float32))
    with smb.connect(cluster.address, timeout=20) as other:
        theirs = other.open("w")
        assert theirs.read()[0] == 1
        client.delete("w")
        with pytest.raises(smb.NotFoundError, match="deleted"):
            theirs.accumulate(np.ones(1000, np.float32))


def test_a_lost_copy_is_shown(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """smb stat says how many copies there are, and where. Last: a server of the cluster dies."""

    def shown(*options: str) -> str:
        answer = CliRunner().invoke(app, ["stat", "w", "--coordinator", cluster.address, *options])
        assert answer.exit_code == 0, answer.output
        return answer.output

    client.create("w", 1000, replicas=2).write(np.ones(1000, np.float32))
    described = json.loads(shown("--json"))
    assert described["replicas"] == 2
    assert {described["segments"][0][key] for key in ("server", "backup")} == {"server-0", "server-1"}
    assert "degraded" not in shown()
    victim = next(server for server in cluster.servers if server.name == described["segments"][0]["server"])
    victim.kill()
    wait_for(lambda: "degraded: 1 of 1 segments have one" in shown(), "a lost copy")
    assert client.open("w").read()[0] == 1
