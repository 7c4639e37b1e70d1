"""smb.torch.Publisher.publish of an iterable of (name, tensor): one tensor in memory at a time; all or nothing."""

from __future__ import annotations

import os
import signal
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
from tests.conftest import Connect
from tests.support.clients import in_process
from tests.support.transports import FAR

SHAPES = {"a": (300, 40), "b": (7,), "none": (0, 3), "n": ()}
DTYPES = {"a": torch.float32, "b": torch.bfloat16, "none": torch.float16, "n": torch.int64}


def state_of(value: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value, dtype=DTYPES[name]) for name, shape in SHAPES.items()}


def pairs_of(value: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A generator, in another order than the first trainer's."""
    return iter(reversed(state_of(value).items()))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("deltas", [0, 4])
def test_pairs_arrive_as_they_were_given(client: smb.Client, connect: Connect, deltas: int) -> None:
    """A generator, a list and a mapping, by a Publisher that was made without a state; then by one made again."""
    publisher = smb.torch.Publisher(client, "w", deltas=deltas)
    assert (publisher.generation, publisher.last, publisher.sent_bytes) == (0, 0, 0)
    with pytest.raises(smb.NotFoundError, match="the first publication makes the buffer"):
        _ = publisher.buffer
    with pytest.raises(smb.NotFoundError):
        smb.torch.follow(client, "w")
    assert publisher.publish(pairs_of(1)) == 1
    follower = smb.torch.follow(connect(FAR), "w")
    assert equal(follower.state_dict(), state_of(1))
    assert publisher.publish(list(pairs_of(2))) == 2
    assert publisher.publish(state_of(3)) == 3
    assert equal(follower.state_dict(), state_of(3))
    assert publisher.publish(pairs_of(4)) == publisher.generation == publisher.last == 4
    again = smb.torch.Publisher(connect(), "w", deltas=deltas)  # the trainer restarts
    assert again.generation == 4
    assert again.publish(pairs_of(5)) == 5
    assert equal(follower.state_dict(), state_of(5))
    assert smb.torch.publish(client, "w", pairs_of(6), deltas=deltas) == 6
    smb.torch.publish(client, "list", list(pairs_of(7)))
    assert equal(smb.torch.follow(client, "list").state_dict(), state_of(7))
    with pytest.raises(smb.InvalidArgumentError, match="made without a state; pass one"):
        again.publish()


@pytest.mark.parametrize("deltas", [0, 4])
def test_one_tensor_is_in_memory_at_a_time(client: smb.Client, deltas: int) -> None:
    """When a tensor is asked for, the one before is gone: at the first publication, later, and in the background."""
    alive: list[weakref.ref[Any]] = []

    def pairs(value: float) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(5):
            assert all(each() is None for each in alive)
            memory = np.full(1000, value, np.float32)
            alive.append(weakref.ref(memory))
            tensor = torch.from_numpy(memory)
            del memory
            yield f"t{number}", tensor
            del tensor

    publisher = smb.torch.Publisher(client, "w", deltas=deltas)
    for generation in (1, 2, 3):
        assert publisher.publish(pairs(generation)) == generation
    assert publisher.publish_async(pairs(4)).result(60) == 4
    assert len(alive) == 20
    state = smb.torch.follow(client, "w").state_dict()
    assert {float(value) for tensor in state.values() for value in tensor} == {4}


@pytest.mark.parametrize("deltas", [0, 4])
def test_pairs_that_fail_leave_the_generation_in_force(client: smb.Client, connect: Connect, deltas: int) -> None:
    """A generator that raises or ends early, and pairs that do not fit; the next publication is whole and right."""
    publisher = smb.torch.Publisher(client, "w", deltas=deltas)
    publisher.publish(pairs_of(1))
    follower = smb.torch.follow(connect(), "w")
    given = list(state_of(2).items())

    def raises() -> Iterator[tuple[str, torch.Tensor]]:
        yield from given[:3]
        raise ZeroDivisionError("in the generator")

    wrong: list[tuple[Any, type[Exception], str]] = [
        (raises(), ZeroDivisionError, "in the generator"),
        (given[:3], smb.InvalidArgumentError, r"publish 'w': .*\(1 differ\): n is missing"),
        ([], smb.InvalidArgumentError, r"\(4 differ\): n is missing; none is missing; b is missing"),
        ([*given[:2], given[0]], smb.InvalidArgumentError, "'a' comes twice"),
        ([*given, ("e", torch.zeros(1))], smb.InvalidArgumentError, "e is not in it"),
        ([("a", torch.zeros(40, 300))], smb.InvalidArgumentError, r"a is \(\(40, 300\), .*, not \(\(300, 40\), "),
        ([("a", torch.zeros(300, 40, dtype=torch.float16))], smb.InvalidArgumentError, "float16.*, not .*float32"),
        ([("a", torch.zeros(300, 40, device="meta"))], smb.InvalidArgumentError, "'a' is on the meta device"),
        ([("a", torch.zeros(300, 40).to_sparse())], smb.InvalidArgumentError, "'a' is sparse"),
        ([("a", 3.0)], smb.InvalidArgumentError, "'a' is a float, not a tensor"),
        ([given[1], "a"], smb.InvalidArgumentError, "item 1 is a str, not a pair"),
        ([(3, torch.zeros(1))], smb.InvalidArgumentError, "item 0 is a tuple, not a pair"),
        (3, smb.InvalidArgumentError, "an iterable of pairs .*, not a int"),
        (torch.zeros(3), smb.InvalidArgumentError, "an iterable of pairs .*, not a Tensor"),
    ]
    for pairs, kind, told in wrong:
        with pytest.raises(kind, match=told):
            publisher.publish(pairs)
        assert publisher.generation == publisher.last == 1
        assert equal(follower.state_dict(), state_of(1))
    with pytest.raises(ZeroDivisionError):
        publisher.publish_async(raises())
    assert publisher.publish(pairs_of(3)) == 2
    assert equal(follower.state_dict(), state_of(3))
    assert publisher.publish(pairs_of(4)) == 3
    assert equal(follower.state_dict(), state_of(4))


def test_a_first_publication_that_fails_leaves_nothing(client: smb.Client) -> None:
    """Neither a buffer nor a temporary file; what is no state is refused, and so is the name of another buffer."""
    publisher = smb.torch.Publisher(client, "w")

    def raises() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publisher.publish(raises())
    nothing: list[tuple[str, torch.Tensor]] = []
    for empty in (nothing, iter(nothing)):
        with pytest.raises(smb.InvalidArgumentError, match="no tensors to publish"):
            publisher.publish(empty)
    assert client.list() == []
    client.create("plain", 3)
    with pytest.raises(smb.AlreadyExistsError, match=r"'plain': a buffer of that name exists.*smb rm plain"):
        smb.torch.Publisher(client, "plain")
    with pytest.raises(smb.InvalidArgumentError, match=r"not str and .*iterator; pass an iterator to publish\(\)"):
        smb.torch.Publisher(client, "w", pairs_of(1))  # type: ignore[arg-type]
    with pytest.raises(smb.InvalidArgumentError, match="mesh= needs the model"):
        smb.torch.Publisher(client, "w", mesh=object())  # type: ignore[arg-type]


def test_a_full_disk_is_told(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first publication of a generator needs a temporary file, unless names and shapes are given."""
    full = Path("/dev/full").open("r+b")  # noqa: SIM115 # closed by the Publisher
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
    publisher = smb.torch.Publisher(client, "w")
    with pytest.raises(smb.OutOfMemoryError, match=r"publish 'w': .* disk is full; set TMPDIR .* \(shape, dtype\)"):
        publisher.publish((name, torch.zeros(1_000_000)) for name in "abc")
    assert client.list() == []
    forms = {name: (shape, DTYPES[name]) for name, shape in SHAPES.items()}
    publisher = smb.torch.Publisher(client, "w", forms)
    with pytest.raises(smb.InvalidArgumentError, match="on the meta device"):
        publisher.publish()
    assert publisher.publish(pairs_of(1)) == 1
    assert smb.torch.Publisher(client, "w").publish(pairs_of(2)) == 2  # the buffer says what it needs
    assert equal(smb.torch.follow(client, "w").state_dict(), state_of(2))
    with pytest.raises(smb.InvalidArgumentError, match="float12"):
        smb.torch.Publisher(client, "v", {"a": ((3,), "float12")})


@pytest.mark.parametrize("deltas", [0, 4])
def test_ties_names_and_dtypes_hold_for_pairs(client: smb.Client, deltas: int) -> None:
    """Tied names may be left out, as by named_parameters(), and are refused if they differ; names= and dtype= hold."""
    first, second = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    publisher = smb.torch.Publisher(client, "tied", model, deltas=deltas)
    assert publisher.publish(model.named_parameters()) == 1
    assert publisher.publish(reversed(model.state_dict().items())) == 2
    follower = smb.torch.follow(client, "tied")
    assert follower.state_dict().keys() == {"0.weight", "1.weight"}
    with pytest.raises(smb.InvalidArgumentError, match=r"1\.weight and 0\.weight were one tensor at the first time"):
        publisher.publish([("1.weight", torch.zeros(4, 4)), ("0.weight", torch.ones(4, 4))])
    assert torch.equal(follower.state_dict()["1.weight"], first.weight)
    again = smb.torch.Publisher(client, "tied", deltas=deltas)
    assert again.publish(model.state_dict()) == 3

    part = smb.torch.Publisher(client, "part", names=["a", "n"], dtype=torch.bfloat16, deltas=deltas)
    part.publish(pairs_of(3))
    part.publish(pairs_of(4))
    found = smb.torch.follow(client, "part").state_dict()
    assert {name: tensor.dtype for name, tensor in found.items()} == {"a": torch.bfloat16, "n": torch.int64}
    assert float(found["a"][0, 0]) == 4
    with pytest.raises(smb.InvalidArgumentError, match="names= has 'n', but the state has no such tensor"):
        part.publish([("a", torch.zeros(300, 40))])
    some = smb.torch.Publisher(client, "some", names=lambda name: name == "b", deltas=deltas)
    some.publish(pairs_of(5))
    assert smb.torch.follow(client, "some").state_dict().keys() == {"b"}


def test_readers_have_the_former_generation_until_the_last_pair(client: smb.Client, connect: Connect) -> None:
    """A reader in the middle of a publication, and in the background what was given cannot change any more."""
    publisher = smb.torch.Publisher(client, "w")
    publisher.publish(pairs_of(1))
    follower = smb.torch.follow(connect(), "w")

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs_of(2):
            assert equal(follower.state_dict(), state_of(1))
            yield name, tensor

    assert publisher.publish(pairs()) == 2
    assert equal(follower.state_dict(), state_of(2))
    state = state_of(3)
    future = publisher.publish_async(iter(state.items()))
    state["a"].zero_()
    assert future.result(60) == 3
    assert equal(follower.state_dict(), state_of(3))


def killed_half_way(_messages: Any, address: str) -> None:
    with smb.connect(address) as client:
        publisher = smb.torch.Publisher(client, "w")

        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            for number, pair in enumerate(pairs_of(2)):
                yield pair
                if number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

        publisher.publish(pairs())


def test_a_trainer_killed_between_two_pairs_publishes_nothing(cluster: smb.LocalCluster, client: smb.Client) -> None:
    """Readers keep the former generation, every value of it."""
    smb.torch.publish(client, "w", pairs_of(1))
    with in_process(killed_half_way, cluster.address) as (process, _):
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    follower = smb.torch.follow(client, "w")
    assert follower.latest == 1
    assert equal(follower.state_dict(), state_of(1))


def test_tensors_in_several_ranks_are_refused(client: smb.Client) -> None:
    """A DTensor of a mesh of two ranks, by a Publisher without a state; nothing is made."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        shard = DTensor.from_local(torch.zeros(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        publisher = smb.torch.Publisher(client, "w")
        with pytest.raises(smb.InvalidArgumentError, match=r"'x' lies in several ranks; pass x\.full_tensor\(\)"):
            publisher.publish(iter([("x", shard)]))
        with pytest.raises(smb.InvalidArgumentError, match=r"Publisher\(client, name, model\)"):
            publisher.publish({"x": shard})
    finally:
        torch.distributed.destroy_process_group()
    assert client.list() == []
