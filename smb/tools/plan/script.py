"""Measures a PyTorch model of the user's: seconds of a step at two batches, and of each layer.

The script is a Python file that defines

    model()              -> the torch.nn.Module, on its device
    batch(size)          -> what one step of so many samples trains on, on that device
    loss(model, batch)   -> the loss of it, a scalar
    optimizer(model)     -> optional; the default is SGD
"""

from __future__ import annotations

import itertools
import runpy
import statistics
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smb.errors import Error, InvalidArgumentError
from smb.tools.plan.spec import Compute, Spec, scaled
from smb.train.partition import Layer

if TYPE_CHECKING:
    import torch

_NEEDED = ("model", "batch", "loss")
_STEPS = 7  # their median counts; one untimed step comes before
_SECONDS_MAX = 20.0  # limit for the steps of one batch; past it 3 steps are made


def measure_script(path: Path, batch: int) -> Spec:
    """Run a script's model at `batch` and at twice that; return it as a spec. Makes at most 19 steps.

    Raises InvalidArgumentError if the file is not such a script, Error if PyTorch is missing, and Error with the
    script's line for exceptions of the script itself.
    """
    if find_spec("torch") is None:
        raise Error("measuring a script needs PyTorch, which is not installed: python -m pip install 'torch>=2.7'")
    if not path.is_file():
        raise InvalidArgumentError(f"{path} does not exist")
    try:
        return _run(path, batch)
    except Error:
        raise
    except Exception as error:
        last = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)][-1:]
        where = f"{path}, line {last[0]}" if last else str(path)
        raise Error(f"{where}: {type(error).__name__}: {error}") from error


def _run(path: Path, batch: int) -> Spec:
    # The name is not __main__, so the script does not start a training of its own.
    found = runpy.run_path(str(path), run_name="smb_plan")
    if missing := [name for name in _NEEDED if not callable(found.get(name))]:
        names = ", ".join(f"{name}()" for name in missing)
        raise InvalidArgumentError(f"{path} must define {names}; docs/plan.md describes the script")
    return _measure(found, path.stem, batch)


def _measure(found: dict[str, Any], name: str, batch: int) -> Spec:
    import torch

    model = found["model"]()
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidArgumentError("model() must return a module with parameters to train")
    optimizer = found["optimizer"](model) if "optimizer" in found else torch.optim.SGD(trained, lr=1e-6)
    finish = _finish(trained[0].device)

    def step(data: Any) -> None:
        optimizer.zero_grad()
        loss = found["loss"](model, data)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise InvalidArgumentError(
                f"loss() must return a scalar, not {getattr(loss, 'shape', type(loss).__name__)}"
            )
        torch.autograd.backward(loss)
        optimizer.step()
        finish()

    data = {size: found["batch"](size) for size in (batch, 2 * batch)}
    times = {size: _timed(lambda at=size: step(data[at])) for size in data}  # type: ignore[misc]
    compute = Compute.through(times)
    with LayerTimer(model, finish) as watch:
        for _ in range(3):
            watch.begin()
            step(data[batch])
            watch.end()
    return Spec(name, batch, scaled(watch.layers(), compute.seconds(batch)), compute, by_layer=True)


def _timed(step: Callable[[], None]) -> float:
    step()
    times: list[float] = []
    while len(times) < _STEPS and (len(times) < 3 or sum(times) < _SECONDS_MAX):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _finish(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device is done; on the CPU there is nothing to wait for."""
    import torch

    return (lambda: None) if device.type == "cpu" else (lambda: torch.accelerator.synchronize(device))


class LayerTimer:
    """Times of the layers of a model: modules with parameters of their own, in the order of their first use.

    A layer's forward time lasts until the next layer begins. Its backward time is the time from the gradients before it
    to its own last gradient. So time between layers counts with one of them, and nothing is left out.
    """

    def __init__(self, model: torch.nn.Module, finish: Callable[[], None]) -> None:
        """`finish` waits for the device."""
        self._finish = finish
        self._owner: dict[torch.nn.Parameter, torch.nn.Module] = {}
        self._handles: list[Any] = []
        self._begun: dict[torch.nn.Module, float] = {}  # in this step, in order
        self._ready: dict[torch.nn.Module, float] = {}
        self._steps: list[tuple[float, dict[torch.nn.Module, float], dict[torch.nn.Module, float], float]] = []
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad and parameter not in self._owner:
                    self._owner[parameter] = module
        for module in dict.fromkeys(self._owner.values()):
            self._handles.append(module.register_forward_pre_hook(self._forward))
        for parameter in self._owner:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient))  # type: ignore[no-untyped-call]

    def __enter__(self) -> LayerTimer:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        self._begun, self._ready = {}, {}
        self._started = self._now()

    def end(self) -> None:
        self._steps.append((self._started, self._begun, self._ready, self._now()))

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers with medians over the steps, in seconds."""
        _, order, _, _ = self._steps[-1]
        unused = [module for module in dict.fromkeys(self._owner.values()) if module not in order]
        spent = [_spent(*step) for step in self._steps]
        made = []
        for module in [*order, *unused]:
            nbytes = sum(4 * parameter.numel() for parameter, owner in self._owner.items() if owner is module)
            forward, backward = (statistics.median(step[which].get(module, 0.0) for step in spent) for which in (0, 1))
            made.append(Layer(nbytes, forward, backward))
        return tuple(made)

    def _now(self) -> float:
        self._finish()
        return time.perf_counter()

    def _forward(self, module: torch.nn.Module, _inputs: Any) -> None:
        self._begun.setdefault(module, self._now())

    def _gradient(self, parameter: torch.nn.Parameter) -> None:
        self._ready[self._owner[parameter]] = self._now()  # the last gradient counts


Times = dict[Any, float]


def _spent(started: float, begun: Times, ready: Times, ended: float) -> tuple[Times, Times]:
    """Return the forward and backward seconds of each layer, from the times of its begin and of its gradients."""
    layers = list(begun)
    forward: Times = {}
    # The first gradient is there when the last layer's forward and backward are done: a third of that time is forward.
    first = min(ready.values(), default=ended)
    turn = begun[layers[-1]] + (first - begun[layers[-1]]) / 3 if layers else started
    begins = [started, *(begun[layer] for layer in layers[1:]), turn]
    for layer, (begin, end) in zip(layers, itertools.pairwise(begins), strict=True):
        forward[layer] = max(0.0, end - begin)
    backward: Times = {}
    now = turn
    for layer in reversed(layers):
        there = max(now, ready.get(layer, now))
        backward[layer] = there - now
        now = there
    return forward, backward
