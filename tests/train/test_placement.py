"""A model placed in one array of the client's memory trains to the same bits, and stays placed, or is copied again."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import smb
import smb.torch
import smb.train
from smb.tools.cli.main import app
from smb.train.advice import Costs, advice
from tests.conftest import Connect
from tests.support.daemons import wait_for

SCHEMES = [
    ("asp", {}, "exact"),
    ("asp", {}, "int8"),
    ("ssp", {}, "exact"),
    ("r2sp", {"warmup": 1}, "exact"),
    ("bsp", {}, "exact"),
    ("localsgd", {"every": 2}, "int8"),
    ("diloco", {"every": 2, "fragments": 2}, "exact"),
    ("easgd", {"every": 2}, "exact"),
]


class Network(nn.Module):
    """With tied parameters, a frozen one, running statistics, and a tensor whose place needs padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(6, 7)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(7, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(torch.tanh(self.norm(self.first(rows)) + self.second(rows))))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for number in range(first, first + steps):
        rows = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """The same bits; running statistics almost, since they are mixed in the background, and less often on a busy
    machine: state += (own - state) rounds each time.
    """
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-6)
        if "running" in name
        else torch.equal(one[name], other[name])
        for name in one
    )


def is_placed(model: nn.Module, placed: smb.torch.Placement) -> bool:
    memory = torch.from_numpy(placed.values)
    return all(
        dict(model.named_parameters())[name].data_ptr() == memory.data_ptr() + info.offset
        for name, info in placed.table.items()
    )


@pytest.mark.parametrize(("scheme", "settings", "wire"), SCHEMES, ids=str)
def test_the_same_bits_as_without(connect: Connect, scheme: str, settings: dict[str, Any], wire: str) -> None:
    """Also after values were loaded and the model was joined again. Afterwards it lies where it was placed."""
    client, models = connect(), []
    for name in ("placed", "scattered"):
        model = Network()
        optimizer = adam(model)
        placed = smb.torch.place(model, optimizer, client) if name == "placed" else None
        for turn in range(2):
            with smb.torch.join(
                model, optimizer, name, client=client, scheme=scheme, wire=wire, fresh=turn == 1, **settings
            ):
                train(model, optimizer, 5, first=5 * turn)
                model.load_state_dict(copy.deepcopy(model.state_dict()))
                train(model, optimizer, 2, first=100)
        if placed is not None:
            assert is_placed(model, placed)
        models.append(model)
    assert same(models[0].state_dict(), models[1].state_dict())
    assert same(smb.torch.shared_state_dict(client, "placed"), smb.torch.shared_state_dict(client, "scattered"))


def test_two_workers_one_of_them_placed(connect: Connect) -> None:
    """Each sees the other's steps in its parameters."""
    models, shared = [], []
    for number in range(2):
        model, client = Network(), connect()
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        if number == 0:
            placed = smb.torch.place(model, optimizer, client)
        shared.append(smb.torch.join(model, optimizer, "run", client=client, scheme="asp"))
        models.append((model, optimizer))
    for number in range(6):
        train(*models[number % 2], 1, first=number)
    train(*models[0], 1)
    now = {name: value.detach().clone() for name, value in models[0][0].named_parameters() if value.requires_grad}
    assert all(torch.equal(value, shared[1].state_dict()[name]) for name, value in now.items())
    assert is_placed(models[0][0], placed)
    for each in shared:
        each.close()
    assert same(
        *(
            {name: value for name, value in model.state_dict().items() if "num_batches" not in name}
            for model, _ in models
        )
    )


def test_values_and_gradients_are_views(connect: Connect) -> None:
    model = Network()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    train(model, optimizer, 1)
    before, slope = copy.deepcopy(model.state_dict()), model.last.weight.grad.clone()
    placed = smb.torch.place(model, optimizer, connect(), gradients=True)
    assert same(before, model.state_dict())
    assert len(placed.table) == 9  # one of the tied ones, none of the frozen ones
    assert placed.gradients is not None
    at = placed.table["last.weight"].offset // 4
    assert torch.equal(torch.from_numpy(placed.gradients[at : at + 21]).view(3, 7), slope)
    optimizer.zero_grad(set_to_none=False)
    assert not placed.gradients.any()
    model(torch.ones(4, 6)).sum().backward()
    assert placed.gradients[at : at + 21].any()
    used = np.zeros(placed.table.size, bool)
    for info in placed.table.values():
        used[info.offset // 4 : info.offset // 4 + info.size] = True
    assert not placed.values[~used].any()  # what lies between two tensors


def test_a_copy_has_memory_of_its_own(connect: Connect) -> None:
    """A deep copy, a pickled model, and one loaded from a state."""
    model = Network()
    optimizer = adam(model)
    placed = smb.torch.place(model, optimizer, connect())
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    loaded = Network()
    loaded.load_state_dict(model.state_dict())
    others = [copy.deepcopy(model), torch.load(kept, weights_only=False), loaded]
    before = copy.deepcopy(model.state_dict())
    assert all(same(before, other.state_dict()) for other in others)
    placed.values[:] = 7
    assert all(same(before, other.state_dict()) for other in others)
    assert (model.last.weight == 7).all()


def test_a_tensor_that_moved_is_copied_as_before(connect: Connect) -> None:
    """As model.to() moves them, in the middle of a training; and it counts to the same bits."""
    client, models = connect(), []
    for name in ("moved", "scattered"):
        model = Network()
        optimizer = adam(model)
        if name == "moved":
            placed = smb.torch.place(model, optimizer, client)
        with smb.torch.join(model, optimizer, name, client=client, scheme="asp") as shared:
            train(model, optimizer, 3)
            for each in (model.last.weight, model.first.bias):
                each.data = each.data.clone()
            assert shared._trained.array is None
            train(model, optimizer, 3, first=3)
        models.append(model)
    assert not is_placed(models[0], placed)
    assert same(models[0].state_dict(), models[1].state_dict())


@pytest.mark.parametrize("overlap", ["forward", "both"])
def test_placed_with_overlap(connect: Connect, overlap: str) -> None:
    client, models = connect(), []
    for name in ("placed", "scattered"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if name == "placed":
            smb.torch.place(model, optimizer, client)
        with smb.torch.join(model, optimizer, name, client=client, scheme="asp", overlap=overlap):
            train(model, optimizer, 8)
        models.append(model.state_dict())
    assert same(*models)


class Counts(nn.Module):
    """Two parameters of one flat memory of the user's own, and between them a count that each process has."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.zeros(32)
        self.first, self.second = nn.Parameter(flat[:15]), nn.Parameter(flat[16:])
        self.register_buffer("count", flat[15:16], persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sum() * (self.first.sum() + self.second.sum())


def test_memory_of_the_users_own_is_not_exchanged_whole(connect: Connect) -> None:
    """What lies between two parameters there is not a parameter, and stays each worker's."""
    client, models = connect(), [Counts(), Counts()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with contextlib.ExitStack() as stack:
        for model, optimizer in zip(models, optimizers, strict=True):
            stack.enter_context(smb.torch.join(model, optimizer, "run", client=client, scheme="asp"))
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, 1)
                model.count += 1
    assert [model.count.item() for model in models] == [3, 3]


def test_shared_memory_ends_a_placement(connect: Connect) -> None:
    model = Network()
    optimizer = adam(model)
    client = connect()
    placed = smb.torch.place(model, optimizer, client)
    model.share_memory()
    assert not is_placed(model, placed)
    with smb.torch.join(model, optimizer, "run", client=client, scheme="asp") as shared:
        train(model, optimizer, 2)
        assert not any(tensor.placed for tensor in shared.explain().tensors)
    smb.torch.place(model, optimizer, client)
    with smb.torch.join(model, optimizer, "again", client=client, scheme="asp") as shared:
        assert all(tensor.placed for tensor in shared.explain().tensors)


def test_a_parameter_with_other_strides_is_refused(connect: Connect) -> None:
    """The optimizer's state has its strides; a fused step would take the state of other elements."""
    client, model = connect(), nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with pytest.raises(smb.InvalidArgumentError, match=r"'weight' is not contiguous: its strides are \(36, 1, 12, 4\)"):
        smb.torch.place(model, optimizer, client)
    model.to(memory_format=torch.contiguous_format)
    smb.torch.place(model, torch.optim.Adam(model.parameters(), fused=True), client)


def test_what_cannot_be_placed(connect: Connect) -> None:
    """The model is as it was."""
    client = connect()
    model = Network()
    model.last.to(torch.bfloat16)
    where = model.first.weight.data_ptr()
    with pytest.raises(smb.InvalidArgumentError, match=r"'last.weight' is torch.bfloat16 on cpu; only float32 in host"):
        smb.torch.place(model, adam(model), client)
    assert model.first.weight.data_ptr() == where
    with pytest.raises(smb.InvalidArgumentError, match="the optimizer trains 9 tensors that are not parameters of"):
        smb.torch.place(Network(), adam(model), client)


def test_what_an_exchange_costs_is_explained(connect: Connect) -> None:
    """By counters of this worker's: bytes, copies, which tensors are placed, and what may help."""
    client = connect()
    model = Network()
    optimizer = adam(model)
    placed = smb.torch.place(model, optimizer, client)
    size = placed.values.nbytes
    with smb.torch.join(model, optimizer, "run", client=client, scheme="asp") as shared:
        joined = shared.explain()
        train(model, optimizer, 4)
        found = shared.explain()
        assert (found.contributions, found.bytes) == (4, 4 * 2 * size)
        assert joined.copied_bytes is not None
        assert (
            found.copied_bytes == joined.copied_bytes + 4 * size
        )  # the new values, to what the next are compared with
        assert all(tensor.placed for tensor in found.tensors)
        assert [tensor.name for tensor in found.tensors] == list(placed.table)
        assert found.transports == client.open("run").transports
        assert not any("smb.torch.place" in each for each in found.advice)
        assert "4" in str(found)
        assert "first.weight  (7, 6)  float32 on cpu  168 B  yes" in str(found)
        model.last.bias.data = model.last.bias.data.clone()
        moved = shared.explain()
        assert not any(tensor.placed for tensor in moved.tensors)
        assert any("or were moved since smb.torch.place" in each for each in moved.advice)
        assert "training run" in moved._repr_html_()
    with pytest.raises(smb.InvalidArgumentError, match="has left training 'run'"):
        shared.explain()


def test_the_command_tells_it_of_each_worker(cluster: smb.LocalCluster, connect: Connect) -> None:
    """By what workers report: of two, the one whose model is placed, and one whose is not."""
    kept: list[torch.optim.Optimizer] = []
    with contextlib.ExitStack() as stack:
        for number in range(2):
            client, model = connect(name=f"worker-{number}"), Network()
            optimizer = adam(model)
            if number == 0:
                smb.torch.place(model, optimizer, client)
            shared = smb.torch.join(model, optimizer, "told", client=client, scheme="localsgd", every=1)
            stack.callback(shared.abandon)
            kept.append(optimizer)  # the next join would take the place of one whose optimizer is gone

        def told() -> dict[str, Any] | None:
            answer = CliRunner().invoke(app, ["explain", "told", "--coordinator", cluster.address, "--json"])
            assert answer.exit_code == 0, answer.output
            found: dict[str, Any] = json.loads(answer.stdout)
            done = len(found["workers"]) == 2 and all(worker["transports"] for worker in found["workers"])
            return found if done else None

        found = wait_for(told, "reports of both workers")
        assert (found["training"], found["scheme"]) == ("told", "localsgd")
        assert {worker["worker"].split()[0]: worker["placed"] for worker in found["workers"]} == {
            "worker-0": True,
            "worker-1": False,
        }
        answer = CliRunner().invoke(app, ["explain", "told", "--coordinator", cluster.address])
        assert re.search(r"worker-0 .* yes", answer.output), answer.output
        assert re.search(r"worker-1 .* no ", answer.output), answer.output
    answer = CliRunner().invoke(app, ["explain", "nothing", "--coordinator", cluster.address])
    assert isinstance(answer.exception, smb.NotFoundError)
    assert 'no training and no published state is named "nothing"' in str(answer.exception)


def test_advice_follows_from_the_counters() -> None:
    """Whoever waits for others, exchanges at each step, or sends exact values over a network, gets it said."""
    costs = Costs(("tcp",), "exact", blocked=0.1, waiting=0.0, scattered=False)

    def said(scheme: type[smb.train.Scheme] = smb.train.ASP, **other: Any) -> list[str]:
        return [each.split(":")[0] for each in advice(dataclasses.replace(costs, **other), scheme.TRAITS)]

    assert not said()
    behind, seldom, bits = (
        "exchanges can run behind the passes",
        "every step is an exchange",
        "contributions travel exact",
    )
    assert said(blocked=0.5) == [behind, seldom, bits]
    assert said(blocked=0.5, overlaps=True, wire="int8") == [seldom]
    assert said(blocked=0.5, transports=("shm",)) == [behind, seldom]
    assert said(smb.train.LocalSGD, blocked=0.5, wire=None) == []
    assert said(blocked=0.5, waiting=0.4) == [
        "most of the time that training stands still is waiting for other workers"
    ]
    assert said(scattered=True)[0].startswith("parameters lie in arrays of their own")
    assert not said(smb.train.LocalSGD, scattered=True)
