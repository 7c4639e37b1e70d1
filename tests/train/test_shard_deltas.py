"""Deltas from all ranks of a mesh, and for readers of parts: bit for bit what was published, whoever dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smb
import smb.torch
from smb.relay import reader_source
from smb.relay.publication_log import PublicationLog
from tests.conftest import Connect
from tests.support.clients import in_process
from tests.support.daemons import DEADLINE_S, state_of_process, wait_for
from tests.support.meshes import Mesh
from tests.support.sparse_states import DENSE_EVERY, equal, state_of
from tests.support.transports import FAR

LONG = os.environ.get("SMB_LONG") == "1"
GENERATIONS = 200 if LONG else 10
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


@pytest.mark.parametrize("deltas", [0, 4])
def test_shards_must_stay_where_they_were(mesh: Mesh, connect: Connect, deltas: int) -> None:
    """A state whose shards are as large as before, but of other rows, is refused at all ranks; it would be mixed up."""
    for generation, said in mesh.ask("publish_flipped", f"flipped{deltas}", deltas):
        assert generation == 1
        assert "or had other elements; shard the state as it was then" in said
    found = smb.torch.follow(connect(FAR), f"flipped{deltas}").state_dict()
    assert found["w"].equal(torch.arange(36.0).reshape(6, 6))


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


@pytest.mark.parametrize("before", [0, 2], ids=["whole state", "delta"])
def test_a_rank_that_is_stopped(
    context: Any, cluster: smb.LocalCluster, connect: Connect, tmp_path: Path, before: int
) -> None:
    """While it was to write its part of a whole state or of a delta: another trainer publishes meanwhile. Let go, all
    ranks are told that nothing was published, and their next generation is whole."""
    client = connect()
    group = Mesh(context, cluster.address, tmp_path)
    try:
        assert group.ask("sparse_publisher", "w", "rows", turn_s=2.0, deltas=8) == [0] * 2
        for number in range(1, before + 1):
            group.ask("sparse_publish", number)
        group.ask("stop_at_write", 1, 0.5)
        group.tell("sparse_publish", DENSE_EVERY)
        stopped = group.processes[1].pid
        wait_for(lambda: state_of_process(stopped) == "T", "a stopped rank", 60.0)
        assert smb.torch.publish(client, "w", state_of(before + 1), deltas=8) == before + 1
        os.kill(stopped, signal.SIGCONT)
        for rank in range(2):
            assert "LockLostError" in group.heard(rank)
        follower = smb.torch.follow(client, "w")
        assert equal(follower.state_dict(), before + 1)
        for number, is_whole in ((before + 2, True), (before + 3, False)):
            said = group.ask("sparse_publish", number)
            assert [generation for generation, _ in said] == [number] * 2
            assert (sum(sent for _, sent in said) > follower.buffer.nbytes // 2) == is_whole
            assert equal(follower.state_dict(), number)
    finally:
        group.end()


def read_parts_until_killed(messages: Any, address: str) -> None:
    """Follow the state's parts; tell each generation that was read, and whether its bits were right."""
    with smb.connect(address, transport=FAR) as client:
        follower = smb.torch.follow(client, "w", placements=PARTS, timeout=DEADLINE_S)
        while True:
            follower.wait()
            found = follower.state_dict()
            messages.put((follower.generation, equal(found, follower.generation, PARTS)))


# More than 5 s: each group of ranks is several processes with PyTorch.
@pytest.mark.timeout(1800 if LONG else 120)
def test_ranks_and_readers_that_die_and_come_back(
    context: Any, cluster: smb.LocalCluster, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of ranks publish in turn, each of another size and with other shards; one rank of each is killed at some
    step of a publication. Readers of the source, of a mirror and of parts, and a reader that is killed with each group,
    have every generation to the bit. What a killed rank took part in is never seen, and the next group goes on."""
    # A coordinator that answers after a second, on a busy machine, is one that is away: then it is the source.
    monkeypatch.setattr(reader_source, "_ASK_S", DEADLINE_S)
    monkeypatch.setattr(reader_source, "near_servers", lambda _, near: (frozenset({near or "server-0"}), frozenset()))
    seed = int(os.environ.get("SEED", time.time_ns() % 10**6))
    print(f"SEED={seed}")
    chance, number, turn, in_a_row = random.Random(seed), 0, 0, 0
    client = connect()
    readers: list[tuple[smb.torch.Follower, Any]] = []
    sources: dict[int, set[str]] = {}  # from which each follower has read

    def follow(way: str, near: str | None = None, parts: Any = None) -> None:
        readers.append((smb.torch.follow(connect(way), "w", near=near, placements=parts), parts))

    def check(latest: int) -> None:
        for follower, parts in readers:
            assert follower.wait(generation=latest, timeout=DEADLINE_S) == latest
            assert equal(follower.state_dict(), latest, parts)
            assert follower.generation == latest
            sources.setdefault(id(follower), set()).add(follower.source)

    while number < GENERATIONS:
        ranks, kind = ((2, "rows"), (3, "columns"), (1, "rows"), (2, "mixed"))[(seed + turn) % 4]
        turn += 1
        (tmp_path / str(turn)).mkdir()
        group = Mesh(context, cluster.address, tmp_path / str(turn), ranks=ranks)
        options = {"deltas": 4, "versions": 3, "servers": ["server-0"], "relays": ["server-1"]}
        try:
            assert group.ask("sparse_publisher", "w", kind, turn_s=3.0, **options) == [number] * ranks
            if not readers:
                for way, near, parts in (
                    (FAR, None, None), ("shm", None, PARTS), (FAR, "server-1", None), (FAR, "server-1", PARTS),
                ):  # fmt: skip
                    follow(way, near, parts)
            with in_process(read_parts_until_killed, cluster.address) as (_, messages):
                # "commit some": of the group's first generation, when the whole state is there, and its entry is not.
                steps = [("write", 0), ("write some", 0), ("commit", 0), ("commit some", 0), ("write", ranks - 1)]
                # As often as there are versions, and nobody who comes then can read what is published: its whole state
                # has been overwritten.
                step, killed = chance.choice([each for each in steps if each[0] != "commit some" or in_a_row < 2])
                in_a_row = in_a_row + 1 if step == "commit some" else 0
                if step != "commit some":
                    for _ in range(chance.randint(3, 12 if LONG else 6)):
                        number += 1
                        said = group.ask("sparse_publish", number)
                        assert [each[0] for each in said] == [number] * ranks, said
                        check(number)
                    read = 0
                    while read < number:
                        read, same = messages.get(timeout=DEADLINE_S)
                        assert same, read
                group.ask("die_at", step, killed)
                group.tell("sparse_publish", number + 1)
                group.processes[killed].join(60)
                assert group.processes[killed].exitcode == -signal.SIGKILL, (ranks, kind, step, killed, number)
                said = [group.heard(rank) for rank in range(ranks) if rank != killed]
                assert all("UnavailableError" in each for each in said), (step, killed, said)
                assert client.open("w.log").version == number
                if number:
                    check(number)
        finally:
            group.end()
    # A mirror that is late, on a busy machine, is passed over for once.
    wanted = [{""}, {""}, {"", "w.mirror.server-1"}, {"", "w.mirror.server-1"}]
    found = [sources[id(follower)] | {""} for follower, _ in readers]
    assert found == wanted
