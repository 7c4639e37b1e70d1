"""Mirrors of a published buffer: every generation in them is one of the source's, to the bit, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import smb
from smb.relay.arrived import BLOCKS_MAX, Arrived, Blocks, bits_of
from smb.relay.fill import Fill
from smb.relay.mirror import Relay
from smb.tools.cli.main import app
from tests.support import second_copy
from tests.support.daemons import DEADLINE_S, relay_of, running_daemons, tidy, wait_for

BYTES = 3 << 20
SOURCE = "policy"


def generation(number: int) -> np.ndarray:
    """What is published as that version: no byte is as in another near it."""
    return ((np.arange(BYTES, dtype=np.uint32) * 2654435761 >> 7) + 17 * number).astype(np.uint8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=4, capacity="64MiB") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with smb.connect(cluster.address, timeout=DEADLINE_S) as client:
        yield client
        for info in client.list():
            client.delete(info.name, missing_ok=True)


def published(client: smb.Client, versions: int = 3) -> smb.Buffer:
    source = client.create(SOURCE, BYTES, "uint8", versions=versions, servers=["server-0"], stripe="64KiB")
    source.publish(generation(1))
    return source


def has(client: smb.Client, server: str, version: int) -> smb.Buffer:
    mirror = client.open(f"{SOURCE}.mirror.{server}")
    assert mirror.wait(version, timeout=DEADLINE_S) == version
    np.testing.assert_array_equal(mirror.read(version=version), generation(version))
    return mirror


def fed_by(client: smb.Client) -> dict[str, set[str]]:
    return {mirror.server: set(mirror.feeds) for mirror in client.open(SOURCE).info.mirrors}


def test_every_mirror_gets_every_byte_and_from_each_other(client: smb.Client) -> None:
    source = published(client)
    assert client.relay(SOURCE) == ["server-1", "server-2", "server-3"]
    for server in ("server-1", "server-2", "server-3"):
        mirror = has(client, server, 1)
        with pytest.raises(smb.InvalidArgumentError, match="publish to 'policy'"):
            mirror.publish(generation(9))
    number = 1

    def planned() -> bool:
        nonlocal number
        number = source.publish(generation(number + 1))
        for server in ("server-1", "server-2", "server-3"):
            has(client, server, number)
        return all(len(parents) > 1 for parents in fed_by(client).values())

    wait_for(planned, "mirrors that feed each other")
    assert all(mirror.alive for mirror in client.open(SOURCE).info.mirrors)
    source.publish(generation(number + 1))
    assert client.stop_relays(SOURCE, ["server-2"]) == ["server-2"]
    for server in ("server-1", "server-3"):
        has(client, server, number + 1)
    client.delete(SOURCE)
    assert client.list() == []


def test_a_relay_killed_in_the_middle_goes_on_and_nothing_is_mixed(
    client: smb.Client, cluster: smb.LocalCluster
) -> None:
    source = published(client)
    client.relay(SOURCE, ["server-1", "server-2"])
    for server in ("server-1", "server-2"):
        has(client, server, 1)
    words = client.open(f"{SOURCE}.mirror.server-1.arrived")
    begun = words.version + 1
    source.publish(generation(2))
    words.wait(begun, timeout=DEADLINE_S)  # the first bytes of it are on their way
    os.kill(relay_of(cluster.servers[1]), signal.SIGKILL)
    has(client, "server-2", 2)
    has(client, "server-1", 2)
    source.publish(generation(3))
    has(client, "server-1", 3)
    has(client, "server-2", 3)


def test_a_mirror_may_leave_versions_out_and_keeps_their_numbers(client: smb.Client, cluster: smb.LocalCluster) -> None:
    source = published(client)
    client.relay(SOURCE, ["server-1"])
    mirror = has(client, "server-1", 1)
    relay = relay_of(cluster.servers[1])
    os.kill(relay, signal.SIGSTOP)
    for number in range(2, 8):
        source.publish(generation(number), timeout=DEADLINE_S, readers=0.5)
    os.kill(relay, signal.SIGCONT)
    has(client, "server-1", 7)
    missing = [number for number in range(2, 7) if not holds(mirror, number)]
    assert missing  # three copies cannot have six
    with pytest.raises(smb.NotFoundError, match="overwritten"):
        mirror.read(version=missing[0])


def holds(mirror: smb.Buffer, number: int) -> bool:
    try:
        np.testing.assert_array_equal(mirror.read(version=number), generation(number))
    except smb.NotFoundError:
        return False
    return True


def test_a_mirror_that_was_overtaken_goes_on_without_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay, here one of ours in place of the server's, gave up what it had open for a version that was gone."""
    overtaking: list[int] = []

    def fill(blocks: Blocks, *given: Any) -> Fill:
        while overtaking:
            source.publish(generation(overtaking.pop(0)))
        return Fill(blocks, *given)

    with (
        smb.LocalCluster(servers=2, capacity="64MiB") as cluster,
        smb.connect(cluster.address, timeout=DEADLINE_S) as client,
        smb.connect(cluster.address, timeout=1.0) as relays,
    ):
        source = published(client)
        client.relay(SOURCE, ["server-1"])
        mirror = has(client, "server-1", 1)
        process = relay_of(cluster.servers[1])
        os.kill(process, signal.SIGSTOP)
        relay = Relay(relays, "server-1", mirror.name, SOURCE)
        try:
            wait_for(lambda: relay.version == 1, "the relay", DEADLINE_S)
            source.publish(generation(2))
            has(client, "server-1", 2)
            cluster.coordinator.kill()
            overtaking += (4, 5, 6)
            monkeypatch.setattr("smb.relay.mirror.Fill", fill)
            source.publish(generation(3))
            assert mirror.wait(6, timeout=DEADLINE_S) == 6
            np.testing.assert_array_equal(mirror.read(version=6), generation(6))
        finally:
            relay.stop()
            os.kill(process, signal.SIGCONT)


def test_a_source_with_two_copies_is_mirrored_over_the_loss_of_its_host() -> None:
    """Its readers map a mirror, where the source itself is read through its servers."""
    with smb.LocalCluster(servers=3, capacity="64MiB") as cluster, tidy(cluster, DEADLINE_S) as client:
        source = client.create(SOURCE, BYTES, "uint8", versions=3, servers=1, stripe="64KiB", replicas=2)
        source.publish(generation(1))
        (place,) = source.layout.segments
        client.relay(SOURCE)
        mirrors = {"server-0", "server-1", "server-2"} - {place.server}
        for server in mirrors:
            assert has(client, server, 1).transports == ("shm",)
        assert source.transports == ("unix",)
        (lost,) = (each for each in cluster.servers if each.name == place.server)
        lost.kill()
        second_copy.lose(cluster.memory_directory, lost.name)
        assert source.publish(generation(2)) == 2
        for server in mirrors:  # one of them on the host of the source's new primary
            assert has(client, server, 2).transports == ("shm",)


def test_a_mirror_whose_memory_was_lost_is_made_anew() -> None:
    """Its server came back without: it stayed empty, and asking for a mirror there changed nothing."""
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster, tidy(cluster, DEADLINE_S) as client:
        source = published(client)
        client.relay(SOURCE, ["server-1"])
        has(client, "server-1", 1)
        wait_for(lambda: [each.version for each in client.open(SOURCE).info.mirrors] == [1], "the relay's report")
        (lost,) = (each for each in cluster.servers if each.name == "server-1")
        lost.kill()
        second_copy.lose(cluster.memory_directory, lost.name)
        lost.start()
        mirror = f"{SOURCE}.mirror.server-1"
        wait_for(lambda: client.open(mirror).layout.segments[0].lost, "the loss")
        answer = CliRunner().invoke(app, ["relay", SOURCE, "--coordinator", cluster.address])
        assert f"Create the mirror again: smb relay {SOURCE} --to server-1" in answer.output
        assert client.relay(SOURCE, ["server-1"]) == ["server-1"]
        has(client, "server-1", 1)
        has(client, "server-1", source.publish(generation(2)))


def test_a_mirror_stopped_and_made_again_at_once_is_filled(client: smb.Client) -> None:
    """The relay has another mirror to fill under the same name, and nothing is published meanwhile."""
    published(client)
    client.relay(SOURCE, ["server-1"])
    has(client, "server-1", 1)
    client.stop_relays(SOURCE)
    client.relay(SOURCE, ["server-1"])
    has(client, "server-1", 1)


def test_a_relay_whose_session_ended_is_replaced(tmp_path: Path) -> None:
    """It was stopped for longer than its session's lease: it could fill nothing any more, and counted as alive."""
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator("127.0.0.1:0", None, "--session-lease", "3")
        servers = [daemons.memory_server(coordinator.address, f"server-{number}") for number in range(2)]
        assert all(server.address for server in servers)  # they serve
        with smb.connect(coordinator.address, timeout=DEADLINE_S) as client:
            source = published(client)
            client.relay(SOURCE, ["server-1"])
            has(client, "server-1", 1)
            pid = relay_of(servers[1])
            os.kill(pid, signal.SIGSTOP)
            wait_for(lambda: coordinator.metric("smb_coordinator_ended_sessions") >= 1, "end of the relay's session")
            os.kill(pid, signal.SIGCONT)
            has(client, "server-1", source.publish(generation(2)))
            assert relay_of(servers[1]) != pid


def test_what_can_have_no_mirror_is_told_and_nothing_is_left(client: smb.Client) -> None:
    client.create("plain", 8, "uint8")
    with pytest.raises(smb.InvalidArgumentError, match="not published"):
        client.relay("plain")
    with pytest.raises(smb.NotFoundError, match="no buffer"):
        client.relay("nothing")
    source = published(client)
    with pytest.raises(smb.Error, match="server-9"):
        client.relay(SOURCE, ["server-1", "server-9"])
    with pytest.raises(smb.InvalidArgumentError, match="itself lies"):
        client.relay(SOURCE, ["server-0"])
    big = client.create("big", 20 << 20, "uint8", servers=["server-0"], versions=2)
    big.publish(np.ones(20 << 20, np.uint8))
    client.create("full", 40 << 20, "uint8", servers=["server-2"])
    with pytest.raises(smb.OutOfMemoryError, match="server-2"):
        client.relay("big", ["server-1", "server-2"])
    assert [info.name for info in client.list()] == ["big", "full", "plain", SOURCE]
    with pytest.raises(smb.NotFoundError, match="no mirror"):
        client.stop_relays(SOURCE, ["server-1"])
    client.relay(SOURCE, ["server-1"])
    with pytest.raises(smb.InvalidArgumentError, match="a mirror itself"):
        client.relay(f"{SOURCE}.mirror.server-1", ["server-2"])
    with pytest.raises(smb.InvalidArgumentError, match="stop its relays"):
        client.rename(SOURCE, "other")
    assert source.version == 1


def test_words_of_what_arrived_are_read_as_written() -> None:
    for bits in (0, 1, bits_of((0, 63, 64, BLOCKS_MAX - 1)), 2**BLOCKS_MAX - 1):
        assert Arrived.of(Arrived(7, 2, bits).to_words()) == Arrived(7, 2, bits)
    for nbytes in (1, 4096, 5 << 20, (1 << 32) + 12):
        blocks = Blocks(nbytes, max(1, -(-nbytes // BLOCKS_MAX // 4096)) * 4096)
        assert blocks.count <= BLOCKS_MAX
        assert sum(blocks.range(block)[1] for block in range(blocks.count)) == nbytes
        places = sorted(blocks.point(block) for block in range(blocks.count))
        gaps = np.diff([0.0, *places, 1.0])
        assert gaps.max() < 3 / blocks.count + 1e-9 or blocks.count < 3  # evenly
