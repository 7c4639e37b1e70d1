"""Exchanges that hide behind the passes of a step: hooks of the model and the optimizer, for smb.torch.join(overlap=).

The computing thread runs everything here. Worker's thread exchanges (smb/overlap/parts.py).

    a gradient is there      "both": step the optimizer for this parameter, and make the parts that are whole with it
    the optimizer steps      "forward": make all parts; the exchange begins. "both": make the rest
    a module is called       take over the parts that its parameters lie in, each once it came

Invariant: a parameter changes between its gradient and the next use of it, never while a graph needs it. All parts of a
module's parameters are taken over before it runs; what is called without its module is found by its gradient.

The first steps exchange without overlap, and are measured: which modules are called, in which order, how long each
layer computes, how fast the link is. Then plan.py picks the parts. Some steps are made by them, some
without overlap, and the faster way stays: what is predicted does not know who else needs a host's processors. After
twice as many steps it is planned anew if measurements have moved.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import smb.train
from smb.config.log import TRAINING
from smb.errors import Error, InvalidArgumentError
from smb.overlap.part_parameters import PartParameters
from smb.overlap.pass_clock import PassClock
from smb.overlap.plan import ExchangePlan, LayerPlace, Measured, plan_of
from smb.overlap.step_by_parameter import StepByParameter, refused
from smb.train.ledger import Run
from smb.train.partition import OVERLAPS
from smb.train.scheme import by_traits

_LEARNING = 4  # steps without overlap; the first one, which warms up, is not measured
_COMPARED = 20  # steps by a new plan, and as many without overlap, before the faster way stays
_PROBES, _PROBES_AT_ONCE = 5, 16  # small reads that tell what a message costs

_news = logging.getLogger(TRAINING)


def check_overlap(overlap: object, scheme: smb.train.Scheme | None = None, *, mesh: bool = False) -> None:
    """Raise InvalidArgumentError for an overlap that there is not, or not with this scheme or a mesh."""
    if overlap not in OVERLAPS:
        raise InvalidArgumentError(f"smb.torch.join: overlap={overlap!r} is none of {', '.join(OVERLAPS)}")
    if mesh:
        raise InvalidArgumentError(
            f"smb.torch.join: overlap={overlap!r} is not there with mesh= yet: leave one of them out"
        )
    if scheme is not None and scheme.traits.no_overlap:
        able = [name for name, kind in by_traits() if not kind.TRAITS.no_overlap]
        these = "with these settings of" if scheme.NAME in able else "for"
        raise InvalidArgumentError(
            f"smb.torch.join: overlap={overlap!r} is for {', '.join(able)}, not {these} {scheme.NAME!r}: "
            f"{scheme.traits.no_overlap}"
        )


class Overlap:
    """The hooks of one joined model. `attach` the worker once it is a member; `remove` at the end."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, trained: PartParameters, overlap: str
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._trained = trained
        self._flow = trained.flow
        self._asked = overlap
        self._now = "none"  # the overlap of the plan
        self._check_model()
        self._worker: smb.train.Worker
        self._names = {entry.tensor: entry.names[0] for entry in trained.entries}
        self._runs = {entry.tensor: Run(entry.offset, entry.offset, entry.count) for entry in trained.entries}
        self._own = {  # of each module the trained parameters that are its own
            module: [each for each in module.parameters(recurse=False) if each in self._runs]
            for module in model.modules()
        }
        self._samples: Callable[[], int | None]
        # Learned in the first steps: modules in the order of their first call, and the parameters that each needs.
        self._called: dict[torch.nn.Module, None] = {}
        self._needed: dict[torch.nn.Module, list[torch.Tensor]] = {}
        self._places: list[LayerPlace] = []
        self._layer: dict[torch.Tensor, int] = {}
        self._measured: Measured | None = None
        self.plan: ExchangePlan | None = None  # by which exchanges go; None while the first steps are measured
        self._steps = 0  # exchanged
        self._compared: ExchangePlan | None = (
            None  # a plan as long as it is compared with none; self.plan is one of both
        )
        self._next_at = 0  # the step after which to look at the plan
        self._stepped_at = 0.0  # when the last step was over
        # The parts, by module and by parameter.
        self._pulls: dict[torch.nn.Module, list[int]] = {}
        self._pulls_of: dict[torch.Tensor, set[int]] = {}
        self._pushes_of: dict[torch.Tensor, list[int]] = {}
        self._left: list[int] = []  # by part: parameters whose gradients are not there
        self._pending: set[int] = set()  # parts that are not taken over
        self._unseen: frozenset[int] | None = None  # those when the backward pass began
        self._began = False  # this step's exchange began in the backward pass
        self._clock = PassClock(any(entry.tensor.device.type != "cpu" for entry in trained.entries))
        self._gradients = StepByParameter(optimizer, self._names)
        self._steps_inside = 0  # of the optimizer: one inside of the other
        self._hooks: list[Any] = []
        self._install()

    def attach(self, worker: smb.train.Worker, samples: Callable[[], int | None]) -> None:
        """Exchange by this worker from now on; `samples` tells how many this step is over."""
        self._worker = worker
        self._samples = samples
        self._index()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._flow.close()

    # ---- for Shared

    def stepped(self) -> None:
        """Exchange after a step of the optimizer: begin, or end what began in the backward pass."""
        self._unseen = None
        if self._began:
            self._began = False
            self._flow.make_rest()
            if self._learn():
                # Parts are cut anew only where none is under way. An error is for the next step: this one is done.
                self._worker.steps.wait()
                if not self._worker.steps.failed:
                    self.wait()
                    self._replan()
        else:
            if self._settle() or self._recovered():
                self._clock.forget()
                return
            if self._learn():
                self._replan()
            self._begin()
            self._flow.make_rest()
        if self._now == "none":
            self.wait()
        self._clock.forget()

    def wait(self) -> None:
        """Wait for the exchange under way, and take all of it over. Raises what the exchange does."""
        self._tell_refusal()
        self._take_all()
        self._settle()

    def finish(self) -> None:
        """As wait, before the worker leaves: a step that a backward pass has begun is ended with what there is."""
        if self._began:
            self._began = False
            self._flow.make_rest()
        self.wait()

    # ---- hooks

    def _install(self) -> None:
        add = self._hooks.append
        for module in self._model.modules():
            if any(each in self._runs for each in module.parameters()):
                add(module.register_forward_pre_hook(_Hook(self._before_module, self._take_all)))
        add(self._model.register_forward_hook(_Hook(lambda *_: self._clock.forward_ended(), self._take_all)))
        model: Any = self._model
        add(model.register_state_dict_pre_hook(_Hook(lambda *_: self._take_all(), self._take_all)))
        parameters: list[Any] = [each for each in self._runs if each.requires_grad]
        for parameter in parameters:
            add(parameter.register_post_accumulate_grad_hook(self._gradient_there))
        add(self._optimizer.register_step_pre_hook(self._before_step))
        add(self._optimizer.register_step_post_hook(lambda *_: self._after_step()))

    def _before_module(self, module: torch.nn.Module, _: Any) -> None:
        if module not in self._own:  # copy.copy of a module shares its hooks
            return
        self._clock.module(module if self._own[module] or module in self._needed else None)
        if not self._places:
            self._called.setdefault(module)
        if torch._C._current_graph_task_id() != -1:  # checkpointing computes a part once more
            if self._began:
                self._clock.resume()
                return
        else:
            self._tell_refusal()
            if self._asked == "both" and self._gradients.waiting:
                raise refused(
                    "a module was called between backward() and optimizer.step(): gradient accumulation, several "
                    "losses, a look at the model, or a step that was left out, or failed and was not called again"
                )
        if self._pending and self._worker.steps.unfinished:
            self._again()  # a pass failed here: this is the first module of the next one
        if self._pending:
            if module.training and torch.is_grad_enabled():
                for number in self._pulls.get(module, ()):
                    self._take(number)
            else:  # a whole block may run as one function then, its modules not called
                self._take_all()
        self._clock.resume()

    def _gradient_there(self, parameter: torch.Tensor) -> None:
        self._steps_inside = 0  # if a step of the optimizer was left by an exception
        self._clock.gradient(parameter)
        if self._unseen is None:  # the first one of a backward pass
            self._unseen = frozenset(self._pending)
        if self._unseen and self._unseen & self._pulls_of[parameter]:
            raise Error(
                f"overlap={self._asked!r}: parameter {self._names[parameter]!r} was used before its module was called, "
                f"and so before its exchanged values were there: join with overlap='none', or call the module"
            )
        if self._asked == "both":
            self._gradients.check(parameter)
            if self._now == "both":
                self._step_by_parameter(parameter)
            self._gradients.used(parameter, summed=self.plan is None)
        self._clock.resume()

    def _before_step(self, _: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        if self.inside:  # one whose step() calls that of its class above, which runs hooks, too
            self._steps_inside += 1
            return
        if not self._began:
            try:
                self._tell_refusal()
                self._take_all()
                self._worker.steps.wait()
                if not self._worker.steps.lost:
                    self._settle()  # here, so that a step that raises has changed nothing, and may be called again
            except smb.train.RefusedContributionError:
                self._gradients.forget()  # they are not of the model that the parameters are now
                raise
        if self._asked == "both":
            self._gradients.check_step(args, options)
            if self._now == "both":
                self._gradients.hide()
        self._clock.backward_ended()
        self._steps_inside += 1

    def _after_step(self) -> None:
        self._steps_inside -= 1
        if not self.inside:
            self._clock.optimized()
            self._gradients.show()

    @property
    def inside(self) -> bool:
        """Whether a step of the optimizer is under way: another one inside of it, or by parameter."""
        return self._steps_inside > 0 or self._gradients.stepping

    def _step_by_parameter(self, parameter: torch.Tensor) -> None:
        """Step the optimizer for one parameter, and make the parts that this completes."""
        if not self._began and not self._worker.steps.unfinished:
            # All of the exchange before came: what is left of it are a few small calls. If they fail, that is for the
            # optimizer's step, as a graph needs the parameters now.
            self._worker.steps.wait()
            if not self._worker.steps.failed:
                self._take_all()  # of modules that were not called
                self._settle()
                self._begin()
                self._began = True
                self._left = self._counted()
        began = time.perf_counter()
        self._gradients.step(parameter)
        self._clock.optimized_one(time.perf_counter() - began)
        if self._began:
            for number in self._pushes_of.get(parameter, ()):
                self._left[number] -= 1
                if self._left[number] == 0:
                    self._flow.make(number)

    # ---- the exchange

    def _begin(self) -> None:
        if self._trained.verify is not None:
            self._trained.verify()
        if self.plan is None:
            self._flow.begin()
        else:
            self._flow.begin(self.plan.cut)
        self._pending = set(range(len(self._flow.cut.pull)))
        try:
            self._worker.start(self._samples(), self._flow.over)
        except BaseException:
            self._flow.cancel()
            self._pending.clear()
            raise

    def _again(self) -> None:
        """Exchange anew after a failure, and bring all parts once more: before any is used."""
        if not self._recovered():
            self._begin()
            self._flow.make_rest()

    def _take(self, number: int) -> None:
        """Take over a part. Raises if the exchange has failed; asked once more it leaves the part as it is."""
        if self._began and number in self._pending:
            raise refused("the parameters were looked at between backward() and optimizer.step()")
        while number in self._pending:
            if self._flow.wait(number):
                self._flow.adopt(number)
                self._pending.discard(number)
            elif self._worker.steps.lost:
                # To join again is for the next step: it changes all parameters, and a graph may need some.
                self._pending.clear()
            elif self._worker.steps.under_way:
                self._settle()
            else:  # what was done here is kept, and sent with the next step
                self._pending.clear()

    def _take_all(self) -> None:
        for number in sorted(self._pending):
            self._take(number)

    def _settle(self) -> bool:
        """Wait for the exchange under way. True if this worker joined again, with the shared model's parameters."""
        if not self._worker.steps.under_way:
            return False
        try:
            rejoined = self._worker.steps.settle()
        except smb.train.RefusedContributionError:
            self._pending.clear()
            raise
        if rejoined:
            self._pending.clear()
        else:
            self._count()
        return rejoined

    def _tell_refusal(self) -> None:
        """Take the shared model over after a refusal, where that failed, and raise the refusal."""
        if self._worker.steps.refused:
            self._recovered()

    def _recovered(self) -> bool:
        """Finish what a failed exchange has left. True if this worker joined again."""
        try:
            if not self._worker.steps.recover():
                return False
        except smb.train.RefusedContributionError:
            self._pending.clear()
            raise
        self._pending.clear()
        return True

    # ---- measuring and planning

    def _count(self) -> None:
        """Take note of an exchange that is done."""
        self._steps += 1
        flow, measured = self._flow, self._measured
        if measured is None:
            return
        measured.moved(flow.pushed.nbytes, flow.pushed.busy_s, pull=False)
        measured.moved(flow.pulled.nbytes, flow.pulled.busy_s, pull=True)
        if flow.pulled.messages and flow.pushed.messages:
            measured.closed(max(0.0, flow.pulled.first - flow.pushed.last))

    def _learn(self) -> bool:
        """After a step: measure. Return whether it is time for another plan."""
        now, before = time.perf_counter(), self._stepped_at
        self._stepped_at = now
        measured = self._measured
        if measured is None:
            if self._steps:
                if not self._places:
                    self._find_layers()
                with contextlib.suppress(Error):  # then later: the optimizer has stepped, and must not step again
                    self._measured = Measured(self._places, *self._probed())
            return False
        measured.stepped(now - before, overlapped=self._now != "none")
        if self._clock.tells(learning=self.plan is None):
            measured.computed(*self._clock.by_layer(self._layer, self._layer_of_module, len(self._places)))
        if self.plan is None:
            if self._steps == 2 * _LEARNING and not measured.ready:
                _news.warning("training %r: no overlap, as no module of the model is called", self._worker.name)
            return self._steps >= _LEARNING and measured.ready
        if self._steps < self._next_at:
            return False
        if self._compared is None and not measured.outdated(self.plan):
            self._next_at += _COMPARED
            return False
        return True

    def _replan(self) -> None:
        """Make a plan; some steps later go without overlap; some steps later decide which of both stays."""
        measured, name, compared = self._measured, self._worker.name, self._compared
        assert measured is not None
        self._next_at = self._steps + _COMPARED
        if compared is None:
            self.plan = self._planned(measured, self._asked)
            _news.info("training %r: %s", name, self.plan)
            if self.plan.chosen.overlap != "none":
                self._compared = self.plan
            else:
                self._next_at = max(self._next_at, 2 * self._steps)
        elif self.plan is compared:
            self.plan = self._planned(measured, "none")
        else:
            with_s, without_s = (measured.step_s(overlapped=each) for each in (True, False))
            self.plan = compared if with_s <= without_s else self._planned(measured, "none")
            self._compared, self._next_at = None, 2 * self._steps
            _news.info(
                "training %r: a step took %.1f ms with overlap %r and %.1f ms without: overlap %r from here on",
                *(name, 1e3 * with_s, compared.chosen.overlap, 1e3 * without_s, self.plan.chosen.overlap),
            )
        self._now = self.plan.chosen.overlap
        self._trained.recut()
        self._index()

    def _planned(self, measured: Measured, overlap: str) -> ExchangePlan:
        exchange = self._worker.scheme.traits.way
        return plan_of(self._places, measured.layers(), measured.channel(), exchange, measured.closing_s(), overlap)

    def _find_layers(self) -> None:
        """Divide the parameters over the modules that are called, in the order of their first call. Those of a module
        that is not called itself are used by the nearest one around it that is.
        """
        first = next(iter(self._called), self._model)
        needed: dict[torch.nn.Module, list[torch.Tensor]] = {module: [] for module in self._called}

        def walk(module: torch.nn.Module, around: torch.nn.Module) -> None:
            if module in self._called:
                around = module
            needed.setdefault(around, []).extend(self._own[module])
            for child in module.children():
                walk(child, around)

        walk(self._model, first)
        taken: set[torch.Tensor] = set()
        for module, parameters in needed.items():
            if parameters:
                self._needed[module] = list(dict.fromkeys(parameters))
            if new := [each for each in self._needed.get(module, ()) if each not in taken]:
                self._add_layer(new)
                taken.update(new)
        self._index()

    def _add_layer(self, parameters: list[torch.Tensor]) -> None:
        runs = sorted((self._runs[each] for each in parameters), key=lambda run: run.here)
        for each in parameters:
            self._layer[each] = len(self._places)
        self._places.append(LayerPlace(tuple(runs)))

    @property
    def _layer_of_module(self) -> dict[torch.nn.Module, int]:
        return {module: self._layer[needed[0]] for module, needed in self._needed.items()}

    def _index(self) -> None:
        """Find the parts of each module and each parameter."""
        cut = self._flow.cut if self.plan is None else self.plan.cut
        pulls, pushes = (_Ranges(parts) for parts in (cut.pull, cut.push))
        self._pulls_of = {each: set(pulls.of(run)) for each, run in self._runs.items()}
        self._pushes_of = {each: sorted(set(pushes.of(run))) for each, run in self._runs.items()}
        self._pulls = {}
        for module, needed in self._needed.items():
            numbers = set().union(*(self._pulls_of[each] for each in needed))
            self._pulls[module] = sorted(numbers, key=lambda number: -cut.pull[number].urgency)

    def _counted(self) -> list[int]:
        left = [0] * len(self._flow.cut.push)
        for parameter, numbers in self._pushes_of.items():
            if parameter.requires_grad:
                for number in numbers:
                    left[number] += 1
        return left

    def _probed(self) -> tuple[float, float]:
        """Return what a message of a few bytes takes alone, and how much of that passes for each of many at once."""
        queue, weights = self._flow.queue(), self._worker.weights
        alone = []
        for _ in range(_PROBES):
            began = time.perf_counter()
            queue.read(weights, 0, 1, wire="exact").result()
            alone.append(time.perf_counter() - began)
        began = time.perf_counter()
        for future in [queue.read(weights, 0, 1, wire="exact") for _ in range(_PROBES_AT_ONCE)]:
            future.result()
        return statistics.median(alone), (time.perf_counter() - began) / _PROBES_AT_ONCE

    def _check_model(self) -> None:
        for module in self._model.modules():
            compiled = type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
            around = isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel))
            if compiled or around or isinstance(module, torch.jit.ScriptModule):
                what = "compiled" if compiled else f"in {type(module).__name__}"
                raise InvalidArgumentError(
                    f"smb.torch.join: overlap={self._asked!r} needs the calls of the model's modules, and the model is "
                    f"{what}, which hides them: join with overlap='none', or without that"
                )


class _Hook:
    """A hook that a module has. Copies of the module, and what is pickled of it, have one that does nothing: they
    compute with the values of that moment, and exchange nothing.
    """

    def __init__(self, call: Callable[..., None], take_all: Callable[[], None]) -> None:
        self._call = call
        self._take_all = take_all

    def __call__(self, *given: Any) -> None:
        self._call(*given)

    def __reduce__(self) -> tuple[type[_IdleHook], tuple[()]]:
        self._take_all()  # a module's hooks come before the modules inside it: these are copied with new values
        return _IdleHook, ()


class _IdleHook:
    """In a copy of a joined model."""

    def __call__(self, *_: Any) -> None:
        return


class _Ranges:
    """Parts by the elements that they have."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._found = sorted((run.here, run.here + run.count, number) for number, part in enumerate(parts)
                             for run in part.runs)  # fmt: skip

    def of(self, run: Run) -> Iterator[int]:
        """Yield the parts that have some of a run."""
        for begin, end, number in self._found:
            if begin < run.here + run.count and run.here < end:
                yield number
