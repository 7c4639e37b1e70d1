"""Exchanges that are hidden behind the passes of a step: hooks of the model and the optimizer, for
smb.torch.join(overlap=).

The computing thread runs everything here. The worker's thread exchanges (smb/overlap/parts.py).

    a gradient is ready      "both": step the optimizer for this parameter, and make the parts that are complete with it
    the optimizer steps      "forward": make all parts; the exchange begins. "both": make the remaining parts
    a module is called       take over the parts in which its parameters lie, each as soon as it has arrived

Invariant: a parameter changes between its gradient and its next use, never while a graph needs it. All parts of a
module's parameters are taken over before the module runs. If parameters are used without a call of their module, their
gradients reveal it.

The hooks say when something happens. Other files act on it: step_exchange.py sends a step and takes it over,
step_meter.py measures, planner.py decides about plans, model_layers.py knows which parts a module needs, and
step_by_parameter.py steps the optimizer in the backward pass.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

import smb.train
from smb.config.log import TRAINING
from smb.errors import Error, InvalidArgumentError
from smb.overlap.model_layers import LayerParts, ModelLayers
from smb.overlap.part_parameters import PartParameters
from smb.overlap.pass_clock import PassClock
from smb.overlap.plan import ExchangePlan, Measured
from smb.overlap.planner import Planner
from smb.overlap.step_by_parameter import StepByParameter, refused
from smb.overlap.step_exchange import StepExchange
from smb.overlap.step_meter import StepMeter
from smb.train.ledger import Run
from smb.train.partition import OVERLAPS
from smb.train.scheme import by_traits

_news = logging.getLogger(TRAINING)


def check_overlap(overlap: object, scheme: smb.train.Scheme | None = None, *, mesh: bool = False) -> None:
    """Raise InvalidArgumentError for an unknown overlap, or one that can't be used with this scheme or a mesh."""
    if overlap not in OVERLAPS:
        raise InvalidArgumentError(f"smb.torch.join: overlap must be one of {', '.join(OVERLAPS)}, not {overlap!r}")
    if mesh:
        raise InvalidArgumentError(
            f"smb.torch.join: overlap={overlap!r} does not work with mesh= yet; leave one of them out"
        )
    if scheme is not None and scheme.traits.no_overlap:
        able = [name for name, kind in by_traits() if not kind.TRAITS.no_overlap]
        these = "with these settings of" if scheme.NAME in able else "for"
        raise InvalidArgumentError(
            f"smb.torch.join: overlap={overlap!r} is for {', '.join(able)}, not {these} {scheme.NAME!r}: "
            f"{scheme.traits.no_overlap}"
        )


class Overlap:
    """The hooks of one joined model. Call `attach` once the worker is a member, and `remove` at the end."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, trained: PartParameters, overlap: str
    ) -> None:
        _check_model(model, overlap)
        self._model = model
        self._trained = trained
        self._asked = overlap
        self._names = {entry.tensor: entry.names[0] for entry in trained.entries}
        self._layers = ModelLayers(
            model, {entry.tensor: Run(entry.offset, entry.offset, entry.count) for entry in trained.entries}
        )
        self._clock = PassClock(any(entry.tensor.device.type != "cpu" for entry in trained.entries))
        self._meter = StepMeter(self._clock, self._layers, trained.flow)
        self._planner = Planner(overlap)
        self._exchange = StepExchange(trained, self._meter.exchange_done)
        self._gradients = StepByParameter(optimizer, self._names)
        self._worker: smb.train.Worker
        self._parts: LayerParts
        # By pushed part: the number of parameters whose gradients are not ready yet.
        self._gradients_left: list[int] = []
        self._unseen: frozenset[int] | None = None  # parts that were pending when the backward pass began
        self._optimizer_steps = 0  # running calls of step(), one inside another
        self._hooks: list[Any] = []
        self._install(optimizer)

    def attach(self, worker: smb.train.Worker, samples: Callable[[], int | None]) -> None:
        """Exchange through this worker from now on. `samples` returns the number of samples of a step."""
        self._worker = worker
        self._exchange.attach(worker, samples)
        self._index()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._trained.flow.close()

    # ---- for Shared

    @property
    def plan(self) -> ExchangePlan | None:
        """The plan that exchanges follow. None while the first steps are measured."""
        return self._planner.plan

    def stepped(self) -> None:
        """Exchange after a step of the optimizer: begin, or end what began in the backward pass."""
        exchange = self._exchange
        self._unseen = None
        if exchange.in_backward:
            exchange.end_backward()
            if (measured := self._measure()) is not None:
                # Parts are cut anew only between exchanges. This step is done, so the next one raises an error of the
                # exchange.
                exchange.steps.wait()
                if not exchange.steps.failed:
                    exchange.wait()
                    self._advance(measured)
        else:
            if exchange.finish() or exchange.recover():
                self._clock.forget()
                return
            if (measured := self._measure()) is not None:
                self._advance(measured)
            exchange.begin(self._planner.cut)
            self._trained.flow.make_rest()
        if self._planner.overlap == "none":
            exchange.wait()
        self._clock.forget()

    def wait(self) -> None:
        """Wait for the exchange in progress, and take over all of it. Raises the errors of the exchange."""
        self._exchange.wait()

    def finish(self) -> None:
        """Wait as `wait` does, before the worker leaves. A step that began in a backward pass is ended as it is."""
        if self._exchange.in_backward:
            self._exchange.end_backward()
        self._exchange.wait()

    # ---- hooks

    def _install(self, optimizer: torch.optim.Optimizer) -> None:
        add, take_all = self._hooks.append, self._exchange.take_all
        for module in self._model.modules():
            if any(each in self._layers.runs for each in module.parameters()):
                add(module.register_forward_pre_hook(_Hook(self._before_module, take_all)))
        add(self._model.register_forward_hook(_Hook(lambda *_: self._clock.forward_ended(), take_all)))
        model: Any = self._model
        add(model.register_state_dict_pre_hook(_Hook(lambda *_: take_all(), take_all)))
        parameters: list[Any] = [each for each in self._layers.runs if each.requires_grad]
        # Python's collector does not look into a tensor's hooks: what they refer to would never be freed.
        found = weakref.WeakMethod(self._gradient_there)

        def gradient_there(parameter: torch.Tensor) -> None:
            if (call := found()) is not None:
                call(parameter)

        for parameter in parameters:
            add(parameter.register_post_accumulate_grad_hook(gradient_there))
        add(optimizer.register_step_pre_hook(self._before_step))
        add(optimizer.register_step_post_hook(lambda *_: self._after_step()))

    def _before_module(self, module: torch.nn.Module, _: Any) -> None:
        if not self._layers.knows(module):
            return
        exchange = self._exchange
        self._clock.module(module if self._layers.uses_parameters(module) else None)
        self._layers.note_call(module)
        if torch._C._current_graph_task_id() != -1:  # checkpointing computes a part of the model again
            if exchange.in_backward:
                self._clock.resume()
                return
        else:
            exchange.raise_refusal()
            if self._asked == "both" and self._gradients.waiting:
                raise refused(
                    "a module was called between backward() and optimizer.step(), as with gradient accumulation, "
                    "several losses, an evaluation in between, or a step that was left out, or failed and was not "
                    "repeated"
                )
        if exchange.pending and exchange.steps.unfinished:
            exchange.begin_again(self._planner.cut)  # a pass failed, and this is the first module of the next one
        if exchange.pending:
            if module.training and torch.is_grad_enabled():
                for number in self._parts.pulls.get(module, ()):
                    exchange.take(number)
            else:  # without gradients a whole block may run as one function, without calls of its modules
                exchange.take_all()
        self._clock.resume()

    def _gradient_there(self, parameter: torch.Tensor) -> None:
        self._optimizer_steps = 0  # if an exception ended a step of the optimizer
        self._clock.gradient(parameter)
        if self._unseen is None:  # the first gradient of a backward pass
            self._unseen = frozenset(self._exchange.pending)
        if self._unseen and self._unseen & self._parts.pulls_of[parameter]:
            raise Error(
                f"overlap={self._asked!r}: parameter {self._names[parameter]!r} was used before its module was called, "
                f"and so before its exchanged values had arrived: join with overlap='none', or call the module"
            )
        if self._asked == "both":
            self._gradients.check(parameter)
            if self._planner.overlap == "both":
                self._step_by_parameter(parameter)
            self._gradients.used(parameter, summed=self._planner.plan is None)
        self._clock.resume()

    def _before_step(self, _: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        if self.inside:  # an optimizer may call its base class's step(), which runs hooks, too
            self._optimizer_steps += 1
            return
        exchange = self._exchange
        if not exchange.in_backward:
            try:
                exchange.raise_refusal()
                exchange.take_all()
                exchange.steps.wait()
                if not exchange.steps.lost:
                    # Before the step, so that a step that raises has changed nothing and can be repeated.
                    exchange.finish()
            except smb.train.RefusedContributionError:
                self._gradients.forget()  # the gradients belong to parameters that were replaced
                raise
        if self._asked == "both":
            self._gradients.check_step(args, options)
            if self._planner.overlap == "both":
                self._gradients.hide()
        self._clock.backward_ended()
        self._optimizer_steps += 1

    def _after_step(self) -> None:
        self._optimizer_steps -= 1
        if not self.inside:
            self._clock.optimized()
            self._gradients.show()

    @property
    def inside(self) -> bool:
        """True if a step of the optimizer is running: one that calls another step(), or one by parameter."""
        return self._optimizer_steps > 0 or self._gradients.stepping

    def _step_by_parameter(self, parameter: torch.Tensor) -> None:
        """Step the optimizer for one parameter, and make the parts that are complete with it."""
        exchange = self._exchange
        if not exchange.in_backward and not exchange.steps.unfinished:
            # All parts of the last exchange have arrived, and only a few small calls of it are left. If they fail, the
            # optimizer's next step handles that, because a graph needs the parameters now.
            exchange.steps.wait()
            if not exchange.steps.failed:
                exchange.take_all()  # parts of modules that were not called
                exchange.finish()
                exchange.begin(self._planner.cut)
                exchange.in_backward = True
                self._gradients_left = self._parts.gradients_needed()
        began = time.perf_counter()
        self._gradients.step(parameter)
        self._clock.optimized_one(time.perf_counter() - began)
        if exchange.in_backward:
            for number in self._parts.pushes_of.get(parameter, ()):
                self._gradients_left[number] -= 1
                if self._gradients_left[number] == 0:
                    self._trained.flow.make(number)

    # ---- plans

    def _measure(self) -> Measured | None:
        """Record a step. Returns the measurements if a new plan is due."""
        meter, planner = self._meter, self._planner
        measured = meter.step_done(
            self._worker.weights, overlapped=planner.overlap != "none", learning=planner.plan is None
        )
        if measured is None:
            self._index()  # the layers may have been found
            return None
        if planner.hopeless(meter.exchanges, measured):
            _news.warning(
                "training %r: exchanges do not overlap, because the model computes without calling its modules",
                self._worker.name,
            )
        return measured if planner.due(meter.exchanges, measured) else None

    def _advance(self, measured: Measured) -> None:
        """Continue with the next plan. Called when no exchange is in progress."""
        if news := self._planner.advance(self._meter.exchanges, measured, self._worker.scheme.traits.way):
            _news.info("training %r: %s", self._worker.name, news)
        self._trained.recut()
        self._index()

    def _index(self) -> None:
        """Find the parts of each module and each parameter."""
        self._parts = LayerParts(self._layers, self._planner.cut or self._trained.flow.cut)


def _check_model(model: torch.nn.Module, overlap: str) -> None:
    """Raise InvalidArgumentError for a model that hides the calls of its modules."""
    for module in model.modules():
        compiled = type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        around = isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel))
        if compiled or around or isinstance(module, torch.jit.ScriptModule):
            what = "compiled" if compiled else f"in {type(module).__name__}"
            raise InvalidArgumentError(
                f"smb.torch.join: overlap={overlap!r} needs the calls of the model's modules, and the model is "
                f"{what}, which hides them: join with overlap='none', or with the model before that"
            )


class _Hook:
    """A hook of a module. Copies and pickles of the module get a hook that does nothing: they compute with the values
    of that moment, and exchange nothing.
    """

    def __init__(self, call: Callable[..., None], take_all: Callable[[], None]) -> None:
        self._call = call
        self._take_all = take_all

    def __call__(self, *given: Any) -> None:
        self._call(*given)

    def __reduce__(self) -> tuple[type[_IdleHook], tuple[()]]:
        # A module's hooks are copied before the modules inside it, which are then copied with the new values.
        self._take_all()
        return _IdleHook, ()


class _IdleHook:
    """A hook in a copy of a joined model; it does nothing."""

    def __call__(self, *_: Any) -> None:
        return
