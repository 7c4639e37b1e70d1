"""What each scheme computes, to the bit, recorded as sums: whatever is changed inside must come to the same.

Two workers do steps whose arithmetic no processor rounds in a way of its own: all factors are powers of two. So the
sums are those of every machine, and of every carrier: a numpy array, a model's parts with overlap=, ranks of a mesh.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.overlap import planner
from smb.train.exchange.streaming import FragmentExchange
from smb.train.scheme import Values
from tests.conftest import Connect
from tests.fault.long import LONG
from tests.support.daemons import wait_for
from tests.support.exact_steps import SHAPES, SIZE, goal_of, local_step, network, shaped, start
from tests.support.meshes import Mesh
from tests.support.overlapped_workers import plan_by
from tests.support.training import together

STEPS = 8


@dataclass(frozen=True)
class Case:
    """A scheme's run, and the sum of the shared model and of both workers' values. `turns`: one after the
    other; `flushed`: what a step has left under way is there before the other's turn.
    """

    id: str
    scheme: str
    sum: str
    settings: dict[str, Any] = field(default_factory=dict)
    wire: str = "exact"
    samples: tuple[int, int] = (1, 1)
    turns: bool = False
    flushed: bool = False
    carriers: tuple[str, ...] = ("array",)


ALL = ("array", "forward", "both", "fsdp")
RANKS = ("array", "fsdp")
CASES = [
    Case("bsp", "bsp", "0095381d", carriers=(*ALL, "ddp")),
    Case("bsp-bfloat16", "bsp", "27d1adc5", wire="bfloat16", carriers=(*ALL, "ddp")),
    Case("bsp-int8", "bsp", "dc47781a", wire="int8"),
    Case("bsp-weights", "bsp", "20e10610", {"token_weights": True}, samples=(1, 3), carriers=ALL),
    Case("localsgd", "localsgd", "ec9ee366", {"every": 2}, carriers=(*RANKS, "ddp")),
    Case("localsgd-bfloat16", "localsgd", "93f09117", {"every": 3}, wire="bfloat16", carriers=RANKS),
    Case("diloco", "diloco", "36c8bf4b", {"every": 2}, carriers=RANKS),
    Case("diloco-bfloat16", "diloco", "95bd71a8", {"every": 2}, wire="bfloat16", carriers=RANKS),
    Case("streaming", "diloco", "a457c84d", {"every": 4, "fragments": 2, "delay": 1, "mix": 0.25}),
    Case("streaming-bfloat16", "diloco", "88145a71", {"every": 4, "fragments": 2, "delay": 1}, wire="bfloat16"),
    Case("step-wire", "diloco", "cf057c8b", {"every": 2, "step_wire": "bfloat16"}),
    Case("asyncdiloco", "asyncdiloco", "5aa1c7ca", {"every": 2}, turns=True, carriers=RANKS),
    Case("asyncdiloco-quorum", "asyncdiloco", "67090669", {"every": 2, "quorum": 2}, turns=True),
    Case("asp", "asp", "07991f2b", turns=True, carriers=(*ALL, "ddp")),
    Case("asp-bfloat16", "asp", "258d59f6", wire="bfloat16", turns=True, carriers=(*ALL, "ddp")),
    Case("asp-int8", "asp", "707c691f", wire="int8", turns=True),
    Case("ssp", "ssp", "07991f2b", {"staleness": 2}, turns=True, carriers=ALL),
    Case("ssp-bfloat16", "ssp", "258d59f6", {"staleness": 2}, wire="bfloat16", turns=True, carriers=ALL),
    Case("r2sp", "r2sp", "07991f2b", turns=True, carriers=ALL),
    Case("r2sp-bfloat16", "r2sp", "258d59f6", wire="bfloat16", turns=True, carriers=ALL),
    Case("easgd", "easgd", "977ffded", {"alpha": 0.3, "every": 2}, turns=True, carriers=(*RANKS, "ddp")),
    Case("easgd-by-workers", "easgd", "123acd8f", {"every": 2}, turns=True, carriers=RANKS),
    Case(
        "easgd-bfloat16", "easgd", "b45d10e4", {"alpha": 0.3, "every": 2}, wire="bfloat16", turns=True, carriers=RANKS
    ),
    Case("eamsgd", "eamsgd", "977ffded", {"alpha": 0.3, "every": 2}, turns=True, carriers=RANKS),
    Case(
        "seasgd", "seasgd", "630ca279", {"alpha": 0.3, "every": 2}, turns=True, flushed=True, carriers=(*RANKS, "ddp")
    ),
    Case("seasgd-bfloat16", "seasgd", "5278ad7d", {"alpha": 0.3}, "bfloat16", turns=True, flushed=True, carriers=RANKS),
    Case("hsgd", "hsgd", "06bc7e3d", {"alpha": 0.3, "every": 2}),
    Case("hsgd-bfloat16", "hsgd", "608ce650", {"alpha": 0.3, "every": 2}, wire="bfloat16"),
]
# Cases whose two halves the short form has. SSP and R2SP are ASP that waits, so fewer bits go with ASP, and each has
# one overlap. In rounds and in averages fewer bits go with BSP, DiLoCo and EASGD, and copies ("ddp") with BSP and ASP.
# EAMSGD is EASGD with a momentum that is nothing here. Of BSP and ASP shards have one each, and copies the other one.
AT_NIGHT = {
    *((f"{scheme}-bfloat16", carrier) for scheme in ("ssp", "r2sp") for carrier in ("forward", "both", "fsdp")),
    ("ssp", "both"), ("r2sp", "forward"), ("localsgd-bfloat16", "fsdp"), ("seasgd-bfloat16", "fsdp"),
    *((scheme, "ddp") for scheme in ("localsgd", "easgd", "seasgd")),
    *((scheme, "fsdp") for scheme in ("bsp-bfloat16", "asp", "diloco", "easgd", "eamsgd")),
    ("bsp", "ddp"), ("asp-bfloat16", "ddp"), ("bsp-bfloat16", "forward"), ("asp-bfloat16", "both"),
}  # fmt: skip


def of_carriers(*carriers: str) -> Any:
    """Run a test with all cases of these carriers."""
    found = [
        (case, each)
        for each in carriers
        for case in CASES
        if each in case.carriers and (LONG or (case.id, each) not in AT_NIGHT)
    ]
    ids = [case.id if len(carriers) == 1 else f"{case.id}-{each}" for case, each in found]
    return pytest.mark.parametrize(("case", "carrier"), found, ids=ids)


def sum_of(*vectors: Any) -> str:
    """A sum of all bits of float32 vectors."""
    return f"{zlib.crc32(b''.join(np.ascontiguousarray(each, np.float32).tobytes() for each in vectors)):08x}"


def run(case: Case, steps: list[Callable[[], None]]) -> None:
    """Have the workers step: at one time, or in turn."""
    for _ in range(STEPS):
        if case.turns:
            for step in steps:
                step()
        else:
            together(*steps)


def _is_exchanging(worker: smb.train.Worker) -> bool:
    job = worker.exchange._job if isinstance(worker.exchange, FragmentExchange) else None
    return job is not None and job.running


@of_carriers("array")
def test_arrays(connect: Connect, case: Case, carrier: str) -> None:
    """Two workers with numpy arrays."""
    values = [start(), np.zeros(SIZE, np.float32)]
    scheme = smb.train.scheme_of(case.scheme, case.settings)
    workers = [
        smb.train.join(connect(), "run", values[0], scheme, wire=case.wire),
        smb.train.join(connect(), "run", values[1]),
    ]
    done = [0, 0]

    def step(worker: int) -> None:
        local_step(values[worker], worker, done[worker])
        done[worker] += 1
        workers[worker].step(case.samples[worker])
        if case.flushed:
            workers[worker].flush()

    run(case, [lambda worker=worker: step(worker) for worker in (0, 1)])  # type: ignore[misc]
    # A flush takes over what is closed, and waits for nobody: whether the last round was closed must not be chance.
    wait_for(lambda: not any(_is_exchanging(worker) for worker in workers), "the last round of fragments")
    for worker in workers:
        worker.flush()
    found = sum_of(workers[0].shared(), *values)
    for worker in workers:
        worker.close()
    assert found == case.sum


class Layers(nn.Module):
    """The tensors, each in a module of its own, with a loss whose gradient is the distance from the goals."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(tensor) for tensor in shaped(values))

    def forward(self, goals: Values) -> torch.Tensor:
        """Return the loss."""
        losses = [layer(goal) for layer, goal in zip(self.layers, shaped(goals), strict=True)]
        return torch.stack(losses).sum()


class _Layer(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor)

    def forward(self, goal: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((self.weight - goal) ** 2).sum()


def vector(tensors: Any) -> Values:
    """Tensors as one vector, without what lies between them in a group's buffer."""
    flat: Values = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy()
    return flat


@of_carriers("forward", "both")
def test_parts(connect: Connect, monkeypatch: pytest.MonkeyPatch, case: Case, carrier: str) -> None:
    """Two models whose exchanges hide behind the passes, by parts."""
    monkeypatch.setattr(planner, "LEARNING_STEPS", 2)
    monkeypatch.setattr(planner, "plan_of", plan_by("slices", 64))
    models = [Layers(start()), Layers(np.zeros(SIZE, np.float32))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
    options = {"scheme": case.scheme, "wire": case.wire, **case.settings}
    members = [
        smb.torch.join(models[0], optimizers[0], "run", client=connect(), overlap=carrier, **options),
        smb.torch.join(models[1], optimizers[1], "run", client=connect(), overlap=carrier),
    ]
    done = [0, 0]

    def step(worker: int) -> None:
        members[worker].samples = case.samples[worker]
        optimizers[worker].zero_grad()
        models[worker](goal_of(worker, done[worker])).backward()
        done[worker] += 1
        optimizers[worker].step()
        members[worker].wait()

    run(case, [lambda worker=worker: step(worker) for worker in (0, 1)])  # type: ignore[misc]
    assert all(member.plan is not None for member in members)
    values = [vector(model.parameters()) for model in models]
    found = sum_of(vector(smb.torch.shared_state_dict(connect(), "run").values()), *values)
    for member in members:
        member.close()
    assert found == case.sum


@pytest.fixture(scope="module")
def mesh(context: Any, cluster: smb.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two ranks that all tests use."""
    made = Mesh(context, cluster.address, tmp_path_factory.mktemp("mesh"))
    yield made
    made.end()


@of_carriers("fsdp", "ddp")
def test_ranks(mesh: Mesh, connect: Connect, case: Case, carrier: str) -> None:
    """A model in one process, and one whose shards, or copies, two ranks have."""
    model, client = network(), connect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    options = {"scheme": case.scheme, "wire": case.wire, **case.settings}
    with smb.torch.join(model, optimizer, "run", client=client, samples=case.samples[0], **options) as shared:
        assert mesh.ask("join", 1, carrier, lr=0.125, samples=case.samples[1]) == ["joined", "joined"]
        for number in range(STEPS):
            if not case.turns:
                mesh.tell("exact_step")
            for parameter, goal in zip(model.parameters(), shaped(goal_of(0, number)), strict=True):
                parameter.grad = parameter.detach() - goal
            optimizer.step()
            if case.flushed:
                shared.worker.flush()
            if case.turns:
                mesh.tell("exact_step")
            assert mesh.all_heard() == [number + 1, number + 1]
            if case.flushed:
                mesh.ask("flush")
        shared.worker.flush()
        mesh.ask("flush")
        ours, theirs = vector(model.parameters()), mesh.ask("values")[0]
        weights = vector(smb.torch.shared_state_dict(client, "run").values())
        found = sum_of(weights, ours, np.concatenate([each.reshape(-1) for each in theirs]))
        mesh.ask("close")
    assert [each.shape for each in theirs] == list(SHAPES)
    assert found == case.sum
