"""How a joined model's steps are exchanged: each one inside optimizer.step(), or behind the passes (smb/overlap)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

import smb.train
from smb.torch.training.model_parameters import ModelParameters
from smb.torch.training.model_tensors import Named

if TYPE_CHECKING:
    from smb.overlap.plan import ExchangePlan


class Exchanges(Protocol):
    """What a joined model calls around its steps. smb.overlap.hooks.Overlap is one, too."""

    @property
    def plan(self) -> ExchangePlan | None:
        """How exchanges are hidden behind the passes, if they are and once it is known."""

    @property
    def inside(self) -> bool:
        """True if a step of the optimizer is running inside another one, so that no step has ended."""

    def attach(self, worker: smb.train.Worker, samples: Callable[[], int | None]) -> None:
        """Exchange through this worker from now on. `samples` returns the number of samples of a step."""

    def stepped(self) -> None:
        """Exchange after a step of the optimizer. Raises the errors of the exchange."""

    def wait(self) -> None:
        """Wait until the parameters have the values of the last exchange. Raises its errors."""

    def finish(self) -> None:
        """Wait as `wait` does, before the worker leaves."""

    def remove(self) -> None:
        """Leave the model and the optimizer as they were."""


class InEachStep:
    """Exchanges inside optimizer.step(): when it returns, the parameters have the values of the exchange."""

    plan = None
    inside = False

    def attach(self, worker: smb.train.Worker, samples: Callable[[], int | None]) -> None:
        """See Exchanges.attach."""
        self._worker, self._samples = worker, samples

    def stepped(self) -> None:
        """See Exchanges.stepped."""
        self._worker.step(self._samples())

    def wait(self) -> None:
        """Return at once."""

    def finish(self) -> None:
        """Return at once."""

    def remove(self) -> None:
        """Do nothing: there are no hooks."""


def parameters_for(overlap: str, trained: Named) -> ModelParameters:
    """Return the trained parameters, in parts if exchanges are to overlap."""
    if overlap == "none":
        return ModelParameters(trained)
    from smb.overlap.part_parameters import PartParameters

    return PartParameters(trained)


def exchanges_for(overlap: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, parameters: Any) -> Exchanges:
    """Return how steps are exchanged, with hooks in the model and the optimizer if exchanges are to overlap.
    `parameters` are those of parameters_for.
    """
    if overlap == "none":
        return InEachStep()
    from smb.overlap.hooks import Overlap

    return Overlap(model, optimizer, parameters, overlap)


def check_overlap(overlap: object, scheme: smb.train.Scheme | None = None, *, mesh: bool = False) -> None:
    """Raise InvalidArgumentError for an unknown overlap, or one that can't be used with this scheme or a mesh."""
    if overlap != "none":
        from smb.overlap import hooks

        hooks.check_overlap(overlap, scheme, mesh=mesh)
