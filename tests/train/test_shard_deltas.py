"""Deltas from all ranks of a mesh, and for readers of parts: bit for bit what was published, whoever dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import smb
import smb.torch
from smb.relay.publication_log import PublicationLog
from tests.conftest import Connect
from tests.support.daemons import DEADLINE_S
from tests.support.meshes import Mesh
from tests.support.sparse_states import DENSE_EVERY, equal, state_of
from tests.support.transports import FAR

LONG = os.environ.get("SMB_LONG") == "1"
GENERATIONS = 200 if LONG else 16
# Rows of one tensor, columns of another, and a whole one.
PARTS: dict[str, tuple[slice, ...]] = {
    "head.weight": (slice(None), slice(31, 130)),
    "embed.weight": (slice(128, 160), slice(None)),
    "count": (slice(None),),
}


@pytest.fixture(scope="module")
def mesh(context: Any, cluster: smb.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Three ranks, for tests that kill none."""
    made = Mesh(context, cluster.address, tmp_path_factory.mktemp("mesh"), ranks=3)
    yield made
    made.end()


@pytest.mark.parametrize("kind", ["rows", "columns", "mixed"])
def test_each_rank_sends_its_part_of_a_delta(mesh: Mesh, connect: Connect, kind: str) -> None:
    """Whole readers and readers of parts have each generation over both ways. A sparse change is a small part of the
    state at every rank; a change of everything is published whole."""
    client = connect(FAR)
    assert mesh.ask("sparse_publisher", "w", kind, deltas=4) == [0] * 3
    nbytes = client.open("w").nbytes
    wholes = [smb.torch.follow(connect(way), "w") for way in (FAR, "shm")]
    parts = [smb.torch.follow(connect(way), "w", placements=PARTS) for way in (FAR, "shm")]
    # The first one; each fourth one after a whole state, beside its delta; a change of everything, and back.
    whole = {1, 5, DENSE_EVERY, DENSE_EVERY + 1}
    for number in range(1, DENSE_EVERY + 4):
        said = mesh.ask("sparse_publish", number)
        assert [generation for generation, _ in said] == [number] * 3
        sent = [sent for _, sent in said]
        if number in whole:
            assert sum(sent) > nbytes * 9 // 10
        else:
            assert sum(sent) < nbytes // 8
            assert all(each > 100 for each in sent)
            assert max(sent) < nbytes // 12
        for follower in wholes:
            assert follower.wait(timeout=DEADLINE_S) == number
            assert equal(follower.state_dict(), number)
            assert number in whole or follower.received_bytes < nbytes // 8
        for follower in parts:
            assert equal(follower.state_dict(), number, PARTS)
            assert follower.generation == follower.latest == number
    with parts[0].pin() as generation:
        assert generation.number == number
        assert equal(dict(generation), number, PARTS)
    late = smb.torch.follow(connect(FAR), "w", placements=PARTS)
    assert equal(late.state_dict(), number, PARTS)
    assert equal(late.state_dict(generation=number - 1), number - 1, PARTS)


def test_readers_with_other_shards_take_their_part_of_a_delta(mesh: Mesh, connect: Connect) -> None:
    """A reader of some rows receives about its share of a delta, one of columns at most the delta; ranks that are
    sharded in another way than the trainer have their shards' bits. It is the same with the delta of one process."""
    rows: dict[str, tuple[slice, ...]] = {"a": (slice(0, 400), slice(None)), "b": (slice(0, 40), slice(None))}
    state = {name: torch.zeros(4096, 512, dtype=torch.bfloat16) for name in "ab"}
    trainer = smb.torch.Publisher(connect(), "big", state, deltas=8)
    follower = smb.torch.follow(connect(FAR), "big", placements=rows)
    for number in range(1, 5):
        for tensor in state.values():
            tensor[number::97] += number
        trainer.publish()
        found = follower.state_dict()
        assert all(found[name].equal(state[name][index]) for name, index in rows.items())
        if number > 1:  # parts have at most a million elements, so there are two of each tensor
            assert follower.received_bytes < trainer.sent_bytes * 0.6
    nothing = smb.torch.follow(connect(FAR), "big", placements={"a": (slice(5, 5), slice(None))})
    assert nothing.state_dict()["a"].shape == (0, 512)

    mesh.ask("sparse_publisher", "w", "rows", deltas=8)
    for number in range(1, 5):
        mesh.ask("sparse_publish", number)
        for same, received, nbytes in mesh.ask("sparse_read", "w", "columns", number):
            assert same
            assert number == 1 or received < nbytes


def test_what_one_rank_is_refused_all_are_with_deltas(mesh: Mesh, connect: Connect) -> None:
    """Another state at one rank: every rank raises, and readers keep what they had; the next publication is whole,
    since one rank has no base, and the one after that is a delta again. Other settings are refused in words."""
    client = connect()
    assert mesh.ask("sparse_publisher", "w", "rows", deltas=8) == [0] * 3
    follower = smb.torch.follow(client, "w")
    mesh.ask("sparse_publish", 1)
    said = mesh.ask("sparse_publish", 2, wrong=(2,))
    assert all("these are not the published tensors" in each for each in said)
    assert follower.latest == 1
    assert equal(follower.state_dict(), 1)
    nbytes = client.open("w").nbytes
    for number, is_whole in ((2, True), (3, False)):
        said = mesh.ask("sparse_publish", number)
        assert [generation for generation, _ in said] == [number] * 3
        assert (sum(sent for _, sent in said) > nbytes // 2) == is_whole
        assert equal(follower.state_dict(), number)
    for deltas in (0, 4):
        for told in mesh.ask("sparse_publisher", "w", "rows", deltas=deltas):
            assert "it exists, published with deltas=8" in told
    assert mesh.ask("sparse_publisher", "w", "columns", deltas=8) == [3] * 3
    mesh.ask("sparse_publish", 4)  # whole: other ranks, or other shards, begin anew
    assert equal(follower.state_dict(), 4)


def test_damaged_parts_are_never_shown(connect: Connect) -> None:
    """A reader of parts notices a delta that somebody overwrote by the checksum of a part, and goes on with the next
    whole state."""
    client = connect()
    publisher = smb.torch.Publisher(client, "w", state_of(1), deltas=4)
    follower = smb.torch.follow(connect(FAR), "w", placements=PARTS)
    publisher.publish(state_of(1))
    assert equal(follower.state_dict(), 1, PARTS)
    publisher.publish(state_of(2))
    log = PublicationLog(client.open("w.log"))
    entry = log.entries(log.buffer, 2, 1)[0]
    content = log.buffer.read(log.position(entry), entry.nbytes)
    damaged = content.copy()
    damaged[-1] ^= 1
    log.buffer.write(damaged, log.position(entry))
    with pytest.raises(smb.UnavailableError, match="read other bytes than were published"):
        follower.state_dict()
    log.buffer.write(content, log.position(entry))
    assert equal(follower.state_dict(), 2, PARTS)
