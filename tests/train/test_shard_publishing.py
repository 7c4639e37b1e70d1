"""All ranks of a mesh publish one generation, each its own shards; readers with other shards read just their parts."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
from tests.conftest import Connect
from tests.support.daemons import state_of_process, wait_for
from tests.support.meshes import Mesh, local_step, network, published
from tests.support.transports import FAR


@pytest.fixture(scope="module")
def mesh(context: Any, cluster: smb.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Four ranks, that all tests use that kill nobody."""
    made = Mesh(context, cluster.address, tmp_path_factory.mktemp("mesh"), ranks=4)
    yield made
    made.end()


def equal(state: Any, seed: int) -> bool:
    """Whether a state has the values of that seed, to the bit."""
    values = published(seed).state_dict()
    return list(state) == list(values) and all(
        torch.as_tensor(state[name]).equal(tensor) for name, tensor in values.items()
    )


@pytest.mark.parametrize("kind", ["fsdp", "columns", "grid"])
def test_every_rank_publishes_its_own_shards(mesh: Mesh, connect: Connect, kind: str) -> None:
    """What is published is the gathered state, bit for bit, and each byte of it was sent by one rank; so too in the
    background, by a second Publisher, and for a part of the state rounded."""
    client = connect(FAR)
    assert mesh.ask("publisher", "w", kind, given=kind != "grid", stripe="4KiB") == [0] * 4
    follower = smb.torch.follow(client, "w")
    for seed in (1, 2):
        said = mesh.ask("publish", seed)
        assert [(generation, same) for generation, _, same in said] == [(seed, True)] * 4
        assert sum(sent for _, sent, _ in said) == sum(place.nbytes for place in follower.buffer.table.values())
        assert all(sent for _, sent, _ in said)
        assert follower.load(model := published(9)) == seed
        assert equal(model.state_dict(), seed)
    assert mesh.ask("publisher", "w", kind) == [2] * 4
    assert {generation for generation, _, _ in mesh.ask("publish", 3)} == {3}
    assert equal(follower.state_dict(), 3)
    assert (
        mesh.ask("publisher", "part", kind, names=["0.weight", "4.num_batches_tracked"], dtype=torch.bfloat16)
        == [0] * 4
    )
    mesh.ask("publish", 5)
    part, values = smb.torch.follow(client, "part").state_dict(), published(5).state_dict()
    assert part["0.weight"].equal(values["0.weight"].bfloat16())
    assert int(part["4.num_batches_tracked"]) == 5


@pytest.mark.parametrize("kind", ["fsdp", "columns", "grid"])
def test_readers_with_other_shards_read_their_parts(mesh: Mesh, connect: Connect, kind: str) -> None:
    """Ranks that are sharded in another way than the trainer have what was published; what each received is what it
    has, and the generation is the one that was named."""
    trainer = smb.torch.Publisher(connect(), "w", published(1), versions=4)
    for seed in (1, 2):
        trainer.publish(published(seed))
    itemsizes = [tensor.dtype.itemsize for tensor in published(1).state_dict().values()]
    for seed in (2, 1):
        for generation, received, found, local in mesh.ask("follow", "w", kind, seed):
            assert generation == seed
            assert equal(found, seed)
            assert received == sum(count * size for count, size in zip(local, itemsizes, strict=True))
            assert received < trainer.sent_bytes // 2
    (said, *_) = mesh.ask("follow", "w", kind, 3)
    assert "version 3 is not published yet" in said


def transferred(client: smb.Client) -> float:
    """Bytes that the memory servers have sent as what was read."""
    pages = [
        urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=20).read() for server in client.servers()
    ]
    lines = [line for page in pages for line in page.decode().splitlines()]
    start = f'smb_server_transferred_bytes_total{{kind="read",transport="{FAR}"}}'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def test_slices(connect: Connect) -> None:
    """Slices take parts of some tensors, over both ways, and their bytes alone; in pin(), too; a model
    of that form takes them. Wrong ones are refused in words."""
    client = connect()
    big = torch.arange(4096.0 * 256).reshape(4096, 256)
    trainer = smb.torch.Publisher(client, "w", {"big": big, "n": torch.tensor(7), "tied": big}, versions=3)
    trainer.publish()
    for way in ("shm", FAR):
        reader = connect(way)
        parts = {"big": (slice(1024, 2048), slice(64, None)), "n": ()}
        follower = smb.torch.follow(reader, "w", placements=parts)
        before = transferred(client)
        found = follower.state_dict()
        if way == FAR:
            assert follower.received_bytes <= transferred(client) - before < 1.1 * follower.received_bytes
        assert list(found) == ["big", "n", "tied"]
        assert found["big"].equal(big[1024:2048, 64:])
        assert found["tied"] is found["big"]
        assert int(found["n"]) == 7
        assert follower.received_bytes == 1024 * 192 * 4 + 8
        with follower.pin() as generation:
            assert set(generation) == {"big", "n", "tied"}
            assert generation["tied"].equal(big[1024:2048, 64:])
            with pytest.raises(KeyError):
                generation["m"]
        rows = smb.torch.follow(reader, "w", placements={"tied": (slice(0, 8), slice(None))})
        model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(8, 256)) for name in ("big", "tied")})
        assert rows.load(model) == 1
        assert model["big"].equal(big[:8])
        nothing = smb.torch.follow(reader, "w", placements={"big": (slice(5, 5), slice(None))})
        assert nothing.state_dict()["big"].shape == (0, 256)
        assert nothing.received_bytes == 0
    for wrong, told in (
        ({"x": (slice(None),)}, "has 'x', which is not published"),
        ({"big": slice(None)}, "give a slice for each dimension"),
        ({"big": (slice(0, 9), 3)}, "give a slice for each dimension"),
        ({"big": (slice(0, 5000), slice(None))}, "take 0 <= start <= stop <= 4096"),
        ({"big": (slice(0, 9, 2), slice(None))}, "in steps of one"),
        ({"big": torch.zeros(3)}, r"big has shape \(3,\) in placements=, but \(4096, 256\)"),
        ({"big": (slice(0, 1), slice(None)), "tied": (slice(0, 2), slice(None))}, "are one tensor"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match=told):
            smb.torch.follow(client, "w", placements=wrong)  # type: ignore[arg-type]


# More than 5 s: some forty generations, each read in 400 short parts over the network.
def test_parts_are_of_one_generation(connect: Connect) -> None:
    """A reader of many short parts, over the network, beside a trainer at full rate: never of two generations."""
    trainer = smb.torch.Publisher(connect(), "w", {"w": torch.zeros(400, 300)}, versions=2)
    trainer.publish()
    follower = smb.torch.follow(connect(FAR), "w", placements={"w": (slice(None), slice(7, 9))})
    seen = set()
    for number in range(2, 40):
        future = trainer.publish_async({"w": torch.full((400, 300), float(number))})
        values = follower.state_dict()["w"]
        assert len(values.unique()) == 1
        seen.add(float(values[0, 0]))
        future.result(60)
    assert len(seen) > 3


def test_a_generation_that_was_asked_for(connect: Connect) -> None:
    """A reader may name the latest but one, and with deltas any to which a whole state and deltas lead; one that is
    over is refused, and the state goes on."""
    for deltas in (0, 4):
        state = {"w": torch.arange(60_000, dtype=torch.float32)}
        trainer = smb.torch.Publisher(connect(), f"w{deltas}", state, deltas=deltas, versions=3)
        follower = smb.torch.follow(connect(FAR), f"w{deltas}")
        for number in range(1, 9):
            state["w"][number] = -1.0
            trainer.publish()
            assert follower.state_dict()["w"].equal(state["w"])
            if number > 1:
                assert float(follower.state_dict(generation=number - 1)["w"][number]) == number
                assert follower.generation == number - 1
        if deltas:  # of generation 1 and of 5 the whole states are there
            for number in (3, 7):
                assert float(follower.state_dict(generation=number)["w"][number]) == -1.0
                assert float(follower.state_dict(generation=number)["w"][number + 1]) == number + 1
            for number in (9, 10, 11, 12, 13):
                state["w"][number] = -1.0
                trainer.publish()
        for wrong in (3, 14):
            with pytest.raises(smb.NotFoundError):
                follower.state_dict(generation=wrong)
        with pytest.raises(smb.InvalidArgumentError, match=r"generation must be .* not 0"):
            follower.state_dict(generation=0)
        assert follower.state_dict()["w"].equal(state["w"])


def test_a_grid_is_one_member(mesh: Mesh, connect: Connect) -> None:
    """Shards of tensor parallelism and FSDP2 together train as a plain process does."""
    assert mesh.ask("join", 0, "grid", scheme="localsgd", every=2) == ["joined"] * 4
    assert mesh.ask("step", 4) == [4] * 4
    ends = mesh.ask("close")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        local_step(model, optimizer, 0, step)
    own = [parameter.detach().numpy() for parameter in model.parameters()]
    shared = smb.torch.shared_state_dict(connect(), "run")
    for found in (*ends, list(shared.values())):
        assert all(np.allclose(one, other, atol=1e-6) for one, other in zip(found, own, strict=True))


def test_what_one_rank_is_refused_all_are(mesh: Mesh, connect: Connect) -> None:
    """Another state at one rank, and another model at one: every rank raises, nothing is there; then the next
    publication works."""
    mesh.tell("publisher", "w", "fsdp", ranks=(0, 1, 2))
    mesh.tell("publisher", "w", "fsdp", names=["0.weight"], ranks=(3,))
    for said in mesh.all_heard():
        assert "ranks 0 and 3 of the mesh have other tensors" in said
    assert not connect().list()
    assert mesh.ask("publisher", "w", "fsdp") == [0] * 4
    said = mesh.ask("publish", 1, wrong=(2,))
    assert all("these are not the published tensors" in each for each in said)
    assert "rank 2 of the mesh" in said[0]
    assert [generation for generation, _, _ in mesh.ask("publish", 3)] == [1] * 4
    assert equal(smb.torch.follow(connect(), "w").state_dict(), 3)


def test_a_rank_that_is_stopped(context: Any, cluster: smb.LocalCluster, connect: Connect, tmp_path: Path) -> None:
    """Another trainer publishes meanwhile. Let go, all ranks are told that nothing was published, and publish again."""
    client = connect()
    trainer = Mesh(context, cluster.address, tmp_path)
    try:
        assert trainer.ask("publisher", "w", "columns") == [0] * 2
        trainer.ask("publish", 1)
        trainer.ask("stop_at_write", 1, 0.5)
        trainer.tell("publish", 7)
        stopped = trainer.processes[1].pid
        wait_for(lambda: state_of_process(stopped) == "T", "a stopped rank", 60.0)
        # The turn is given up: this waits for it, and has the next number.
        assert smb.torch.publish(client, "w", published(3)) == 2
        os.kill(stopped, signal.SIGCONT)
        for rank in range(2):
            assert "LockLostError" in trainer.heard(rank)
        follower = smb.torch.follow(client, "w")
        assert equal(follower.state_dict(), 3)
        assert [generation for generation, _, _ in trainer.ask("publish", 5)] == [3] * 2
        assert equal(follower.state_dict(), 5)
    finally:
        trainer.end()


@pytest.mark.timeout(300)  # each time the others wait for as long as a turn may take
def test_ranks_that_are_killed(context: Any, cluster: smb.LocalCluster, connect: Connect, tmp_path: Path) -> None:
    """Whichever it is and when: its generation never appears, the other rank is told, and the next trainer's first
    publication is the next generation, whole. Rank 0 is the speaker."""
    kills = [(0, "write"), (0, "write some"), (0, "commit"), (1, "write"), (1, "write some")]
    client = connect()
    trainers = []
    try:
        for turn, kill in enumerate((*kills, None)):
            (tmp_path / str(turn)).mkdir()
            trainer, seed = Mesh(context, cluster.address, tmp_path / str(turn)), 2 * turn + 1
            trainers.append(trainer)
            assert trainer.ask("publisher", "w", "columns") == [turn] * 2, kills[turn - 1]
            assert [generation for generation, _, _ in trainer.ask("publish", seed)] == [turn + 1] * 2
            follower = smb.torch.follow(client, "w")
            assert equal(follower.state_dict(), seed)
            if kill is not None:
                killed, step = kill
                trainer.ask("die_at", step, killed)
                trainer.tell("publish", 100)
                trainer.processes[killed].join(60)
                assert "UnavailableError" in trainer.heard(1 - killed), kill
                assert client.open("w").version == turn + 1, kill
                assert equal(follower.state_dict(), seed), kill
    finally:
        for trainer in trainers:
            trainer.end()
