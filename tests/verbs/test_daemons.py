"""Verbs between processes on two devices: kills on both sides, a broken cable, every transport at once, idleness."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.transport.verbs.devices import Port
from tests.api.test_transports import hidden_socket
from tests.support.clients import Adders, add_forever, add_whole, make_event, pattern, run_together, spawn
from tests.support.daemons import cluster_metric, stop, wait_for
from tests.support.transports import SLOWNESS
from tests.verbs.conftest import Cable

COUNT = 100_003
TIMEOUT_S = 20.0 * SLOWNESS
BUSY_MAX = 0.02  # of a processor, for what an idle daemon does beside RDMA: renewing its lease


@contextlib.contextmanager
def on(port: Port) -> Iterator[None]:
    """Processes that start meanwhile, and clients that connect, use this device."""
    before = os.environ.get("SMB_VERBS_DEVICE")
    os.environ["SMB_VERBS_DEVICE"] = port.device
    try:
        yield
    finally:
        if before is None:
            del os.environ["SMB_VERBS_DEVICE"]
        else:
            os.environ["SMB_VERBS_DEVICE"] = before


@pytest.fixture(scope="module")
def cluster(ports: tuple[Port, Port]) -> Iterator[smb.LocalCluster]:
    """Two memory servers on one device; the tests' clients are on the other one."""
    with on(ports[0]), smb.LocalCluster(servers=2, capacity="64MiB") as running, on(ports[1]):
        yield running


def verbs_connections(cluster: smb.LocalCluster) -> int:
    """How many queue pairs the servers have."""
    return int(cluster_metric(cluster, 'smb_server_connections{transport="verbs"}'))


def restart(cluster: smb.LocalCluster, index: int, port: Port) -> None:
    """kill -9 and start again, on the device it was on."""
    with on(port):
        cluster.servers[index].kill()
        cluster.servers[index].start()


@pytest.mark.verbs("one buffer by shm, tcp and verbs at once, exact sums")
def test_all_transports_on_one_buffer_at_once(cluster: smb.LocalCluster) -> None:
    """Four processes, one over shared memory, one over TCP, two over verbs, add whole arrays: nothing is lost."""
    ways, times = ("shm", "tcp", "verbs", "verbs"), 8
    with smb.connect(cluster.address, timeout=TIMEOUT_S) as client:
        buffer = client.create("w", COUNT, "int64", stripe="64KiB", servers=2)
        run_together(*((add_whole, cluster.address, way, "w", times) for way in ways))
        np.testing.assert_array_equal(buffer.read(), np.full(COUNT, len(ways) * times))
        client.delete("w")


@pytest.mark.verbs("a client killed in the middle")
def test_killed_clients_leave_nothing(cluster: smb.LocalCluster) -> None:
    """Clients killed while they add: each chunk has whole additions only, their queue pairs go at the servers too, and
    so often that there would be no room for more if anything stayed."""
    with smb.connect(cluster.address, transport="verbs", timeout=TIMEOUT_S) as client:
        buffer = client.create("w", COUNT, "int64", stripe="64KiB", servers=2)
        buffer.read()
        before = verbs_connections(cluster)
        for _ in range(3):
            running = [make_event() for _ in range(2)]
            adders = [spawn(add_forever, cluster.address, "verbs", "w", event) for event in running]
            for event in running:
                assert event.wait(TIMEOUT_S)
            for adder in adders:
                adder.kill()
                adder.join()
            wait_for(lambda: verbs_connections(cluster) == before, "end of the killed clients' connections")
        values = buffer.read()
        per_chunk = buffer.layout.chunk_bytes // 8
        for first in range(0, COUNT, per_chunk):
            assert len(set(values[first : first + per_chunk].tolist())) == 1
        buffer.accumulate(np.ones(COUNT, np.int64))
        np.testing.assert_array_equal(buffer.read(), values + 1)
        assert buffer.transports == ("verbs",)
        client.delete("w")


@pytest.mark.verbs("a memory server killed under load, and restarted; queue pairs made anew")
def test_a_server_killed_under_load(cluster: smb.LocalCluster, ports: tuple[Port, Port]) -> None:
    """kill -9 and restart of servers under clients of every transport: each acknowledged addition counts once."""
    adders = Adders(cluster.address, ("verbs", "shm", "tcp"), 20_003, timeout=TIMEOUT_S)
    try:
        for index in range(2):
            seen = adders.done()
            wait_for(lambda seen=seen: all(n > m + 2 for n, m in zip(adders.done(), seen, strict=True)), "additions")
            restart(cluster, index, ports[0])
        seen = adders.done()
        wait_for(lambda: all(n > m + 2 for n, m in zip(adders.done(), seen, strict=True)), "additions at the end")
        done = adders.finish()
    except BaseException:
        adders.kill()
        raise
    with smb.connect(cluster.address, transport="verbs", timeout=TIMEOUT_S) as client:
        delta = pattern(0, 20_003, "int64")
        for number, count in enumerate(done):
            np.testing.assert_array_equal(client.open(f"lane-{number}").read(), count * delta)
        np.testing.assert_array_equal(client.open("common").read(), sum(done) * delta)
    adders.drop()


@pytest.mark.verbs("a memory server that dies owing an answer, of which its card says nothing")
def test_a_server_that_dies_owing_an_answer(cluster: smb.LocalCluster, ports: tuple[Port, Port]) -> None:
    """What a stopped server's card has acknowledged is asked again of its next run, though nothing was left to be sent
    when it was killed; it counts once."""
    ones = np.ones(COUNT, np.int64)
    with smb.connect(cluster.address, transport="verbs", timeout=TIMEOUT_S) as client:
        buffer = client.create("w", COUNT, "int64", servers=["server-0"])
        buffer.accumulate(ones)
        (carrier,) = client._session.verbs.carriers()
        stop(cluster.servers[0].pid)
        future = buffer.accumulate_async(ones)
        wait_for(carrier.awaits, "request under way")
        asked = time.monotonic()
        wait_for(lambda: time.monotonic() > asked + 1, "time in which the card acknowledges")
        assert not future.done()
        restart(cluster, 0, ports[0])
        future.result(TIMEOUT_S)
        np.testing.assert_array_equal(buffer.read(), 2 * ones)
        client.delete("w")


@pytest.mark.verbs("a server's restart under a client that stays: verbs again, by new keys")
def test_after_a_restart_it_is_verbs_again(cluster: smb.LocalCluster, ports: tuple[Port, Port]) -> None:
    """A client whose servers were restarted goes on with new queue pairs and keys, past the server's processor."""
    with smb.connect(cluster.address, transport="verbs", timeout=TIMEOUT_S) as client:
        buffer = client.create("w", COUNT, "int64", servers=["server-0"])
        buffer.write(np.arange(COUNT))
        old = client._session.verbs.carriers()
        restart(cluster, 0, ports[0])
        np.testing.assert_array_equal(buffer.read(), np.arange(COUNT))
        buffer.accumulate(np.ones(COUNT, np.int64))
        np.testing.assert_array_equal(buffer.read(), np.arange(COUNT) + 1)
        wait_for(lambda: buffer.read() is not None and _one_sided(client, old), "one-sided reads after the restart")
        client.delete("w")


def _one_sided(client: smb.Client, old: object) -> bool:
    return any(c.one_sided_bytes for c in client._session.verbs.carriers() if c not in old)  # type: ignore[operator]


@pytest.mark.verbs("TCP where the link is gone, and verbs for those that come when it is back")
@pytest.mark.parametrize("broken", ["cut", "down"])
def test_without_a_link_it_goes_on_over_tcp(
    cluster: smb.LocalCluster, cable: Cable, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    """A cable that breaks under a client: its calls end over TCP, each counts once; the next client says why it takes
    TCP, or has verbs again once the cable is whole."""
    ones = np.ones(COUNT, np.int64)
    with smb.connect(cluster.address, transport="verbs", timeout=TIMEOUT_S) as client:
        buffer = client.create("w", COUNT, "int64", servers=["server-0"])
        buffer.accumulate(ones)
        cable.lose(100) if broken == "cut" else cable.down()
        with caplog.at_level(logging.INFO, "smb"):
            buffer.accumulate(ones)
            np.testing.assert_array_equal(buffer.read(), 2 * ones)
        assert "going on over TCP" in caplog.text
        assert not client._session.verbs.carriers()
        with smb.connect(cluster.address, timeout=TIMEOUT_S) as other, hidden_socket(other, "server-0"):
            caplog.clear()
            with caplog.at_level(logging.INFO, "smb"):
                seen = other.open("w")
                np.testing.assert_array_equal(seen.read(count=9), 2 * ones[:9])
            assert seen.transports == ("tcp",)
            assert "tcp to server-0" in caplog.text
            assert "rxe1" in caplog.text or "RDMA" in caplog.text
        cable.mend()
        with smb.connect(cluster.address, transport="verbs", timeout=TIMEOUT_S) as third:
            assert third.open("w").read(count=1)[0] == 2
            assert third.open("w").transports == ("verbs",)
        client.delete("w")


@pytest.mark.verbs("transport=auto: shared memory, then verbs")
def test_auto_takes_verbs_where_there_is_no_shared_memory(cluster: smb.LocalCluster) -> None:
    """Auto maps what is on this host, and reaches by RDMA what is not."""
    with smb.connect(cluster.address, timeout=TIMEOUT_S) as client, hidden_socket(client, "server-1"):
        buffer = client.create("w", COUNT, "int64", stripe="64KiB", servers=["server-0", "server-1"])
        buffer.write(np.arange(COUNT))
        np.testing.assert_array_equal(buffer.read(), np.arange(COUNT))
        assert buffer.transports == ("shm", "verbs")
        client.delete("w")


@pytest.mark.verbs("two servers' transfers through the memory that both are staged in")
def test_more_than_can_be_staged_at_once(cluster: smb.LocalCluster) -> None:
    """New arrays of many stripes, which are copied through the client's few blocks, from and to two servers at once:
    who finds no block free goes on when the other one has given some back."""
    with smb.connect(cluster.address, transport="verbs", timeout=TIMEOUT_S) as client:
        buffer = client.create("w", 8 << 17, "int64", stripe="64KiB", servers=2)  # 64 times 64 KiB at each
        for round_ in range(3):
            buffer.write(np.arange(buffer.size) + round_)
            np.testing.assert_array_equal(buffer.read(), np.arange(buffer.size) + round_)
            buffer.accumulate(np.ones(buffer.size, np.int64))
        assert not client._session.verbs.memory().registered_bytes
        client.delete("w")


@pytest.mark.verbs("no processor time of an idle daemon")
def test_an_idle_daemon_uses_no_processor(cluster: smb.LocalCluster) -> None:
    """With a client that is connected and silent a daemon sleeps: what is used is the renewal of leases."""
    with smb.connect(cluster.address, transport="verbs", timeout=TIMEOUT_S) as client:
        buffer = client.create("w", COUNT, "int64", servers=2)
        buffer.write(np.arange(COUNT))
        buffer.read()
        assert verbs_connections(cluster) == 2
        seconds = 6.0
        before, began = _processor_seconds(cluster), time.monotonic()
        wait_for(lambda: time.monotonic() > began + seconds, "time in which nothing happens")
        after = _processor_seconds(cluster)
        shares = {name: (after[name] - before[name]) / seconds for name in before}
        print("share of a processor while idle:", {name: f"{share:.4f}" for name, share in shares.items()})
        assert max(shares.values()) < BUSY_MAX * SLOWNESS, shares
        client.delete("w")


def _processor_seconds(cluster: smb.LocalCluster) -> Mapping[str, float]:
    """Processor time of each memory server so far."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = {}
    for server in cluster.servers:
        fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        used[server.name] = (int(fields[11]) + int(fields[12])) / ticks
    return used
