"""smb.torch: a trainer publishes a state_dict, readers follow it, and nobody ever sees a mix of two generations."""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
from tests.conftest import Connect
from tests.fault.long import LONG
from tests.support.clients import in_process, run_together
from tests.support.daemons import stop, wait_for
from tests.support.states import (
    filled,
    follow_until,
    pin_and_wait,
    publish_until_killed,
    publish_up_to,
    value_of,
)
from tests.support.transports import FAR

DTYPES = [
    "float16", "float32", "float64", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32",
    "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def network(seed: int = 0) -> torch.nn.Module:
    """float32 weights, bfloat16 ones, and batch norm's int64 counter."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(100, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 10, dtype=torch.bfloat16)
    )


def equal(one: Any, other: Any) -> bool:
    """Whether two states are the same to the bit."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].reshape(-1).view(torch.uint8).equal(other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


def test_a_model_arrives_as_it_left(client: smb.Client, connect: Connect) -> None:
    """Weights, bfloat16, running statistics and counters, exact; into a state_dict, and into another model."""
    trained, model = network(1), network(2)
    publisher = smb.torch.Publisher(client, "policy", trained)
    follower = smb.torch.follow(connect(FAR), "policy")
    assert (publisher.generation, follower.latest, follower.generation) == (0, 0, 0)
    for call in (follower.state_dict, lambda: follower.load(model)):
        with pytest.raises(smb.NotFoundError, match=r"of 'policy'|load 'policy'"):
            call()
    for generation in (1, 2, 3):
        trained[1](torch.randn(20, 50))  # type: ignore[index]
        assert publisher.publish() == generation
        assert follower.wait(timeout=10) == generation
        assert follower.load(model) == follower.generation == generation
        assert int(model[1].num_batches_tracked) == generation  # type: ignore[index,arg-type]
        assert equal(model.state_dict(), trained.state_dict())
        assert equal(follower.state_dict(), trained.state_dict())
    kept = follower.state_dict()
    publisher.publish({name: torch.ones_like(tensor) for name, tensor in trained.state_dict().items()})
    assert follower.load(model) == 4
    assert equal(kept, trained.state_dict())  # what was given before is the caller's own
    assert client.open("policy").tensor("0.weight").read().sum() == 5000
    assert smb.torch.publish(client, "policy", trained) == 5


def test_every_dtype_bit_for_bit(client: smb.Client) -> None:
    """All that a state_dict may hold, any bits, with tensors that have no elements or are not contiguous."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        bits = torch.randint(0, 2 if dtype == "bool" else 256, (12 * kind.itemsize,), generator=generator)
        state[dtype] = bits.to(torch.uint8).view(kind).view(3, 4)
    state |= {"transposed": state["float32"].T, "none": torch.zeros(0, 3), "one": torch.tensor(7)}
    smb.torch.publish(client, "odd", state)
    follower = smb.torch.follow(client, "odd")
    assert equal(follower.state_dict(), {name: tensor.contiguous() for name, tensor in state.items()})
    with follower.pin() as generation:
        assert generation.number == 1
        assert equal(dict(generation), follower.state_dict())
        with pytest.raises(KeyError):
            generation["two"]


def test_what_is_not_the_published_state_is_refused(client: smb.Client) -> None:
    """Other names, shapes or dtypes, and what is no dense tensor: nothing is published, no model is touched."""
    state = filled(1)
    publisher = smb.torch.Publisher(client, "w", state)
    publisher.publish()
    for change, told in (
        ({"e": torch.zeros(1)}, "e is not in it"),
        ({"b": torch.zeros(7, 11)}, r"b is .*float32"),
        ({"a": torch.zeros(300_001)}, "300001"),
        ({"a": torch.zeros(3).to_sparse()}, "sparse"),
        ({"a": 3.0}, "'a' is a float, not a tensor"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match=told):
            publisher.publish({**state, **change})  # type: ignore[dict-item]
    with pytest.raises(smb.InvalidArgumentError, match="a is missing"):
        publisher.publish({name: tensor for name, tensor in state.items() if name != "a"})
    assert publisher.generation == 1
    assert value_of(smb.torch.follow(client, "w").state_dict()) == 1
    changed = {**state, "b": torch.zeros(7, 11)}
    with pytest.raises(smb.InvalidArgumentError, match="a name and a model or state_dict, not dict and str"):
        smb.torch.Publisher(client, state, "w")  # type: ignore[arg-type]
    for dtype in (torch.int8, "bfloat16"):
        with pytest.raises(smb.InvalidArgumentError, match=f"dtype must be a floating-point dtype, not {dtype}"):
            smb.torch.Publisher(client, "w", state, dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(smb.AlreadyExistsError, match=r"other tensors \(1 differ\): b: .*\[7, 11\], not .*smb rm w\)"):
        smb.torch.Publisher(client, "w", changed)
    with pytest.raises(smb.AlreadyExistsError, match=r"other tensors .*only in one"):
        smb.torch.Publisher(client, "w", network())
    model = network(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(smb.InvalidArgumentError, match=r"load 'w': .*differ"):
        smb.torch.follow(client, "w").load(model)
    assert equal(model.state_dict(), before)
    smb.torch.publish(client, "net", network())
    with pytest.raises(smb.InvalidArgumentError, match=r"load 'net': '0.weight' .* on the meta device.*to_empty"):
        smb.torch.follow(client, "net").load(network().to("meta"))
    client.create("plain", 3)
    client.create("single", tensors={"a": (3, "float32")})
    client.create("nameless", 3, versions=2)
    for name in ("plain", "single", "nameless"):
        with pytest.raises(smb.InvalidArgumentError, match="not a published state"):
            smb.torch.follow(client, name)
    with (
        smb.train.join(client, "group", np.zeros(3, np.float32), smb.train.ASP()),
        pytest.raises(smb.InvalidArgumentError, match=r"group of smb\.train.*shared_state_dict\(client, 'group'\)"),
    ):
        smb.torch.follow(client, "group")
    with pytest.raises(smb.NotFoundError):
        smb.torch.follow(client, "nobody")


def test_readers_never_see_a_mix(cluster: smb.LocalCluster, connect: Connect) -> None:
    """One trainer at full rate, four readers over both transports that were there before it: every generation that
    anybody saw is whole, its number is right, and the numbers grow.
    """
    last = 60 if LONG else 12
    readers = [(follow_until, cluster.address, transport, last) for transport in ("shm", FAR) * 2]
    *seen, published = run_together(*readers, (publish_up_to, cluster.address, last))
    assert published == [last + 1]
    for numbers in seen:
        assert numbers[-1] >= last
        assert numbers == sorted(numbers)
    assert sum(map(len, seen)) >= 8


def test_a_stopped_reader_does_not_stop_the_trainer(cluster: smb.LocalCluster, connect: Connect) -> None:
    """A reader that was stopped with a generation pinned delays one publication by the pin's time; the trainer's next
    ones go on at once, and the reader, woken, is told that it has lost: it read nothing of another generation.
    """
    client = connect()
    publisher = smb.torch.Publisher(client, "w", filled(0), versions=2)
    publisher.publish(filled(1))
    with in_process(pin_and_wait, cluster.address, 2.0) as (process, messages):
        assert messages.get(timeout=60) == 1
        stop(process.pid)
        began = time.monotonic()
        for number in range(2, 8):
            assert publisher.publish(filled(number)) == number
        assert time.monotonic() - began < 10
        os.kill(process.pid, signal.SIGCONT)
        assert "version 1 was overwritten" in messages.get(timeout=60)
    assert value_of(smb.torch.follow(client, "w").state_dict()) == 7


def test_a_trainer_that_will_not_wait_leaves_a_generation_out(client: smb.Client, connect: Connect) -> None:
    """With a short timeout it is told that nothing was published, and the next call publishes."""
    publisher = smb.torch.Publisher(client, "w", filled(0), versions=2)
    publisher.publish(filled(1))
    follower = smb.torch.follow(connect(FAR), "w")
    with follower.pin(ttl=30) as generation:
        publisher.publish(filled(2))
        with pytest.raises(smb.TimeoutError, match="nothing was done"):
            publisher.publish(filled(3), timeout=0.1)
        assert value_of(generation) == 1
        assert value_of(follower.state_dict()) == follower.generation == 2
    assert publisher.publish(filled(3), timeout=0.1) == 3
    with pytest.raises(smb.TimeoutError):
        follower.wait(timeout=0.1) if follower.state_dict() else None


def test_by_default_one_reader_delays_no_publication(client: smb.Client, connect: Connect) -> None:
    """A reader holds a generation while five are published by a trainer that waits for nobody."""
    publisher = smb.torch.Publisher(client, "w", filled(0))
    publisher.publish(filled(1))
    with smb.torch.follow(connect(FAR), "w").pin(ttl=30) as generation:
        for number in range(2, 7):
            assert publisher.publish(filled(number), timeout=0.1) == number
        assert value_of(generation) == 1


@pytest.mark.parametrize("deltas", [0, 4])
def test_two_trainers_under_one_name(
    client: smb.Client, connect: Connect, caplog: pytest.LogCaptureFixture, deltas: int
) -> None:
    """Readers got both trainers' states in turn, and nobody was told. Each trainer is now, once."""
    first = smb.torch.Publisher(client, "w", filled(0), deltas=deltas)
    first.publish(filled(1))
    second = smb.torch.Publisher(connect(), "w", filled(0), deltas=deltas)
    second.publish(filled(2))  # after a restart the first one does so, too
    assert not [message for message in caplog.messages if "Another trainer" in message]
    for generation in (3, 5):
        first.publish(filled(generation))
        second.publish(filled(generation + 1))
    told = [message for message in caplog.messages if "Another trainer publishes under this name" in message]
    assert ["generation 3 is ours, but 1 between it" in told[0], "generation 4 is ours" in told[1]] == [True, True]
    assert len(told) == 2


def test_a_trainer_that_is_killed_comes_back(cluster: smb.LocalCluster, connect: Connect) -> None:
    """kill -9 in the middle, three times: readers keep the last whole generation, and the next run goes on from it."""
    client = connect(FAR)
    last, reads = 0, 0
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        nonlocal reads
        try:
            follower = smb.torch.follow(client, "w", timeout=60)
            follower.wait(timeout=60)
            while not stop.is_set():
                assert value_of(follower.state_dict()) == follower.generation
                reads += 1
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(3):
        with in_process(publish_until_killed, cluster.address) as (process, messages):
            for _ in range(2 + turn):
                number = messages.get(timeout=60)
                assert number > last
                last = number
            process.kill()
    wait_for(lambda: reads > 20 or failures, "reads")
    stop.set()
    reader.join()
    assert not failures
    follower = smb.torch.follow(client, "w")
    assert value_of(follower.state_dict()) == follower.generation >= last


def test_pickles_of_publishers_followers_and_trainings_say_what_to_do(connect: Connect) -> None:
    """As those of clients and buffers; the model that was joined may be copied."""
    client, model = connect(), torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    publisher = smb.torch.Publisher(client, "policy", model)
    follower = smb.torch.follow(client, "policy")
    with smb.torch.join(model, optimizer, "run", scheme="asp", client=client) as shared:
        for thing, instead in (
            (publisher, "call smb.torch.Publisher(smb.connect("),
            (follower, f"call smb.torch.follow(smb.connect({client.address!r}), 'policy')"),
            (shared, "call smb.torch.join with training 'run'"),
            (shared.worker, "call smb.train.join with training 'run'"),
        ):
            for refused in (pickle.dumps, copy.deepcopy, copy.copy):
                with pytest.raises(TypeError, match=f"belongs to this process.*{re.escape(instead)}"):
                    refused(thing)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(copied.weight, model.weight)


def test_notebooks_show_publishers_followers_and_trainings(connect: Connect) -> None:
    """repr() and the tables of notebooks name the state or the training, and what is there; they ask no server."""
    client, model = connect(), torch.nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = smb.torch.Publisher(client, "late")
    publisher = smb.torch.Publisher(client, "policy", model, deltas=16)
    follower = smb.torch.follow(client, "policy")
    assert repr(publisher) == "<smb.torch.Publisher of 'policy', no generation yet>"
    assert repr(follower) == "<smb.torch.Follower of 'policy', no generation yet>"
    publisher.publish()
    follower.load(model)
    assert repr(publisher) == "<smb.torch.Publisher of 'policy', generation 1>"
    assert repr(follower) == "<smb.torch.Follower of 'policy', generation 1>"
    with smb.torch.join(model, optimizer, "run", scheme="asp", client=client) as shared:
        tables = [thing._repr_html_() for thing in (late, publisher, follower, shared)]
    closed = shared._repr_html_()
    client.close()
    assert [repr(thing) for thing in (publisher, follower)] == [
        f"<smb.torch.{kind} of 'policy', generation 1>" for kind in ("Publisher", "Follower")
    ]
    assert publisher._repr_html_() == tables[1]
    for table, shown in zip(
        [*tables, closed],
        (
            ["<caption>Publisher<", "<td>late</td>", "none yet"],
            ["<td>policy</td>", "<th>generation</th><td>1</td>", "<th>tensors</th><td>2</td>", "3.9 KiB", "16th time"],
            ["<caption>Follower<", "<td>1</td>", "server-", "the state&#x27;s own servers"],
            ["<caption>Shared<", "<td>run</td>", "1,010", "ASP()", "trains"],
            ["<caption>Shared<", "closed"],
        ),
        strict=True,
    ):
        assert table.startswith("<table>")
        assert [part for part in shown if part not in table] == []


def test_a_trainings_name_is_not_for_a_state(connect: Connect) -> None:
    """And nobody is told to delete the training."""
    client, model = connect(), torch.nn.Linear(2, 2)
    with smb.torch.join(model, torch.optim.SGD(model.parameters(), lr=0.1), "run", scheme="asp", client=client):
        for state in (model, None):
            with pytest.raises(smb.AlreadyExistsError, match="'run' is a training; publish its model under another"):
                smb.torch.Publisher(client, "run", state).publish(iter(model.state_dict().items()))
