from __future__ import annotations

import pytest
import torch
from torch import nn

from smb.errors import Error, InvalidArgumentError
from smb.torch.flat_parameters import Trained, Untrained, split


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)).to(dtype)


def flat(model: nn.Module) -> tuple[Trained, Untrained]:
    return split(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_float32_parameters_become_views_and_keep_their_values() -> None:
    """The model computes the same after the move, and what is written into the vector is what it computes with."""
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained, _ = flat(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for entry in trained.entries:
        assert torch.equal(entry.of(trained.vector), entry.tensor)
        assert entry.offset * 4 % 64 == 0
    trained.values[:] = 0.0
    assert all(not parameter.any() for parameter in model.parameters())


def test_the_optimizer_goes_on_with_its_state() -> None:
    """A model that is moved between two steps of Adam ends bit for bit as one that is not."""
    ends = []
    for moved in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            if moved and step == 2:
                split(model, optimizer)
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 20).reshape(4, 5)).square().sum().backward()
            optimizer.step()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_bfloat16_without_an_exchange_is_bit_for_bit_what_it_was() -> None:
    """Through master and back, a bfloat16 model trains exactly as it does alone; the master is its float32 values."""
    alone, shared = network(torch.bfloat16), network(torch.bfloat16)
    trained, _ = flat(shared)
    images = torch.linspace(-1, 1, 20).reshape(4, 5).bfloat16()
    for model, vector in ((alone, None), (shared, trained)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(20):
            optimizer.zero_grad()
            model(images).square().sum().backward()
            optimizer.step()
            if vector is not None:
                vector.absorb()
                vector.spread()
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        assert other.dtype == torch.bfloat16
        assert torch.equal(one, other)
    assert all(torch.equal(entry.of(trained.vector), entry.tensor.float()) for entry in trained.entries)


def test_bfloat16_master_keeps_what_rounding_hides() -> None:
    """Small moves by others add up in the master until a bfloat16 shows them; parameters are it, to nearest even."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    trained, _ = flat(model)
    for moved in range(1, 9):
        trained.absorb()
        trained.values[0] += 2.0**-10  # an eighth of the step between bfloat16 numbers above 1
        trained.spread()
        assert float(trained.values[0]) == 1.0 + moved * 2.0**-10
        assert model.weight.item() == float(torch.tensor(1.0 + moved * 2.0**-10).bfloat16())
    assert model.weight.item() == 1.0 + 2.0**-7
    with torch.no_grad():
        model.weight -= 0.5  # what an optimizer does: the master moves by as much
    trained.absorb()
    assert float(trained.values[0]) == 0.5 + 2.0**-7


def test_a_model_of_both_types_has_one_vector() -> None:
    """Bfloat16 layers among float32 ones: each parameter follows the vector in its own type."""
    model = network()
    model[0].bfloat16()
    trained, _ = flat(model)
    trained.values[:] = 1.0 + 2.0**-9
    trained.spread()
    assert (model[0].weight == 1.0).all()
    assert (model[3].weight == 1.0 + 2.0**-9).all()


def test_tied_parameters_are_one_entry() -> None:
    """A Parameter with two names is in the vector once, under both."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    trained, _ = flat(model)
    assert [entry.names for entry in trained.entries] == [("0.weight", "1.weight"), ("0.bias",), ("1.bias",)]
    trained.values[:] = 2.0
    assert model[1].weight is model[0].weight
    assert (model[1].weight == 2.0).all()


def test_frozen_parameters_and_buffers_are_apart() -> None:
    """What no optimizer moves does not travel with every exchange: running statistics first, then frozen parameters;
    integers are nowhere."""
    model = network()
    model[0].weight.requires_grad_(False)
    trained, untrained = split(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    assert "0.weight" not in trained.table
    assert list(untrained.table) == ["1.running_mean", "1.running_var", "0.weight"]
    assert untrained.averaged == 16 + 7
    untrained.collect()
    untrained.values[:] += 1.0
    untrained.spread()
    assert (model[1].running_mean == 1.0).all()
    model[0].weight.requires_grad_(True)
    with pytest.raises(Error, match=r"'0\.weight' was frozen at smb\.torch\.join and requires gradients now"):
        untrained.check()


def test_one_that_the_optimizer_has_is_trained_even_while_frozen() -> None:
    """Gradual unfreezing: give all to the optimizer, and all are shared from the start."""
    model = network()
    model[0].weight.requires_grad_(False)
    trained, _ = flat(model)
    assert "0.weight" in trained.table


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda model: model.double(), "'0.weight' is torch.float64: float32 and bfloat16 can be shared"),
        (lambda model: model.half(), "'0.weight' is torch.float16"),
        (lambda model: model.to("meta"), "'0.weight' is on meta: smb.torch.join takes models in host memory"),
        (lambda model: model.append(nn.LazyLinear(3)), "'4.weight' has no shape yet"),
        (lambda model: model.requires_grad_(False), "no parameter that requires gradients"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(spoil: object, says: str) -> None:
    """Wrong type, wrong device, no shape, nothing to train: refused with what to do, and nothing was moved."""
    model = network()
    spoil(model)  # type: ignore[operator]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.param_groups[0]["params"] = []
    before = [parameter for parameter in model.parameters() if not isinstance(parameter, nn.UninitializedParameter)]
    memory = [parameter.data_ptr() for parameter in before]
    with pytest.raises(InvalidArgumentError, match=says):
        split(model, optimizer)
    assert [parameter.data_ptr() for parameter in before] == memory


def test_sparse_parameters_are_refused() -> None:
    """Only dense parameters have a place in a vector."""
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(InvalidArgumentError, match=r"'weight' is torch\.sparse_coo: only dense"):
        split(model, torch.optim.SGD([model.bias], lr=0.1))


def test_a_tie_by_memory_alone_is_refused() -> None:
    """Two Parameters on the same memory would part in silence; two on different halves of one are fine."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight.data = model[0].weight.data.t()
    with pytest.raises(InvalidArgumentError, match=r"'0\.weight' and '1\.weight' share memory without being one"):
        flat(model)
    both = torch.arange(32.0).reshape(2, 4, 4)
    model[0].weight.data, model[1].weight.data = both[0], both[1]
    flat(model)
    assert (model[1].weight == both[1]).all()


def test_a_parameter_that_the_state_dict_leaves_out_is_refused() -> None:
    """It would be trained and shared with nobody; frozen, it may stay out."""

    def leave_out(_module: nn.Module, state: dict[str, torch.Tensor], *_: object) -> None:
        del state["3.weight"]

    model = network()
    model._register_state_dict_hook(leave_out)
    before = model[3].weight.data_ptr()
    with pytest.raises(InvalidArgumentError, match=r"'3\.weight' is trained, but not in the model's state_dict"):
        flat(model)
    assert model[3].weight.data_ptr() == before
    model[3].weight.requires_grad_(False)
    trained, _ = split(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    assert "3.bias" in trained.table
    assert "3.weight" not in trained.table


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    """What the optimizer trains outside of the model would be shared with nobody."""
    model = network()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(InvalidArgumentError, match="the optimizer trains 1 tensors that are no parameters"):
        split(model, optimizer)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: setattr(model[0].weight, "data", torch.zeros(7, 5)),
        lambda model: model.bfloat16(),
    ],
)
def test_memory_given_to_a_parameter_later_is_noticed(move: object) -> None:
    """A parameter that left the vector is named at the next step. Copying values in is fine."""
    model = network()
    trained, _ = flat(model)
    model.load_state_dict(network().state_dict())
    trained.check()
    move(model)  # type: ignore[operator]
    with pytest.raises(Error, match=r"parameter '0\.weight' was given other memory after smb\.torch\.join"):
        trained.check()
