"""A program whose tensors are on a GPU by default (torch.set_default_device) could not join: smb's own were there, too.

Here the default device is "meta", which has no memory: nothing of smb's may be there.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import smb
import smb.torch
import smb.torch.checkpoint
from smb.torch.meshes.mesh import _part_of
from smb.torch.training.staging import _pinned
from tests.conftest import Connect


@pytest.fixture
def client(connect: Connect) -> smb.Client:
    """One: where tensors are has nothing to do with how clients reach servers."""
    return connect()


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("scheme", "settings"), [("bsp", {}), ("diloco", {"every": 2}), ("easgd", {"every": 2}), ("ssp", {})]
)
def test_a_training(client: smb.Client, scheme: str, settings: dict[str, int]) -> None:
    """Beside one without a default device: equal to the bit."""
    found = []
    for name, default in (("with", "meta"), ("without", "cpu")):
        model, rows = network(0), torch.randn(6, 16, 6, generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.device(default):
            shared = smb.torch.join(model, optimizer, name, scheme=scheme, client=client, **settings)
        for images in rows:
            optimizer.zero_grad()
            model(images).square().mean().backward()
            with torch.device(default):
                optimizer.step()
        with torch.device(default):
            shared.close()
        found.append(model.state_dict())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[1])


def test_batches(client: smb.Client) -> None:
    """The numbers of their rows are in the host's memory, and so is a rank's part of a batch there."""
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        torch.device("meta"),
        smb.torch.join(model, optimizer, "run", scheme="localsgd", every=2, client=client) as shared,
    ):
        taken = list(shared.batches(10, 4, epochs=1))
        part = _part_of(torch.arange(10, device="cpu"), 2, 3)
    assert sorted(torch.cat(taken).tolist()) == list(range(10))
    assert part.tolist() == [8, 9, 0, 1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_published_and_saved(client: smb.Client) -> None:
    """A follower and a load bring what was published and saved, also into a tensor that is not contiguous."""
    model, theirs = network(0), network(1)
    for each in (model, theirs):
        each.register_buffer("nothing", torch.empty(0))
    with torch.device("meta"):
        publisher = smb.torch.Publisher(client, "policy", model, versions=4, deltas=2)
        follower = smb.torch.follow(client, "policy")
        for generation in (1, 2, 3):
            assert publisher.publish() == generation
            assert follower.load(theirs) == generation
            assert {tensor.device.type for tensor in follower.state_dict().values()} == {"cpu"}
    assert all(torch.equal(theirs.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    state = {"x": torch.randn(5, 6), "turned": torch.randn(6, 4).t()}
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with torch.device("meta"):
        dcp.save(state, storage_writer=smb.torch.checkpoint.Writer(client, "c"))
        dcp.load(read, storage_reader=smb.torch.checkpoint.Reader(client, "c"))
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


def test_rooms_for_copies() -> None:
    """They are the host's, where page locks can be had and where not."""
    with torch.device("meta"):
        assert _pinned(16).device == torch.device("cpu")
