"""The ranks of a mesh are one member: FSDP2 and tensor parallel on gloo, each rank a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smb
import smb.torch
import smb.train
from tests.support.daemons import wait_for
from tests.support.meshes import Member, local_step, network
from tests.support.training import LEASE_S

SCHEME = {"scheme": "localsgd", "every": 2}


@pytest.fixture(scope="module")
def context() -> Any:
    """Processes that find PyTorch there."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "smb.torch.mesh"])
    return found


def _reference(members: int, rounds: int) -> list[np.ndarray]:  # type: ignore[type-arg]
    """What so many plain members come to: the mean of what each does in two steps."""
    weights = [parameter.detach().clone() for parameter in network().parameters()]
    for number in range(rounds):
        sums = [torch.zeros_like(each) for each in weights]
        for member in range(members):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with torch.no_grad():
                for parameter, each in zip(model.parameters(), weights, strict=True):
                    parameter.copy_(each)
            for step in range(2):
                local_step(model, optimizer, member, 2 * number + step)
            for total, parameter, each in zip(sums, model.parameters(), weights, strict=True):
                total += (parameter.detach() - each) / members
        weights = [each + total for each, total in zip(weights, sums, strict=True)]
    return [each.numpy() for each in weights]


def _near(found: Any, expected: Any) -> bool:
    return all(np.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))


def test_members_with_different_meshes_train_one_model(
    context: Any, cluster: smb.LocalCluster, connect: Any, tmp_path: Path
) -> None:
    """Two FSDP2 ranks, two tensor parallel ones and a plain process are three members, each with its place by tensors:
    they come to what three plain processes would."""
    sharded = Member(context, cluster.address, str(tmp_path / "store"), 0, 2, **SCHEME)
    assert sharded.all_heard() == ["joined", "joined"]
    columns = Member(context, cluster.address, str(tmp_path / "store"), 1, 2, columns=True)
    assert columns.all_heard() == ["joined", "joined"]
    model, client = network(), connect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with smb.torch.join(model, optimizer, "run", client=client) as shared:
        for member in (sharded, columns):
            member.tell(6)
        for step in range(6):
            local_step(model, optimizer, 2, step)
        assert sharded.all_heard() == columns.all_heard() == [6, 6]
        assert len(smb.train.status(client, "run").workers) == 3
        assert shared.progress.steps == 6
        for member in (sharded, columns):
            member.tell(None)
        ends = [*sharded.all_heard(), *columns.all_heard()]
    expected = _reference(3, 3)
    assert _near([parameter.detach().numpy() for parameter in model.parameters()], expected)
    assert all(_near(end, expected) for end in ends)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_the_members_death(
    context: Any, cluster: smb.LocalCluster, connect: Any, tmp_path: Path, killed: int
) -> None:
    """Whichever it is, and where the other one only waits: the others go on after a lease."""
    first = Member(context, cluster.address, str(tmp_path / "store"), 0, 2, lease=LEASE_S, **SCHEME)
    assert first.all_heard() == ["joined", "joined"]
    second = Member(context, cluster.address, str(tmp_path / "store"), 1, 2)
    assert second.all_heard() == ["joined", "joined"]
    process = first.processes[killed]
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    second.tell(4)  # two rounds, of which the first waits for who was there
    assert second.all_heard() == [4, 4]
    client = connect()
    wait_for(lambda: sum(each.alive for each in smb.train.status(client, "run").workers) == 1, 30)
    if killed == 1:  # the speaker, which has waited for nobody, finds that it is alone
        first.tell(2, 0)
        assert isinstance(first.heard(0), str)
    second.tell(None)
    assert len(second.all_heard()) == 2
    first.processes[1 - killed].kill()


def test_what_a_mesh_cannot_do_is_said_by_all_ranks(
    context: Any, cluster: smb.LocalCluster, connect: Any, tmp_path: Path
) -> None:
    """A scheme that is none of rounds is refused, at every rank, and nothing of it stays; so is a sharded model
    without mesh=."""
    member = Member(context, cluster.address, str(tmp_path / "store"), 0, 2, scheme="easgd")
    for said in member.all_heard():
        assert said.startswith("InvalidArgumentError: smb.torch.join with mesh=: take a scheme of rounds")
    assert not connect().list()
