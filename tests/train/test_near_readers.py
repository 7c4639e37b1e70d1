"""Readers of a published state with mirrors: from the nearest, and from another where that one dies; never a mix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import smb
import smb.torch
from smb.relay import reader_source as module
from tests.support.daemons import DEADLINE_S, wait_for

ELEMENTS = 400_000


def state(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(ELEMENTS, dtype=torch.float32) + number, "n": torch.tensor([number])}


def check(follower: smb.torch.Follower, number: int) -> None:
    found = follower.state_dict()
    assert follower.generation == number
    assert all(found[name].equal(tensor) for name, tensor in state(number).items())


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster:
        yield cluster


def test_a_dead_mirrors_readers_go_to_the_source_and_come_back(
    cluster: smb.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with smb.connect(cluster.address) as trainer, smb.connect(cluster.address, timeout=2) as reader:
        publisher = smb.torch.Publisher(
            trainer, "policy", state(1), relays=["server-1"], versions=3, servers=["server-0"]
        )
        publisher.publish()
        follower = smb.torch.follow(reader, "policy", near="server-1", timeout=DEADLINE_S)
        assert follower.wait(timeout=DEADLINE_S) == 1
        check(follower, 1)
        # Both servers are on this host: `near` decides only where the source is not.
        nearest = follower._nearest
        here = frozenset({"server-1"})
        monkeypatch.setattr(module, "near_servers", lambda *_: (here, frozenset()))
        nearest._looked = 0.0
        assert nearest.buffer().name == "policy.mirror.server-1"
        for number in (2, 3):
            publisher.publish(state(number))
            follower.wait(timeout=DEADLINE_S)
            check(follower, number)
        with follower.pin() as generation:
            assert generation.number == 3
            assert generation["n"].item() == 3
        cluster.servers[1].kill()
        for number in (4, 5):
            publisher.publish(state(number))
            assert follower.wait(timeout=DEADLINE_S) == number
            check(follower, number)
        assert nearest.buffer() is follower.buffer
        cluster.servers[1].start()

        def back() -> bool:
            nearest._looked = 0.0
            nearest._left.clear()
            return nearest.buffer().name == "policy.mirror.server-1"

        wait_for(back, "the mirror is taken again", DEADLINE_S)
        publisher.publish(state(6))
        follower.wait(timeout=DEADLINE_S)
        check(follower, 6)
        trainer.stop_relays("policy")
        publisher.publish(state(7))
        assert follower.wait(timeout=DEADLINE_S) == 7
        check(follower, 7)


def test_a_publisher_without_a_server_for_its_relay_leaves_nothing(cluster: smb.LocalCluster) -> None:
    """A relay on a server that there is not is refused, and so is the Publisher: its buffers are gone, with deltas,
    too."""
    with smb.connect(cluster.address) as client:
        for deltas in (0, 4):
            with pytest.raises(smb.InvalidArgumentError, match="server-7"):
                smb.torch.Publisher(client, "q", state(1), deltas=deltas, relays=["server-7"])
        assert [info.name for info in client.list() if info.name.startswith("q")] == []
