"""A reader's wait said that generation 2 was there. By then a mirror with generation 1 was the nearest, and the read
that followed gave that one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

import smb
import smb.torch
from smb.relay import reader_source
from tests.support.daemons import DEADLINE_S, relay_of, wait_for

NAME = "policy"


@pytest.fixture
def trainer() -> Iterator[tuple[smb.LocalCluster, smb.Client]]:
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster, smb.connect(cluster.address) as client:
        yield cluster, client


@pytest.mark.parametrize("deltas", [0, 4])
def test_a_mirror_that_is_behind_what_was_waited_for(
    trainer: tuple[smb.LocalCluster, smb.Client], monkeypatch: pytest.MonkeyPatch, deltas: int
) -> None:
    cluster, client = trainer
    beside = ["server-0"]
    monkeypatch.setattr(reader_source, "near_servers", lambda *_: (frozenset(beside), frozenset()))
    monkeypatch.setattr(reader_source, "_LOOK_S", 0.0)  # each read takes the nearest as it is then
    monkeypatch.setattr(reader_source, "_ASK_S", DEADLINE_S)
    state = {"w": torch.arange(10_000.0)}
    publisher = smb.torch.Publisher(
        client, NAME, state, deltas=deltas, servers=["server-0"], relays=["server-1"], versions=3
    )
    publisher.publish()
    wait_for(lambda: [m.version for m in client.open(NAME).info.mirrors] == [1], "the mirror", DEADLINE_S)
    with smb.connect(cluster.address, timeout=DEADLINE_S) as connected:
        follower = smb.torch.follow(connected, NAME)
        assert follower.wait(timeout=DEADLINE_S) == 1
        relay = relay_of(cluster.servers[1])
        os.kill(relay, signal.SIGSTOP)
        try:
            state["w"][0] = 2.0
            publisher.publish(state)
            assert follower.wait(timeout=DEADLINE_S) == 2
            assert not follower.source
            beside[:] = ["server-1"]
            assert follower._nearest.buffer().name == f"{NAME}.mirror.server-1"
            assert follower.wait(timeout=DEADLINE_S) >= 1  # the mirror's; what was told before counts still
            with follower.pin() as generation:
                assert (generation.number, generation["w"][0].item()) == (2, 2.0)
            assert follower.state_dict()["w"][0].item() == 2.0
            assert follower.generation == 2
        finally:
            os.kill(relay, signal.SIGCONT)


def test_what_was_pinned_was_read(trainer: tuple[smb.LocalCluster, smb.Client]) -> None:
    """A reader that only pins waits for the next generation. It was told of the same one again at once."""
    _, client = trainer
    publisher = smb.torch.Publisher(client, NAME, {"w": torch.zeros(10)})
    publisher.publish()
    follower = smb.torch.follow(client, NAME)
    with follower.pin() as generation:
        assert (generation.number, follower.generation) == (1, 1)
    with pytest.raises(smb.TimeoutError):
        follower.wait(timeout=0.1)
    publisher.publish()
    assert follower.wait(timeout=DEADLINE_S) == 2
