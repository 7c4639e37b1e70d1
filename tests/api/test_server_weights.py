"""Servers of unequal weights: a buffer has several segments on the heavier ones, and every call works on it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from tests.support.commands import run_smb
from tests.support.daemons import Daemons, running_daemons
from tests.support.transports import EACH_WAY, FAR

SIZE = 300_001
WEIGHTS = {"a": 1, "b": 3}


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


@pytest.fixture
def address(daemons: Daemons) -> str:
    """A coordinator and two servers, of which b is to take three times the traffic of a."""
    coordinator = daemons.coordinator().address
    started = [daemons.memory_server(coordinator, name, "--weight", str(weight)) for name, weight in WEIGHTS.items()]
    assert all(server.address for server in started)
    return coordinator


def segments(buffer: smb.Buffer) -> Counter[str]:
    return Counter(segment.server for segment in buffer.layout.segments)


def test_a_weight_is_shown_kept_and_decides_over_new_buffers(daemons: Daemons, address: str) -> None:
    """Over a restart of the coordinator too; a server that comes back with another weight is given by that."""
    with smb.connect(address, transport=FAR) as client:
        assert {server.name: server.weight for server in client.servers()} == WEIGHTS
        buffer = client.create("w", SIZE, "int64", servers=2)
        assert segments(buffer) == WEIGHTS
        on_heavy = sum(segment.nbytes for segment in buffer.layout.segments if segment.server == "b")
        assert on_heavy == pytest.approx(0.75 * buffer.nbytes, rel=0.02)
        shown = json.loads(run_smb("status", "--json", "--coordinator", address).stdout)
        assert {server["name"]: server["weight"] for server in shown["servers"]} == WEIGHTS
    coordinator = next(daemon for daemon in daemons._started if daemon.ready_file.name.startswith("coordinator"))
    coordinator.kill()
    daemons.coordinator(listen=address).address  # noqa: B018 - waits until it serves
    with smb.connect(address, transport=FAR) as client:
        assert {server.name: server.weight for server in client.servers()} == WEIGHTS
        heavy = next(daemon for daemon in daemons._started if daemon.ready_file.name.startswith("b"))
        heavy.stop()
        assert daemons.memory_server(address, "b", "--weight", "1").address
        assert segments(client.create("even", SIZE, "int64", servers=2)) == {"a": 1, "b": 1}
        assert segments(client.create("like", like="w")) == WEIGHTS


@pytest.mark.parametrize("transport", EACH_WAY)
def test_every_call_works_on_several_segments_of_one_server(address: str, transport: str) -> None:
    """Each call, in ranges that end anywhere, gives what numpy gives; locks and versions hold over all segments."""
    with smb.connect(address, transport=transport) as client:
        buffer = client.create("w", SIZE, "int64", stripe="64KiB", servers=2)
        assert segments(buffer) == WEIGHTS
        expected = np.arange(SIZE, dtype=np.int64)
        buffer.write(expected)
        for start, stop in ((0, SIZE), (8191, 8193), (5000, 40_000), (SIZE - 1, SIZE)):
            buffer.accumulate(expected[start:stop].copy(), start)
            expected[start:stop] *= 2
        np.testing.assert_array_equal(buffer.read(), expected)
        np.testing.assert_array_equal(buffer.read(7000, 30_000), expected[7000:37_000])
        np.testing.assert_array_equal(buffer.accumulate(expected, fetch=True), 2 * expected)
        other = client.create("v", like="w")
        other.accumulate_from(buffer)
        np.testing.assert_array_equal(other.read(), 2 * expected)
        assert [buffer.fetch_add(index, 1) for index in (0, 9000, SIZE - 1)] == [
            2 * int(expected[index]) for index in (0, 9000, SIZE - 1)
        ]
        if transport == "shm":
            np.testing.assert_array_equal(buffer.view(), buffer.read())
        with buffer.lock() as stale:
            pass
        with buffer.lock() as lock:
            buffer.write(expected, fence=lock)
            with pytest.raises(smb.Error):
                buffer.fill(1, fence=stale)
        np.testing.assert_array_equal(buffer.read(), expected)
        versions = client.create("p", SIZE, "int64", stripe="64KiB", servers=2, versions=2)
        assert segments(versions) == WEIGHTS
        for turn in range(1, 4):
            versions.publish(turn * expected)
            assert versions.version == turn
            np.testing.assert_array_equal(versions.read(), turn * expected)


def test_additions_to_several_segments_of_one_server_count_once_over_kills(daemons: Daemons, address: str) -> None:
    """kill -9 of the heavy server between additions and in the middle of them."""
    with smb.connect(address, transport=FAR, timeout=30) as client:
        buffer = client.create("w", SIZE, "int64", stripe="64KiB", servers=2)
        delta = np.arange(SIZE, dtype=np.int64) % 251 + 1
        done = 0
        for _ in range(3):
            adding = [buffer.accumulate_async(delta) for _ in range(10)]
            heavy = [daemon for daemon in daemons._started if daemon.ready_file.name.startswith("b")][-1]
            adding[2].result(30)
            heavy.kill()
            assert daemons.memory_server(address, "b", "--weight", "3").address
            for future in adding:
                future.result(30)
            done += len(adding)
            np.testing.assert_array_equal(buffer.read(), done * delta)


def test_a_weight_that_is_none_is_refused(daemons: Daemons) -> None:
    """With what was given and what would do, before anything is started."""
    server = daemons.memory_server("127.0.0.1:1", "a", "--weight", "0")
    assert server.wait() == 1
    assert "--weight 0: use a number from 1e-06 to 1e+12" in server.log.read_text()
