"""Publisher.explain(), Follower.explain() and `smb explain` of a published state: by counters, not by estimates."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import smb
import smb.torch
from smb.spi import session_of
from smb.state_costs import StateCosts, StateUse, advice
from smb.tools.cli.main import app
from tests.conftest import Connect
from tests.support.daemons import wait_for


def told(cluster: smb.LocalCluster, name: str, *options: str) -> str:
    answer = CliRunner().invoke(app, ["explain", name, "--coordinator", cluster.address, *options])
    if answer.exception is not None:
        raise answer.exception
    return answer.stdout


@pytest.mark.parametrize("deltas", [0, 4])
def test_a_publisher_and_a_follower_say_what_they_cost(connect: Connect, deltas: int) -> None:
    model = nn.Linear(64, 32)
    size = 4 * (64 * 32 + 32)
    publisher = smb.torch.Publisher(connect(), "policy", model, deltas=deltas)
    follower = smb.torch.follow(connect(), "policy")
    assert follower.explain().times == 0
    for _ in range(3):
        publisher.publish()
        follower.load(model)
    sent, read = publisher.explain(), follower.explain()
    assert (sent.state, sent.role, sent.generation, sent.times) == ("policy", "publisher", 3, 3)
    assert (read.state, read.role, read.generation, read.times) == ("policy", "reader", 3, 3)
    assert sent.copied_bytes == read.copied_bytes == 3 * size
    if deltas:
        assert 0 < sent.bytes < 3 * size  # nothing changed after the first
    else:
        assert sent.bytes == publisher.buffer.nbytes * 3
        assert read.bytes >= 3 * size
    assert sent.transports == publisher.buffer.transports
    assert 0 < sent.seconds < sent.age
    assert 0 < read.seconds < read.age
    assert [(tensor.name, tensor.shape, tensor.bytes) for tensor in read.tensors] == [
        ("weight", (32, 64), 4 * 64 * 32),
        ("bias", (32,), 4 * 32),
    ]
    assert "publisher of policy\n  generation: 3; 3 by this publisher\n" in str(sent)
    assert "  weight  (32, 64)  float32  8 KiB" in str(read)
    assert "reader of policy" in read._repr_html_()


def test_what_fails_costs_nothing(connect: Connect) -> None:
    """The shares of what succeeded would be wrong."""
    client = connect()
    publisher = smb.torch.Publisher(client, "policy", {"a": torch.ones(10)})
    follower = smb.torch.follow(client, "policy")
    with pytest.raises(smb.NotFoundError):
        follower.state_dict()
    with pytest.raises(smb.InvalidArgumentError):
        publisher.publish({"b": torch.ones(10)})
    publisher.publish()
    with pytest.raises(smb.InvalidArgumentError):
        follower.load(nn.Linear(2, 2))
    for found in (publisher.explain(), follower.explain()):
        assert (found.times, found.copied_bytes) == ((1, 40) if found.role == "publisher" else (0, 0))
        assert (found.seconds > 0) == (found.role == "publisher")


def test_copies_are_those_of_the_published_form(connect: Connect) -> None:
    publisher = smb.torch.Publisher(connect(), "half", {"a": torch.ones(100)}, dtype=torch.bfloat16)
    publisher.publish_async().result(timeout=30)
    assert publisher.explain().copied_bytes == 200


def test_copies_of_pairs_are_not_counted(connect: Connect) -> None:
    publisher = smb.torch.Publisher(connect(), "pairs", {"a": torch.ones(100)})
    publisher.publish(iter([("a", torch.ones(100))]))
    assert publisher.explain().copied_bytes is None
    assert "copies per generation: not counted" in str(publisher.explain())


def test_a_reader_of_parts_lists_the_parts(connect: Connect) -> None:
    client = connect()
    smb.torch.publish(client, "policy", {"a": torch.ones(100, 10)})
    follower = smb.torch.follow(client, "policy", placements={"a": (slice(0, 20), slice(0, 10))})
    follower.views()
    found = follower.explain()
    assert [(tensor.shape, tensor.bytes) for tensor in found.tensors] == [((20, 10), 800)]
    assert found.bytes == 800


def test_several_readers_of_one_client_are_reported_together(connect: Connect) -> None:
    client = connect()
    smb.torch.publish(client, "policy", {"a": torch.ones(100)})
    ahead, behind = (smb.torch.follow(client, "policy") for _ in range(2))
    for _ in range(3):
        ahead.views()
    (report,) = [each for each in session_of(client).published.reports(16) if not each.publishes]
    assert (report.generation, report.times) == (0, 3)
    behind.views()
    (report,) = [each for each in session_of(client).published.reports(16) if not each.publishes]
    assert (report.generation, report.times, report.bytes) == (1, 4, ahead.explain().bytes + behind.explain().bytes)


@pytest.mark.parametrize("deltas", [0, 4])
def test_what_views_and_pins_copy(connect: Connect, deltas: int) -> None:
    client = connect()
    publisher = smb.torch.Publisher(client, "policy", {"a": torch.ones(100), "b": torch.ones(50)}, deltas=deltas)
    publisher.publish()
    follower = smb.torch.follow(client, "policy")
    with follower.pin() as generation:
        assert follower.explain().times == bool(deltas)  # a state with deltas is read as a whole at once
        generation["b"]
        generation["b"]
    pinned = follower.explain()
    assert (pinned.times, pinned.copied_bytes) == (1, 400 if deltas else 0)
    assert pinned.bytes == (follower.received_bytes if deltas else 400)
    assert pinned.transports == publisher.buffer.transports
    follower.views()
    assert follower.explain().copied_bytes == pinned.copied_bytes


def test_a_publisher_that_has_no_buffer_yet_has_nothing_to_say(connect: Connect) -> None:
    publisher = smb.torch.Publisher(connect(), "later")
    with pytest.raises(smb.NotFoundError, match="publish 'later': the first publication makes the buffer"):
        publisher.explain()


def test_the_command_tells_it_of_publisher_and_readers(cluster: smb.LocalCluster, connect: Connect) -> None:
    state = {"weight": torch.ones(1000)}
    publisher = smb.torch.Publisher(connect(name="trainer"), "policy", state)
    publisher.publish()
    followers = [smb.torch.follow(connect(name=f"reader-{number}"), "policy") for number in range(2)]
    for follower in followers:
        follower.state_dict()

    def reported() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(told(cluster, "policy", "--json"))
        return found if [client["times"] for client in found["clients"]] == [1, 1, 1] else {}

    found = wait_for(reported, "reports of the publisher and two readers")
    assert (found["state"], found["generation"]) == ("policy", 1)
    names = {client["client"].split()[0]: client for client in found["clients"]}
    assert names.keys() == {"trainer", "reader-0", "reader-1"}
    assert [names["trainer"][key] for key in ("does", "bytes", "copied")] == ["publishes", publisher.sent_bytes, 4000]
    assert [names["reader-1"][key] for key in ("does", "bytes", "copied")] == ["reads", 4000, 4000]
    assert tuple(names["trainer"]["transports"]) == publisher.buffer.transports
    text = told(cluster, "policy")
    assert "published state policy: 1 tensor, 3.9 KiB, 3 generations kept" in text
    assert re.search(r"trainer .* publishes .* 3\.9 KiB", text), text


def test_what_is_neither_a_training_nor_a_state(cluster: smb.LocalCluster, connect: Connect) -> None:
    connect().create("plain", 10)
    for name in ("plain", "nothing"):
        with pytest.raises(smb.NotFoundError, match=f'no training and no published state is named "{name}"'):
            told(cluster, name)


def test_names_of_what_belongs_to_a_state_and_no_name(cluster: smb.LocalCluster, connect: Connect) -> None:
    publisher = smb.torch.Publisher(connect(), "policy", {"a": torch.ones(10)}, deltas=4)
    publisher.publish()
    with pytest.raises(smb.NotFoundError, match="it belongs to policy: smb explain policy"):
        told(cluster, "policy.log")
    with pytest.raises(smb.InvalidArgumentError, match="name a training or a published state"):
        told(cluster, "")


def test_times_are_those_of_what_was_counted() -> None:
    at = [100.0]
    costs = StateCosts(lambda: at[0])
    at[0] += 8
    costs.count(10, 4, 2.0)
    assert (costs.times, costs.bytes, costs.copied_bytes, costs.seconds, costs.age) == (1, 10, 4, 2.0, 8.0)
    costs.count(10, None, 1.0)
    costs.count(10, 4, 1.0)
    assert costs.copied_bytes is None


def test_advice_follows_from_the_counters() -> None:
    """Nothing is said of what costs little, of what is done already, or while little is known."""
    busy = StateUse("policy", True, ("tcp",), times=10, seconds=50.0, age=100.0, deltas=False)

    def said(**other: Any) -> list[str]:
        return [each.split(":")[0] for each in advice(dataclasses.replace(busy, **other))]

    background, less = "the publisher stands still while it publishes", "each generation travels whole"
    many = "many readers read from the state's own servers"
    assert said() == [background, less]
    assert said(seconds=10.0) == said(times=2) == said(age=9.0, seconds=5.0) == []
    assert said(transports=("shm",)) == said(transports=()) == said(deltas=True) == [background]
    assert said(publishes=False, direct_readers=3) == [less]
    assert said(publishes=False, direct_readers=4) == [less, many]
    assert said(publishes=False, direct_readers=4, mirrored=True, deltas=True) == []
    assert "smb relay policy --auto" in list(advice(dataclasses.replace(busy, publishes=False, direct_readers=4)))[1]
