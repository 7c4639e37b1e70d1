"""Training with others by four lines in a PyTorch script.

    import smb.torch
    shared = smb.torch.join(model, optimizer, "run", scheme="diloco", every=50)
    batches = shared.batches(len(dataset), 32, epochs=10)    # this process's share of the rows
    ...                       # the script as it was: optimizer.step() exchanges when the scheme says
    shared.close()            # the model is the shared one now

How each kind of tensor is shared:

- Parameters that the optimizer has or that require gradients: by the scheme, as one float32 vector. They stay where
  they are, on any device, float32, bfloat16 or float16; they are copied, block by block, when the scheme exchanges
  (smb/torch/training/model_parameters.py). Momenta are never sent.
- Frozen parameters: each process has its own. A joiner is refused if its frozen values differ from those of the group's
  maker; digests of a few values are compared.
- Floating-point buffers, most often batch normalisation's running statistics: each process keeps and uses its own while
  it trains, because they describe its own batches. After each exchange, and at the end of `batches`, it mixes them into
  NAME/state, with weight 1/members: `state += (own - state) / members`, at the servers, in the background. state_dict()
  and close() return that average, and a late joiner starts from it.
- Integer and float64 buffers (num_batches_tracked), buffers with infinities (masks), and the result of a module's
  get_extra_state(): local.

Every tensor of the two buffers can be opened by its name: client.open("run").tensor("layer3.weight").
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

import smb
import smb.train
from smb.config.pickling import refuse_pickle
from smb.errors import Error, InvalidArgumentError, NotFoundError
from smb.html_tables import described
from smb.torch.explanation import Explanation, explained
from smb.torch.tensor_values import lasting
from smb.torch.training.admission import ModelAdmission
from smb.torch.training.batches import Batches, BatchUnits
from smb.torch.training.exchanges import check_overlap, exchanges_for, parameters_for
from smb.torch.training.mixed_statistics import MixedStatistics
from smb.torch.training.model_parameters import TensorEntry
from smb.torch.training.model_tensors import ModelCheck, ModelTensors, Statistics, parts_of
from smb.torch.training.own_joins import OwnJoin, check_alone
from smb.torch.training.shared_values import state_with, values_of
from smb.train.optimizers import OptimizerUsed

if TYPE_CHECKING:
    from smb.overlap.plan import ExchangePlan

_log = logging.getLogger("smb")


class ScalarWriter(Protocol):
    """What writes numbers to a log, as torch.utils.tensorboard.SummaryWriter does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number under its tag and step."""


class Shared:
    """A model that is trained together: the result of smb.torch.join. A context manager. Use it in one thread at a
    time.

    If an exception ends the `with` block, the process leaves the group without waiting for anything. The optimizer's
    hook refers to this object: the process also leaves once nothing else refers to both.

    ```python
    with smb.torch.join(model, optimizer, "digits", scheme="localsgd", every=20) as shared:
        shared.scheme  # the group's scheme with its settings
    ```
    """

    samples: int | None
    """Samples that one optimizer.step() trains; None: not said."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        name: str,
        scheme: str | smb.train.Scheme | None,
        settings: dict[str, Any],
        client: smb.Client,
        samples: int | None,
        options: dict[str, Any],
    ) -> None:
        check_alone(model, name, client)
        self.samples = samples
        self._name = name
        self._model = model
        self._last: smb.train.Progress | None = None  # after close()
        self._optimizer_used = _used(optimizer)
        overlap = options.pop("overlap", "none")
        parts, self._trained, self._statistics = self._tensors(model, optimizer, overlap)
        self._check = ModelCheck(model, optimizer, self._trained.entries, parts.frozen)
        self._trained.verify = self._check
        self._mixed = MixedStatistics(self._statistics)
        self._open = False
        self._client = client
        self._units = self._batch_units()
        self.owned = contextlib.ExitStack()  # the client, if this object made it
        check = functools.partial(check_overlap, overlap)
        admission = ModelAdmission(client, name, self._trained, self._mixed, parts.frozen, check)
        with contextlib.ExitStack() as on_failure:
            self._exchanges = exchanges_for(overlap, model, optimizer, self._trained)
            on_failure.callback(self._exchanges.remove)
            self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())
            on_failure.callback(self._hook.remove)
            on_failure.callback(admission.withdraw)  # after Ctrl-C at the end, or a failure at another rank of a mesh
            self._join(admission, scheme, settings, options)
            on_failure.pop_all()
        self._open = True
        self._own = self._own_join(optimizer)

    # ---- what a member that is a mesh makes in another way

    def _tensors(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, overlap: str
    ) -> tuple[ModelTensors, Any, Statistics]:
        """Return the model's tensors, and the two vectors that are shared: its parameters and its statistics."""
        parts = parts_of(model, optimizer)
        return parts, parameters_for(overlap, parts.trained), Statistics(parts.statistics)

    def _batch_units(self) -> BatchUnits:
        return BatchUnits(self._client, self._name, self._mixed.mix_rest)

    def _own_join(self, optimizer: torch.optim.Optimizer) -> OwnJoin:
        # With a delay, a worker waits for the others' contributions only steps after its own.
        waits = self.worker.scheme.WAITS and not self.worker.scheme.traits.delay
        weights_id, entries, units = self.worker.weights.info.id, self._trained.entries, self._units
        return OwnJoin(self._name, self._client, weights_id, entries, optimizer, units, self.abandon, waits=waits)

    def _join(
        self,
        admission: ModelAdmission,
        scheme: str | smb.train.Scheme | None,
        settings: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        ours = weakref.ref(self)  # the model's hooks refer to the exchanges

        def samples() -> int | None:
            shared = ours()
            return None if shared is None else shared.samples

        def attach(worker: smb.train.Worker) -> None:
            worker.group.compare_optimizers(self._optimizer_used)
            self._units.attach(worker)
            self._exchanges.attach(worker, samples)

        self.worker = admission.run(scheme, settings, options, attach)

    @property
    def scheme(self) -> smb.train.Scheme:
        """The group's scheme, with its settings."""
        return self.worker.scheme

    def explain(self) -> Explanation:
        """Return what this worker's exchanges have cost so far, and what would make them cheaper: the transport, bytes,
        copies and shares of time, which tensors are placed, and advice. Print it, or look at it in a notebook.

        Makes no call, unless a server's path is still being looked for. Not for the ranks of a mesh, and with overlap=
        copies are not counted.

        ```python
        with smb.torch.join(model, optimizer, "digits", scheme="asp") as shared:
            optimizer.step()
            print(shared.explain())
        ```
        """
        self._check_open()
        copies = self._trained.copies
        return explained(self.worker, self._trained.entries, None if copies is None else copies.total_bytes)

    @property
    def progress(self) -> smb.train.Progress:
        """The group's steps and samples so far; after close(), as of then. One small read."""
        if self._last is not None:
            return self._last
        self._check_open()
        return self.worker.progress

    def on_exchange(self, listener: Callable[[smb.train.ExchangeEvent], object]) -> None:
        """Call `listener` after each exchange of this process, inside optimizer.step().

        ```python
        with smb.torch.join(model, optimizer, "digits", scheme="localsgd", every=20) as shared:
            shared.on_exchange(lambda event: print(event.step, event.bytes))
        ```
        """
        self._check_open()
        self.worker.on_exchange(listener)

    def log_to(self, writer: ScalarWriter) -> None:
        """Write the values of each exchange (ExchangeEvent.scalars) to TensorBoard, by the group's steps.

        `writer` is a torch.utils.tensorboard.SummaryWriter, or has its add_scalar(tag, value, global_step).

        ```python
        from torch.utils.tensorboard import SummaryWriter
        with SummaryWriter() as writer, smb.torch.join(model, optimizer, "digits", scheme="asp") as shared:
            shared.log_to(writer)  # smb/round, smb/members, smb/staleness, smb/norm, smb/bytes, smb/seconds
        ```
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise InvalidArgumentError(
                f"log_to: pass a SummaryWriter of torch.utils.tensorboard, not {type(writer).__name__}; for another "
                f"log use on_exchange() and ExchangeEvent.scalars()"
            )

        def write(event: smb.train.ExchangeEvent) -> None:
            for tag, value in event.scalars().items():
                writer.add_scalar(tag, value, event.step)

        self.on_exchange(write)

    def catch_up(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> int:
        """Step a learning-rate schedule until it is where the group is, and return the group's steps. Call it after
        joining.

        For schedules that count optimizer steps.

        ```python
        import torch
        with smb.torch.join(model, optimizer, "digits", scheme="localsgd", every=20) as shared:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
            shared.catch_up(scheduler)  # 0: the steps of the group so far
        ```
        """
        steps = self._steps_so_far()
        scheduler = getattr(scheduler, "scheduler", scheduler)  # Accelerate's scheduler has the scheduler inside
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\)", category=UserWarning)
            for _ in range(steps - scheduler.last_epoch):
                scheduler.step()
        return steps

    def _steps_so_far(self) -> int:
        return self.progress.steps

    def batches(self, rows: int, size: int, *, epochs: int | None = None, seed: int = 0) -> Batches:
        """Divide a data set over all processes that take part. Yields this process's batches: row numbers, int64 (n,).

        Rows 0 to `rows` - 1 are shuffled anew for each epoch (by `seed`, the same for all) and cut into batches of
        `size`. Each batch goes to one process, and counts when the next one is asked for. Batches that a process had
        when it left or died go to another process. The iteration ends when all processes together have done all
        `epochs`. `epochs` counts over the life of the training: if a script asked for 10, its second run finds no
        batches left, and has to ask for 20 or begin anew (fresh=True). Without `epochs` it is one epoch: the one that
        the training is in at the first call, and the next one at each further call. After an iteration that was left,
        as by `break`, the next call yields the rest of its epoch, with the batch that was in hand.

        len() is the number of batches that all processes together have left, and `epoch` that of the batch in hand.

        Index tensors with a batch, or pass the iterator to a torch.utils.data.DataLoader as batch_sampler: each pass
        over the loader is a further call, so without `epochs` it is the next epoch. With num_workers, batches that were
        fetched ahead count, too. Sets `samples` to the number of rows in each batch.

        The shuffle takes 8 bytes for each row. Blocks at the end of the last epoch until other processes have done
        their last batches. Raises InvalidArgumentError if others use another number of rows, size or seed, or if the
        scheme itself chooses batch sizes (use smb.train.WorkUnits).

        ```python
        with smb.torch.join(model, optimizer, "digits", scheme="localsgd", every=20) as shared:
            for batch in shared.batches(len(images), 32, epochs=1):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
        ```
        """

        def begin() -> tuple[Iterator[tuple[int, torch.Tensor]], int]:
            self._check_open()
            found, left = self._units.begin(rows, size, epochs, seed)
            return counted(self, found), left

        return Batches(begin)

    def wait(self) -> None:
        """Wait until the parameters have the values of the last exchange. Call it to look at them between two steps.

        Needed only with overlap=. Raises the errors of the exchange.

        ```python
        with smb.torch.join(model, optimizer, "digits", scheme="asp", overlap="forward") as shared:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            shared.wait()
            norm = model[0].weight.norm()
        ```
        """
        self._check_open()
        self._exchanges.wait()

    @property
    def plan(self) -> ExchangePlan | None:
        """How exchanges are hidden behind the passes. None without overlap=, and until the first
        steps were measured.

        ```python
        with smb.torch.join(model, optimizer, "digits", scheme="asp", overlap="forward") as shared:
            shared.plan  # None: no step was measured yet
        ```
        """
        return self._exchanges.plan

    @lasting
    def state_dict(self) -> dict[str, Any]:
        """Return the model's state_dict() with the group's present values in place of its shared tensors, in new
        memory.

        Use it for a checkpoint, or for load_state_dict() of a model of this kind. Blocks for one read; raises smb's
        errors.

        ```python
        with smb.torch.join(model, optimizer, "digits", scheme="localsgd", every=20) as shared:
            state = shared.state_dict()
        model.load_state_dict(state)
        ```
        """
        self._check_open()
        self._check.model()
        values = values_of(self._trained.entries, torch.from_numpy(self.worker.shared()))
        if self._mixed.buffer is not None:
            self._mixed.wait()
            values |= values_of(self._statistics.entries, torch.from_numpy(self._mixed.buffer.read(wire="exact")))
        return state_with(self._model, values)

    def close(self, *, load: bool = True) -> None:
        """Finish exchanges in progress, load the shared values into the model (unless load=False), and leave the group.

        Local steps since this worker's last exchange are contributed, too, if the scheme can do that without waiting
        for others (local SGD). With DiLoCo they are lost and their number is logged; for the ranks of a mesh they are
        lost as well. The hook is removed from the optimizer. If the training was deleted, the model stays as it is. If
        the coordinator is away, a warning is logged. A second call does nothing.

        ```python
        shared = smb.torch.join(model, optimizer, "digits", scheme="localsgd", every=20)
        optimizer.step()
        shared.close()  # the model has the shared values
        ```
        """
        if not self._open:
            return
        last: smb.train.Progress | None = None
        try:
            if self._finish(load=load) and self._mixed.buffer is not None:
                self._statistics.spread()
            with contextlib.suppress(Error):
                last = self.progress
        finally:
            self._leave()
        self._last = last

    def _finish(self, *, load: bool) -> bool:
        """Finish exchanges, and load the parameters, and the running statistics into their vector. Returns False if
        load is False, or if the training was deleted.
        """
        try:
            self._exchanges.finish()
            self.worker.membership.finish()
            self._mixed.mix_rest()
            if load:
                self._check.model()
                self.worker.close(load=True)
                if self._mixed.buffer is not None:
                    self._mixed.buffer.read(out=self._statistics.values, wire="exact")
        except NotFoundError as error:
            if not self.worker.deleted:
                raise
            _log.warning("%s; the model keeps this process's own values", error)
            return False
        return load

    def abandon(self) -> None:
        """Leave the group at once, without waiting for anything or for other ranks of a mesh. The model
        stays as it is.

        ```python
        shared = smb.torch.join(model, optimizer, "digits", scheme="localsgd", every=20)
        shared.abandon()  # the model stays as it is
        ```
        """
        if not self._open:
            return
        try:
            self._leave()
        except Error as error:
            _log.warning("training %r: could not leave it while another error was raised: %s", self._name, error)

    def __repr__(self) -> str:
        return (
            f"<smb.torch.Shared {_count(self._trained.entries):,} parameters in training {self.worker.name!r}: "
            f"{self.scheme}, {self.worker.contributions} contributions"
            f"{'' if self._open else ', closed'}>"
        )

    def __reduce__(self) -> NoReturn:
        refuse_pickle(repr(self), f"call smb.torch.join with training {self._name!r}")

    def _repr_html_(self) -> str:
        row = {
            "training": self.worker.name,
            "parameters": f"{_count(self._trained.entries):,}",
            "scheme": self.scheme,
            "contributions": self.worker.contributions,
            "state": "trains" if self._open else "closed",
        }
        return described("Shared", row)

    def __enter__(self) -> Shared:
        self._own.in_a_block = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    # ---- after each step of the optimizer

    def _stepped(self) -> None:
        if not self._open:  # the join is not done, or has failed
            return
        self._own.stepped()
        if self._exchanges.inside:
            return
        self._exchanges.stepped()
        self._mixed.stepped()

    def _leave(self) -> None:
        self._open = False
        self._own.end()
        self._hook.remove()
        with contextlib.ExitStack() as last:
            last.push(self.owned)
            last.callback(self._exchanges.remove)
            last.callback(self.worker.abandon)
            last.callback(self._units.close)

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidArgumentError(f"the model has left training {self._name!r}; call smb.torch.join again")


def _used(optimizer: torch.optim.Optimizer) -> OptimizerUsed:
    """Return the optimizer as members compare it. A schedule keeps the rate from before it as `initial_lr`."""
    rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
    known = [float(rate) for rate in rates if rate is not None]
    return OptimizerUsed(type(optimizer).__name__, max(known, default=math.nan))


def counted(shared: Shared, batches: Iterator[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the batches, each after setting `samples` to its size."""
    for epoch, batch in batches:
        shared.samples = len(batch)
        yield epoch, batch


def _count(entries: Iterable[TensorEntry]) -> int:
    """Return the number of values, without the gaps between tensors in the shared vector."""
    return sum(entry.count for entry in entries)
