"""The optimizer's step in the backward pass, parameter by parameter, for overlap="both" (hooks.py)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smb.errors import Error

_CHANGES = "changes {} in its step, and would do so once for each parameter"


class StepByParameter:
    """Steps the optimizer by parameter in the backward pass, and refuses scripts that would then
    compute wrong results.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> None:
        self._held = weakref.ref(optimizer)  # the optimizer's hooks refer to this object
        self._names = names
        self._used: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}  # gradients of this step, with their versions
        # Gradients of the last step: id (to keep them would cost memory) and version.
        self._before: dict[torch.Tensor, tuple[int, int]] = {}
        # Settings of the optimizer's groups when the first gradient was ready.
        self._settings: list[dict[str, Any]] = []
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._param_groups: dict[torch.Tensor, dict[str, Any]] = {}
        self._sums: dict[torch.Tensor, torch.Tensor] = {}  # sums of the gradients, in the first steps
        self.stepping = False  # whether a step by parameter is running

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._held()
        if optimizer is None:
            raise Error("the optimizer that was given to smb.torch.join is gone; join again with the new one")
        return optimizer

    def check(self, parameter: torch.Tensor) -> None:
        """Check a gradient that is ready. Raises Error."""
        name = self._names[parameter]
        if parameter in self._used:
            raise refused(
                f"parameter {name!r} got a second gradient before optimizer.step(), as with gradient accumulation, "
                f"several losses, or a backward pass after one that failed"
            )
        grad = parameter.grad
        if grad is None:
            raise refused(f"the gradient of {name!r} was removed by another hook")
        before = self._before.get(parameter)
        if before is not None and before[0] == id(grad) and grad._version == before[1] + 1:
            raise refused(f"the gradient of {name!r} was added to that of the last step: call optimizer.zero_grad()")
        if not self._used:
            self._settings = [_settings(param_group) for param_group in self._optimizer.param_groups]
            self._param_groups = {
                each: param_group for param_group in self._optimizer.param_groups for each in param_group["params"]
            }

    def used(self, parameter: torch.Tensor, *, summed: bool) -> None:
        """Record a gradient that was used, or would have been, and its sum, because not every change of a tensor
        changes its version.
        """
        grad = parameter.grad
        assert grad is not None
        self._used[parameter] = grad, grad._version
        if summed and grad.layout == torch.strided:
            self._sums[parameter] = grad.sum()

    def step(self, parameter: torch.Tensor) -> None:
        """Step the optimizer for one parameter, with its own state and its group's settings."""
        param_group = self._param_groups.get(parameter)
        if param_group is None:
            return  # the parameter of another optimizer, or of none
        alone = {**param_group, "params": [parameter]}
        param_groups, self._optimizer.param_groups = self._optimizer.param_groups, [alone]
        self.stepping = True
        try:
            _step_of(type(self._optimizer))(self._optimizer)
        finally:
            self.stepping = False
            self._optimizer.param_groups = param_groups
        self._check_settings(_settings(alone), _settings(param_group), _CHANGES)

    def check_step(self, args: Sequence[Any], options: dict[str, Any]) -> None:
        """Check the script's own step. Raises Error."""
        if any(each is not None for each in args[1:]) or options.get("closure") is not None:
            raise refused("optimizer.step() got a closure, which computes the gradients again")
        if getattr(self._optimizer, "grad_scale", None) is not None or "grad_scaler" in options:
            raise refused("a GradScaler scales the gradients until the optimizer's step")
        for parameter, (grad, version) in self._used.items():
            same = parameter.grad is grad and grad._version == version
            if same and (total := self._sums.get(parameter)) is not None:
                same = torch.allclose(total, grad.sum(), rtol=0, atol=0, equal_nan=True)
            if not same:
                raise refused(
                    f"the gradient of {self._names[parameter]!r} was changed between backward() and optimizer.step(), "
                    f"as by clipping by norm or value, GradScaler.unscale_, or noise"
                )
        for param_group, before in zip(self._optimizer.param_groups, self._settings, strict=False):
            self._check_settings(
                _settings(param_group), before, "had its {} changed between backward() and optimizer.step()"
            )

    def _check_settings(self, now: dict[str, Any], before: dict[str, Any], how: str) -> None:
        changed = [key for key, value in now.items() if value is not before.get(key) and value != before.get(key)]
        if changed:
            raise refused(f"the optimizer {type(self._optimizer).__name__} {how.format(', '.join(changed))}")

    @property
    def waiting(self) -> bool:
        """True if there are gradients with which the script has not stepped."""
        return any(each in self._param_groups for each in self._used)  # not gradients of another optimizer

    def forget(self) -> None:
        """Drop the present gradients."""
        self._used, self._sums = {}, {}

    def hide(self) -> None:
        """Hide gradients that were used from the script's own step, which must not use them again."""
        self._hidden = [(parameter, parameter.grad) for parameter in self._used if parameter in self._param_groups]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def show(self) -> None:
        """End a step. Raises Error for an optimizer that changes its groups, since it would count each parameter as a
        step.
        """
        for param_group, before in zip(self._optimizer.param_groups, self._settings, strict=False):
            self._check_settings(_settings(param_group), before, _CHANGES)
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden = []
        self._sums = {}
        self._before = {each: (id(grad), version) for each, (grad, version) in self._used.items()}
        self._used = {}


def _settings(param_group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in param_group.items() if key != "params"}


def _step_of(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """Return the optimizer's step without the hooks of torch.optim.Optimizer, which are for the script's own step."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def refused(why: str) -> Error:
    """Return the error that says why overlap='both' does not work with this script."""
    return Error(
        f"overlap='both' steps the optimizer in the backward pass, which would give wrong results here: {why}. Join "
        f"with overlap='forward', which needs no change of the script"
    )
