"""The ranks of a mesh are one member: FSDP2, DDP and tensor parallel on gloo, each rank a process."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint

import smb
import smb.torch
import smb.train
from smb.torch.checkpoint import Reader
from tests.support.daemons import wait_for
from tests.support.meshes import Mesh, local_step, network
from tests.support.training import LEASE_S

LONG = bool(os.environ.get("SMB_LONG"))


@pytest.fixture(scope="module")
def meshes(context: Any, cluster: smb.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Mesh]]:
    """Two of two ranks each, that all tests use that kill nobody."""
    made = [Mesh(context, cluster.address, tmp_path_factory.mktemp("mesh")) for _ in range(2)]
    yield made
    for mesh in made:
        mesh.end()


def _near(found: Any, expected: Any, atol: float = 1e-6) -> bool:
    return all(np.allclose(one, other, atol=atol) for one, other in zip(found, expected, strict=True))


def _plain(client: smb.Client, **options: Any) -> tuple[Any, torch.optim.Optimizer, smb.torch.Shared]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, smb.torch.join(model, optimizer, "plain", client=client, **options)


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


def test_members_with_different_meshes_train_one_model(meshes: list[Mesh], connect: Any, tmp_path: Path) -> None:
    """Two FSDP2 ranks, two tensor parallel ones and a plain process are three members, each with its place by tensors:
    they come to what three plain processes would. What is saved of it, another mesh goes on from."""
    sharded, columns = meshes
    assert sharded.ask("join", 0, scheme="localsgd", every=2) == ["joined", "joined"]
    assert columns.ask("join", 1, "columns") == ["joined", "joined"]
    model, client = network(), connect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with smb.torch.join(model, optimizer, "run", client=client) as shared:
        for member in meshes:
            member.tell("step", 6)
        for step in range(6):
            local_step(model, optimizer, 2, step)
        assert sharded.all_heard() == columns.all_heard() == [6, 6]
        assert len(smb.train.status(client, "run").workers) == 3
        assert shared.progress.steps == 6
        for member in meshes:
            member.tell("close")
        ends = [*sharded.all_heard(), *columns.all_heard()]
    expected = _reference(3, 3)
    assert _near([parameter.detach().numpy() for parameter in model.parameters()], expected)
    assert all(_near(end, expected) for end in ends)
    smb.train.save(client, "run", tmp_path / "run.safetensors")
    smb.train.load(client, "again", tmp_path / "run.safetensors")
    assert columns.ask("join", name="again") == ["joined", "joined"]
    assert all(_near(end, expected) for end in columns.ask("close"))


# Of additions, of averages and of rounds one each; test_bits_of_schemes.py has a mesh beside a plain member for all.
SCHEMES = [
    ({"scheme": "hsgd", "alpha": 0.25, "every": 2}, {"scheme": "seasgd"}),  # its host is the mesh
    ({"scheme": "asp"}, {}),
    ({"scheme": "asyncdiloco", "every": 2, "quorum": 1}, {}),
]
if LONG:
    SCHEMES += [
        ({"scheme": "easgd", "alpha": 0.25, "every": 2}, {}),
        ({"scheme": "seasgd", "alpha": 0.25, "every": 2}, {}),
        ({"scheme": "ssp", "staleness": 9}, {}),
        ({"scheme": "r2sp"}, {}),
    ]


@pytest.mark.parametrize(("settings", "reference"), SCHEMES, ids=lambda settings: settings.get("scheme", ""))
def test_every_scheme(meshes: list[Mesh], connect: Any, settings: dict[str, Any], reference: dict[str, Any]) -> None:
    """Two members in turn, an FSDP2 mesh and a DDP one, whose ranks have the same: as two plain members."""
    client = connect()
    plain = [_plain(client, **(settings | reference)), _plain(client)]
    for number, (mesh, kind) in enumerate(zip(meshes, ("fsdp", "ddp"), strict=True)):
        assert mesh.ask("join", number, kind, **(settings if number == 0 else {})) == ["joined", "joined"]
    for step in range(4):
        for number, (model, optimizer, shared) in enumerate(plain):
            local_step(model, optimizer, number, step)
            shared.worker.flush()
            assert meshes[number].ask("step", 1) == [step + 1, step + 1]
            meshes[number].ask("flush")
    for number, (model, _, shared) in enumerate(plain):
        own = [parameter.detach().numpy() for parameter in model.parameters()]
        assert all(_near(values, own) for values in meshes[number].ask("values"))
        shared.close()
        meshes[number].ask("close")
    ours, theirs = (smb.torch.shared_state_dict(client, name) for name in ("run", "plain"))
    assert _near(ours.values(), theirs.values())
    assert [worker.contributions for worker in smb.train.status(client, "run").workers] == [
        worker.contributions for worker in smb.train.status(client, "plain").workers
    ]


@pytest.mark.parametrize("kind", ["fsdp", "ddp", "columns"])
@pytest.mark.parametrize("scheme", ["bsp", "asp"])
def test_fewer_bits_lose_nothing(meshes: list[Mesh], connect: Any, scheme: str, kind: str) -> None:
    """What rounding leaves out of a shard's part goes along with its next one, wherever shards begin: after a few steps
    that change nothing the model has all of the first one."""
    if kind != "columns" and not LONG:
        pytest.skip("the other shards; SMB_LONG=1 runs them")
    mesh, client, model = meshes[0], connect(), network()
    assert mesh.ask("join", 0, kind, scheme=scheme, wire="int8") == ["joined", "joined"]
    mesh.ask("step", 1)
    mesh.ask("idle", 4)
    local_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, 0)
    shared = smb.torch.shared_state_dict(client, "run")
    mesh.ask("close")
    assert _near(shared.values(), model.state_dict().values(), 1e-7)


def test_a_rank_that_could_not_write(meshes: list[Mesh], connect: Any) -> None:
    """One rank's write of a contribution fails, after the other's: the next step contributes all of both, in fewer bits
    too.
    """
    mesh, client, model = meshes[0], connect(), network()
    assert mesh.ask("join", 0, "columns", scheme="bsp", wire="int8") == ["joined", "joined"]
    mesh.ask("fail_at_write", 1)
    assert all("says the test" in told for told in mesh.ask("step", 1))
    mesh.ask("idle", 4)
    local_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, 0)
    shared = smb.torch.shared_state_dict(client, "run")
    mesh.ask("close")
    assert _near(shared.values(), model.state_dict().values(), 1e-7)


@pytest.mark.parametrize("kind", ["ddp", "columns"])
def test_both_sides_take_what_was_rounded(meshes: list[Mesh], connect: Any, kind: str) -> None:
    """An elastic member gives what the shared model takes, in fewer bits too, whatever its shards: their sum stays."""
    mesh, client = meshes[0], connect()
    assert mesh.ask("join", 0, kind, scheme="easgd", alpha=0.5, every=1, wire="int8") == ["joined", "joined"]
    weights = client.open("run")
    aside = np.random.default_rng(1).standard_normal(weights.size).astype(np.float32)
    weights.accumulate(aside, wire="exact")

    def total() -> list[Any]:
        shared = smb.torch.shared_state_dict(client, "run")
        return [one.numpy() + own for one, own in zip(shared.values(), mesh.ask("values")[1], strict=True)]

    before = total()
    mesh.ask("idle", 3)
    mesh.ask("flush")
    assert _near(total(), before, 2e-6)
    mesh.ask("close")


def test_state_and_batches(meshes: list[Mesh], connect: Any) -> None:
    """state_dict() has the shared values in the model's own shards, and is saved as such; batches are a member's, and
    its ranks divide them."""
    mesh, client = meshes[0], connect()
    assert mesh.ask("join", 0, scheme="diloco", every=2) == ["joined", "joined"]
    first, second = mesh.ask("batches", 24, 8, epochs=1)
    assert [len(batch) for batch in first + second] == [4] * 6
    assert sorted(row for batch in first + second for row in batch) == list(range(24))
    shared = smb.torch.shared_state_dict(client, "run")
    for state in mesh.ask("state"):
        assert all(sharded for sharded, _ in state.values())
        assert _near([values for _, values in state.values()], shared.values())
    assert mesh.ask("checkpoint", "saved") == [None, None]
    loaded = network().state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that this process is alone
        checkpoint.load(loaded, storage_reader=Reader(client, "saved"))
    assert _near(loaded.values(), shared.values())
    assert smb.train.status(client, "run").workers[0].samples == 16  # of the last round; three batches were trained
    mesh.ask("close")


@pytest.mark.parametrize("scheme", ["bsp", "asp", "easgd"])
def test_a_rank_without_a_tensor_of_its_own(meshes: list[Mesh], connect: Any, scheme: str) -> None:
    """DDP of a model with one tensor on two ranks: the second one sends nothing, and steps as the first one does."""
    mesh, client = meshes[0], connect()
    assert mesh.ask("join", 0, "one tensor", scheme=scheme) == ["joined", "joined"]
    before = smb.torch.shared_state_dict(client, "run")["weight"]
    assert mesh.ask("step", 30) == [30, 30]
    first, second = mesh.ask("values")
    assert np.array_equal(first[0], second[0])
    mesh.ask("close")
    assert not np.allclose(smb.torch.shared_state_dict(client, "run")["weight"], before)
    assert not [said for each in mesh.ask("warnings") for said in each if "train apart" in said]


def test_ranks_that_nothing_keeps_alike(meshes: list[Mesh], connect: Any) -> None:
    """The first rank says that the others' steps would be lost."""
    assert meshes[1].ask("join", 0, "alone", scheme="bsp") == ["joined", "joined"]
    meshes[1].ask("close")
    first, second = meshes[1].ask("warnings")
    assert [said for said in first if "mesh= has 2 ranks, but the model is neither sharded nor in" in said]
    assert not [said for said in second if "neither sharded" in said]


def test_running_statistics(meshes: list[Mesh], connect: Any) -> None:
    """They are the mean over the ranks and members, and every rank has them in the end."""
    mesh, client = meshes[0], connect()
    assert mesh.ask("join", 0, "ddp", norm=True, scheme="bsp") == ["joined", "joined"]
    mesh.ask("step", 2)
    mesh.ask("close")
    shared = smb.torch.shared_state_dict(client, "run")["3.running_mean"]
    assert float(shared) != 0
    for found in mesh.ask("statistics"):
        assert found == pytest.approx([float(shared)])


@pytest.mark.parametrize(
    ("scheme", "killed"),
    [
        ({"scheme": "localsgd", "every": 2}, 0),
        ({"scheme": "localsgd", "every": 2}, 1),
        ({"scheme": "easgd", "every": 1}, 1),
        ({"scheme": "r2sp"}, 1),
        ({"scheme": "ssp", "staleness": 1}, 0),
    ],
    ids=["speaker", "rounds", "elastic", "turns", "clocks"],
)
def test_a_rank_that_is_killed_is_the_members_death(
    context: Any, cluster: smb.LocalCluster, connect: Any, tmp_path: Path, scheme: dict[str, Any], killed: int
) -> None:
    """Whichever it is, and where the other one only waits: the others go on after a lease."""
    first, client = Mesh(context, cluster.address, tmp_path), connect()
    assert first.ask("join", 0, name="killed", lease=LEASE_S, **scheme) == ["joined", "joined"]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with smb.torch.join(model, optimizer, "killed", client=client):
        process = first.processes[killed]
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)

        def alone() -> bool:
            """Whoever waits finds it; in schemes without waiting, who counts how many there are."""
            local_step(model, optimizer, 1, 0)
            return sum(each.alive for each in smb.train.status(client, "killed").workers) == 1

        wait_for(alone, 30)
        if killed == 1:  # the speaker, which has waited for nobody, finds that it is alone
            first.tell("step", 2, ranks=(0,))
            assert isinstance(first.heard(0), str)
    first.processes[1 - killed].kill()
    first.processes[1 - killed].join()


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_mesh_of_one_rank(context: Any, cluster: smb.LocalCluster, connect: Any, tmp_path: Path, kind: str) -> None:
    """It is a member as any other, beside a plain one; on a GPU its model is there, and its backend is NCCL."""
    mesh, client = Mesh(context, cluster.address, tmp_path, ranks=1), connect()
    assert mesh.ask("join", 0, kind, scheme="localsgd", every=2) == ["joined"]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with smb.torch.join(model, optimizer, "run", client=client):
        mesh.tell("step", 4)
        for step in range(4):
            local_step(model, optimizer, 1, step)
        assert mesh.heard() == 4
        expected = _reference(2, 2)
        assert _near(mesh.ask("close")[0], expected)
    assert _near([parameter.detach().numpy() for parameter in model.parameters()], expected)
    mesh.end()


def test_steps_go_on_without_the_coordinator(context: Any, tmp_path: Path) -> None:
    """Each exchange opened its buffers anew, at every rank."""
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster:
        mesh = Mesh(context, cluster.address, tmp_path)
        assert mesh.ask("join", 0, scheme="localsgd", every=2) == ["joined", "joined"]
        assert mesh.ask("step", 2) == [2, 2]
        cluster.coordinator.kill()
        assert mesh.ask("step", 4) == [6, 6]
        cluster.coordinator.start()
        mesh.ask("close")
        mesh.end()


def test_what_a_mesh_cannot_do_is_said_by_all_ranks(meshes: list[Mesh], connect: Any) -> None:
    """Batches by single processes' speeds are refused, at every rank, and nothing of it stays; so is a sharded model
    without mesh=."""
    for said in meshes[0].ask("join", scheme="r2sp", batch_size=8):
        assert said.startswith("InvalidArgumentError: scheme 'r2sp' with mesh=: batch_size=")
    for said in meshes[0].ask("join", scheme="bsp", mesh=False):
        assert "is a DTensor" in said
        assert "mesh=" in said
    assert not connect().list()
