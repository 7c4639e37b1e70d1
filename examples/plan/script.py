"""A model for `smb plan` to measure: smb plan examples/plan/script.py --workers 1,4,16 --link 1Gbit."""

import torch


def model() -> torch.nn.Module:
    """Return the network, on its device."""
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.LayerNorm(256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and labels of a step of `size` samples."""
    return torch.randn(size, 64), torch.randint(10, (size,))


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss, a scalar."""
    inputs, labels = batch
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; without this function `smb plan` uses SGD."""
    return torch.optim.AdamW(model.parameters())
