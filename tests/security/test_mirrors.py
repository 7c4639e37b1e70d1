"""Mirrors where access is asked for: relays show their memory server's certificate, and reach their mirrors alone; who
may not read the source gets nothing from a mirror of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
from smb.relay.arrived import SUFFIX, WORDS
from tests.support.daemons import DEADLINE_S, wait_for
from tests.support.transports import FAR

BYTES = 1 << 20
SOURCE, MIRROR = "team/policy", "team/policy.mirror.server-1"


def generation(number: int) -> np.ndarray[Any, Any]:
    return ((np.arange(BYTES, dtype=np.uint32) * 2654435761 >> 7) + 17 * number).astype(np.uint8)


@pytest.fixture(scope="module")
def guarded(certificates: Path) -> Iterator[smb.LocalCluster]:
    """Three memory servers with credentials, data in TLS."""
    with smb.LocalCluster(servers=3, capacity="32MiB", credentials=certificates) as running:
        yield running


@pytest.fixture
def source(connect_as: Any) -> smb.Buffer:
    """Published once, on server-0, by a client of its namespace."""
    made: smb.Buffer = connect_as("of-team").create(SOURCE, BYTES, "uint8", versions=3, servers=["server-0"])
    made.publish(generation(1))
    return made


def has(client: smb.Client, server: str, number: int) -> bool:
    mirror = client.open(f"{SOURCE}.mirror.{server}")
    assert mirror.wait(number, timeout=DEADLINE_S) == number
    return np.array_equal(mirror.read(version=number), generation(number))


def test_relays_fill_mirrors_and_readers_read_them(
    guarded: smb.LocalCluster, source: smb.Buffer, connect_as: Any
) -> None:
    """From the source and from each other, over TLS; whoever may read the source reads them; a relay that is killed
    goes on; readers and relays change nothing but what is theirs."""
    team, reader = connect_as("of-team"), connect_as("reader-of-team", transport=FAR)
    assert team.relay(SOURCE) == ["server-1", "server-2"]
    for client in (team, reader, connect_as("operator")):
        assert has(client, "server-1", 1)
        assert has(client, "server-2", 1)
    number = 1

    def planned() -> bool:
        nonlocal number
        number = source.publish(generation(number + 1))
        assert has(reader, "server-1", number)
        assert has(reader, "server-2", number)
        return any(len(mirror.feeds) > 1 for mirror in reader.open(SOURCE).info.mirrors)

    wait_for(planned, "a mirror that is fed by the other")
    children = Path(f"/proc/{guarded.servers[1].pid}/task").glob("*/children")
    (relay,) = [int(pid) for each in children for pid in each.read_text().split()]
    os.kill(relay, signal.SIGKILL)
    number = source.publish(generation(number + 1))
    assert has(reader, "server-1", number)
    mirror = reader.open(MIRROR)
    for refused in (
        lambda: create_mirror(reader, "team/third", SOURCE, "server-2"),
        lambda: reader.stop_relays(SOURCE, ["server-1"]),
        lambda: mirror.write(np.zeros(1, np.uint8), 0),
    ):
        with pytest.raises((smb.PermissionDeniedError, smb.InvalidArgumentError)):
            refused()
    with pytest.raises(smb.InvalidArgumentError, match="a mirror cannot be published to"):
        team.open(MIRROR).publish(generation(9))
    assert team.stop_relays(SOURCE) == ["server-1", "server-2"]
    assert [info.name for info in team.list()] == [SOURCE]


def test_who_may_not_read_the_source_gets_nothing(source: smb.Buffer, connect_as: Any) -> None:
    """Not by a mirror's name, not by making one of their own, in no namespace; the source's own clients do."""
    everybody, team = connect_as("client"), connect_as("of-team")
    team.relay(SOURCE, ["server-1"])
    assert has(team, "server-1", 1)
    secret = everybody.create("other/secret", BYTES, "uint8", versions=2, servers=["server-0"])
    secret.publish(generation(5))
    everybody.relay("other/secret", ["server-1"])
    for who in ("of-team", "reader-of-team"):
        outsider = connect_as(who)
        for name in ("other/secret", "other/secret.mirror.server-1", "other/secret.mirror.server-1.arrived"):
            with pytest.raises(smb.PermissionDeniedError, match="limited to team/"):
                outsider.open(name)
        with pytest.raises(smb.PermissionDeniedError):
            outsider.relay("other/secret", ["server-2"])
        for made in ("team/stolen", "other/secret.mirror.server-2"):
            with pytest.raises(smb.PermissionDeniedError):
                create_mirror(outsider, made, "other/secret", "server-2")
        assert not [info.name for info in outsider.list() if not info.name.startswith("team/")]
    with pytest.raises(smb.InvalidArgumentError, match="in the namespace of its source"):
        create_mirror(everybody, "team/given", "other/secret", "server-2")
    with pytest.raises(smb.InvalidArgumentError, match="stop its relays"):
        everybody.rename(MIRROR, "other/taken")
    create_mirror(team, "team/second", SOURCE, "server-2")
    assert team.open("team/second").wait(1, timeout=DEADLINE_S) == 1


def test_deltas_by_way_of_mirrors(connect_as: Any) -> None:
    """A state with deltas=, and its log, are mirrored with its namespace's rights; a reader of it
    follows to the bit, and another memory server opens none of it."""
    trainer, reader = connect_as("of-team", timeout=DEADLINE_S), connect_as("reader-of-team", transport=FAR)
    rogue = connect_as("server-2", timeout=20.0)
    bits = torch.arange(100_000, dtype=torch.int32)
    publisher = smb.torch.Publisher(
        trainer, "team/steps", {"w": bits}, deltas=4, versions=3, relays=["server-1"], servers=["server-0"]
    )
    follower = smb.torch.follow(reader, "team/steps", near="server-1", timeout=DEADLINE_S)
    for number in range(1, 7):
        bits[number * 1000 : number * 1100] += number
        assert publisher.publish() == number
        assert reader.open("team/steps.log.mirror.server-1").wait(number, timeout=DEADLINE_S) == number
        assert torch.equal(follower.state_dict()["w"], bits)
        assert follower.generation == number
    for name in ("team/steps", "team/steps.log", "team/steps.log.mirror.server-1"):
        with pytest.raises(
            smb.PermissionDeniedError, match=r"server-2.*a relay may open only the mirrors on its server"
        ):
            rogue.open(name)


def create_mirror(client: smb.Client, name: str, of: str, server: str) -> None:
    from smb.rpc import control_pb2 as pb

    request = pb.CreateBufferRequest(name=name, mirror_of=of, server_names=[server])
    client._session.coordinator.create_buffer(request, 10.0)


def test_a_memory_server_reaches_its_mirrors_alone(source: smb.Buffer, connect_as: Any) -> None:
    """With server-1's certificate: its mirror, the words beside it, and for reading what feeds it. Nothing else, by no
    name, though it be there or not; no lock; and of another's mirror it can change no byte."""
    everybody, team, rogue = connect_as("client"), connect_as("of-team"), connect_as("server-1", timeout=20.0)
    everybody.create("team/private", 8).fill(7)
    everybody.create("other/plain", 8)
    nobodys = everybody.create(f"team/x{SUFFIX}", WORDS, "int64", servers=["server-2"])
    for name in (SOURCE, MIRROR, "team/private", "other/plain", "nothing", "other/nothing"):
        with pytest.raises(
            smb.PermissionDeniedError, match=r"server-1.*a relay may open only the mirrors on its server"
        ):
            rogue.open(name)
    team.relay(SOURCE, ["server-1", "server-2"])
    assert has(team, "server-1", 1)
    assert has(team, "server-2", 1)
    for name in ("team/private", "other/plain", "nothing", f"{SOURCE}.mirror.server-0", f"{SOURCE}{SUFFIX}"):
        with pytest.raises(smb.PermissionDeniedError, match="a relay may open only the mirrors on its server"):
            rogue.open(name)
    assert rogue.open(SOURCE).version == 1
    assert np.array_equal(rogue.open(SOURCE).read(version=1), generation(1))
    for name in (SOURCE, f"{SOURCE}.mirror.server-2"):
        with pytest.raises(smb.PermissionDeniedError):
            rogue.open(name).publish(generation(9)) if name == SOURCE else rogue.open(name)._versions.begin(1, 1, 1)
    words = f"{SOURCE}.mirror.server-2{SUFFIX}"
    with pytest.raises(smb.PermissionDeniedError):
        rogue.open(words).write(np.zeros(WORDS, np.int64))
    assert rogue.open(MIRROR + SUFFIX).size == WORDS
    for refused in (
        lambda: rogue.create("team/new", 8),
        lambda: rogue.create(MIRROR + SUFFIX, WORDS, "int64", servers=["server-2"], exist_ok=True),
        lambda: rogue.create(words, WORDS, "int64", servers=["server-1"], exist_ok=True),
        lambda: rogue.create(MIRROR + SUFFIX, WORDS, "int64", servers=["server-1"], exist_ok=True, metadata={"a": 1}),
        lambda: create_mirror(rogue, "team/mine", SOURCE, "server-1"),
        lambda: rogue.delete(SOURCE),
        lambda: rogue.delete(MIRROR),
        lambda: rogue.delete(MIRROR + SUFFIX),
        lambda: rogue.delete(nobodys.name),
        lambda: rogue.rename(MIRROR, "team/z"),
        lambda: rogue.list(),
        lambda: rogue.servers(),
        lambda: rogue.lock("team/lock").acquire(),
        lambda: rogue.barrier("team/barrier", 1),
        lambda: rogue._session.coordinator.overview(5),
    ):
        with pytest.raises(smb.PermissionDeniedError):
            refused()
    with pytest.raises(smb.PermissionDeniedError):
        connect_as("coordinator").open(MIRROR)
    team.stop_relays(SOURCE, ["server-1"])
    with pytest.raises(smb.PermissionDeniedError, match="a relay may open only the mirrors on its server"):
        rogue.open(SOURCE)
    assert everybody.open("team/private").read().tolist() == [7] * 8
