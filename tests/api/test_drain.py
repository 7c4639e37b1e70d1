"""smb drain, undrain and rebalance on a cluster: what they say, and what follows. tests/fault/test_drain.py does it
under load.
"""

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
    wait_for(lambda: "Nothing to move" in run(cluster, "rebalance", "--dry-run"), "nothing left to move")
    wait_for(lambda: second_copy.are_whole(client), "two copies of each segment")
    assert np.array_equal(buffer.read(), np.arange(COUNT, dtype=np.float32))
    assert second_copy.check_copies(client, cluster.memory_directory) == len(buffer.layout.segments)


def test_what_cannot_leave_is_named(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """Buffers of one copy stay, and are served; --wait ends with an error."""
    buffer = client.create("one", 1000, servers=["server-2"])
    shown = run(cluster, "drain", "server-2", "--wait", fails=True)
    assert 'stays: buffer "one"' in shown
    assert "it has one copy, which can't move" in shown
    assert "server-2 is not empty" in shown
    buffer.fill(3)
    client.delete("one")
    assert "server-2 is empty" in run(cluster, "drain", "server-2", "--wait")
    run(cluster, "undrain", "server-2")


def test_what_is_refused(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """An unknown server, no room elsewhere, no other server. It is not being drained then."""
    client.create("w", 2_200_000, replicas=2)
    assert "no such memory server is known" in run(cluster, "drain", "server-9", fails=True)
    assert 'no room for copies of buffer "w"' in run(cluster, "drain", "server-0", fails=True)
    client.delete("w")
    run(cluster, "drain", "server-0")
    run(cluster, "drain", "server-1")
    assert "no other memory server is alive" in run(cluster, "drain", "server-2", fails=True)
    assert [server.draining for server in client.servers()] == [True, True, False]
    for name in ("server-0", "server-1"):
        run(cluster, "undrain", name)
