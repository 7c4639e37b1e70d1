"""Every metric is described once, and moves when what it tells of happens."""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import smb
import smb.metrics
import smb.torch
from smb.daemon.metric_names import CLIENT, COORDINATOR, METRICS, SERVER
from tests.support.builds import build
from tests.support.daemons import running_daemons, stop, wait_for
from tests.support.proxy import Fault, behind_a_proxy
from tests.support.raw import Dtype, Flag, Frame, Op, Opcode, RawClient, scale_bits

ROOT = Path(__file__).parents[2]
Key = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture(scope="module")
def small() -> Iterator[smb.LocalCluster]:
    """One server, and sessions that end soon."""
    with smb.LocalCluster(servers=1, capacity="16MiB", session_lease=1.0) as running:
        yield running


def scrape(address: str) -> dict[Key, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(address: str, name: str, **labels: str) -> float:
    """The sum of all samples of that name that have these labels."""
    return sum(v for (n, found), v in scrape(address).items() if n == name and labels.items() <= dict(found).items())


def moves(address: str, name: str, act: Callable[[], object], by: float = 1, **labels: str) -> None:
    """Acting makes it larger, by at least so much."""
    before = value(address, name, **labels)
    act()
    wait_for(lambda: value(address, name, **labels) >= before + by, f"{name} {labels} past {before}")


@pytest.mark.parametrize(
    ("script", "function"), [("docs/make_metrics.py", "page"), ("deploy/grafana/make_dashboards.py", "all_dashboards")]
)
def test_what_is_made_is_current(script: str, function: str) -> None:
    """docs/metrics.md and the dashboards are what their scripts make now: run the script, and commit."""
    made = runpy.run_path(str(ROOT / script))[function]()
    files = made if isinstance(made, dict) else {"metrics.md": made}
    for name, text in files.items():
        assert (ROOT / script).with_name(name).read_text() == text, f"python {script}"


def test_names() -> None:
    """Names start with smb_; counters end in _total, and sizes, times and shares in their unit; every text is there."""
    for name, found in METRICS.items():
        assert re.fullmatch(r"smb_(server|coordinator|certificate|client|training)_[a-z_]+", name)
        assert name.endswith("_total") == (found.type == "counter"), name
        assert found.type != "histogram" or name.endswith("_seconds"), name
        assert found.text.endswith("."), name


def test_exactly_these_are_exported(small: smb.LocalCluster) -> None:
    """Daemons and clients export the metrics that are described, with these types, texts and labels, and no others."""
    with smb.connect(small.address, transport="tcp") as client, smb.metrics.serve(client) as pages:
        client.create("these", (8,)).read()
        for address, described in (
            (small.servers[0].metrics, SERVER),
            (small.coordinator.metrics, COORDINATOR),
            (pages.address, CLIENT),
        ):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
                families = {f.name: f for f in text_string_to_metric_families(page.read().decode())}
            assert families.keys() == {d.name.removesuffix("_total") for d in described}
            for d in described:
                family = families[d.name.removesuffix("_total")]
                assert (family.type, family.documentation) == (d.type, d.text)
                for sample in family.samples:
                    assert sample.labels.keys() - {"le"} == set(d.labels), d.name
        client.delete("these")


def test_traffic(small: smb.LocalCluster) -> None:
    """Operations and bytes are counted by kind, transport, buffer and client; each is timed; the buffer's capacity is
    there, and goes with it."""
    server = small.servers[0].metrics
    with smb.connect(small.address, transport="tcp") as tcp, smb.connect(small.address, transport="shm") as shm:
        buffer, mapped = tcp.create("traffic", (1000,), "float32"), shm
        ones = np.ones(1000, dtype=np.float32)
        which = {"transport": "tcp", "kind": "accumulate"}
        moves(server, "smb_server_operations_total", lambda: buffer.accumulate(ones), **which)
        moves(server, "smb_server_transferred_bytes_total", lambda: buffer.accumulate(ones), 4000, **which)
        moves(server, "smb_server_request_duration_seconds_count", lambda: buffer.accumulate(ones), **which)
        moves(server, "smb_server_request_duration_seconds_sum", lambda: buffer.accumulate(ones), 1e-7, **which)
        for label, name in (("buffer", "traffic"), ("client", tcp.name)):
            named = {label: name, **which}
            moves(server, f"smb_server_{label}_operations_total", lambda: buffer.accumulate(ones), **named)
            moves(server, f"smb_server_{label}_transferred_bytes_total", lambda: buffer.accumulate(ones), 4000, **named)
        there = mapped.open("traffic")
        moves(server, "smb_server_buffer_operations_total", there.read, buffer="traffic", transport="shm", kind="read")
        assert value(server, "smb_server_buffer_capacity_bytes", buffer="traffic") > 4000
        assert value(small.coordinator.metrics, "smb_coordinator_buffer_allocated_bytes", buffer="traffic") > 4000
        assert value(server, "smb_server_journal_slots") >= 1
        tcp.delete("traffic")
        wait_for(lambda: not value(server, "smb_server_buffer_operations_total", buffer="traffic"), "end of its counts")


def test_more_names_than_there_are_labels(small: smb.LocalCluster) -> None:
    """The first 64 buffers have a name of their own, all later ones are "other", and no counter falls."""
    server = small.servers[0].metrics
    with smb.connect(small.address, transport="tcp") as client:
        for i in range(70):
            client.create(f"many/{i}", (1,), "int64").fetch_add(0, 1)
        one = {"kind": "fetch_add", "transport": "tcp"}
        total = "smb_server_buffer_operations_total"
        wait_for(lambda: value(server, total, **one) == 70, "all of their names")
        other = value(server, total, buffer="other", **one)
        labels = {dict(found)["buffer"] for (name, found) in scrape(server) if name == total}
        assert other >= 6
        assert len(labels - {"other", "(locks)", "(barriers)"}) <= 64
        for i in range(70):
            client.delete(f"many/{i}")
        assert value(server, total, buffer="other", **one) == other
        after = client.create("after", (1,), "int64")
        moves(server, total, lambda: after.fetch_add(0, 1), buffer="after", **one)
        client.delete("after")


def test_locks_and_barriers(small: smb.LocalCluster) -> None:
    """Holders, waits, timeouts, lost locks and broken barriers are counted, and how long locks took."""
    server = small.servers[0].metrics
    with smb.connect(small.address) as client, smb.connect(small.address) as other:

        def wait_in_vain() -> None:
            with pytest.raises(smb.TimeoutError):
                other.lock("a", timeout=0.1).acquire()

        with client.lock("a"):
            assert value(server, "smb_server_held_locks", kind="lock") == 1
            moves(server, "smb_server_lock_waits_total", wait_in_vain)
            moves(server, "smb_server_lock_timeouts_total", wait_in_vain)
            waiting = other.submit(lambda: other.lock("a", timeout=20).acquire())
            wait_for(lambda: value(server, "smb_server_waiting_requests", kind="lock") == 1, "a waiter")
        moves(server, "smb_server_request_duration_seconds_sum", waiting.result(20).release, 0, kind="lock")
        assert value(server, "smb_server_request_duration_seconds_count", kind="lock") >= 2
        moves(server, "smb_server_locks_granted_total", lambda: client.lock("a").acquire().release())

        def stop_renewing() -> None:
            lock = client.lock("expires", ttl=0.1).acquire()
            client._session.renewals.remove(lock)

        moves(server, "smb_server_locks_lost_total", stop_renewing, reason="expired")
        leaver = smb.connect(small.address)
        leaver.lock("left").acquire()
        moves(server, "smb_server_locks_lost_total", leaver.close, reason="session_ended")

        def alone() -> None:
            with pytest.raises(smb.BrokenBarrierError):
                client.barrier("b", 2, timeout=0.05)

        moves(server, "smb_server_broken_barriers_total", alone)


def test_errors_and_repetitions(small: smb.LocalCluster) -> None:
    """Frames that are none, and refused requests, are errors by class; what is sent again is counted, and what had been
    made is recognised."""
    server = small.servers[0].metrics
    with smb.connect(small.address) as client:
        place = client.create("repeated", (8,), "int64").layout.segments[0]
        host, port = place.address.rsplit(":", 1)

        def garbage() -> None:
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n" + bytes(64))
                assert stranger.recv(64) == b""

        opened = value(server, "smb_server_connections_opened_total", transport="tcp")
        moves(server, "smb_server_errors_total", garbage)
        assert value(server, "smb_server_connections_opened_total", transport="tcp") > opened
        frame = Frame(Opcode.ACCUMULATE, dtype=Dtype.INT64, op=Op.SUM, segment=place.id, epoch=1, length=8,
                      payload=8, argument=scale_bits(1.0))  # fmt: skip
        with RawClient(int(port)).hello(1 << 33) as raw:
            raw.ask(frame, struct.pack("<q", 1))

            def again() -> None:
                raw.sequence -= 1
                raw.ask(replace(frame, flags=Flag.RETRY), struct.pack("<q", 1))

            moves(server, "smb_server_repeated_requests_total", again)
            moves(server, "smb_server_replayed_requests_total", again)
            wrong = replace(frame, segment=place.id ^ 1)
            moves(server, "smb_server_errors_total", lambda: raw.ask(wrong, bytes(8)), **{"class": "not_found"})
        client.delete("repeated")


def test_a_client_counts_itself(small: smb.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SMB_CLIENT_METRICS a client serves its calls, times, failures, locks and calls under way."""
    monkeypatch.setenv("SMB_CLIENT_METRICS", "127.0.0.1:0")
    with smb.connect(small.address, transport="shm", timeout=2.0) as client:
        monkeypatch.delenv("SMB_CLIENT_METRICS")
        assert client.pages is not None
        here = client.pages.address
        buffer = client.create("mine", (8,), "int64")
        moves(here, "smb_client_operations_total", lambda: buffer.fetch_add(0, 1), kind="fetch_add", transport="shm")
        moves(here, "smb_client_transferred_bytes_total", buffer.read, 64, kind="read")
        moves(
            here, "smb_client_call_duration_seconds_count", lambda: [buffer.read() for _ in range(65)], 64, kind="read"
        )
        lock = client.lock("mine", ttl=0.2).acquire()
        assert value(here, "smb_client_held_locks") == 1
        client._session.renewals.remove(lock)
        wait_for(lambda: not lock.held, "its end")

        def check() -> None:
            with pytest.raises(smb.LockLostError):
                lock.check()

        moves(here, "smb_client_locks_lost_total", check)
        running = client.submit(lambda: client.open("never", timeout=0.5))
        assert value(here, "smb_client_async_calls") == 1
        assert isinstance(running.exception(20), smb.NotFoundError)
        wait_for(lambda: value(here, "smb_client_async_calls") == 0, "the end of the call")
        with smb.connect(small.address) as other:
            other.delete("mine")

        def in_vain() -> None:
            with pytest.raises(smb.NotFoundError):
                buffer.read()

        moves(here, "smb_client_failed_calls_total", in_vain, **{"class": "not_found"})
        assert value(here, "smb_client_session_alive") == 1
        publisher = smb.torch.Publisher(client, "policy", {"w": torch.zeros(10)})
        follower = smb.torch.follow(client, "policy")
        assert [publisher.publish() for _ in range(2)] == [1, 2]
        ahead = smb.torch.follow(client, "policy")
        ahead.state_dict()
        assert value(here, "smb_client_generation_count", state="policy", role="publisher") == 2
        assert value(here, "smb_client_generation_count", state="policy", role="reader") == 0  # the one that is behind
        follower.state_dict()
        assert value(here, "smb_client_generation_count", state="policy", role="reader") == 2


def test_deaths(small: smb.LocalCluster) -> None:
    """A killed client's and a killed server's lease is counted as lost; a client sees the outage and its end; the next
    run of the server tells what it took over, in which time."""
    coordinator = small.coordinator.metrics
    dies = f"import os, smb; smb.connect({small.address!r}); os._exit(1)"
    moves(
        coordinator,
        "smb_coordinator_leases_lost_total",
        lambda: subprocess.run([sys.executable, "-c", dies], check=False, timeout=60),
        of="client",
    )
    with smb.connect(small.address, transport="tcp", timeout=60) as client, smb.metrics.serve(client) as pages:
        buffer = client.create("kept", (8,), "int64")
        buffer.fetch_add(0, 1)
        started = value(small.servers[0].metrics, "smb_server_start_time_seconds")
        small.servers[0].kill()
        waiting = client.submit(lambda: buffer.fetch_add(0, 1))
        wait_for(lambda: value(pages.address, "smb_client_outages_total") >= 1, "the outage")
        moves(coordinator, "smb_coordinator_leases_lost_total", lambda: None, 0, of="server")
        wait_for(lambda: value(coordinator, "smb_coordinator_leases_lost_total", of="server") >= 1, "end of its lease")
        assert value(coordinator, "smb_coordinator_server_alive", server="server-0") == 0
        small.servers[0].start()
        assert waiting.result(60) == 1
        # The call may return before the thread that connected again has noted how long that took.
        wait_for(lambda: value(pages.address, "smb_client_outage_duration_seconds_count") >= 1, "the outage's end")
        server = small.servers[0].metrics
        assert value(server, "smb_server_recovered_segments") >= 1
        assert 0 < value(server, "smb_server_recovery_seconds") < 10
        assert started < value(server, "smb_server_start_time_seconds") <= time.time()
        assert value(server, "smb_server_coordinator_connected") == 1
        client.delete("kept")


def test_a_peer_that_does_not_read(small: smb.LocalCluster) -> None:
    """Answers that it leaves where they are count as backlog while it is there, and the wait for it counts once."""
    server = small.servers[0].metrics
    with smb.connect(small.address) as client:
        place = client.create("unread", (65536,)).layout.segments[0]
        read = Frame(Opcode.READ, dtype=Dtype.FLOAT32, segment=place.id, epoch=1, length=262144)
        with RawClient(int(place.address.rsplit(":", 1)[1])).hello(1 << 34) as raw:

            def ask_and_leave() -> None:
                for _ in range(64):  # 16 MiB: more than sockets hold
                    raw.send(read)

            moves(server, "smb_server_send_backlogs_total", ask_and_leave)
            wait_for(lambda: value(server, "smb_server_send_backlog_bytes") > 0, "a backlog")
        wait_for(lambda: value(server, "smb_server_send_backlog_bytes") == 0, "its end")
        client.delete("unread")


def test_what_the_coordinator_knows(small: smb.LocalCluster) -> None:
    """Buffers, locks and barriers, being made and made, and what they take of which server; a server whose coordinator
    was killed registers again, and the next run tells when it began and how long it took to read its store."""
    coordinator, server = small.coordinator, small.servers[0]
    here, of_server = coordinator.metrics, {"server": "server-0"}
    names = ("buffers", "locks", "barriers", "buffer_bytes", "allocated_bytes", "free_bytes", "server_allocated_bytes")

    def now() -> dict[str, float]:
        return {name: value(here, f"smb_coordinator_{name}") for name in names}

    with smb.connect(small.address) as client:
        before = now()
        stop(server.pid)  # it answers nothing: what is made there stays half made
        try:
            creating = client.submit(lambda: client.create("known", (1000,)))
            wait_for(lambda: value(here, "smb_coordinator_pending_buffers") == 1, "a pending buffer")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        creating.result(30)
        wait_for(lambda: value(here, "smb_coordinator_pending_buffers") == 0, "a buffer that is there")
        with client.lock("known-lock"):
            client.barrier("known-barrier", 1)
        after = now()
        for name in ("buffers", "locks", "barriers"):
            assert after[name] == before[name] + 1, name
        assert after["buffer_bytes"] == before["buffer_bytes"] + 4000
        taken = after["allocated_bytes"] - before["allocated_bytes"]
        assert taken > 4000
        assert after["server_allocated_bytes"] - before["server_allocated_bytes"] == taken
        assert before["free_bytes"] - after["free_bytes"] == taken
        assert value(here, "smb_coordinator_server_capacity_bytes", **of_server) == 16 << 20
        client.delete("known")
        wait_for(lambda: now()["buffers"] == before["buffers"], "its end")

        started = value(here, "smb_coordinator_start_time_seconds")
        coordinator.kill()
        moves(server.metrics, "smb_server_leases_lost_total", coordinator.start)
        assert started < value(here, "smb_coordinator_start_time_seconds") <= time.time()
        assert 0 < value(here, "smb_coordinator_recovery_seconds") < 10


class Breaks:
    """Of a proxy: what to do with the next answer to a FETCH_ADD, once."""

    def __init__(self) -> None:
        self.next: Fault | None = None

    def __call__(self, reply: bool, header: bytes) -> Fault | None:
        if not reply or header[3] != Opcode.FETCH_ADD:
            return None
        fault, self.next = self.next, None
        return fault


def test_a_client_counts_what_it_repeats(tmp_path: Path) -> None:
    """A request whose answer got lost is sent again, and one whose answer was spoilt on the way as well."""
    plan = Breaks()
    with (
        behind_a_proxy(tmp_path, plan) as (address, _),
        smb.connect(address, transport="tcp", checksum=True, timeout=30.0) as client,
        smb.metrics.serve(client) as pages,
    ):
        counter = client.create("counter", (1,), "int64")
        for number, (fault, moved) in enumerate(
            (
                (Fault("cut reply"), "smb_client_repeated_frames_total"),
                (Fault("flip reply", 8 * 40), "smb_client_spoilt_answers_total"),
            )
        ):
            plan.next = fault
            before = value(pages.address, "smb_client_repeated_frames_total")
            moves(pages.address, moved, lambda: counter.fetch_add(0, 1))
            assert plan.next is None
            assert value(pages.address, "smb_client_repeated_frames_total") == before + 1
            assert counter.read() == [number + 1]


@pytest.mark.parametrize(
    ("journal", "found"), [("kept", "smb_server_recovered_changes"), ("lost", "smb_server_torn_chunks")]
)
def test_what_a_kill_left_half_made(tmp_path: Path, journal: str, found: str) -> None:
    """A server that was killed within a chunk's addition tells that it finished it; without its journal, that it could
    not."""
    other = {"smb_server_recovered_changes", "smb_server_torn_chunks"} - {found}
    failing = build("failpoints").environment
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator()
        daemons.variables = failing | {"SMB_ENGINE_FAILPOINT": "journal.block_changed"}
        server = daemons.memory_server(coordinator.address, "m")
        assert server.address
        with smb.connect(coordinator.address, transport="tcp", timeout=60.0) as client:
            buffer = client.create("w", 65536)
            adding = buffer.accumulate_async(np.ones(65536, np.float32))
            assert server.wait() == -signal.SIGKILL, "the failpoint did not fire"
            server.kill()
            if journal == "lost":
                (file,) = daemons.memory.glob("*journal*")
                file.unlink()
            daemons.variables = failing
            server = daemons.memory_server(coordinator.address, "m")
            assert (server.metric(found), server.metric(*other)) == (1, 0)
            adding.result()
            if journal == "kept":
                assert (buffer.read() == 1).all()


def test_targets(small: smb.LocalCluster, tmp_path: Path) -> None:
    """The coordinator lists itself and its servers for Prometheus; `smb targets` writes the same into a file, and says
    so where there is no coordinator."""
    with urllib.request.urlopen(f"http://{small.coordinator.metrics}/targets", timeout=10) as page:
        assert page.headers["Content-Type"].startswith("application/json")
        text = page.read().decode()
    assert small.servers[0].metrics in text
    assert small.coordinator.metrics in text
    file = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "smb.tools.cli.main", "targets"]
    listed = f"127.0.0.1:9,{small.coordinator.metrics}"  # of several coordinators, the first one that answers
    subprocess.run([*command, listed, "--output", str(file)], check=True, timeout=60)
    assert file.read_text() == text
    refused = subprocess.run([*command, "127.0.0.1:9"], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert "cannot read targets from a coordinator" in refused.stderr
