"""Training with others in three lines of a PyTorch script.

    import smb.torch
    shared = smb.torch.join(model, optimizer, "run", scheme="diloco", every=50)
    batches = shared.batches(len(dataset), 32, epochs=10)    # this process's share of the rows
    ...                       # the script as it was: optimizer.step() exchanges when the scheme says
    shared.close()            # the model is the shared one now

How each kind of tensor is shared:

- Parameters that the optimizer has or that require gradients: by the scheme, as one float32 vector. They stay where
  they are, on any device, float32, bfloat16 or float16; what is exchanged is copied, by pieces, when the scheme
  exchanges (smb/torch/model_parameters.py). Momenta are never sent.
- Frozen parameters: each process brings its own. A joiner is refused if its frozen values differ from those of the
  group's maker: a digest of a few of them is compared.
- Floating-point buffers, batch normalisation's running statistics above all: each process keeps and uses its own while
  it trains, as they describe the batches that it sees. After each exchange, and at the end of `batches`, it mixes them
  into NAME/state, with weight 1/members: `state += (own - state) / members`, at the servers, in the background.
  state_dict() and close() give that average; a late joiner starts from it.
- Integer and float64 buffers (num_batches_tracked), buffers with infinities (masks), and what a module's
  get_extra_state() gives: local.

Every tensor of the two buffers can be opened by its name: client.open("run").tensor("layer3.weight").
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import smb
import smb.train
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError
from smb.tensors import TensorTable
from smb.torch.mixed_statistics import STATE, MixedStatistics
from smb.torch.model_parameters import ModelParameters, TensorEntry
from smb.torch.model_tensors import ModelCheck, Parts, Statistics, mark_of, parts_of, plain_name
from smb.torch.tensor_values import lasting
from smb.train.group import clear, copies_of, keeping, view
from smb.train.steps import there
from smb.train.worker import take_part

if TYPE_CHECKING:
    from smb.overlap.hooks import Overlap
    from smb.overlap.plan import ExchangePlan

TIED = "smb.torch.tied"  # in a buffer's metadata: further name -> the name in the table
FROZEN = "smb.torch.frozen"  # in a buffer's metadata: the mark of the maker's frozen parameters
_JOIN_TTL_S = 30.0

_log = logging.getLogger("smb")
_joined: weakref.WeakSet[Shared] = weakref.WeakSet()


@lasting
def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    name: str,
    *,
    scheme: str | smb.train.Scheme | None = None,
    coordinator: str | None = None,
    client: smb.Client | None = None,
    samples: int | None = None,
    guards: smb.train.Guards | None = None,
    lease: float | None = None,
    fresh: bool = False,
    servers: Any = None,
    stripe: Any = None,
    wire: str | None = None,
    replicas: int | None = None,
    mesh: Any = None,
    overlap: str = "none",
    **settings: Any,
) -> Shared:
    """Train the model together with all processes that join the same name. Returns when the model has the shared
    values.

    ```python
    shared = smb.torch.join(model, optimizer, "digits", scheme="localsgd", every=20)
    for batch in shared.batches(len(images), 32, epochs=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    shared.close()
    ```

    The first process that joins makes the group, with its model's values. Later ones get the current values. After each
    optimizer.step() the scheme may exchange: it blocks as the scheme says, and changes the parameters in place. A step
    without an exchange takes no time that grows with the model.

    - `optimizer`: of several, pass the one that steps last, with all parameters that require gradients. A wrapped one
      (Accelerate's, Lightning's) is found by its `.optimizer`.
    - `scheme` is a scheme of smb.train, or the name of one with its settings as further arguments. Settings that are
      left out are the group's, or the defaults if there is no group. None adopts all of the group's.
    - `coordinator` is an address (default: $SMB_COORDINATOR, else 127.0.0.1:7070). Or pass a `client`, which stays
      open.
    - `samples` is the number of samples that a step trains. Statistics count them, and with token_weights=True they are
      the weight of a contribution. None: none are counted. Shared.batches() sets it; set `samples` of the result if you
      make batches yourself.
    - `fresh=True` begins anew: it deletes a training of this name in which nobody is alive.
    - `guards`, `lease`, `servers`, `stripe`, `wire` and `replicas` are those of smb.train.join.
    - `mesh`, a torch.distributed DeviceMesh, makes its ranks one member. Each rank calls join() with a client of its
      own, and moves its own shards: DTensors of fully_shard or parallelize_module, and tensors that all ranks have
      alike, as with DDP. Rank 0 of the mesh speaks for all. All ranks step, and call methods of the result, together.
      If one of them dies, the member dies.
    - `overlap` hides the exchanges of ASP, SSP, R2SP and BSP behind the forward and backward passes (docs/training.md).
      With "forward" the script stays as it is: optimizer.step() returns at once, and each module waits for its own
      parameters when it is called. "both" also steps the optimizer in the backward pass, parameter by parameter. It
      raises Error where that would be wrong: clipping, accumulation, closures, GradScaler. Errors of an exchange come
      out of the next call of a module, or of the optimizer's next step. Not with mesh=, nor with a compiled model.

    The model may be on any device, compiled, or in DistributedDataParallel. Its trained parameters are float32,
    bfloat16 or float16.

    Raises InvalidArgumentError if the model cannot be shared or already is, or if settings or tensors differ from the
    group's. Raises NotFoundError if there is no group and no scheme is given, AlreadyExistsError with fresh=True if
    others are alive, and smb's other errors if the cluster fails. The model then has its former values, and nothing of
    this join stays. Afterwards optimizer.step() raises smb.train.RefusedContributionError if a guard refuses a
    contribution (for example NaN): the model is the shared one again, and the optimizer's state unchanged. It raises
    NotFoundError if the training was deleted; close() succeeds then.
    """
    if client is not None and coordinator is not None:
        raise InvalidArgumentError("smb.torch.join: pass coordinator= or client=, not both")
    if settings and not isinstance(scheme, str):
        raise InvalidArgumentError(
            f"smb.torch.join: {', '.join(settings)}: settings belong to a scheme that is given by its name"
        )
    inner = _unwrapped(optimizer)
    if not isinstance(model, torch.nn.Module) or inner is None:
        raise InvalidArgumentError(
            f"smb.torch.join: first the model, then the optimizer, not {type(model).__name__} and "
            f"{type(optimizer).__name__}"
        )
    _check_overlap(overlap, mesh=mesh is not None)
    placement = {"servers": servers, "stripe": stripe, "wire": wire, "replicas": replicas}
    options: dict[str, Any] = {key: value for key, value in placement.items() if value is not None}
    with contextlib.ExitStack() as on_failure:
        if client is None:
            client = on_failure.enter_context(smb.connect(coordinator))
        options |= {"guards": guards, "lease": lease, "fresh": fresh}
        if mesh is None:
            options["overlap"] = overlap
            shared = Shared(model, inner, name, scheme, settings, client, samples, options)
        else:
            from smb.torch.mesh import MeshShared  # with torch.distributed.tensor, which takes a second

            shared = MeshShared(model, inner, name, scheme, settings, client, samples, options, mesh)
        shared._owned = on_failure.pop_all()
    return shared


class Shared:
    """A model that is trained together: the result of smb.torch.join. A context manager. Use it in one thread at a
    time.

    Leaving the `with` block by an exception leaves the group without waiting for anything.
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
        _check_free(model)
        self.samples = samples
        self._name = name
        self._model = model
        parts = self._parts(model, optimizer)
        self._asked_overlap: str = options.pop("overlap", "none")
        self._trained = self._parameters(parts)
        self._check = ModelCheck(model, optimizer, self._trained.entries, parts.frozen)
        self._trained.verify = self._check
        self._statistics = Statistics(parts.statistics)
        self._mixed = MixedStatistics(self._statistics, self._collect_statistics)
        self._open = False
        self._client = client
        self._units: smb.train.WorkUnits | None = None  # of batches()
        self._owned = contextlib.ExitStack()  # the client, where it is ours
        self._overlap: Overlap | None = None
        self._new: smb.train.Worker | None = None  # while the join may fail
        with contextlib.ExitStack() as on_failure:
            if self._asked_overlap != "none":
                from smb.overlap.hooks import Overlap

                self._overlap = Overlap(model, optimizer, self._trained, self._asked_overlap)
                on_failure.callback(self._overlap.remove)
            self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())
            on_failure.callback(self._hook.remove)
            on_failure.callback(self._withdraw)  # Ctrl-C at the end of the join, or another rank of a mesh that failed
            self._join(name, scheme, settings, parts, options)
            on_failure.pop_all()
        self._new = None
        self._open = True
        _joined.add(self)

    def _parts(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Parts:
        return parts_of(model, optimizer)

    def _parameters(self, parts: Parts) -> Any:
        if self._asked_overlap == "none":
            return ModelParameters(parts.trained)
        from smb.overlap.part_parameters import PartParameters

        return PartParameters(parts.trained)

    def _join(
        self,
        name: str,
        scheme: str | smb.train.Scheme | None,
        settings: dict[str, Any],
        parts: Parts,
        options: dict[str, Any],
    ) -> None:
        """Become a member. Nothing of the model is changed before all that can fail is done."""
        copies = copies_of(self._client, name, options.get("replicas")) or 1
        # Kept from before joining until the state is there, so that both buffers are of one maker.
        with keeping(self._client.lock(f"{name}/{STATE}", ttl=_JOIN_TTL_S, replicas=copies)):
            self._join_locked(name, scheme, settings, parts, options)
        self._mixed.joined()

    def _join_locked(
        self,
        name: str,
        scheme: str | smb.train.Scheme | None,
        settings: dict[str, Any],
        parts: Parts,
        options: dict[str, Any],
    ) -> None:
        client, mark = self._client, mark_of(parts.frozen) if parts.frozen else None
        group, fresh = None, options.pop("fresh")
        if fresh:
            chosen = _scheme(scheme, settings, None)
            _check_overlap(self._asked_overlap, chosen)  # before anything is deleted
            clear(client, name, self._trained, chosen, options["lease"], options.get("replicas"))
        with contextlib.suppress(NotFoundError):
            group = view(client, name)
            _compare(group.weights, self._trained.table)
            _compare_frozen(group.weights, mark)
        chosen = _scheme(scheme, settings, group.scheme if group else None)
        _check_overlap(self._asked_overlap, chosen or (group.scheme if group else None))
        metadata = _metadata(self._trained) | ({FROZEN: mark} if mark else {})
        guards, lease = options.pop("guards"), options.pop("lease")
        self.worker = self._new = take_part(
            client, name, self._trained, chosen, guards, lease, metadata=metadata, **options
        )
        try:
            _compare(self.worker.weights, self._trained.table)  # another may have made it meanwhile
            _compare_frozen(self.worker.weights, mark)
            if fresh and not self.worker.made:
                raise AlreadyExistsError(f"join of training {name!r} with fresh=True: another made it at this moment")
            statistics = self._statistics
            self._mixed.join(
                client, self.worker, _metadata(statistics), lambda state: _compare(state, statistics.table)
            )
            self.worker.membership.begin()
            if self._mixed.buffer is not None:
                self._statistics.spread()
            if self._overlap is not None:
                self._overlap.attach(self.worker, lambda: self.samples)
            self.worker.membership.announce()
            _say_idle(name, self._trained.entries)
        except BaseException:
            if self._withdraw() and self._mixed.buffer is not None:
                with contextlib.suppress(Error):  # the reason of the failed join matters more
                    client.delete(self._mixed.buffer, missing_ok=True)
            raise

    def _withdraw(self) -> bool:
        """Leave after a join that failed, if it had come to that. Returns whether the group is gone.

        Without the lock of the join its state stays then, as it may be another's by now; the next maker deletes it.
        """
        worker, self._new = self._new, None
        return worker is not None and worker.membership.withdraw()

    @property
    def scheme(self) -> smb.train.Scheme:
        """The group's scheme, with its settings."""
        return self.worker.scheme

    @property
    def progress(self) -> smb.train.Progress:
        """The group's steps and samples so far. One small read."""
        self._check_open()
        return self.worker.progress

    def on_exchange(self, listener: Callable[[smb.train.ExchangeEvent], object]) -> None:
        """Call `listener` after each exchange of this process, inside optimizer.step()."""
        self._check_open()
        self.worker.on_exchange(listener)

    def catch_up(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> int:
        """Step a learning-rate schedule until it is where the group is, and return the group's steps. Call it after
        joining.

        For schedules that count optimizer steps.
        """
        steps = self._steps_so_far()
        scheduler = getattr(scheduler, "scheduler", scheduler)  # Accelerate's has it inside
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\)", category=UserWarning)
            for _ in range(steps - scheduler.last_epoch):
                scheduler.step()
        return steps

    def _steps_so_far(self) -> int:
        return self.progress.steps

    def batches(self, rows: int, size: int, *, epochs: int | None = None, seed: int = 0) -> Iterator[torch.Tensor]:
        """Divide a data set over all processes that take part. Yields this process's batches: row numbers, int64 (n,).

        Rows 0 to `rows` - 1 are shuffled anew for each epoch (by `seed`, the same for all) and cut into batches of
        `size`. Each batch goes to one process, and counts when the next one is asked for. Batches that a process had
        when it left or died go to another one. The iteration ends when all processes together have done all `epochs`
        (None: never). `epochs` counts over the life of the training: a second run of a script that asked for 10 finds
        none left; it asks for 20, or begins anew (fresh=True).

        Index tensors with a batch, or pass the iterator to a torch.utils.data.DataLoader as batch_sampler; with
        num_workers, batches that were fetched ahead count, too. Sets `samples` to each batch's rows.

        The shuffle takes 8 bytes for each row. Blocks, at the end of an epoch's batches, for the last ones of others.
        Raises InvalidArgumentError if others use another number of rows, size or seed, or if the scheme itself chooses
        batch sizes (use smb.train.WorkUnits).
        """
        self._check_open()
        self._open_units(rows, size, epochs, seed)
        return self._batches(self._units, rows, seed, epochs)

    def _open_units(self, rows: int, size: int, epochs: int | None, seed: int) -> None:
        if self.worker.batch_size is not None:
            raise InvalidArgumentError("batches: the scheme decides how large a batch is; use smb.train.WorkUnits")
        if self._units is not None:
            self._units.close()
        name = f"{self.worker.name}/units"
        self._units = smb.train.WorkUnits(self._client, name, rows, size, seed, epochs=epochs, worker=self.worker)

    def _batches(
        self, units: smb.train.WorkUnits | None, rows: int, seed: int, epochs: int | None
    ) -> Iterator[torch.Tensor]:
        order, shuffled, taken = torch.empty(0, dtype=torch.int64, device="cpu"), -1, 0
        while (unit := self._taken(units)) is not None:
            if unit.epoch != shuffled:
                shuffled = unit.epoch
                order = torch.from_numpy(np.random.default_rng([seed, shuffled]).permutation(rows))
            self.samples = unit.count
            taken += 1
            yield order[unit.start : unit.start + unit.count]
        if not taken:
            _log.warning(
                "training %r: all batches of all%s epochs are done; epochs= counts from its first run on: ask for "
                "more, or begin anew: join(..., fresh=True), or under another name",
                self._name,
                "" if epochs is None else f" {epochs}",
            )

    def _taken(self, units: smb.train.WorkUnits | None) -> smb.train.Unit | None:
        assert units is not None
        with there(self.worker.group):
            return units.take(self._mixed.mix_rest)

    def wait(self) -> None:
        """Wait until the parameters have the values of the last exchange. Call it to look at them between two steps.

        Needed only with overlap=. Raises what the exchange raises.
        """
        self._check_open()
        if self._overlap is not None:
            self._overlap.wait()

    @property
    def plan(self) -> ExchangePlan | None:
        """How exchanges are hidden behind the passes; None without overlap=, and until the first steps were
        measured.
        """
        return None if self._overlap is None else self._overlap.plan

    @lasting
    def state_dict(self) -> dict[str, Any]:
        """Return the model's state_dict() with the group's present values in place of its shared tensors, in new
        memory.

        Use it for a checkpoint, or for load_state_dict() of a model of this kind. Blocks for one read; raises smb's
        errors.
        """
        self._check_open()
        self._check.model()
        values = values_of(self._trained.entries, torch.from_numpy(self.worker.shared()))
        if self._mixed.buffer is not None:
            self._mixed.wait()
            values |= values_of(self._statistics.entries, torch.from_numpy(self._mixed.buffer.read(wire="exact")))
        return self._state_with(values)

    def _state_with(self, values: dict[str, torch.Tensor]) -> dict[str, Any]:
        own: dict[str, Any] = self._model.state_dict()
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                # Tensors that are not shared (integers) are copied too: nothing returned is the model's memory.
                shared = values.get(plain_name(self._model, key))
                own[key] = value.detach().clone() if shared is None else shared.to(value.device)
        return own

    def close(self, *, load: bool = True) -> None:
        """Finish exchanges in progress, load the shared values into the model (unless load=False), and leave the group.

        Local steps since this worker's last exchange are contributed, too, if the scheme can do that without waiting
        for others (local SGD). They are lost with DiLoCo, which logs how many, and for the ranks of a mesh. The hook is
        removed from the optimizer. If the training was deleted, the model stays as it is. If the coordinator is away, a
        warning is logged. A second call does nothing.
        """
        if not self._open:
            return
        try:
            if self._finish(load=load) and self._mixed.buffer is not None:
                self._statistics.spread()
        finally:
            self._leave()

    def _finish(self, *, load: bool) -> bool:
        """Finish what is under way, and load the parameters, and the running statistics into their vector. False: not
        that, or there is nothing to load any more."""
        try:
            if self._overlap is not None:
                self._overlap.finish()
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
            _log.warning("%s; the model is this process's own", error)
            return False
        return load

    def abandon(self) -> None:
        """Leave the group at once, without waiting for anything or for other ranks of a mesh. The model
        stays as it is.
        """
        if not self._open:
            return
        try:
            self._leave()
        except Error as error:
            _log.warning("could not leave the group on the way out of an error: %s", error)

    def __repr__(self) -> str:
        return (
            f"<smb.torch.Shared {self._trained.size:,} parameters in training {self.worker.name!r}: "
            f"{self.scheme}, {self.worker.contributions} contributions"
            f"{'' if self._open else ', closed'}>"
        )

    def __enter__(self) -> Shared:
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
        if not self._open:  # a join that is not done, or was not to be
            return
        if self._overlap is None:
            self.worker.step(self.samples)
        elif self._overlap.inside:
            return
        else:
            self._overlap.stepped()
        self._mixed.stepped()

    def _collect_statistics(self) -> None:
        self._statistics.collect()

    # ---- coming and going

    def _leave(self) -> None:
        self._open = False
        self._hook.remove()
        with contextlib.ExitStack() as last:
            last.push(self._owned)
            if self._overlap is not None:
                last.callback(self._overlap.remove)
            last.callback(self.worker.abandon)
            if self._units is not None:
                last.callback(self._leave_units, self._units)

    def _leave_units(self, units: smb.train.WorkUnits) -> None:
        try:
            units.close()
        except NotFoundError as error:
            _log.debug("%s", error)
        except Error as error:
            _log.warning("training %r: could not hand back what was in hand: %s", self.worker.name, error)

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidArgumentError(f"the model has left training {self._name!r}; smb.torch.join it again")


@lasting
def shared_state_dict(client: smb.Client, name: str) -> dict[str, torch.Tensor]:
    """Return a group's shared values by name, without taking part: float32 tensors on the CPU, exact.

    ```python
    model.load_state_dict(smb.torch.shared_state_dict(client, "digits"), strict=False)
    ```

    Frozen parameters, and integer and float64 buffers, belong to each process and are not in it: hence strict=False if
    the model has some. (PyTorch accepts a state without batch normalisation's num_batches_tracked.) Blocks for two
    reads. Raises NotFoundError, and InvalidArgumentError for a group that was not made by smb.torch.join.
    """
    pairs = [(client.open(name), smb.train.shared(client, name))]
    with contextlib.suppress(NotFoundError):
        state = client.open(f"{name}/{STATE}")
        pairs.append((state, state.read(wire="exact")))
    found: dict[str, torch.Tensor] = {}
    for buffer, values in pairs:
        metadata = buffer.metadata
        table = _table(buffer)
        found |= {key: torch.from_numpy(array) for key, array in table.views(values).items()}
        found |= {other: found[key] for other, key in metadata.get(TIED, {}).items()}
    return found


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer whose step() is called in the end: wrappers have it as `.optimizer`."""
    seen: list[Any] = []
    while not any(optimizer is each for each in seen) and hasattr(optimizer, "optimizer"):
        seen.append(optimizer)
        optimizer = optimizer.optimizer
    hooked = isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_optimizer_step_post_hooks")
    return optimizer if hooked else None


def _metadata(vector: ModelParameters | Statistics) -> dict[str, Any]:
    tied = {other: entry.names[0] for entry in vector.entries for other in entry.names[1:]}
    return vector.table.to_metadata() | ({TIED: tied} if tied else {})


def _table(buffer: smb.Buffer) -> TensorTable:
    if not buffer.table:
        raise InvalidArgumentError(
            f"group of buffer {buffer.name!r}: it has no names for its tensors, so it was not made by smb.torch.join"
        )
    return buffer.table


def _check_overlap(overlap: object, scheme: smb.train.Scheme | None = None, *, mesh: bool = False) -> None:
    """Raise InvalidArgumentError for an overlap that there is not, or not with this scheme or a mesh."""
    if overlap != "none":
        from smb.overlap.hooks import check_overlap

        check_overlap(overlap, scheme, mesh=mesh)


def _scheme(
    asked: str | smb.train.Scheme | None, settings: dict[str, Any], groups: smb.train.Scheme | None
) -> smb.train.Scheme | None:
    """Return the scheme that is asked for; settings that were not given are the group's."""
    if not isinstance(asked, str):
        return asked
    if groups is not None and asked == groups.NAME:
        settings = groups.settings() | settings
    return smb.train.scheme_of(asked, settings)


def _check_free(model: torch.nn.Module) -> None:
    """A second join of the same model would move its parameters away under the first one."""
    parameters = {id(parameter) for parameter in model.parameters()}
    for shared in _joined:
        if shared._open and any(id(entry.tensor) in parameters for entry in shared._trained.entries):
            raise InvalidArgumentError(
                f"smb.torch.join: this model is already joined to {shared._name!r}; close() what that join "
                f"returned first"
            )


def _compare(buffer: smb.Buffer, ours: TensorTable) -> None:
    theirs = _table(buffer)
    differences = []
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        here, there = (_shape(table, key) for table in (ours, theirs))
        if here != there:
            differences.append(f"{key} is {here} here, and {there} in the group")
    if differences := differences or ours.differences(theirs):
        raise InvalidArgumentError(
            f"join of training {buffer.name!r}: it has another model: {'; '.join(differences[:3])}"
            + (f", and {len(differences) - 3} more" if len(differences) > 3 else "")
            + f". Nothing was changed. Take another name, or fresh=True: it deletes {buffer.name!r} if nobody trains it"
        )


def _say_idle(name: str, entries: Sequence[TensorEntry]) -> None:
    """Say it where the optimizer has parameters that don't train."""
    idle = sum(entry.count for entry in entries if not entry.tensor.requires_grad)
    if idle:
        _log.warning(
            "training %r shares %d values, and %d of them require no gradients: they are shared since the optimizer "
            "has them. Give it the others alone, and these cost nothing",
            name,
            sum(entry.count for entry in entries),
            idle,
        )


def _compare_frozen(buffer: smb.Buffer, mark: dict[str, str] | None) -> None:
    """Raise where the frozen values are others than those of who made the group; of other types they may be."""
    theirs = buffer.metadata.get(FROZEN)
    if mark and theirs and mark["types"] == theirs["types"] and mark["values"] != theirs["values"]:
        raise InvalidArgumentError(
            f"join of training {buffer.name!r}: the model's frozen parameters have other values than those of "
            f"who made the group: what is trained fits only one of the two. Load the same ones before joining"
        )


def _shape(table: TensorTable, name: str) -> str:
    return f"float32{list(table[name].shape)}" if name in table else "not there (or, of a trained one, frozen)"


def values_of(entries: Iterable[TensorEntry], vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a vector under all their names, in the model's dtypes; tied names get the same tensor."""
    found: dict[str, torch.Tensor] = {}
    for entry in entries:
        value = entry.of(vector).to(entry.tensor.dtype)
        found |= dict.fromkeys(entry.names, value)
    return found
