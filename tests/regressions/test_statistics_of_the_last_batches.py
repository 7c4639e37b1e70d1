"""Two processes ended one training with two models: each mixed its last running statistics when it closed, and who
closed first had loaded the average before."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import smb.torch
from tests.conftest import Connect
from tests.support.training import together


@pytest.mark.parametrize("scheme", [{"scheme": "localsgd", "every": 4}, {"scheme": "diloco", "every": 3}])
def test_all_end_with_the_same_running_statistics(connect: Connect, scheme: dict[str, Any]) -> None:
    """Who closes after the others have loaded the model at the end of the batches changes nothing in it."""
    torch.manual_seed(5)
    rows = torch.randn(46, 6)
    models = [nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    joined = [
        smb.torch.join(model, optimizer, "run", client=connect(), **scheme)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, shared: smb.torch.Shared) -> None:
        for batch in shared.batches(len(rows), 2, epochs=2):
            model.zero_grad()
            model(rows[batch]).square().sum().backward()
            optimizer.step()

    together(*(functools.partial(train, *one) for one in zip(models, optimizers, joined, strict=True)))
    for shared in joined:
        shared.close()
    first, *others = (model.state_dict() for model in models)
    for other in others:
        for key in ("0.weight", "1.weight", "1.running_mean", "1.running_var"):
            assert torch.equal(first[key], other[key]), key
