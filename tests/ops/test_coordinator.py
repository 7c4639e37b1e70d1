"""A real coordinator process and its gRPC, against memory servers that do as they are told."""

from __future__ import annotations

import json
import random
import signal
import socket
import sqlite3
import threading
import urllib.error
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from smb.coordinator.store import FILE_NAME
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from smb.rpc.metadata import pack, unpack
from tests.support.daemons import Daemon, Daemons, running_daemons, wait_for
from tests.support.memory_server import FakeMemoryServer, coordinator_stub, fake_memory_servers

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


@pytest.fixture
def servers(coordinator: CoordinatorStub) -> Iterator[list[FakeMemoryServer]]:
    with fake_memory_servers("a", "b", "c") as started:
        for server in started:
            server.register(coordinator)
        yield started


def create(coordinator: CoordinatorStub, name: str = "w", nbytes: int = 3 * MIB, **wishes: Any) -> Any:
    request = pb.CreateBufferRequest(**{"name": name, "shape": [nbytes], "dtype": "uint8", **wishes})
    return coordinator.CreateBuffer(request, timeout=20)


def open_buffer(coordinator: CoordinatorStub, name: str, timeout_ms: int = 0) -> Any:
    return coordinator.OpenBuffer(pb.OpenBufferRequest(name=name, timeout_ms=timeout_ms), timeout=20)


def delete(coordinator: CoordinatorStub, name: str) -> Any:
    return coordinator.DeleteBuffer(pb.DeleteBufferRequest(name=name), timeout=20)


def names(coordinator: CoordinatorStub) -> list[str]:
    """Ask again where the channel still had the connection of a coordinator that was killed."""

    def ask() -> Any:
        try:
            return coordinator.ListBuffers(pb.ListBuffersRequest(), timeout=10, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return None

    return [buffer.name for buffer in wait_for(ask, "answer of the coordinator").buffers]


def alive(coordinator: CoordinatorStub) -> dict[str, bool]:
    return {s.name: s.alive for s in coordinator.ListServers(pb.ListServersRequest(), timeout=10).servers}


@contextmanager
def refused(code: grpc.StatusCode, *texts: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code() == code, caught.value.details()
    for text in texts:
        assert text in caught.value.details()


def test_create_open_list_delete(coordinator: CoordinatorStub, servers: list[FakeMemoryServer]) -> None:
    """A buffer's segments are made as its layout says, can be looked up, and are dropped with it; the name is free
    again.
    """
    made = create(coordinator, "model/w")
    assert [segment.server for segment in made.layout.segments] == ["a", "b", "c"]
    assert (made.nbytes, made.layout.epoch, made.layout.stripe_bytes, made.layout.chunk_bytes) == (
        3 * MIB, 1, MIB // 4, MIB // 4,
    )  # fmt: skip
    for server, segment in zip(servers, made.layout.segments, strict=True):
        asked = server.segments[segment.id]
        assert (asked.nbytes, asked.epoch, asked.dtype, asked.chunk_bytes) == (MIB, 1, "uint8", MIB // 4)
        assert segment.data_address == "127.0.0.1:1"
        assert segment.instance_id == server.instance_id
    assert open_buffer(coordinator, "model/w") == made
    assert names(coordinator) == ["model/w"]
    delete(coordinator, "model/w")
    assert not any(server.segments for server in servers)
    with refused(Code.NOT_FOUND, 'no buffer "model/w" exists; `smb ls` lists the names; a timeout waits'):
        open_buffer(coordinator, "model/w")
    create(coordinator, "model/w")


def test_a_creation_that_one_server_refuses_leaves_nothing(
    coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """Two of three made their segments: they drop them, the error names the third, and the name is free."""
    servers[1].refuse_creation = Code.RESOURCE_EXHAUSTED
    with refused(Code.RESOURCE_EXHAUSTED, 'create of "w"', 'memory server "b"', "b refuses", "nothing was created"):
        create(coordinator)
    assert not any(server.segments for server in servers)
    assert names(coordinator) == []
    servers[1].refuse_creation = None
    create(coordinator)
    assert all(len(server.segments) == 1 for server in servers)


def test_what_names_no_servers_is_created_without_the_one_that_does_not_answer(
    coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """The coordinator tries once more, on the others; where these are too few, the error is of the first attempt."""
    servers[2].refuse_creation = Code.UNAVAILABLE
    made = create(coordinator)
    assert [segment.server for segment in made.layout.segments] == ["a", "b"]
    assert not servers[2].segments
    for wishes in ({"server_count": 3}, {"server_names": ["c"]}):
        with refused(Code.UNAVAILABLE, 'memory server "c"', "cannot be reached", "nothing was created"):
            create(coordinator, "v", **wishes)
    assert names(coordinator) == ["w"]
    assert [len(server.segments) for server in servers] == [1, 1, 0]
    servers[1].refuse_creation = Code.UNAVAILABLE  # a second attempt is the last one
    servers[0].refuse_creation = Code.UNAVAILABLE
    with refused(Code.UNAVAILABLE, "cannot be reached", "nothing was created"):
        create(coordinator, "v")


def test_a_server_that_does_not_answer_fails_the_creation_in_time(
    coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """A mute server costs some seconds, not forever; what it made after all is dropped once it registers again. The
    error says for how long it counts as alive.
    """
    hung = servers[2]
    hung.hold = threading.Event()
    with refused(
        Code.UNAVAILABLE, 'memory server "c"', "in time", "nothing was created. That server counts as alive for "
    ):
        create(coordinator, server_names=["a", "b", "c"])
    assert not servers[0].segments
    assert not servers[1].segments
    hung.hold.set()
    wait_for(lambda: hung.segments, "late segment")
    with refused(Code.NOT_FOUND, "must register again"):
        hung.renew(coordinator)
    hung.register(coordinator)
    assert not hung.segments


def test_wrong_requests_are_refused_as_such(coordinator: CoordinatorStub, servers: list[FakeMemoryServer]) -> None:
    """Each class of mistake has its code and says what was asked; the coordinator serves on."""
    for wishes, told in (
        ({"name": "../w"}, '"../w" cannot name a buffer'),
        ({"dtype": "complex128"}, 'not "complex128"'),
        ({"stripe_bytes": 1000}, "multiple of 4096"),
        ({"replicas": 3}, "replicas must be 1 or 2"),
        ({"versions": 17}, "versions must be from 1 to 16"),
        ({"packed_metadata": pack("[1]")}, 'create of "w": metadata must be a JSON object'),
        ({"packed_metadata": pack('{"a":' * 100_000)}, "is nested deeper than 64"),
        ({"packed_metadata": pack(" " * (4 << 20) + "{}")}, "metadata cannot be unpacked: it has more than 4 MiB"),
        (
            {"kind": pb.LOCK, "packed_metadata": pack("{}")},
            'lock "w": give only the name and the number of copies; the coordinator decides shape',
        ),
        ({"kind": pb.LOCK}, 'lock "w": give only the name and the number of copies; the coordinator decides shape'),
        ({"kind": 7}, "kind 7 is unknown to this coordinator"),
        ({"server_names": ["a", "x"]}, 'no memory server is named "x"'),
    ):
        with refused(Code.INVALID_ARGUMENT, told):
            create(coordinator, **wishes)
    with refused(Code.NOT_FOUND, 'no buffer "nobody"'):
        create(coordinator, like="nobody")
    with refused(Code.RESOURCE_EXHAUSTED, "no room for", "free: a 64 MiB, b 64 MiB, c 64 MiB"):
        create(coordinator, nbytes=1 << 50)
    with refused(Code.RESOURCE_EXHAUSTED, "no room for"):
        create(coordinator, shape=[(1 << 64) - 1] * 4, dtype="float64")
    with refused(Code.UNAVAILABLE, "4 servers were asked for, 3 are alive"):
        create(coordinator, server_count=4)
    assert names(coordinator) == []
    create(coordinator)


def test_without_a_memory_server_creates_say_how_to_start_one(coordinator: CoordinatorStub) -> None:
    """UNAVAILABLE, with the command."""
    with refused(Code.UNAVAILABLE, "no memory server is alive", "smb-memserver --coordinator"):
        create(coordinator)


def test_of_concurrent_creates_one_wins(coordinator: CoordinatorStub, servers: list[FakeMemoryServer]) -> None:
    """Sixteen at once: one buffer, fifteen ALREADY_EXISTS; with exist_ok sixteen times the same buffer."""

    def attempt(exist_ok: bool) -> Any:
        try:
            return create(coordinator, "same" if exist_ok else "w", exist_ok=exist_ok).id
        except grpc.RpcError as error:
            return error.code()

    with ThreadPoolExecutor(16) as threads:
        outcomes = Counter(threads.map(attempt, [False] * 16))
        assert outcomes[Code.ALREADY_EXISTS] == 15
        ids = set(threads.map(attempt, [True] * 16))
    assert len(ids) == 1
    assert ids == {open_buffer(coordinator, "same").id}
    assert [len(server.segments) for server in servers] == [2, 2, 2]


def test_concurrent_creates_do_not_promise_memory_twice(
    coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """Ten at once of 40 MiB each for three servers of 64 MiB: one fits on each, seven are refused."""

    def attempt(number: int) -> str:
        try:
            create(coordinator, f"w{number}", nbytes=40 * MIB, server_count=1)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "made"

    with ThreadPoolExecutor(10) as threads:
        outcomes = Counter(threads.map(attempt, range(10)))
    assert outcomes == {"made": 3, "RESOURCE_EXHAUSTED": 7}
    assert [len(server.segments) for server in servers] == [1, 1, 1]


def test_an_open_waits_for_the_creation_and_holds_no_thread(
    daemon: Daemon, coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """A hundred opens wait without a thread each and all return what is then created; a short one times out."""

    def threads() -> int:
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Threads:")))

    with refused(Code.NOT_FOUND, "within 0.05 s"):
        open_buffer(coordinator, "late", timeout_ms=50)
    before = threads()
    request = pb.OpenBufferRequest(name="late", timeout_ms=15_000)
    opens = [coordinator.OpenBuffer.future(request, timeout=20) for _ in range(100)]
    assert names(coordinator) == [], "answered after the opens, by the same connection"
    assert threads() - before < 10
    made = create(coordinator, "late")
    assert all(opened.result(10).id == made.id for opened in opens)


@pytest.mark.parametrize("whole", [False, True])
def test_everything_comes_back_after_a_kill(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub, servers: list[FakeMemoryServer], whole: bool
) -> None:
    """kill -9 and a restart on the same state and port: buffers are there, and servers go on. A half made one is taken
    back, unless its servers have the `whole` of it.
    """
    made = create(coordinator, "w")
    servers[0].hold = threading.Event()
    servers[0].asked.clear()
    half = coordinator.CreateBuffer.future(pb.CreateBufferRequest(name="half", shape=[3 * MIB], dtype="uint8"))
    assert servers[0].asked.wait(10)
    wait_for(lambda: [len(server.segments) for server in servers] == [1, 2, 2], "segments of the half made buffer")
    address = daemon.address
    daemon.kill()
    assert half.code() == Code.UNAVAILABLE
    servers[0].hold.set()
    wait_for(lambda: len(servers[0].segments) == 2, "last segment of the half made buffer")

    if not whole:
        servers[0].segments.popitem()
    again = daemons.coordinator(listen=address)
    assert again.address == address
    assert names(coordinator) == ["w"]
    assert open_buffer(coordinator, "w") == made
    assert alive(coordinator) == {"a": False, "b": False, "c": False}, "none of them was heard of yet"
    for server in servers:
        with refused(Code.NOT_FOUND, "must register again"):
            server.renew(coordinator)
        server.register(coordinator)
        server.renew(coordinator)
    if whole:
        wait_for(lambda: names(coordinator) == ["half", "w"], "the half made buffer")
    else:
        wait_for(lambda: [len(server.segments) for server in servers] == [1, 1, 1], "no half made buffer")
        assert names(coordinator) == ["w"]
    for server in servers:
        server.register(coordinator)
    assert alive(coordinator) == {"a": True, "b": True, "c": True}
    if not whole:
        create(coordinator, "half")


def test_metadata_outlives_a_kill_and_old_state_is_read(
    daemons: Daemons, daemon: Daemon, coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """As much of it as may be is opened as it was created, after kill -9 too, and not listed. Records of a coordinator
    that knew of none are read, and those of one that did not pack it.
    """
    packed = pack(json.dumps({"a": random.Random(1).randbytes(900_000).hex()}))
    made, plain = create(coordinator, "w", packed_metadata=packed), create(coordinator, "v")
    assert (made.packed_metadata, plain.packed_metadata) == (packed, b"")
    assert create(coordinator, "w", packed_metadata=pack('{"b":1}'), exist_ok=True) == made
    address, file = daemon.address, daemons.directory / "state" / FILE_NAME
    daemon.kill()
    again = daemons.coordinator(listen=address)
    assert names(coordinator) == ["v", "w"]
    assert open_buffer(coordinator, "w") == made
    listed = coordinator.ListBuffers(pb.ListBuffersRequest(), timeout=10).buffers
    assert [buffer.packed_metadata for buffer in listed] == [b"", b""]
    again.stop()
    with closing(sqlite3.connect(file)) as database, database:
        rows = database.execute("SELECT key, text FROM records WHERE key LIKE 'buffer/%'").fetchall()
        assert len(rows) == 2
        for key, old in rows:
            fields = json.loads(old)
            if fields["name"] == "w":
                del fields["metadata"]
            else:
                fields["metadata"] = '{"b":1}'
            database.execute("UPDATE records SET text = ? WHERE key = ?", (json.dumps(fields), key))
    daemons.coordinator(listen=address)
    assert names(coordinator) == ["v", "w"]
    assert unpack(open_buffer(coordinator, "v").packed_metadata) == '{"b":1}'
    assert open_buffer(coordinator, "w").packed_metadata == b""
    create(coordinator, "u", packed_metadata=packed)


def test_a_deleted_buffer_of_a_server_that_is_away_is_dropped_at_its_return(
    coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """Delete answers at once though a server is down; that server is told when it registers."""
    create(coordinator)
    away = servers[0]
    away.stop()
    delete(coordinator, "w")
    assert names(coordinator) == []
    assert [len(server.segments) for server in servers] == [1, 0, 0]
    away.start()
    away.instance_id = 99
    away.register(coordinator)
    assert not away.segments


def test_a_name_belongs_to_the_run_that_answers(coordinator: CoordinatorStub, servers: list[FakeMemoryServer]) -> None:
    """A second run is refused while the first answers, let in at once when it is gone, and the first must then stay
    out.
    """
    with fake_memory_servers("a") as (second,):
        second.instance_id = 77
        with refused(Code.ALREADY_EXISTS, 'a memory server "a" runs already'):
            second.register(coordinator)
        servers[0].stop()
        second.register(coordinator)
        second.renew(coordinator)
        with refused(Code.NOT_FOUND, "another run"):
            servers[0].renew(coordinator)


def test_a_server_whose_lease_ran_out_is_shown_dead_and_not_used(
    coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """Without renewals it takes a lease; its buffers stay listed, new ones go elsewhere, and it can come back."""
    create(coordinator)

    def only_a_is_dead() -> bool:
        servers[1].renew(coordinator)
        servers[2].renew(coordinator)
        return alive(coordinator) == {"a": False, "b": True, "c": True}

    wait_for(only_a_is_dead, "death of a", deadline_s=15)
    assert names(coordinator) == ["w"]
    assert {segment.server for segment in create(coordinator, "v").layout.segments} == {"b", "c"}
    with refused(Code.UNAVAILABLE, '"a" is not alive'):
        create(coordinator, "u", server_names=["a"])
    servers[0].register(coordinator)
    assert alive(coordinator)["a"]


def test_a_client_that_gives_up_in_the_middle_leaves_a_whole_buffer(
    coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """A cancelled create is finished by the coordinator: afterwards the buffer is there with all its segments."""
    servers[0].hold = threading.Event()
    call = coordinator.CreateBuffer.future(pb.CreateBufferRequest(name="w", shape=[3 * MIB], dtype="uint8"))
    assert servers[0].asked.wait(10)
    call.cancel()
    servers[0].hold.set()
    wait_for(lambda: names(coordinator) == ["w"], "buffer")
    assert [len(server.segments) for server in servers] == [1, 1, 1]


def test_sessions_are_opened_renewed_made_again_and_closed(daemon: Daemon, coordinator: CoordinatorStub) -> None:
    """Ids are non-zero and distinct; renewing an id that nobody knows (a restart's) makes it; the count is a metric."""
    opened = [coordinator.OpenSession(pb.OpenSessionRequest(client_name="h:1")) for _ in range(2)]
    assert len({0, *(session.session_id for session in opened)}) == 3
    assert opened[0].lease_ms >= 3000
    coordinator.RenewSession(pb.RenewSessionRequest(session_id=12345, client_name="h:2"))
    assert daemon.metric("smb_coordinator_sessions") == 3
    coordinator.CloseSession(pb.CloseSessionRequest(session_id=12345))
    coordinator.CloseSession(pb.CloseSessionRequest(session_id=999))
    assert daemon.metric("smb_coordinator_sessions") == 2
    assert daemon.metric("smb_coordinator_ended_sessions") == 2
    with refused(Code.INVALID_ARGUMENT):
        coordinator.RenewSession(pb.RenewSessionRequest(session_id=0))


def test_an_ended_session_is_told_to_every_server_and_never_taken_back(
    coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """At once where a server listens, with its next renewal or registration where it does not; once each."""
    servers[1].deaf = servers[2].deaf = True
    session = coordinator.OpenSession(pb.OpenSessionRequest(client_name="h:1")).session_id
    other = coordinator.OpenSession(pb.OpenSessionRequest(client_name="h:2")).session_id
    coordinator.CloseSession(pb.CloseSessionRequest(session_id=session))
    wait_for(lambda: servers[0].ended, "word of the end")
    assert [server.ended for server in servers] == [[session], [], []]
    servers[1].renew(coordinator)
    servers[2].instance_id = 33
    servers[2].stop()
    servers[2].start()
    servers[2].register(coordinator)
    assert [server.ended for server in servers] == [[session]] * 3
    for server in servers[1:]:
        server.renew(coordinator)
        assert server.ended == [session]
    with refused(Code.FAILED_PRECONDITION, "its lease ran out", "connect again"):
        coordinator.RenewSession(pb.RenewSessionRequest(session_id=session, client_name="h:1"))
    coordinator.RenewSession(pb.RenewSessionRequest(session_id=other, client_name="h:2"))


def test_the_lease_of_a_session_is_an_option_and_its_end_outlives_a_kill(daemons: Daemons) -> None:
    """With --session-lease 1 a silent session is over within seconds; the next run knows of it, and of the living."""
    daemon = daemons.coordinator("127.0.0.1:0", None, "--session-lease", "1")
    address = daemon.address
    with coordinator_stub(address) as coordinator, fake_memory_servers("a") as (server,):
        server.register(coordinator)
        silent = coordinator.OpenSession(pb.OpenSessionRequest(client_name="h:1"))
        assert silent.lease_ms == 1000
        wait_for(lambda: server.ended, "end of the silent session")
        living = coordinator.OpenSession(pb.OpenSessionRequest(client_name="h:2")).session_id
        daemon.kill()
        daemons.coordinator(address, None, "--session-lease", "1")
        assert names(coordinator) == []
        with refused(Code.FAILED_PRECONDITION, "connect again"):
            coordinator.RenewSession(pb.RenewSessionRequest(session_id=silent.session_id, client_name="h:1"))
        server.register(coordinator)
        assert server.ended == [silent.session_id] * 2, "another run counts anew"
        wait_for(lambda: server.ended[2:] == [living], "end of the session of before the kill")


def test_a_lock_has_one_home_whoever_comes_first(coordinator: CoordinatorStub, servers: list[FakeMemoryServer]) -> None:
    """Sixteen first uses at once: one segment on one server. A buffer and a barrier of that name are other things."""

    def use(kind: pb.Kind) -> Any:
        return coordinator.CreateBuffer(pb.CreateBufferRequest(name="w", kind=kind, exist_ok=True), timeout=20)

    with ThreadPoolExecutor(16) as threads:
        homes = {lock.SerializeToString() for lock in threads.map(use, [pb.LOCK] * 16)}
    assert len(homes) == 1
    assert sum(len(server.segments) for server in servers) == 1
    lock, barrier = use(pb.LOCK), use(pb.BARRIER)
    assert (lock.kind, list(lock.shape), lock.dtype, lock.nbytes) == (pb.LOCK, [1], "int64", 8)
    assert (barrier.kind, list(barrier.shape), barrier.nbytes) == (pb.BARRIER, [8192], 65_536)
    assert names(coordinator) == []
    with refused(Code.NOT_FOUND, 'no buffer "w" exists; `smb ls` lists the names'):
        delete(coordinator, "w")
    with refused(Code.NOT_FOUND, 'no buffer "lock:w"'):
        delete(coordinator, "lock:w")
    buffer = create(coordinator)
    delete(coordinator, "w")
    assert len({lock.id, barrier.id, buffer.id}) == 3
    opened = coordinator.OpenBuffer(pb.OpenBufferRequest(name="w", kind=pb.LOCK))
    assert opened == use(pb.LOCK) == lock
    with refused(Code.NOT_FOUND, 'no barrier "x" exists; no client has used it yet'):
        coordinator.OpenBuffer(pb.OpenBufferRequest(name="x", kind=pb.BARRIER))


def test_two_versions_are_two_copies_side_by_side(
    coordinator: CoordinatorStub, servers: list[FakeMemoryServer]
) -> None:
    """The message says how far apart; the segments hold both; one version has no stride."""
    twice = create(coordinator, versions=2)
    assert (twice.versions, twice.nbytes, twice.copy_stride_bytes) == (2, 3 * MIB, 3 * MIB)
    assert [segment.nbytes for segment in twice.layout.segments] == [2 * MIB] * 3
    assert [server.used_bytes() for server in servers] == [2 * MIB] * 3
    assert open_buffer(coordinator, "w") == create(coordinator, versions=2, exist_ok=True) == twice
    with refused(Code.ALREADY_EXISTS, "with versions 2, not 1"):
        create(coordinator, exist_ok=True)
    once = create(coordinator, "v")
    assert (once.versions, once.copy_stride_bytes) == (1, 0)


def test_pages_tell_the_truth(daemon: Daemon, coordinator: CoordinatorStub, servers: list[FakeMemoryServer]) -> None:
    """Metrics follow what was created, asked and refused; /healthz is JSON; other paths are 404."""
    create(coordinator, "w")
    with refused(Code.NOT_FOUND):
        open_buffer(coordinator, "x")
    assert daemon.metric("smb_coordinator_buffers") == 1
    assert daemon.metric("smb_coordinator_buffer_bytes") == 3 * MIB
    assert daemon.metric("smb_coordinator_allocated_bytes") > 3 * MIB
    assert daemon.metric("smb_coordinator_servers_alive") == daemon.metric("smb_coordinator_servers_known") == 3
    assert daemon.metric('smb_coordinator_rpcs_total{code="OK",method="CreateBuffer"}') == 1
    assert daemon.metric('smb_coordinator_rpcs_total{code="NOT_FOUND",method="OpenBuffer"}') == 1
    assert daemon.metric('smb_coordinator_rpc_duration_seconds_count{method="CreateBuffer"}') == 1
    health = json.loads(daemon.page("/healthz"))
    assert (health["ok"], health["address"], health["buffers"]) == (True, daemon.address, 1)
    with pytest.raises(urllib.error.HTTPError) as caught:
        daemon.page("/nothing")
    with caught.value as answer:
        assert (answer.code, b"/targets" in answer.read()) == (404, True)


def test_a_stop_is_clean_and_quick(daemon: Daemon, coordinator: CoordinatorStub) -> None:
    """SIGTERM, also with an open that waits: exit code 0, the ready file is gone, no traceback."""
    waiting = coordinator.OpenBuffer.future(pb.OpenBufferRequest(name="late", timeout_ms=60_000))
    assert names(coordinator) == []
    assert daemon.stop() == 0
    assert waiting.code() == Code.UNAVAILABLE
    assert "the coordinator is stopping" in waiting.details()
    assert not daemon.ready_file.exists()
    assert "Traceback" not in daemon.log.read_text()


def test_ctrl_c_stops_as_well(daemon: Daemon) -> None:
    """SIGINT: exit code 0."""
    assert daemon.address
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.wait() == 0


def test_a_start_that_cannot_be_says_why_in_one_line(daemons: Daemons, daemon: Daemon) -> None:
    """A taken port, a state in use, a missing kind of state: exit code 1 and one line, no traceback, no ready file."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for listen, state, told in (
            (f"127.0.0.1:{port}", "fresh", f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (daemon.address, "fresh", "Address already in use"),
            ("127.0.0.1:0", "state", "in use by another coordinator"),
            ("127.0.0.1:0", "etcd://127.0.0.1:2379", "keys is missing"),
            ("nonsense", "fresh", "an address must be HOST:PORT"),
        ):
            place = state if "://" in state else str(daemons.directory / state)
            failed = daemons.coordinator(listen=listen, state=place)
            assert failed.wait() == 1
            (line,) = failed.log.read_text().splitlines()
            assert told in line
            assert " ERROR coordinator: " in line
    assert names_after_all(daemon) == []


def names_after_all(daemon: Daemon) -> list[str]:
    with coordinator_stub(daemon.address) as stub:
        return names(stub)
