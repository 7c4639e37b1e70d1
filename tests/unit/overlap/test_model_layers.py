"""A model's layers by its calls, and the parts of a cut that they need. No training, no exchange."""

from __future__ import annotations

import copy

import torch
from torch import nn

from smb.overlap.model_layers import LayerParts, ModelLayers
from smb.overlap.parts import Cut, Part
from smb.train.ledger import Run


class Block(nn.Module):
    """A linear module whose weight the block uses without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return nn.functional.linear(values, self.inner.weight)


class Network(nn.Module):
    """Modules that are called in another order than they lie in the vector, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2, bias=False)
        self.first = nn.Linear(2, 2, bias=False)
        self.block = Block()
        self.last.weight = self.first.weight


def layers_of(model: Network) -> ModelLayers:
    """Layers in which each parameter lies at a multiple of 16 elements, as in a group's vector."""
    parameters = [model.block.inner.weight, model.first.weight]
    found = ModelLayers(model, {each: Run(16 * at, 16 * at, 4) for at, each in enumerate(parameters)})
    for module in (model, model.first, model.block, model.last):
        found.note_call(module)
    found.find()
    return found


def test_layers_are_in_the_order_of_first_calls() -> None:
    """A tied weight belongs to the first module that uses it; an uncalled module's to the module around it."""
    model = Network()
    layers = layers_of(model)
    assert [place.runs for place in layers.layer_runs] == [(Run(16, 16, 4),), (Run(0, 0, 4),)]
    assert layers.by_parameter == {model.first.weight: 0, model.block.inner.weight: 1}
    assert layers.by_module == {model.first: 0, model.last: 0, model.block: 1}
    assert layers.needed[model.block] == [model.block.inner.weight]


def test_calls_are_noted_until_the_layers_are_found() -> None:
    """A module that is called first after that makes no layer. Copies of a module are not the model's."""
    model = Network()
    layers = layers_of(model)
    layers.note_call(model.block.inner)
    assert model.block.inner not in layers.needed
    assert layers.uses_parameters(model.block.inner)  # by its own weight
    assert layers.knows(model.first)
    assert not layers.knows(copy.copy(model.first))


def test_a_model_without_calls_is_one_layer() -> None:
    """All parameters are then used by the model itself."""
    model = Network()
    layers = ModelLayers(model, {each: Run(16 * at, 16 * at, 4) for at, each in enumerate(model.parameters())})
    layers.find()
    assert set(layers.needed) == {model}
    assert len(layers.layer_runs) == 1


def test_parts_of_modules_and_parameters() -> None:
    """Modules need the parts of their parameters, the most urgent first; a part waits for the gradients in it."""
    model = Network()
    layers = layers_of(model)
    first, inner = model.first.weight, model.block.inner.weight
    push = (Part((Run(0, 0, 20),), 0),)
    pull = (Part((Run(0, 0, 4),), -1), Part((Run(16, 16, 2),), -2), Part((Run(18, 18, 2),), 0))
    parts = LayerParts(layers, Cut(push, pull))
    assert parts.pulls == {model.first: [2, 1], model.last: [2, 1], model.block: [0]}
    assert parts.pulls_of == {first: {1, 2}, inner: {0}}
    assert parts.pushes_of == {first: [0], inner: [0]}
    assert parts.gradients_needed() == [2]
    first.requires_grad_(False)
    assert parts.gradients_needed() == [1]
