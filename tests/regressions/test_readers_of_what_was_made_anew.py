"""A follower took mirrors by their names, of a list as old as itself. It read the state of another client that had the
name by then, and a larger one was written beyond its memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import smb
import smb.torch
from smb.relay import reader_source
from tests.support.daemons import DEADLINE_S, wait_for

NAME, ELEMENTS = "policy", 1000


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster:
        yield cluster


def publish(client: smb.Client, value: float, elements: int = ELEMENTS) -> None:
    """Once, and its mirror on server-1 has it."""
    state = {"w": torch.full((elements,), value)}
    publisher = smb.torch.Publisher(client, NAME, state, servers=["server-0"], relays=["server-1"])
    publisher.publish()
    wait_for(lambda: [m.version for m in client.open(NAME).info.mirrors] == [1], "the mirror", DEADLINE_S)


@pytest.fixture
def follower(cluster: smb.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[smb.torch.Follower]:
    """It has read nothing yet, and is beside server-1."""
    monkeypatch.setattr(reader_source, "near_servers", lambda *_: (frozenset({"server-1"}), frozenset()))
    with smb.connect(cluster.address) as trainer, smb.connect(cluster.address, timeout=DEADLINE_S) as reader:
        publish(trainer, 1.0)
        yield smb.torch.follow(reader, NAME, near="server-1")
        trainer.delete(NAME, missing_ok=True)
        trainer.delete("mine", missing_ok=True)


def test_renamed_and_another_has_the_name(cluster: smb.LocalCluster, follower: smb.torch.Follower) -> None:
    """It goes on with its own."""
    with smb.connect(cluster.address) as trainer:
        trainer.stop_relays(NAME)
        trainer.rename(NAME, "mine")
        publish(trainer, 7.0)
        assert follower.state_dict()["w"].unique().tolist() == [1.0]


@pytest.mark.parametrize("elements", [ELEMENTS, 200 * ELEMENTS])
def test_deleted_and_made_anew(cluster: smb.LocalCluster, follower: smb.torch.Follower, elements: int) -> None:
    """It is told; its memory is for the former one."""
    with smb.connect(cluster.address) as trainer:
        trainer.delete(NAME)
        publish(trainer, 7.0, elements)
        with pytest.raises(smb.NotFoundError, match="deleted and created again"):
            follower.state_dict()


def test_a_pin_leaves_a_mirror_that_is_gone(cluster: smb.LocalCluster, follower: smb.torch.Follower) -> None:
    """As the other calls do; it raised NotFoundError again and again."""
    assert follower.state_dict()["w"].unique().tolist() == [1.0]
    assert follower._nearest.mirror_name
    with smb.connect(cluster.address) as trainer:
        trainer.stop_relays(NAME)
    with follower.pin() as generation:
        assert generation["w"].unique().tolist() == [1.0]
