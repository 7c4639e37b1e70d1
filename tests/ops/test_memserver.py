"""Real memory servers with a real coordinator: life, death and return."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from smb.config.boot import boot_id
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from tests.support.daemons import Daemon, Daemons, running_daemons, wait_for
from tests.support.memory_server import coordinator_stub

Code = grpc.StatusCode
MIB = 1 << 20


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


@pytest.fixture
def daemon(daemons: Daemons) -> Daemon:
    return daemons.coordinator()


@pytest.fixture
def coordinator(daemon: Daemon) -> Iterator[CoordinatorStub]:
    with coordinator_stub(daemon.address) as stub:
        yield stub


def create(coordinator: CoordinatorStub, name: str = "w", nbytes: int = 3 * MIB, **wishes: Any) -> Any:
    request = pb.CreateBufferRequest(**{"name": name, "shape": [nbytes], "dtype": "uint8", **wishes})
    return coordinator.CreateBuffer(request, timeout=20)


def delete(coordinator: CoordinatorStub, name: str) -> None:
    coordinator.DeleteBuffer(pb.DeleteBufferRequest(name=name), timeout=20)


def open_buffer(coordinator: CoordinatorStub, name: str = "w") -> Any:
    return coordinator.OpenBuffer(pb.OpenBufferRequest(name=name), timeout=10)


def servers(coordinator: CoordinatorStub) -> dict[str, Any]:
    return {s.name: s for s in coordinator.ListServers(pb.ListServersRequest(), timeout=10).servers}


def segments(daemons: Daemons) -> list[str]:
    return [name for name in daemons.files() if name.endswith(".segment")]


def test_a_server_serves_registers_and_leaves_nothing(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub
) -> None:
    """Ready means registered; SIGTERM ends with code 0, the coordinator knows at once, and no file stays."""
    server = daemons.memory_server(daemon.address, "a")
    host, _, port = server.address.rpartition(":")
    shown = servers(coordinator)["a"]
    assert (shown.data_address, shown.alive, shown.capacity_bytes) == (server.address, True, 64 * MIB)
    assert shown.metrics_address == server.metrics
    assert daemons.files() == ["smb.a.journal", "smb.a.lock", "smb.a.sock", "smb.a.stamps"]
    for family, address in ((socket.AF_INET, (host, int(port))), (socket.AF_UNIX, shown.unix_path)):
        with socket.socket(family) as client:
            client.connect(address)
    create(coordinator)
    delete(coordinator, "w")
    assert server.stop() == 0
    assert not server.ready_file.exists()
    assert daemons.files() == []
    assert servers(coordinator) == {}
    assert "Traceback" not in server.log.read_text()


def test_a_buffer_lies_in_files_that_a_restart_finds_again(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub
) -> None:
    """After a clean stop and after kill -9 the segments stay, and the next run serves them at its new address."""
    server = daemons.memory_server(daemon.address, "a")
    assert server.address
    made = create(coordinator)
    names = segments(daemons)
    assert names == [f"smb.a.{made.layout.segments[0].id:016x}.segment"]
    memory = daemons.memory / names[0]
    with memory.open("r+b") as file:  # as a local client would: the file is the memory
        file.seek(-1, 2)
        file.write(b"!")
    assert server.stop() == 0
    assert daemons.files() == [*names, "smb.a.journal", "smb.a.sock", "smb.a.stamps"]
    assert not servers(coordinator)["a"].alive

    server = daemons.memory_server(daemon.address, "a")
    address = server.address
    assert open_buffer(coordinator).layout.segments[0].data_address == address
    server.kill()
    server = daemons.memory_server(daemon.address, "a")
    address = server.address
    (segment,) = open_buffer(coordinator).layout.segments
    assert (segment.id, segment.data_address) == (made.layout.segments[0].id, address)
    assert server.metric("smb_server_segments") == 1
    assert memory.read_bytes().endswith(b"!")
    delete(coordinator, "w")
    assert segments(daemons) == []


def test_a_creation_that_one_of_three_servers_refuses_leaves_no_file(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub
) -> None:
    """Where one server's memory is full after all, the error says which, and none of the three keeps a segment."""
    running = {name: daemons.memory_server(daemon.address, name) for name in "abc"}
    assert all(server.address for server in running.values())
    resource.prlimit(running["b"].pid, resource.RLIMIT_FSIZE, (MIB, MIB))
    with pytest.raises(grpc.RpcError) as caught:
        create(coordinator, nbytes=30 * MIB)
    assert caught.value.code() == Code.RESOURCE_EXHAUSTED
    assert 'memory server "b"' in caught.value.details()
    assert "is full" in caught.value.details()
    assert [name for name in daemons.files() if "segment" in name] == []
    assert [server.metric("smb_server_segment_bytes") for server in running.values()] == [0, 0, 0]
    create(coordinator, nbytes=30 * MIB, server_names=["a", "c"])


def test_capacity_is_never_exceeded(daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub) -> None:
    """Buffers are made until one is refused: what lies in files stays within the capacity, and deleting makes room."""
    server = daemons.memory_server(daemon.address, "a", "--capacity", "8MiB")
    assert server.address
    for number in range(7):
        create(coordinator, f"w{number}", nbytes=MIB)
    with pytest.raises(grpc.RpcError) as caught:
        create(coordinator, "one-more", nbytes=MIB)
    assert caught.value.code() == Code.RESOURCE_EXHAUSTED
    assert "no room for 1 MiB; free: a " in caught.value.details()
    in_files = sum((daemons.memory / name).stat().st_size for name in segments(daemons))
    assert (
        in_files == server.metric("smb_server_segment_bytes") <= server.metric("smb_server_capacity_bytes") == 8 * MIB
    )
    delete(coordinator, "w0")
    create(coordinator, "again", nbytes=MIB)


def test_a_buffer_deleted_while_its_server_is_down_is_dropped_at_the_return(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub
) -> None:
    """The killed server's file is gone by the time its next run is ready; that of the other buffer is there."""
    server = daemons.memory_server(daemon.address, "a")
    assert server.address
    create(coordinator, "gone")
    kept = create(coordinator, "kept")
    server.kill()
    delete(coordinator, "gone")
    assert len(segments(daemons)) == 2
    assert daemons.memory_server(daemon.address, "a").address
    assert segments(daemons) == [f"smb.a.{kept.layout.segments[0].id:016x}.segment"]


def test_the_death_of_the_coordinator_changes_nothing_for_the_servers(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub
) -> None:
    """kill -9 of the coordinator: servers serve on and say so; after its restart they are back, with all segments."""
    running = [daemons.memory_server(daemon.address, name) for name in "ab"]
    assert all(server.address for server in running)
    made = create(coordinator)
    before = segments(daemons)
    address = daemon.address
    daemon.kill()
    connected = "smb_server_coordinator_connected"
    wait_for(lambda: all(server.metric(connected) == 0 for server in running), "loss of the coordinator")
    host, _, port = running[0].address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5):
        assert json.loads(running[0].page("/healthz"))["ok"]
    assert daemons.coordinator(listen=address).address == address
    wait_for(lambda: all(server.metric(connected) == 1 for server in running), "return of the coordinator")
    assert open_buffer(coordinator) == made
    assert segments(daemons) == before
    assert {server.used_bytes > 0 for server in servers(coordinator).values()} == {True}
    delete(coordinator, "w")
    assert segments(daemons) == []


def test_a_server_may_start_before_the_coordinator(daemons: Daemons, kept_port: int) -> None:
    """It serves and waits; it is ready once the coordinator came and knows it."""
    address = f"127.0.0.1:{kept_port}"
    server = daemons.memory_server(address, "a")
    wait_for(lambda: "cannot be reached, or does not lead; serving on" in server.log.read_text(), "first attempt")
    assert not server.ready_file.exists()
    daemons.coordinator(listen=address)
    assert server.address
    with coordinator_stub(address) as stub:
        assert servers(stub)["a"].alive


def test_a_server_that_never_found_its_coordinator_stops_cleanly(daemons: Daemons) -> None:
    """SIGTERM before any registration: code 0, nothing left."""
    server = daemons.memory_server("127.0.0.1:9", "a")
    wait_for(lambda: "cannot be reached" in server.log.read_text(), "first attempt")
    assert server.stop() == 0
    assert daemons.files() == []


def test_sigterm_while_it_starts_and_again_while_it_stops(daemons: Daemons) -> None:
    """Told to stop at any moment since it took its name, and told ten times, it ends in order: code 0, nothing left. A
    thread of a library that does not block the signal would be killed by it, and the daemon with it.
    """
    for _ in range(2):
        server = daemons.memory_server("127.0.0.1:9", "a")
        wait_for(lambda: "smb.a.lock" in daemons.files(), "start")
        for _ in range(10):
            server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.log.read_text()
        assert daemons.files() == []


def test_a_server_whose_directory_was_removed_stops_cleanly(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub
) -> None:
    """As by the end of the `smb up` whose server it is, started again by hand: one line, no traceback, code 0."""
    directory = daemons.memory / "gone"
    directory.mkdir(mode=0o700)
    server = daemons.memory_server(daemon.address, "a", "--memory-dir", str(directory))
    assert server.address
    create(coordinator)
    shutil.rmtree(directory)
    assert server.stop() == 0
    log = server.log.read_text()
    assert "was removed meanwhile" in log
    assert "Traceback" not in log


def test_a_second_server_of_a_name_is_refused(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub, tmp_path: Path
) -> None:
    """On the same directory by the lock, elsewhere by the coordinator: exit code 1 in both, and the first serves on."""
    first = daemons.memory_server(daemon.address, "a")
    address = first.address
    for directory, told in ((daemons.memory, '"a" runs already on'), (tmp_path, '"a" runs already at')):
        second = daemons.memory_server(daemon.address, "a", "--memory-dir", str(directory))
        assert second.wait() == 1
        assert told in second.log.read_text()
        assert "Traceback" not in second.log.read_text()
    assert servers(coordinator)["a"].data_address == address
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("smb.")] == []
    create(coordinator)


# More than 5 s: thirteen starts, one for each thing that cannot be.
def test_a_start_that_cannot_be_says_why_in_one_line(daemons: Daemons, tmp_path: Path) -> None:
    """Sizes, directories, names and ports that cannot be had: exit code 1, one line, no traceback, no file."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options, told in (
            (["--capacity", "lots"], "a size must be a number and a unit"),
            (["--capacity", "0"], "more than 0"),
            (["--capacity", "32PiB"], "a size must be a number and a unit"),
            (["--capacity", "8192TiB"], "is more than"),
            (["--memory-dir", str(tmp_path / "nowhere")], "is not a directory"),
            (["--memory-dir", "/proc"], "cannot write into --memory-dir /proc"),
            (["--memory-dir", str(_long_directory(tmp_path))], "longer than the system's 107 bytes"),
            (["--name", "a/b"], '--name must be 1 to 64 characters of A-Z a-z 0-9 . _ -, not "a/b"'),
            (["--loops", "65"], "--loops must be from 1 to 64, not 65"),
            (["--listen", f"127.0.0.1:{port}"], f"cannot listen on 127.0.0.1 port {port}: Address already in use"),
            (["--listen", "no.such.host.invalid:0"], "--listen no.such.host.invalid"),
            (["--metrics", f"127.0.0.1:{port}"], f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (["--coordinator", "somewhere"], "an address must be HOST:PORT"),
        ):
            failed = daemons.memory_server("127.0.0.1:9", "a", *options)
            assert failed.wait() == 1, failed.log.read_text()
            *_, line = failed.log.read_text().splitlines()
            assert told in line
            assert " ERROR memserver: " in line
            assert "Traceback" not in failed.log.read_text()
            assert daemons.files() == []


def test_a_ready_file_that_cannot_be_written_ends_the_start(daemons: Daemons, daemon: Daemon) -> None:
    """Whoever waits for it would wait forever: exit code 1 with its path, and nothing is left in memory."""
    failed = daemons.memory_server(daemon.address, "a", "--ready-file", "/proc/self/ready")
    assert failed.wait() == 1
    assert "cannot write the ready file /proc/self/ready" in failed.log.read_text()
    assert daemons.files() == []


def test_wrong_usage_ends_with_2(daemons: Daemons) -> None:
    """An option that is not there."""
    failed = daemons.memory_server("127.0.0.1:9", "a", "--nonsense")
    assert failed.wait() == 2
    assert "--nonsense" in failed.log.read_text()


def test_files_that_are_no_segments_are_reported_and_left(daemons: Daemons, daemon: Daemon) -> None:
    """Garbage and a truncated segment under our name do not stop the start; they stay for whoever wants to look."""
    for segment_id, content in ((1, b""), (2, b"garbage" * 1000)):
        (daemons.memory / f"smb.a.{segment_id:016x}.segment").write_bytes(content)
    server = daemons.memory_server(daemon.address, "a")
    assert server.metric("smb_server_segments") == 0
    assert server.log.read_text().count("the file stays and is not served") == 2
    assert len(segments(daemons)) == 2


def test_metrics_count_connections_and_errors(daemons: Daemons, daemon: Daemon) -> None:
    """A connection that sends what is no frame is counted as opened and as a protocol error; the next one is served."""
    server = daemons.memory_server(daemon.address, "a")
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)
        assert client.recv(4096) is not None
        client.settimeout(5)
        while client.recv(4096):
            pass
    assert server.metric('smb_server_connections_opened_total{transport="tcp"}') == 1
    assert server.metric('smb_server_errors_total{class="protocol"}') == 1
    wait_for(lambda: server.metric('smb_server_connections{transport="tcp"}') == 0, "closing")
    assert server.metric("smb_server_capacity_bytes") == 64 * MIB
    health = json.loads(server.page("/healthz"))
    assert (health["name"], health["coordinator_connected"], health["segments"]) == ("a", True, 0)


def test_wildcard_addresses_are_told_to_clients_as_reachable_ones(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub
) -> None:
    """Listening everywhere: clients get --advertise, or without it our address towards the coordinator."""
    plain = daemons.memory_server(daemon.address, "a", "--insecure", "--listen", "0.0.0.0:0")
    assert plain.address.startswith("127.0.0.1:")
    told = daemons.memory_server(daemon.address, "b", "--insecure", "--listen", "0.0.0.0:0", "--advertise", "localhost")
    assert told.address.startswith("localhost:")
    create(coordinator, server_names=["a", "b"])


def _long_directory(tmp_path: Path) -> Path:
    directory = tmp_path / ("x" * 120)
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def test_two_copies_lie_in_two_zones_and_on_two_machines(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub
) -> None:
    """At creation and when a copy is made anew. Servers of one machine are known as such by its boot id, unless their
    operator names the machine; a name that is none is refused.
    """
    for name, zone, capacity in (("a", "x", "64MiB"), ("b", "x", "64MiB"), ("c", "y", "16MiB"), ("d", "y", "16MiB")):
        assert daemons.memory_server(daemon.address, name, "--zone", zone, "--capacity", capacity).address
    zones = {name: server.zone for name, server in servers(coordinator).items()}
    assert {server.host_name for server in servers(coordinator).values()} == {boot_id()}
    placed = create(coordinator, replicas=2, server_names=["a", "b"]).layout.segments
    assert [zones[segment.backup] for segment in placed] == ["y", "y"]
    coordinator.DrainServer(pb.DrainServerRequest(name="c"), timeout=10)
    wait_for(lambda: not _copies_on(coordinator, "c"), "an empty server")
    assert {segment.backup or segment.copying_to for segment in open_buffer(coordinator).layout.segments} == {"d"}
    for name, host in (("e", "n1"), ("f", "n1"), ("g", "n2")):
        assert daemons.memory_server(daemon.address, name, "--host-name", host).address
    (segment,) = create(coordinator, "v", replicas=2, server_names=["e"]).layout.segments
    assert segment.backup != "f"
    failed = daemons.memory_server(daemon.address, "h", "--host-name", "a/b")
    assert failed.wait() == 1
    assert '"a/b" cannot name a host' in failed.log.read_text()


def _copies_on(coordinator: CoordinatorStub, name: str) -> int:
    return int(servers(coordinator)[name].segment_count)
