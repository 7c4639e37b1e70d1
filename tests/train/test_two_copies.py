"""Trainings with replicas=2: every buffer that a scheme makes has two copies, and joiners must mean the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.buffer_info import BufferInfo
from smb.rpc import control_pb2 as pb
from smb.train import ASP, BSP, EAMSGD, EASGD, HSGD, R2SP, SEASGD, SSP, AsyncDiLoCo, DiLoCo, LocalSGD
from smb.transport.base import SegmentLocation
from tests.support.daemons import tidy
from tests.support.training import together

SCHEMES = (
    BSP(), LocalSGD(every=2), DiLoCo(every=2), DiLoCo(every=4, fragments=2, delay=1, mix=0.5), AsyncDiLoCo(every=2),
    EASGD(every=2), EAMSGD(every=2), SEASGD(), HSGD(), ASP(), SSP(), R2SP(),
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=2, capacity="32MiB") as made:
        yield made


@pytest.fixture
def client(cluster: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(cluster, 20.0) as made:
        yield made


def test_a_published_state_has_two_copies_in_all_its_parts(client: smb.Client) -> None:
    """Of its deltas there was one: a server's loss ended the publication."""
    model = nn.Linear(30, 30, bias=False)
    publisher = smb.torch.Publisher(client, "state", model, dtype=torch.bfloat16, deltas=4, replicas=2)
    assert publisher.publish() == 1
    assert {info.name: info.replicas for info in client.list()} == {"state": 2, "state.log": 2}
    again = smb.torch.Publisher(client, "state", model, dtype=torch.bfloat16, deltas=4, replicas=2)
    assert again.publish() == 2
    with pytest.raises(smb.InvalidArgumentError, match=r"join of training 'run': replicas must be 1 or 2, not 3"):
        smb.train.join(client, "run", np.zeros(3, np.float32), BSP(), replicas=3)


def test_a_saved_training_keeps_its_copies(client: smb.Client, tmp_path: Path) -> None:
    """So does one that is loaded, unless another number is given."""
    path = tmp_path / "run.safetensors"
    with smb.train.join(client, "run", np.ones(3, np.float32), BSP(), replicas=2):
        smb.train.save(client, "run", path)
    smb.train.load(client, "again", path, replicas=None)
    with pytest.raises(smb.InvalidArgumentError, match=r"load of .*run.safetensors: replicas must be 1 or 2, not 2.0"):
        smb.train.load(client, "wrong", path, replicas=2.0)
    smb.train.load(client, "one", path, replicas=1)
    copies = {info.name: info.replicas for info in client.list()}
    assert {copies[name] for name in ("again", "again/members", "again/tick")} == {2}
    assert {copies[name] for name in ("one", "one/members", "one/tick")} == {1}


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_all_that_a_scheme_keeps_has_two_copies(
    cluster: smb.LocalCluster, client: smb.Client, scheme: smb.train.Scheme
) -> None:
    """Two workers exchange; both come to what one of them would learn, and each buffer is on both servers."""

    def work(number: int) -> float:
        values = np.full(5000, float(number), np.float32)
        with smb.connect(cluster.address) as own, smb.train.join(own, "run", values, scheme, replicas=2) as worker:
            for _ in range(40):
                values += np.float32(0.1) * (3 - values)
                worker.step(samples=1)
            worker.flush()
            return float(np.abs(values - 3).max())

    assert max(together(lambda: work(0), lambda: work(1))) < 1.0
    for info in client.list():
        assert info.replicas == 2, info.name
        assert all(place.backup for place in info.layout.segments), info.name
    for table in [info.name for info in client.list() if info.name.endswith("/members")]:
        for lock in ("setup", "member/0", "member/1"):
            name = f"{table.removesuffix('/members')}/{lock}"
            assert locked(client, name).backup, name


def locked(client: smb.Client, name: str) -> SegmentLocation:
    """Where the lock of that name lies."""
    return BufferInfo.of(client._coordinator.open_buffer(name, 0.0, 10.0, kind=pb.LOCK)).layout.segments[0]


def test_a_model_its_batches_and_its_file_have_two_copies(
    cluster: smb.LocalCluster, client: smb.Client, tmp_path: Path
) -> None:
    """Running statistics and units of work too; who joins with another number of copies is told which it has."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with smb.torch.join(model, optimizer, "run", scheme="diloco", every=2, client=client, replicas=2) as shared:
        for batch in shared.batches(8, 2, epochs=2):
            optimizer.zero_grad()
            model(torch.ones(len(batch), 6) * batch[:, None]).square().sum().backward()
            optimizer.step()
        other = np.zeros(shared.worker.weights.size, np.float32)
        with smb.connect(cluster.address) as second:
            with pytest.raises(smb.InvalidArgumentError, match=r"replicas is 2, not 1; leave these settings out"):
                smb.train.join(second, "run", other, replicas=1)
            smb.train.join(second, "run", other).close()
    smb.train.save(client, "run", tmp_path / "run.safetensors")
    smb.train.load(client, "again", tmp_path / "run.safetensors", replicas=2)
    names = {info.name: info.replicas for info in client.list()}
    assert {"run", "run/state", "run/units", "run/outer/0/0", "again", "again/members", "again/state"} <= names.keys()
    assert set(names.values()) == {2}, names
    for name in ("run/setup", "run/state", "run/member/0", "run/units/member/0", "again/setup"):
        assert locked(client, name).backup, name
