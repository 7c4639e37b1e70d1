"""Generations as deltas: bit for bit what was published, whoever reads when, and whoever is killed."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
from smb.published import ABOUT
from smb.relay.publication_log import PublicationLog
from tests.conftest import Connect
from tests.support.clients import in_process
from tests.support.commands import run_here
from tests.support.daemons import wait_for
from tests.support.transports import FAR

ELEMENTS = 60_000
LONG = os.environ.get("SMB_LONG") == "1"


def state_of(number: int) -> dict[str, torch.Tensor]:
    """A state of which two in a row differ in 2 % of their bfloat16 elements: any bits, NaNs too."""
    random = np.random.default_rng(5)
    bits = random.integers(0, 65536, ELEMENTS, np.uint16)
    step = (number * 1201 + np.arange(1200)) % ELEMENTS
    bits[step] += np.uint16(number)
    count = torch.tensor([number, 0, 7])
    return {"w": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(300, 200), "count": count}


def equal(one: Any, other: Any) -> bool:
    """Whether two states are the same to the bit."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].reshape(-1).view(torch.uint8).equal(other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


def run_smb(capsys: pytest.CaptureFixture[str], client: smb.Client, *arguments: str) -> tuple[int, str, str]:
    """A command on the client's cluster: (exit code, stdout, stderr)."""
    return run_here(capsys, *arguments, "-c", client.address)


def test_stat_tells_the_generation(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    """`smb stat` names the generation that readers see, not the version of the buffer in which whole states lie; of a
    state without deltas it names the version.
    """
    client = connect()
    publisher = smb.torch.Publisher(client, "w", state_of(0), deltas=4)
    assert "nothing yet" in run_smb(capsys, client, "stat", "w")[1]
    for number in range(1, 6):
        publisher.publish(state_of(number))
    version = publisher.buffer.version
    assert version < 5
    shown = run_smb(capsys, client, "stat", "w")[1]
    assert f"  generation 5, last whole state in version {version}\n" in shown
    described = json.loads(run_smb(capsys, client, "stat", "w", "--json")[1])
    assert (described["generation"], described["version"]) == (5, version)
    smb.torch.publish(client, "plain", state_of(1))
    assert "version 1\n" in run_smb(capsys, client, "stat", "plain")[1]
    assert "generation" not in json.loads(run_smb(capsys, client, "stat", "plain", "--json")[1])
    client.delete("w.log")
    assert "generation unknown" in run_smb(capsys, client, "stat", "w")[1]


def test_a_state_with_deltas_keeps_its_name(connect: Connect) -> None:
    """Its deltas lie beside it under its name: alone it gets no other, and nothing takes its place; a folder does."""
    client = connect()
    smb.torch.Publisher(client, "run/w", state_of(0), deltas=4).publish()
    client.create("other", 4)
    for old, new in (("run/w", "v"), ("other", "run/w")):
        with pytest.raises(smb.InvalidArgumentError, match=r"rename of .*: \"run/w\" is published with deltas="):
            client.rename(old, new, replace=True)
    client.rename_folder("run", "walk")
    assert smb.torch.follow(client, "walk/w").state_dict().keys() == state_of(0).keys()


def test_ls_counts_what_lies_beside_a_state(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    """`smb ls` shows a state once; with --all also its log and mirrors. Buffers that only have such names are
    shown.
    """
    client = connect()
    smb.torch.Publisher(client, "w", state_of(0), deltas=4, servers=["server-0"], relays=["server-1"]).publish()
    mirrors = [f"w{end}.mirror.server-1" for end in (".log", "")]
    words = {f"{mirror}.arrived" for mirror in mirrors}
    wait_for(lambda: words <= {info.name for info in client.list()}, "the relays' words")
    for name in ("v", "v.log", "u.mirror.server-1", "u.log"):
        client.create(name, 4)
    client.create("u", 4, versions=2)

    def shown(*options: str) -> list[str]:
        return [line.split()[0] for line in run_smb(capsys, client, "ls", *options)[1].splitlines()[1:] if line]

    plain = ["u", "u.log", "u.mirror.server-1", "v", "v.log"]
    assert shown() == [*plain, "w", "and"]
    assert "and 5 buffers of published states" in run_smb(capsys, client, "ls")[1]
    beside = sorted(["w.log", *mirrors, *words])
    assert shown("--all") == [*plain, "w", *beside]
    listed = json.loads(run_smb(capsys, client, "ls", "--json")[1])
    assert [each["name"] for each in listed] == [*plain, "w", *beside]
    client.delete("w")
    assert shown() == [*plain, "w.log", "and"]


def test_what_lies_beside_a_state_has_no_mirrors(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    """A state's log is mirrored with it: alone it is refused, and names the state. A buffer that only has such a name
    can have mirrors.
    """
    client = connect()
    smb.torch.Publisher(client, "w", state_of(0), deltas=4, servers=["server-0"]).publish()
    code, _, said = run_smb(capsys, client, "relay", "w.log", "--auto")
    assert code == 1
    assert "relay of 'w.log': this buffer belongs to the published state 'w'; mirror that" in said
    assert len(client.relay("w")) == 2
    client.create("v", 4)
    for name in ("v.log", "u.log"):
        client.create(name, 4, versions=2, servers=["server-0"])
        assert len(client.relay(name)) == 2


def test_rm_deletes_a_state_with_what_lies_beside_it(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    """`smb rm` of a state deletes its deltas too, and says so, also where a part is gone; a part alone
    can be deleted, and buffers that only have such names stay.
    """
    client = connect()
    client.create("plain.log", 4)
    client.create("plain", 4)
    for gone in ("", "w.log"):
        smb.torch.Publisher(client, "w", state_of(0), deltas=4).publish()
        if gone:
            assert run_smb(capsys, client, "rm", gone) == (0, "", "")
            assert "w" in [info.name for info in client.list()]
        code, said, _ = run_smb(capsys, client, "rm", "w")
        assert (code, said) == (0, "published state 'w' is deleted, with its deltas\n")
        assert [info.name for info in client.list()] == ["plain", "plain.log"]
    assert run_smb(capsys, client, "rm", "plain") == (0, "", "")
    assert [info.name for info in client.list()] == ["plain.log"]
    assert run_smb(capsys, client, "rm", "w")[0] == 1
    assert run_smb(capsys, client, "rm", "w", "--missing-ok") == (0, "", "")


def test_each_generation_bit_for_bit(client: smb.Client, connect: Connect) -> None:
    """Over many generations: a reader of each, one that reads now and then, one that sleeps through more than 16, and a
    late one, over both ways, have exactly what was published; a delta is a small part of a state.
    """
    publisher = smb.torch.Publisher(client, "w", state_of(0), deltas=16)
    readers = {every: smb.torch.follow(connect(way), "w") for every, way in ((1, FAR), (5, "shm"), (23, FAR))}
    with pytest.raises(smb.NotFoundError, match="no generation"):
        readers[1].state_dict()
    small = 0
    for number in range(1, 1001 if LONG else 81):
        assert publisher.publish(state_of(number)) == publisher.generation == number
        small += publisher.sent_bytes < publisher.buffer.nbytes // 10
        for every, reader in readers.items():
            if number % every == 0:
                assert reader.wait(timeout=10) == number
                assert equal(reader.state_dict(), state_of(number))
                assert reader.generation == reader.latest == number
                if every < 23 and number > every:
                    assert reader.received_bytes < publisher.buffer.nbytes // 2
        if number % 40 == 0:
            late = smb.torch.follow(connect(FAR), "w")
            model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(300, 200))})
            assert equal(late.state_dict(), state_of(number))
            with late.pin() as generation:
                assert generation.number == number
                assert equal(dict(generation), state_of(number))
            with pytest.raises(smb.InvalidArgumentError, match="count is missing"):
                late.load(model)
    assert small > 0.8 * number


def test_dense_steps_and_other_trainers(client: smb.Client, connect: Connect) -> None:
    """A step that changes everything is published whole; so is the first of a trainer that was started again, after
    which deltas go on; two trainers in turn are told apart.
    """
    publisher = smb.torch.Publisher(client, "w", state_of(0), deltas=4)
    reader = smb.torch.follow(connect(FAR), "w")
    random = np.random.default_rng(1)
    numbers = iter(range(1, 100))
    for turn in range(6):
        dense = state_of(0)
        dense["w"] = torch.from_numpy(random.normal(size=(300, 200))).to(torch.bfloat16)
        for state in (dense, state_of(turn), state_of(turn + 1)):
            assert publisher.publish(state) == next(numbers)
            if turn % 2 or state is dense:
                assert equal(reader.state_dict(), state)
        if turn == 3:
            publisher = smb.torch.Publisher(connect("shm"), "w", state_of(0), deltas=4)
    other = smb.torch.Publisher(connect(FAR), "w", state_of(0), deltas=4)
    for _ in range(3):
        for each in (other, publisher):
            number = next(numbers)
            assert each.publish(state_of(number)) == number
            assert equal(reader.state_dict(), state_of(number))
    for wrong in ({"deltas": 5}, {"deltas": 0}, {"deltas": 4, "names": ["w", "count"]}):
        with pytest.raises(smb.InvalidArgumentError, match="it exists, published with deltas=4"):
            smb.torch.Publisher(client, "w", state_of(0), **wrong)  # type: ignore[arg-type]
    for wrong in ({"deltas": 1}, {"deltas": 5000}, {"dtype": torch.int32}, {"versions": 1}, {"names": ["x"]}):
        with pytest.raises(smb.InvalidArgumentError, match="publish 'v'"):
            smb.torch.Publisher(client, "v", state_of(0), **wrong)  # type: ignore[arg-type]
    free = sum(server.capacity - server.used for server in client.servers())
    with pytest.raises(smb.OutOfMemoryError):  # the copies have room, the deltas have not
        smb.torch.Publisher(client, "v", {"w": torch.zeros(free * 2 // 5, dtype=torch.uint8)}, deltas=4)
    assert [info.name for info in client.list() if info.name.startswith("v")] == []


def test_trainers_that_overlap(connect: Connect) -> None:
    """An old one that is slow to end, and its successor. The loser of a turn described the winner's generation: nobody
    could read the state any more, until it was deleted.
    """
    first, second = connect(), connect()
    publishers = [smb.torch.Publisher(each, "w", state_of(0), deltas=8) for each in (first, second)]
    published: list[int] = []

    def publish(publisher: smb.torch.Publisher, begin: int) -> None:
        for number in range(begin, begin + 15):
            published.append(publisher.publish(state_of(number)))

    threads = [threading.Thread(target=publish, args=each) for each in zip(publishers, (100, 200), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(published) == list(range(1, 31))
    third = smb.torch.Publisher(connect(), "w", state_of(0), deltas=8)
    follower = smb.torch.follow(connect(), "w")
    for number in (1, 2):
        assert third.publish(state_of(number)) == 30 + number
        assert equal(follower.state_dict(), state_of(number))


def test_damage_is_never_shown(client: smb.Client, connect: Connect) -> None:
    """Deltas that somebody overwrote are noticed by the sum: the reader takes whole states until it is right again."""
    publisher = smb.torch.Publisher(client, "w", state_of(0), deltas=4)
    reader = smb.torch.follow(connect(FAR), "w")
    publisher.publish(state_of(1))
    assert equal(reader.state_dict(), state_of(1))
    publisher.publish(state_of(2))
    log = PublicationLog(client.open("w.log"))
    log.buffer.write(np.full(log.size, 255, np.uint8), log.start)
    with pytest.raises(smb.UnavailableError, match="read other bytes than were published"):
        reader.state_dict()
    for number in range(3, 12):
        publisher.publish(state_of(number))
        if number >= 7:
            assert equal(reader.state_dict(), state_of(number))


def test_readers_beside_a_trainer_at_full_rate(connect: Connect) -> None:
    """Whatever the trainer does meanwhile, over both ways: each state is one generation's, and none goes back."""
    last = 2000 if LONG else 150
    publisher = smb.torch.Publisher(connect("shm"), "w", state_of(0), deltas=2)
    failures: list[BaseException] = []
    reads: list[int] = []

    def read(follower: smb.torch.Follower) -> None:
        try:
            while follower.generation < last:
                before = follower.generation
                follower.wait(timeout=30)
                assert equal(follower.state_dict(), state_of(follower.generation))
                assert follower.generation > before
                reads.append(follower.generation)
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            failures.append(error)

    followers = [smb.torch.follow(connect(way), "w") for way in (FAR, "shm")]
    threads = [threading.Thread(target=read, args=(follower,)) for follower in followers]
    for thread in threads:
        thread.start()
    for number in range(1, last + 1):
        publisher.publish(state_of(number))
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure
    assert len(reads) >= 4


def publish_until_killed(messages: Any, address: str) -> None:
    """Publish states under "w", each one the number of its generation; tell each number."""
    with smb.connect(address) as client:
        publisher = smb.torch.Publisher(client, "w", state_of(0), deltas=3)
        while True:
            messages.put(publisher.publish(state_of(publisher.generation + 1)))


def test_a_killed_trainer() -> None:
    """kill -9 of the trainer at any instant: readers have a generation that was, whole; the next trainer goes on."""
    with (
        smb.LocalCluster(servers=2, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport=FAR) as client,
    ):
        smb.torch.Publisher(client, "w", state_of(0), deltas=3)
        reader, last = smb.torch.follow(client, "w"), 0
        for turn in range(6 if LONG else 2):
            with in_process(publish_until_killed, cluster.address) as (trainer, messages):
                while messages.get(timeout=60) < last + 3 + turn:
                    assert equal(reader.state_dict(), state_of(reader.generation))
                trainer.kill()
                trainer.join()
            assert equal(reader.state_dict(), state_of(reader.generation))
            assert reader.generation == reader.latest >= last + 3 + turn
            last = reader.generation


def test_rounded_parts_and_ties(client: smb.Client, connect: Connect) -> None:
    """dtype= rounds what is floating, names= takes a part, tied tensors are stored once; with deltas and without."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 20), torch.nn.Linear(20, 50), torch.nn.BatchNorm1d(50))
    model[1].weight = model[0].weight
    for deltas in (0, 4):
        rounded = smb.torch.Publisher(client, f"all{deltas}", model, dtype=torch.bfloat16, deltas=deltas)
        part = smb.torch.Publisher(client, f"part{deltas}", model, names=lambda name: "bias" in name, deltas=deltas)
        assert "1.weight" not in rounded.buffer.table
        for number in range(1, 8):
            with torch.no_grad():
                model[0].weight[number] += 1
                model[1].bias[number] += 1
            assert rounded.publish() == part.publish() == number
            reader = smb.torch.follow(connect(FAR), f"all{deltas}")
            state = reader.state_dict()
            assert state["1.weight"] is state["0.weight"]
            assert equal(
                dict(sorted(state.items())),
                {
                    n: t.to(torch.bfloat16) if t.is_floating_point() else t
                    for n, t in sorted(model.state_dict().items())
                },
            )
            with reader.pin() as pinned:
                assert pinned["1.weight"].equal(state["0.weight"])
            copy = torch.nn.Sequential(torch.nn.Embedding(50, 20), torch.nn.Linear(20, 50), torch.nn.BatchNorm1d(50))
            copy[1].weight = copy[0].weight
            assert reader.load(copy) == number
            assert copy[1].weight.equal(model[0].weight.to(torch.bfloat16).float())
            before = copy[0].weight.clone()
            assert smb.torch.follow(connect(FAR), f"part{deltas}").load(copy) == number
            assert copy[1].bias.equal(model[1].bias)
            assert copy[0].weight.equal(before)
        untied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert rounded.publish(untied) == 8
        untied["1.weight"] += 1
        with pytest.raises(smb.InvalidArgumentError, match=r"1.weight and 0.weight were one tensor .* now they differ"):
            rounded.publish(untied)
        del untied["1.weight"]
        with pytest.raises(smb.InvalidArgumentError, match=r"1.weight is missing"):
            rounded.publish(untied)


def test_a_state_of_before_is_refused(client: smb.Client, connect: Connect) -> None:
    """Deltas in the form of an earlier release: trainers and readers are told to publish anew, and nothing is lost."""
    stored = {"deltas": 4, "tied": {}, "part": False}
    tensors = {name: (tuple(each.shape), each.dtype) for name, each in state_of(0).items()}
    client.create("w", tensors=tensors, versions=3, metadata={ABOUT: stored})
    for call in (
        lambda: smb.torch.Publisher(client, "w", state_of(0), deltas=4),
        lambda: smb.torch.follow(connect(), "w"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match=r"another release published it .*, and publish anew"):
            call()
    assert [info.name for info in client.list()] == ["w"]
    client.delete("w")
    assert smb.torch.Publisher(client, "w", state_of(0), deltas=4).publish() == 1
