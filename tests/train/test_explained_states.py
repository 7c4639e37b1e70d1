"""Publisher.explain(), Follower.explain() and `smb explain` of a published state: by counters, not by estimates."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import smb
import smb.torch
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
    assert [(tensor.name, tensor.shape, tensor.bytes) for tensor in read.tensors] == [
        ("weight", (32, 64), 4 * 64 * 32),
        ("bias", (32,), 4 * 32),
    ]
    assert "publisher of policy\n  generation: 3; 3 by this publisher\n" in str(sent)
    assert "  weight  (32, 64)  float32  8 KiB" in str(read)
    assert "reader of policy" in read._repr_html_()


def test_views_and_pins_copy_nothing(connect: Connect) -> None:
    client = connect()
    smb.torch.publish(client, "policy", {"a": torch.ones(100), "b": torch.ones(50)})
    follower = smb.torch.follow(client, "policy")
    follower.views()
    with follower.pin() as generation:
        generation["b"]
    found = follower.explain()
    assert (found.times, found.copied_bytes) == (2, 0)
    assert found.bytes == follower.received_bytes + 200


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


def test_times_are_those_of_the_calls() -> None:
    at = [100.0]
    costs = StateCosts(lambda: at[0])
    with costs.timed():
        at[0] += 2
    at[0] += 6
    costs.count(10)
    assert (costs.times, costs.bytes, costs.seconds, costs.age) == (1, 10, 2, 8)


def test_advice_follows_from_the_counters() -> None:
    """Nothing is said of what costs little, or of what is done already."""

    def said(
        publishes: bool, *, share: float = 0.5, whole: bool = True, readers: int = 1, via: str = "tcp"
    ) -> list[str]:
        return [each.split(":")[0] for each in advice(StateUse(publishes, (via,), share, whole, readers))]

    background, less = "publishing takes much of the publisher's time", "each generation travels whole"
    assert said(True) == [background, less]
    assert said(True, share=0.1) == []
    assert said(True, via="shm") == [background]
    assert said(True, whole=False) == [background]
    assert said(False, readers=3) == [less]
    assert said(False, readers=4) == [less, "many readers read from the state's own servers"]
    assert list(advice(StateUse(False, ("tcp",), 0.5, False, 4, mirrored=True))) == []
