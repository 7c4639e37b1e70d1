"""A real coordinator process, and buffers that move together, on memory servers that do as they are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from tests.support.daemons import running_daemons, wait_for
from tests.support.memory_server import FakeMemoryServer, coordinator_stub, fake_memory_servers

COUNT = 1 << 18


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorStub]:
    with running_daemons(tmp_path) as running, coordinator_stub(running.coordinator().address) as stub:
        yield stub


@pytest.fixture
def servers(coordinator: CoordinatorStub) -> Iterator[dict[str, FakeMemoryServer]]:
    with fake_memory_servers("a", "b", "c") as started:
        for server in started:
            server.register(coordinator)
        yield {server.name: server for server in started}


def ask(name: str, **wishes: Any) -> pb.CreateBufferRequest:
    request = {"name": name, "shape": [COUNT], "dtype": "float32", **wishes}
    return pb.CreateBufferRequest(**request)


def weights(coordinator: CoordinatorStub) -> Any:
    """Make "w" of one segment, and return that."""
    made = coordinator.CreateBuffer(ask("w", replicas=2, server_names=["a"]), timeout=20)
    return made.layout.segments[0]


def place(coordinator: CoordinatorStub, name: str = "w") -> Any:
    return coordinator.OpenBuffer(pb.OpenBufferRequest(name=name), timeout=20).layout.segments[0]


def part(coordinator: CoordinatorStub, segment: Any) -> None:
    """The primary has not reached the backup for long."""
    broken = pb.BrokenPair(segment_id=segment.id, epoch=segment.epoch, for_ms=10_000)
    coordinator.RenewServer(pb.RenewServerRequest(name="a", instance_id=1, broken=[broken]), timeout=10)


def test_a_report_of_a_peers_earlier_run_parts_nobody(
    coordinator: CoordinatorStub, servers: dict[str, FakeMemoryServer]
) -> None:
    """That run was out of reach for long; the present one was not. A report of the present run counts."""
    first = weights(coordinator)
    broken = pb.BrokenPair(segment_id=first.id, epoch=first.epoch, for_ms=10_000, instance_id=7)
    coordinator.RenewServer(pb.RenewServerRequest(name="a", instance_id=1, broken=[broken]), timeout=10)
    assert place(coordinator).backup == first.backup
    broken.instance_id = servers[first.backup].instance_id
    coordinator.RenewServer(pb.RenewServerRequest(name="a", instance_id=1, broken=[broken]), timeout=10)
    assert place(coordinator).backup != first.backup


def end_copy(coordinator: CoordinatorStub, number: int, epoch: int) -> None:
    """The primary says that the copy is whole."""
    copy = pb.CopyProgress(segment_id=number, epoch=epoch, whole=True)
    coordinator.RenewServer(pb.RenewServerRequest(name="a", instance_id=1, copies=[copy]), timeout=10)


def test_servers_and_clients_are_told_the_group(
    coordinator: CoordinatorStub, servers: dict[str, FakeMemoryServer]
) -> None:
    """Both copies of a state's segment are made with the weights' group; these are told of none."""
    first = weights(coordinator)
    made = coordinator.CreateBuffer(ask("m", like="w", joins=True), timeout=20)
    (segment,) = made.layout.segments
    assert made.replicas == 2
    assert (segment.server, segment.backup, segment.epoch, segment.group_id) == ("a", first.backup, 1, first.id)
    asked = [servers[name].segments[segment.id] for name in ("a", first.backup)]
    assert [(each.group_id, each.epoch, each.replica.role) for each in asked] == [(first.id, 1, 1), (first.id, 1, 2)]
    assert servers["a"].segments[first.id].group_id == 0
    assert place(coordinator).group_id == first.id


def test_servers_of_before_are_not_joined_on(
    coordinator: CoordinatorStub, servers: dict[str, FakeMemoryServer]
) -> None:
    """They would make copies of each segment by itself, and one of them would count for all."""
    first = weights(coordinator)
    servers[first.backup].keeps_together = False
    with pytest.raises(grpc.RpcError) as error:
        coordinator.CreateBuffer(ask("m", like="w", joins=True), timeout=20)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f'"{first.backup}" is too old to move segments together with others: upgrade' in error.value.details()
    assert servers["a"].segments.keys() == servers[first.backup].segments.keys() == {first.id}
    assert servers["a"].segments[first.id].group_id == 0


def test_what_joins_waits_for_a_copy(coordinator: CoordinatorStub, servers: dict[str, FakeMemoryServer]) -> None:
    """Until that is there, or its time is over; a new copy is of all that moves together."""
    first = weights(coordinator)
    m = coordinator.CreateBuffer(ask("m", like="w", joins=True), timeout=20).layout.segments[0]
    part(coordinator, first)
    target = wait_for(lambda: place(coordinator).copying_to, "a copy on its way")
    assert target not in ("a", first.backup)
    assert place(coordinator, "m").copying_to == target
    assert servers[target].segments.keys() == {first.id, m.id}
    assert [servers[target].segments[each].group_id for each in (first.id, m.id)] == [0, first.id]  # 0: its own id
    with pytest.raises(grpc.RpcError) as error:
        coordinator.CreateBuffer(ask("v", like="w", joins=True), timeout=1.5)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert 'create of "v": to move together with "w" it waits for the copy' in error.value.details()
    waiting = coordinator.CreateBuffer.future(ask("v", like="w", joins=True), timeout=20)
    end_copy(coordinator, m.id, 3)
    v = waiting.result().layout.segments[0]
    assert (v.server, v.backup, v.epoch) == ("a", target, 4)
    assert servers[target].segments[v.id].epoch == servers["a"].segments[v.id].replica.epoch == 4
    assert place(coordinator).backup == target


def test_what_moves_while_it_is_joined(coordinator: CoordinatorStub, servers: dict[str, FakeMemoryServer]) -> None:
    """The segments that were made for the roles of before are dropped, and made anew."""
    first = weights(coordinator)
    servers["a"].hold = threading.Event()
    servers["a"].asked.clear()
    creation = coordinator.CreateBuffer.future(ask("m", like="w", joins=True), timeout=20)
    assert servers["a"].asked.wait(10)
    backup = servers[first.backup]
    wait_for(lambda: len(backup.segments) == 2, "a segment at the backup")
    part(coordinator, first)
    assert place(coordinator).backup == ""
    servers["a"].hold.set()
    servers["a"].hold = None
    # The lost copy is made first, and the state with it.
    target = wait_for(lambda: place(coordinator).copying_to, "a copy on its way")
    end_copy(coordinator, first.id, place(coordinator).epoch)
    made = creation.result().layout.segments[0]
    assert (made.server, made.backup, made.group_id) == ("a", target, first.id)
    assert servers["a"].segments.keys() == {first.id, made.id}
    assert servers["a"].segments[made.id].epoch == made.epoch > first.epoch
    assert backup.segments.keys() == {first.id}  # which it is told to drop when it registers
    assert servers[target].segments.keys() == {first.id, made.id}
