"""Training with others in three lines of a PyTorch script.

    import smb.torch
    shared = smb.torch.join(model, optimizer, "run", scheme="diloco", every=50)
    batches = shared.batches(len(dataset), 32, epochs=10)    # this process's share of the rows
    ...                       # the script as it was: optimizer.step() exchanges when the scheme says
    shared.close()            # the model is the shared one now

What is shared, and how:

- Parameters that the optimizer has or that require gradients: by the scheme, as one float32 vector of which they become
  views (smb/torch/flat_parameters.py; bfloat16 ones have a float32 master there). The Parameter objects stay, so the
  optimizer and its state are untouched: momenta are never sent.
- Frozen parameters: the first to join stores its own in the buffer NAME/state, later ones take them from there.
- Floating-point buffers, batch normalisation's running statistics above all: each process keeps and uses its own while
  it trains, as they describe the batches that it sees. After each exchange it mixes them into NAME/state, with weight
  1/members: `state += (own - state) / members`, at the servers, in the background. state_dict() and close() give that
  average; who joins late starts from it.
- Integer and float64 buffers (num_batches_tracked): local.

Every tensor of the two buffers can be opened by its name: client.open("run").tensor("layer3.weight").
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np
import torch

import smb
import smb.train
from smb.errors import Error, InvalidArgumentError, NotFoundError
from smb.tensors import TensorTable
from smb.torch.flat_parameters import Entry, Trained, Untrained, split
from smb.train.group import clear, view

STATE = "state"
TIED = "smb.torch.tied"  # in a buffer's metadata: further name -> the name in the table
_JOIN_TTL_S = 30.0

_log = logging.getLogger("smb")
_joined: weakref.WeakSet[Shared] = weakref.WeakSet()


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
    **settings: Any,
) -> Shared:
    """Train the model together with all who join the same name. Returns when it has the shared model's values.

    The first to join makes the group, with its model's values; who joins later gets the values of now. `scheme` is one
    of smb.train's, or the name of one with its settings as further arguments (scheme="diloco", every=50); settings that
    are left out are the group's, or their defaults where there is none, and None adopts all of the group's. After each
    optimizer.step() the scheme may exchange: it blocks as the scheme says, and changes the parameters in place.
    `coordinator` is an address, default $SMB_COORDINATOR, else 127.0.0.1:7070; or pass a `client`, which stays open.
    `samples` is how many samples a step trains (None: nobody says, and none are counted). What is counted and shown is
    made of them, and with token_weights=True the weight of a contribution. Shared.batches() keeps it right; set
    `samples` of the result where you make batches yourself. fresh=True begins anew: it deletes a training of this name
    in which nobody is alive. guards, lease, servers, stripe and wire are smb.train.join's. Of several optimizers, pass
    the one that steps last, with all parameters requiring gradients.

    The model must be in host memory, its trained parameters float32 or bfloat16: one on a GPU is refused. Raises
    InvalidArgumentError for what can't be shared, or is already, for other settings than the group's, and for other
    tensors than its model's; NotFoundError where there is no group and no scheme is given; AlreadyExistsError with
    fresh=True where others are alive; smb's errors where the cluster fails. The model's values are as they were then.
    optimizer.step() raises smb.train.RefusedContributionError where a guard refuses (NaN, for one): the model is the
    shared one again, the optimizer's state as it was; and NotFoundError where the training was deleted, after which
    close() succeeds.
    """
    if client is not None and coordinator is not None:
        raise InvalidArgumentError("smb.torch.join: pass coordinator= or client=, not both")
    if settings and not isinstance(scheme, str):
        raise InvalidArgumentError(
            f"smb.torch.join: {', '.join(settings)}: settings belong to a scheme that is given by its name"
        )
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"smb.torch.join: first the model, then the optimizer, not {type(model).__name__} and "
            f"{type(optimizer).__name__}"
        )
    placement = {"servers": servers, "stripe": stripe, "wire": wire}
    options: dict[str, Any] = {key: value for key, value in placement.items() if value is not None}
    with contextlib.ExitStack() as on_failure:
        if client is None:
            client = on_failure.enter_context(smb.connect(coordinator))
        options |= {"guards": guards, "lease": lease, "fresh": fresh}
        shared = Shared(model, optimizer, name, scheme, settings, client, samples, options)
        shared._owned = on_failure.pop_all()
    return shared


class Shared:
    """A model that is trained together: what smb.torch.join returns. A context manager.

    Leaving the `with` by an exception leaves the group without waiting for anything. Not for several threads at once.
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
        self._model = model
        self._trained, self._untrained = split(model, optimizer)
        self._mixing: Future[Any] | None = None
        self._open = True
        self._client = client
        self._units: smb.train.WorkUnits | None = None  # of batches()
        self._owned = contextlib.ExitStack()  # the client, where it is ours
        with contextlib.ExitStack() as on_failure:
            # Joining overwrites the parameters: a join that fails gives them back.
            on_failure.callback(np.copyto, self._trained.values, self._trained.values.copy())
            # Kept from before joining until the state is there, so that both buffers are of one maker.
            with client.lock(f"{name}/{STATE}", ttl=_JOIN_TTL_S):
                group = None
                if options["fresh"]:
                    clear(client, name)
                try:
                    group = view(client, name)
                except NotFoundError:
                    client.delete(f"{name}/{STATE}", missing_ok=True)  # of a former group, deleted by its weights alone
                else:
                    _compare(group.weights, self._trained.table)
                chosen = _scheme(scheme, settings, group.scheme if group else None)
                self.worker = smb.train.join(
                    client, name, self._trained.values, chosen, metadata=_metadata(self._trained), **options
                )
                try:
                    _compare(client.open(name), self._trained.table)  # another may have made it meanwhile
                    self._state = self._join_state(client, name)
                except BaseException:
                    if self.worker.withdraw():
                        client.delete(f"{name}/{STATE}", missing_ok=True)
                    raise
            on_failure.pop_all()
        self._trained.spread()
        self._contributions = self.worker.contributions
        self._optimized = _count(optimizer)
        self._hook = optimizer.register_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))
        _joined.add(self)

    @property
    def scheme(self) -> smb.train.Scheme:
        """The group's scheme, with its settings."""
        return self.worker.scheme

    def batches(self, rows: int, size: int, *, epochs: int | None = None, seed: int = 0) -> Iterator[torch.Tensor]:
        """Divide a data set over all who take part: iterate over this process's batches, as row numbers, int64 (n,).

        Rows 0 to `rows` - 1 are shuffled anew for each epoch (by `seed`, the same for all) and cut into batches of
        `size`. Each batch goes to one process and counts when the next one is asked for. What a process had in hand
        that left or died goes to another one before the end. The iteration ends when all `epochs` are done, by all
        (None: never). Who comes back after that finds none left: ask for more epochs. Sets `samples` to each batch's
        rows. Index tensors with it, or pass it to a torch.utils.data.DataLoader as batch_sampler: with num_workers,
        batches that were fetched ahead count too.

        The shuffle takes 8 bytes for each row. Raises InvalidArgumentError: others use another number of rows, size or
        seed, or the scheme itself says how large batches are (smb.train.WorkUnits is for those).
        """
        self._check_open()
        if self.worker.batch_size is not None:
            raise InvalidArgumentError("batches: the scheme decides how large a batch is; use smb.train.WorkUnits")
        if self._units is not None:
            self._units.close()
        name = f"{self.worker.name}/units"
        self._units = smb.train.WorkUnits(self._client, name, rows, size, seed, epochs=epochs, worker=self.worker)
        return self._batches(self._units, rows, seed)

    def _batches(self, units: smb.train.WorkUnits, rows: int, seed: int) -> Iterator[torch.Tensor]:
        order, shuffled, taken = torch.empty(0, dtype=torch.int64), -1, 0
        while (unit := self._taken(units)) is not None:
            if unit.epoch != shuffled:
                shuffled = unit.epoch
                order = torch.from_numpy(np.random.default_rng([seed, shuffled]).permutation(rows))
            self.samples = unit.count
            taken += 1
            yield order[unit.start : unit.start + unit.count]
        self._trained.spread()  # whoever waited for the others' last batches has the shared model of then
        if not taken:
            _log.warning("training %r: all batches of all epochs are done; ask for more epochs", self.worker.name)

    def _taken(self, units: smb.train.WorkUnits) -> smb.train.Unit | None:
        with self.worker.there():
            return units.take()

    def state_dict(self) -> dict[str, Any]:
        """Return the shared model of now, in memory of its own: the model's own state_dict() with the group's values in
        place of what is shared. Blocks for one read; raises smb's errors.

        For a checkpoint, or for load_state_dict() of any model of this kind.
        """
        self._check_open()
        self._check_model()
        own: dict[str, Any] = self._model.state_dict()
        vector = torch.from_numpy(self.worker.shared())
        values = _values(self._trained.entries, vector)
        if self._state is not None:
            self._settle_mixing()
            values |= _values(self._untrained.entries, torch.from_numpy(self._state.read()))
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                # What the group has no part in (integers) is copied too: nothing returned is the model's memory.
                own[key] = values[key] if key in values else value.detach().clone()
        return own

    def close(self, *, load: bool = True) -> None:
        """Finish what is under way, load the shared model into the model (unless load=False), and leave the group.

        What was trained since this worker's last exchange has then no part in the model, here as in the others.
        Parameters stay where they are; the optimizer is free of the hook. Twice does nothing. Of a training that was
        deleted there is nothing to load: the model stays as it is. A coordinator that is away is only warned of.
        """
        if not self._open:
            return
        try:
            self.worker.flush()
            self._settle_mixing()
            if load:
                self._check_model()
                self._load()
        except NotFoundError as error:
            if not self.worker.deleted:
                raise
            _log.warning("%s; the model is this process's own", error)
        finally:
            self._leave()

    def _load(self) -> None:
        self.worker.shared(out=self._trained.values)
        self._trained.spread()
        if self._state is not None:
            self._state.read(out=self._untrained.values)
            self._untrained.spread()

    def __repr__(self) -> str:
        return (
            f"<smb.torch.Shared {self._trained.values.size:,} parameters in training {self.worker.name!r}: "
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
            return
        try:
            self._leave()
        except Error as second:
            _log.warning("could not leave the group on the way out of an error: %s", second)

    # ---- after each step of the optimizer

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if _count(optimizer) != self._optimized:
            self._trained.check_holds(optimizer)
            self._optimized = _count(optimizer)
        self._trained.check()
        self._untrained.check()
        self._trained.absorb()
        try:
            self.worker.step(self.samples)
        finally:
            self._trained.spread()  # after a refusal too: the values are the shared model's again
        if self._state is not None and self._untrained.averaged:
            self._mix(self._state)

    def _mix(self, state: smb.Buffer) -> None:
        """After an exchange, begin to add our running statistics to the average; the last time may be under way yet."""
        contributions = self.worker.contributions
        if contributions == self._contributions or (self._mixing is not None and not self._mixing.done()):
            return
        self._settle_mixing()
        self._contributions = contributions
        self._untrained.collect(self._untrained.averaged)
        own = self._untrained.values[: self._untrained.averaged]
        if not np.isfinite(own).all():
            raise Error(
                "a floating-point buffer of the model (running statistics?) is not finite: it is not shared, and the "
                "model computes with it; look at the batches and the step size"
            )
        self._mixing = state.accumulate_async(own, op="elastic", scale=1.0 / self.worker.members)

    def _settle_mixing(self) -> None:
        if self._mixing is not None:
            mixing, self._mixing = self._mixing, None
            with self.worker.there():
                mixing.result()

    # ---- coming and going

    def _join_state(self, client: smb.Client, name: str) -> smb.Buffer | None:
        """Take frozen parameters and buffers from the group, or be the first to store them. Under the lock."""
        untrained = self._untrained
        if not untrained.entries:
            return None
        untrained.collect()
        state = client.create(f"{name}/{STATE}", untrained.values.size, metadata=_metadata(untrained), exist_ok=True)
        _compare(state, untrained.table)
        if state.version:
            state.read(out=untrained.values)
            untrained.spread()
        else:  # who made it may have died before it was written
            state.publish(untrained.values)
        return state

    def _leave(self) -> None:
        self._open = False
        self._hook.remove()
        with contextlib.ExitStack() as last:
            last.push(self._owned)
            last.callback(self.worker.close)
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
            raise InvalidArgumentError(f"the model has left group {self.worker.name!r}; smb.torch.join it again")

    def _check_model(self) -> None:
        """The optimizer's step would not notice a module that was replaced."""
        self._trained.check()
        now = {id(tensor) for tensor in self._model.parameters()}
        if gone := [entry.names[0] for entry in self._trained.entries if id(entry.tensor) not in now]:
            raise Error(f"{', '.join(gone[:3])} of the model were replaced after smb.torch.join: join afterwards")


def shared_state_dict(client: smb.Client, name: str) -> dict[str, torch.Tensor]:
    """Return what a group shares, by name, without taking part: for evaluation, or to start from. float32, on the CPU.

    Integer and float64 buffers are each process's own and are not in it: load_state_dict(strict=False) where the model
    has some (PyTorch does without batch normalisation's num_batches_tracked). Blocks for two reads. Raises
    NotFoundError, InvalidArgumentError (a group that was not made by smb.torch.join).
    """
    pairs = [(client.open(name), smb.train.shared(client, name))]
    with contextlib.suppress(NotFoundError):
        state = client.open(f"{name}/{STATE}")
        pairs.append((state, state.read()))
    found: dict[str, torch.Tensor] = {}
    for buffer, values in pairs:
        metadata = buffer.metadata
        table = _table(buffer)
        found |= {key: torch.from_numpy(array) for key, array in table.views(values).items()}
        found |= {other: found[key] for other, key in metadata.get(TIED, {}).items()}
    return found


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _metadata(vector: Trained | Untrained) -> dict[str, Any]:
    tied = {other: entry.names[0] for entry in vector.entries for other in entry.names[1:]}
    return vector.table.to_metadata() | ({TIED: tied} if tied else {})


def _table(buffer: smb.Buffer) -> TensorTable:
    if not buffer.table:
        raise InvalidArgumentError(
            f"group of buffer {buffer.name!r}: it has no names for its tensors, so it was not made by smb.torch.join"
        )
    return buffer.table


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
                f"smb.torch.join: this model is already joined to {shared.worker.name!r}; close() what that join "
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
            f"join of group of buffer {buffer.name!r}: another model's: {'; '.join(differences[:3])}"
            + (f", and {len(differences) - 3} more" if len(differences) > 3 else "")
        )


def _shape(table: TensorTable, name: str) -> str:
    return f"float32{list(table[name].shape)}" if name in table else "not there (or, of a trained one, frozen)"


def _values(entries: Iterable[Entry], vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a vector under all their names, in the model's dtypes; tied names get the same tensor."""
    found: dict[str, torch.Tensor] = {}
    for entry in entries:
        value = entry.of(vector).to(entry.tensor.dtype)
        found |= dict.fromkeys(entry.names, value)
    return found
