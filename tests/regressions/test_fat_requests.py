"""A reader's certificate filled the coordinator: a client's name of 15 MiB was kept in memory, in the state, and once
more when its session had ended.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from smb import errors
from smb.coordinator import limits, service, waiting_opens
from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import Instant, SessionClosed, SessionRenewed
from smb.coordinator.mirrors.filling import Mirrors
from smb.coordinator.records import SessionRecord, ShownCertificate
from smb.coordinator.state import State, load
from smb.coordinator.steps import step
from smb.coordinator.store import SqliteStore
from smb.rpc import control_pb2 as pb
from smb.rpc.bounds import check_bounds
from smb.rpc.control_pb2_grpc import CoordinatorStub, MemoryServerStub
from smb.rpc.metadata import PACKED_BYTES_MAX, PARTS_MAX, pack
from smb.security.credentials import COORDINATOR_NAME, channel, load_directory, server_name
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import RULES, Caller, Role
from tests.support.daemons import Daemon, Daemons, running_daemons, wait_for
from tests.support.transports import SLOWNESS

REQUESTS = int(os.environ.get("SMB_TEST_REQUESTS", "100"))  # of each kind; the figure in docs/promises.md: 10 000
MORE_MIB = 64
PATIENCE_S = 60 * SLOWNESS
NOW = Instant(0.0, 0.0)


def requests_of_the_proto() -> list[Any]:
    return [
        method.input_type
        for service_type in pb.DESCRIPTOR.services_by_name.values()
        for method in service_type.methods
        if f"/{service_type.full_name}/{method.name}" in RULES
    ]


def fattened(make: Callable[[], Any], where: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Requests with one field each that is far too large, and the name of that field."""

    def place() -> tuple[Any, Any]:
        whole = make()
        part = whole
        for name in where:
            part = getattr(part, name)
        return whole, part

    for field in place()[1].DESCRIPTOR.fields:
        whole, part = place()
        value = getattr(part, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE and hasattr(value, "SerializeToString"):
            yield from fattened(make, (*where, field.name))
        elif isinstance(value, str):
            setattr(part, field.name, "x" * (2 << 20))
            yield field.name, whole
        elif isinstance(value, bytes):
            setattr(part, field.name, b"x" * (2 << 20))
            yield field.name, whole
        elif hasattr(value, "update"):  # a map
            value.update({str(i): i for i in range(257)})
            yield field.name, whole
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for _ in range(4097):
                value.add()
            yield field.name, whole
        elif not isinstance(value, (int, float)):
            value.extend(["x"] * 200_000 if field.type == FieldDescriptor.TYPE_STRING else [1] * 200_000)
            yield field.name, whole


@pytest.mark.parametrize("request_type", requests_of_the_proto(), ids=lambda each: str(each.name))
def test_every_field_of_every_request_has_a_bound(request_type: Any) -> None:
    """Each text, secret, list and map is refused by its name beyond its bound, also in messages within messages."""
    for name, request in fattened(getattr(pb, request_type.name)):
        with pytest.raises(errors.InvalidArgumentError, match=rf"{name} has \d+ \w+; it may have at most \d+"):
            check_bounds(request)
    check_bounds(getattr(pb, request_type.name)())


def test_a_text_within_a_list_or_map_has_a_bound() -> None:
    """Server names and reasons of errors are texts, too; what is at its bound passes."""
    check_bounds(
        pb.CreateBufferRequest(name="x" * 255, server_names=["x" * 255] * 1024, packed_metadata=bytes(1 << 20))
    )
    with pytest.raises(errors.InvalidArgumentError, match="an item of CreateBuffer: server_names has 256 characters"):
        check_bounds(pb.CreateBufferRequest(server_names=["x" * 256]))
    with pytest.raises(errors.InvalidArgumentError, match="an item of RenewServer: load: errors has 256"):
        check_bounds(pb.RenewServerRequest(load=pb.ServerLoad(errors={"x" * 256: 1})))


def test_bytes_within_a_list_or_map_have_a_bound() -> None:
    """No request has such a field yet; one that comes is bounded as soon as it is there."""
    file = FileDescriptorProto(name="secrets.proto", syntax="proto3")
    secrets = file.message_type.add(name="SecretsRequest")
    pair = secrets.nested_type.add(name="NamedEntry")
    pair.options.map_entry = True
    one, many = FieldDescriptor.LABEL_OPTIONAL, FieldDescriptor.LABEL_REPEATED
    pair.field.add(name="key", number=1, type=FieldDescriptor.TYPE_STRING, label=one)
    pair.field.add(name="value", number=2, type=FieldDescriptor.TYPE_BYTES, label=one)
    secrets.field.add(name="listed", number=1, type=FieldDescriptor.TYPE_BYTES, label=many)
    named = secrets.field.add(name="named", number=2, type=FieldDescriptor.TYPE_MESSAGE, label=many)
    named.type_name = ".SecretsRequest.NamedEntry"
    pool = DescriptorPool()
    pool.Add(file)
    made: Any = GetMessageClass(pool.FindMessageTypeByName("SecretsRequest"))
    check_bounds(made(listed=[b"x" * 255], named={"a": b"x" * 255}))
    for request in (made(listed=[b"x" * 256]), made(named={"a": b"x" * 256})):
        with pytest.raises(
            errors.InvalidArgumentError, match=r"an item of Secrets: \w+ has 256 bytes; it may have at most 255"
        ):
            check_bounds(request)


def test_fields_that_nobody_knows_are_dropped() -> None:
    """What has no bound is not kept either: of a request, and of messages within it, in lists, too."""
    unknown = bytes([0xFA, 0x7F, 0x80, 0x80, 0x04]) + b"x" * (1 << 16)  # field 2047, 64 KiB
    load = pb.ServerLoad(waits=[pb.Wait.FromString(pb.Wait(kind="lock").SerializeToString() + unknown)])
    known = pb.RenewServerRequest(name="a", load=pb.ServerLoad(waits=[pb.Wait(kind="lock")]))
    load.MergeFromString(unknown)
    request = pb.RenewServerRequest(name="a", load=load)
    request.MergeFromString(unknown)
    assert request.ByteSize() > 3 << 16
    check_bounds(request)
    assert request.SerializeToString() == known.SerializeToString()


def open_sessions(state: State, first: int, count: int, owner: str) -> State:
    for session_id in range(first, first + count):
        state, _ = step(state, SessionRenewed(session_id, "one", ShownCertificate(owner)), NOW)
    return state


def test_one_certificate_leaves_sessions_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its bound a certificate opens no more, also after a restart; others do, it renews, and one that closes
    makes room. Without credentials nobody is counted."""
    monkeypatch.setattr(limits, "SESSIONS_PER_CERTIFICATE_MAX", 3)
    state = open_sessions(State(), 1, 3, "a")
    state = open_sessions(state, 11, 3, "b")
    state = open_sessions(state, 21, 9, "")
    with pytest.raises(errors.OutOfMemoryError, match="its certificate has 3 already"):
        open_sessions(state, 4, 1, "a")
    again = load((), (), [SessionRecord.from_json(record.to_json()) for record in state.sessions.values()])
    with pytest.raises(errors.OutOfMemoryError, match="its certificate has 3 already"):
        open_sessions(again, 4, 1, "a")
    state = open_sessions(state, 3, 1, "a")
    state, _ = step(state, SessionClosed(1), NOW)
    open_sessions(state, 4, 1, "a")


def test_certificates_that_say_the_same_are_one() -> None:
    """Renewed ones count on; another name, role or namespace is another."""
    ours = Caller(Role.CLIENT, "a", frozenset({"x"}))
    assert ours.key == Caller(Role.CLIENT, "a", frozenset({"x"})).key
    team = frozenset({"x"})
    others = (Caller(Role.READER, "a", team), Caller(Role.CLIENT, "b", team), Caller(Role.CLIENT, "a"))
    assert ours.key not in {other.key for other in others}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Daemons, Path]]:
    certificates = tmp_path / "certificates"
    roles = (Role.COORDINATOR, Role.CLIENT, Role.READER)
    make_set(certificates, [*(Holder(role, "") for role in roles), Holder(Role.SERVER, "server-0")])
    with running_daemons(tmp_path) as daemons:
        yield daemons, certificates


def resident_mib(daemon: Daemon) -> float:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{daemon.pid}/status").read_text(), re.M)
    assert found
    return int(found[1]) / 1024


def state_mib(daemons: Daemons) -> float:
    return sum(path.stat().st_size for path in (daemons.directory / "state").iterdir()) / (1 << 20)


def asked(
    address: str, credentials: Path, method: str, make: Callable[[int], Any], count: int, at_once: int = 8
) -> Counter[str]:
    """Make so many calls; return how often each code was the answer. One that could not be made now, as a busy memory
    server does not answer in time, is made again.
    """

    def one(number: int) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                getattr(stub, method)(make(number), timeout=PATIENCE_S)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                    return str(error.code().name)
            else:
                return "OK"

    with channel(address, COORDINATOR_NAME, load_directory(credentials)) as opened, ThreadPoolExecutor(at_once) as pool:
        stub = CoordinatorStub(opened)
        return Counter(pool.map(one, range(count)))


@pytest.mark.timeout((240 + REQUESTS / 10) * SLOWNESS)
# More than 5 s: some of the requests have 15 MiB, and others take longest to be looked at.
def test_the_fattest_requests_leave_the_coordinator_small(place: tuple[Daemons, Path]) -> None:
    """Sessions with the longest names, buffers with the longest, metadata up to its bound, names far beyond theirs:
    memory and state grow by less than 64 MiB together with all of it there."""
    daemons, certificates = place
    stay = ("--session-lease", "3600")  # nobody renews them
    coordinator = daemons.coordinator("127.0.0.1:0", None, "--credentials", str(certificates / "coordinator"), *stay)
    address = coordinator.address
    secured = ("--credentials", str(certificates / "server-0"), "--capacity", "4GiB")
    assert daemons.memory_server(address, "server-0", *secured).address
    memory, state = resident_mib(coordinator), state_mib(daemons)
    packed = pack(json.dumps({"a": base64.b64encode(random.Random(1).randbytes(1_036_000)).decode()}))
    assert 1_036_000 < len(packed) <= PACKED_BYTES_MAX
    # What takes most room, and time, when it is looked at.
    dense = pack('{"a":[' + "[]," * (PARTS_MAX // 2 - 2) + "[]]}")

    def session(_: int) -> Any:
        return pb.OpenSessionRequest(client_name="\N{GRINNING FACE}" * 255)

    def buffer(number: int) -> Any:
        name = f"{number:08d}{'x' * 247}"
        return pb.CreateBufferRequest(name=name, shape=[1] * 32, dtype="uint8", attempt_id=number + 1)

    def described(number: int) -> Any:
        form: dict[str, Any] = {"shape": [1], "dtype": "uint8", "attempt_id": number + 1_000_000}
        return pb.CreateBufferRequest(name=f"m{number}", packed_metadata=packed, **form)

    def looked_at(number: int) -> Any:
        form: dict[str, Any] = {"shape": [1], "dtype": "uint8", "attempt_id": number + 2_000_000}
        return pb.CreateBufferRequest(name=f"d{number}", packed_metadata=dense, **form)

    reader, client = certificates / "reader", certificates / "client"
    for characters in (1 << 20, 15 << 20):
        fat = pb.OpenSessionRequest(client_name="x" * characters)
        codes = asked(address, reader, "OpenSession", lambda _, fat=fat: fat, 40)  # type: ignore[misc]
        assert set(codes) <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert asked(address, reader, "OpenSession", session, REQUESTS) == {"OK": REQUESTS}
    buffers = REQUESTS // 2  # a server maps each, and Linux lets it map so many
    assert asked(address, client, "CreateBuffer", buffer, buffers) == {"OK": buffers}
    assert asked(address, client, "CreateBuffer", looked_at, 40) == {"OK": 40}
    room = (limits.METADATA_BYTES_MAX - 40 * len(dense)) // len(packed)
    codes = asked(address, client, "CreateBuffer", described, REQUESTS)
    assert codes == {"OK": codes["OK"], "RESOURCE_EXHAUSTED": REQUESTS - codes["OK"]}
    # One that fails half-way takes room for that time, for which another may be refused: one at a time all get theirs.
    missing = room - codes["OK"]
    codes = asked(address, client, "CreateBuffer", lambda n: described(REQUESTS + n), missing + 1, at_once=1)
    assert codes == Counter(OK=missing, RESOURCE_EXHAUSTED=1)

    wait_for(lambda: resident_mib(coordinator) < memory + MORE_MIB, f"less than {memory + MORE_MIB:.0f} MiB", 60)
    print(f"memory {memory:.0f} -> {resident_mib(coordinator):.0f} MiB, state {state:.1f} -> {state_mib(daemons):.1f}")
    assert state_mib(daemons) < state + MORE_MIB


def test_opens_that_wait_have_a_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that would wait beside too many of its certificate is refused; one that does not wait is answered."""
    monkeypatch.setattr(waiting_opens, "OPENS_WAITING_MAX", 2)
    nothing, no_context = [*[cast(Any, None)] * 7, Mirrors()], cast(Any, None)

    async def work() -> None:
        seen = service.CoordinatorService(await CommitLog.open(SqliteStore(tmp_path), 1), *nothing)

        def opening(timeout_ms: int) -> Coroutine[Any, Any, pb.Buffer]:
            return seen.OpenBuffer(pb.OpenBufferRequest(name="w", timeout_ms=timeout_ms), no_context)

        waiting = [asyncio.ensure_future(opening(60_000)) for _ in range(2)]
        await asyncio.wait(waiting, timeout=0)
        with pytest.raises(errors.OutOfMemoryError, match="2 opens with this certificate are waiting already"):
            await opening(60_000)
        with pytest.raises(errors.NotFoundError):
            await opening(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        with pytest.raises(errors.NotFoundError, match=r"within 0\.001 s"):
            await opening(1)
        waiting[1].cancel()

    asyncio.run(work())


def test_a_memory_server_asks_too(place: tuple[Daemons, Path]) -> None:
    """A request of its control service with a text beyond its bound is refused by the field's name."""
    daemons, _ = place
    coordinator = daemons.coordinator()
    assert daemons.memory_server(coordinator.address, "a").address
    where = json.loads(coordinator.page("/api/server?name=a"))["control_address"]
    with channel(where, server_name("a"), None) as opened:
        stub = MemoryServerStub(opened)
        with pytest.raises(grpc.RpcError) as refused:
            stub.CreateSegment(pb.CreateSegmentRequest(id=1, epoch=1, dtype="x" * 1000), timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "CreateSegment: dtype has 1000 characters; it may have at most 255"
