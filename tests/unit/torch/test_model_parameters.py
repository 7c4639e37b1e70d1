"""A model's parameters as a scheme sees them, and what of a model is shared at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from smb.errors import Error, InvalidArgumentError
from smb.torch.training import model_parameters, staging
from smb.torch.training.model_parameters import ModelParameters
from smb.torch.training.model_tensors import ModelCheck, Statistics, mark_of, parts_of, plain_name
from smb.train import parameters


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def of(model: nn.Module) -> ModelParameters:
    return ModelParameters(parts_of(model, sgd(model)).trained)


def values_of(shared: ModelParameters) -> parameters.Values:
    return np.concatenate([block.copy() for _, block in shared.blocks()])


@pytest.fixture(params=[1 << 22, 16])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one piece, and tensors that begin and end in the middle of pieces."""
    for module in (parameters, model_parameters, staging):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_stay_and_are_seen_as_one_vector(dtype: torch.dtype) -> None:
    """Each at a multiple of 64 bytes, zeros between; deltas are what was done since, to the bit; nothing moves."""
    model = network(dtype)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()  # not contiguous
    places = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    shared = of(model)
    base = values_of(shared)
    assert base.size == shared.size
    named = shared.table.views(base)
    assert all(entry.offset % 16 == 0 for entry in shared.entries)
    assert all(np.array_equal(named[name], p.detach().float().numpy()) for name, p in model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    done = np.concatenate([delta.copy() for _, delta in shared.deltas(base)])
    assert np.array_equal(base + done, values_of(shared))
    shared.fill(base)
    assert np.array_equal(values_of(shared), base)
    shared.subtract(np.ones_like(base))
    for name, parameter in model.named_parameters():
        expected = torch.from_numpy(shared.table.views(base)[name] - np.float32(1)).to(dtype)
        assert torch.equal(parameter, expected)
    assert [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()] == places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_rounding_hides_is_no_delta(dtype: torch.dtype) -> None:
    """The group's values are finer than a parameter shows: filled with them, it has done nothing."""
    shared = of(network(dtype))
    base = np.random.default_rng(1).standard_normal(shared.size).astype(np.float32)
    shared.fill(base)
    assert all(not delta.any() for _, delta in shared.deltas(base))


@pytest.mark.usefixtures("block")
def test_keep_exact_keeps_what_rounding_hides() -> None:
    """Small moves add up beside a bfloat16 until it shows them; without it they are lost."""
    for exact in (True, False):
        model = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.constant_(model.weight, 1.0)
        shared = of(model)
        if exact:
            shared.keep_exact()
        for moved in range(1, 9):
            shared.subtract(np.full(1, -(2.0**-10), np.float32))  # an eighth of the step between numbers above 1
            if exact:
                assert values_of(shared)[0] == 1.0 + moved * 2.0**-10
        assert model.weight.item() == (1.0 + 2.0**-7 if exact else 1.0)


def test_tied_parameters_are_one() -> None:
    """A Parameter with two names is in the vector once, under both."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert [entry.names for entry in of(model).entries] == [("0.weight", "1.weight"), ("0.bias",), ("1.bias",)]


def test_frozen_parameters_and_statistics_are_apart() -> None:
    """What no optimizer moves does not travel with exchanges; integers are nowhere."""
    model = network()
    model[0].weight.requires_grad_(False)
    parts = parts_of(model, sgd(model))
    assert list(parts.frozen) == [("0.weight",)]
    assert list(parts.statistics) == [("1.running_mean",), ("1.running_var",)]
    assert ("0.weight",) not in parts.trained
    statistics = Statistics(parts.statistics)
    statistics.collect()
    statistics.values[:] += 1.0
    statistics.spread()
    assert (model[1].running_mean == 1.0).all()
    check = ModelCheck(model, sgd(model), ModelParameters(parts.trained).entries, parts.frozen)
    check()
    model[0].weight.requires_grad_(True)
    with pytest.raises(Error, match=r"'0\.weight' was frozen at smb\.torch\.join and requires gradients now"):
        check()


def test_marks_of_frozen_parameters() -> None:
    """Equal for equal values; other values, and other types, show. A scalar and an empty one have marks too."""
    tensors: dict[tuple[str, ...], torch.Tensor] = {
        ("a",): torch.randn(100, 50), ("b",): torch.tensor(1.0), ("c",): torch.zeros(0, 3)
    }  # fmt: skip
    mark = mark_of(tensors)
    assert mark == mark_of({names: tensor.clone() for names, tensor in tensors.items()})
    assert mark_of(tensors | {("a",): tensors["a",] + 1})["values"] != mark["values"]
    assert mark_of(tensors | {("a",): tensors["a",].bfloat16()})["types"] != mark["types"]


def test_one_that_the_optimizer_has_is_trained_even_while_frozen() -> None:
    """Gradual unfreezing: give all to the optimizer, and all are shared from the start."""
    model = network()
    optimizer = sgd(model)
    model[0].weight.requires_grad_(False)
    assert ("0.weight",) in parts_of(model, optimizer).trained


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compiler
def test_wrappers_are_taken_off_names() -> None:
    """torch.compile's and DistributedDataParallel's steps in names go, wherever they are; a user's `module` stays."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner.add_module("module", nn.Linear(2, 2))
    names = list(inner.state_dict())
    assert [plain_name(inner, name) for name in names] == names
    for wrapped in (torch.compile(inner), nn.DataParallel(inner), torch.compile(nn.DataParallel(inner))):
        assert [plain_name(wrapped, name) for name in wrapped.state_dict()] == names
    inner[1] = torch.compile(inner[1])
    assert "1._orig_mod.weight" in inner.state_dict()
    assert [plain_name(inner, name) for name in inner.state_dict()] == names


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda model: model.double(), "'0.weight' is torch.float64: float32, bfloat16 and float16 can be shared"),
        (lambda model: model.to("meta"), "'0.weight' is on the meta device, without values: load or initialise"),
        (lambda model: model.append(nn.LazyLinear(3)), "'4.weight' has no shape yet"),
        (
            lambda model: model[3].register_parameter("weight", nn.Parameter(torch.zeros(0, 3))),
            r"'3.weight' has no elements, shape \(0, 3\): freeze it",
        ),
        (lambda model: model.requires_grad_(False), "no parameter that requires gradients"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(spoil: Any, says: str) -> None:
    """Wrong type, no values, no shape, no elements, nothing to train: refused, with what to do."""
    model = network()
    spoil(model)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(InvalidArgumentError, match=says):
        parts_of(model, optimizer)


def test_sparse_parameters_are_refused() -> None:
    """Only dense parameters have a place in a vector."""
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(InvalidArgumentError, match=r"'weight' has the layout torch\.sparse_coo: only dense"):
        parts_of(model, torch.optim.SGD([model.bias], lr=0.1))


def test_a_tie_by_memory_alone_is_refused() -> None:
    """Of two Parameters on the same memory each delta would count twice; two on different halves of one are fine."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight.data = model[0].weight.data.t()
    with pytest.raises(InvalidArgumentError, match=r"'0\.weight' and '1\.weight' share memory without being one"):
        of(model)
    both = torch.arange(32.0).reshape(2, 4, 4)
    model[0].weight.data, model[1].weight.data = both[0], both[1]
    of(model)


def test_a_parameter_that_the_state_dict_leaves_out_is_refused() -> None:
    """It would be trained and shared with nobody; frozen, it may stay out."""

    def leave_out(_module: nn.Module, state: dict[str, torch.Tensor], *_: object) -> None:
        del state["3.weight"]

    model = network()
    model._register_state_dict_hook(leave_out)
    with pytest.raises(InvalidArgumentError, match=r"'3\.weight' is trained, but is not in the model's state_dict"):
        of(model)
    model[3].weight.requires_grad_(False)
    trained = parts_of(model, sgd(model)).trained
    assert ("3.bias",) in trained
    assert ("3.weight",) not in trained


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """What the optimizer trains outside of the model would be shared with nobody."""
    model = network()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(InvalidArgumentError, match="the optimizer trains 1 tensors that are not parameters"):
        parts_of(model, optimizer)
