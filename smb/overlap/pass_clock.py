"""The time that a model's passes take, for plans of overlap (hooks.py)."""

from __future__ import annotations

import contextlib
import time

import torch


class PassClock:
    """Seconds of computing in a step, by module and by parameter, without the time of the hooks."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device  # times on a device are known only after waiting for it
        self._learning = True
        self._last = time.perf_counter()
        self._current: torch.nn.Module | None = None
        self._forward: dict[torch.nn.Module, float] = {}
        self._backward: dict[torch.Tensor, float] = {}
        self._optimizer = 0.0

    def tells(self, *, learning: bool) -> bool:
        """Return True if this step's times were measured. `learning` says whether the next step's will be."""
        measured = bool(self._forward) and (not self._on_device or self._learning)
        self._learning = learning
        return measured

    def forget(self) -> None:
        """Begin a step."""
        self._forward, self._backward, self._optimizer = {}, {}, 0.0
        self._current = None

    def resume(self) -> None:
        """Continue after a hook."""
        self._last = time.perf_counter()

    def module(self, module: torch.nn.Module | None) -> None:
        """Note a call of a module; None if the module is not a layer."""
        self._count_forward()
        if module is not None:
            self._current = module

    def forward_ended(self) -> None:
        """Note the end of the forward pass."""
        self._count_forward()
        self._current = None
        self.resume()

    def _count_forward(self) -> None:
        if self._current is not None:
            self._forward[self._current] = self._forward.get(self._current, 0.0) + self._passed()

    def gradient(self, parameter: torch.Tensor) -> None:
        """Note that a gradient is ready."""
        self._backward[parameter] = self._backward.get(parameter, 0.0) + self._passed()

    def backward_ended(self) -> None:
        """Note that the optimizer's step begins."""
        self.resume()

    def optimized(self) -> None:
        """Note that the optimizer's step has ended."""
        self._optimizer += self._passed()

    def optimized_one(self, seconds: float) -> None:
        """Note the time of the optimizer's step for one parameter, in the backward pass."""
        self._optimizer += seconds

    def _passed(self) -> float:
        if self._on_device and self._learning:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                torch.accelerator.synchronize()
        return time.perf_counter() - self._last

    def by_layer(
        self, layers: dict[torch.Tensor, int], modules: dict[torch.nn.Module, int], count: int
    ) -> tuple[list[float], list[float], float]:
        """Return the seconds of each layer forward and backward, and of the optimizer's step."""
        forward, backward = [0.0] * count, [0.0] * count
        for module, seconds in self._forward.items():
            if module in modules:
                forward[modules[module]] += seconds
        for parameter, seconds in self._backward.items():
            backward[layers[parameter]] += seconds
        return forward, backward, self._optimizer
