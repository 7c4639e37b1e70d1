"""The ranks of a device mesh as one member: each moves its own shards, the first one speaks for all.

A tensor's place in the group is its whole one's, so members with different meshes, and with none, train one model. The
speaker runs the scheme; what it does with parameters is a command to all ranks, over a gloo group of the mesh's, and
each does it for what it has. Every rank but the speaker holds a lock with the member's lease: who waits for the member
finds a dead rank by it, and then the member is gone.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import smb.train
from smb.errors import Error, InvalidArgumentError, UnavailableError
from smb.tensors import TensorTable
from smb.torch.model_parameters import Entry, ModelParameters, check, lay_out
from smb.torch.model_tensors import Check, Parts, parts_of
from smb.torch.shared_model import Shared
from smb.train import group as groups
from smb.train import member_table as t
from smb.train.exchange.rounds import RoundScheme
from smb.train.exchange.snapshot import Snapshot, Together
from smb.train.guards import Norm
from smb.train.members import rank_lock
from smb.train.parameters import Values
from smb.train.progress import Progress, progress_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from smb.buffer import Buffer
    from smb.client import Client
    from smb.lock import Lock
    from smb.train.group import Group

_FOREVER = datetime.timedelta(days=30)  # a round may take long; a dead rank's connections end at once


@dataclass(frozen=True)
class _Run:
    """`count` elements that follow each other in this rank's vector from `here` on, and in the group's from `there`.
    `ours`: this rank writes them, and no other.
    """

    here: int
    there: int
    count: int
    ours: bool


class Ranks:
    """The processes of a mesh, and how they talk."""

    def __init__(self, mesh: DeviceMesh) -> None:
        everyone = mesh.mesh.flatten().tolist()
        if dist.get_rank() not in everyone:
            raise InvalidArgumentError("smb.torch.join: this process is no part of the mesh")
        self.count = len(everyone)
        self.rank: int = everyone.index(dist.get_rank())
        self._first = everyone[0]
        self._group = dist.new_group(everyone, timeout=_FOREVER, backend="gloo", use_local_synchronization=True)

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def tell(self, what: Any = None) -> Any:
        """Return, to all, what the speaker says. Raises UnavailableError where a rank is gone."""
        told = [what]
        try:
            dist.broadcast_object_list(told, src=self._first, group=self._group, device=torch.device("cpu"))
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise UnavailableError(f"a rank of the mesh is gone: {error}") from error
        return told[0]

    def gather(self, what: Any) -> list[Any]:
        """Return, to all, what each says, by rank. Raises as tell."""
        said: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(said, what, group=self._group)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise UnavailableError(f"a rank of the mesh is gone: {error}") from error
        return said


class ShardParameters(ModelParameters):
    """What this rank has of the trained parameters, and where that is in the group's buffers."""

    def __init__(self, tensors: Mapping[tuple[str, ...], torch.Tensor], rank: int) -> None:
        self._tensors = dict(tensors)
        local = {names: _local(tensor) for names, tensor in tensors.items()}
        for names, tensor in local.items():
            if tensor.numel():
                check(names[0], tensor)
        whole = {names: torch.empty(tensor.shape, device="meta") for names, tensor in tensors.items()}
        self.whole: TensorTable = lay_out(whole)[0]
        self.verify = None
        self.place(local)
        # The tensors as the model has them, at their places in the group.
        self.given = tuple(
            Entry(names, tensor, place.offset // 4)
            for (names, tensor), place in zip(tensors.items(), self.whole.values(), strict=True)
        )
        places = zip(self.entries, tensors.items(), self.whole.values(), strict=True)
        self._runs = [
            run for entry, (_, tensor), place in places for run in _runs(entry, tensor, place.offset // 4, rank)
        ]

    def refresh(self) -> None:
        """Take the shards where they are now: FSDP2 may have moved them."""
        self.entries = tuple(
            Entry(entry.names, _local(tensor), entry.offset)
            for entry, tensor in zip(self.entries, self._tensors.values(), strict=True)
        )

    def read(self, buffer: Buffer, out: Values) -> None:
        """Read this rank's elements."""
        for run in self._runs:
            buffer.read(run.there, run.count, out=out[run.here : run.here + run.count], wire="exact")

    def write(self, buffer: Buffer, piece: Values, begin: int) -> list[Future[Any]]:
        """Begin to write those that are this rank's to write."""
        return [buffer.write_async(part, there) for part, there in self._parts(piece, begin)]

    def store(self, weights: Buffer) -> None:
        """Write them, exact."""
        for begin, piece in self.pieces():
            if not np.isfinite(piece).all():
                raise InvalidArgumentError(f"join of group {weights.name!r}: the first values are not finite")
            for part, there in self._parts(piece, begin):
                weights.write(part, there, wire="exact")

    def _parts(self, piece: Values, begin: int) -> Iterator[tuple[Values, int]]:
        for run in self._runs:
            low, high = max(run.here, begin), min(run.here + run.count, begin + piece.size)
            if run.ours and low < high:
                yield piece[low - begin : high - begin], run.there + low - run.here


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _runs(entry: Entry, tensor: torch.Tensor, start: int, rank: int) -> Iterator[_Run]:
    """Where a shard lies in its whole tensor, which begins at `start` of the group's vector."""
    if not isinstance(tensor, DTensor):
        yield _Run(entry.offset, start, entry.count, rank == 0)
        return
    placements = tensor.placements
    if not all(type(placement) in (Shard, Replicate) for placement in placements):
        raise InvalidArgumentError(
            f"parameter {entry.names[0]!r} is placed as {placements}: shards and replicas can be shared"
        )
    if not entry.count:
        return
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    ours = all(place == 0 for place, each in zip(coordinate, placements, strict=True) if isinstance(each, Replicate))
    # The last dimensions that are whole follow each other in memory, with one more that is cut.
    whole, cut = tuple(tensor.shape), len(shape)
    while cut > 0 and shape[cut - 1] == whole[cut - 1]:
        cut -= 1
    length = int(np.prod(shape[max(cut - 1, 0) :], dtype=np.int64))
    strides = [int(np.prod(whole[dim + 1 :], dtype=np.int64)) for dim in range(len(whole))]
    base = start + sum(int(offset) * stride for offset, stride in zip(offsets, strides, strict=True))
    for number, index in enumerate(np.ndindex(*shape[: max(cut - 1, 0)])):
        there = base + sum(place * stride for place, stride in zip(index, strides, strict=False))
        yield _Run(entry.offset + number * length, there, length, ours)


class MeshParameters(Together):
    """All ranks' parameters, at the speaker; what it is asked is done by every rank. `serve` is the others' side."""

    def __init__(self, client: Client, ranks: Ranks, own: ShardParameters) -> None:
        self.size = own.whole.size
        self.table = own.whole
        self.entries = own.given
        self._client = client
        self._ranks = ranks
        self._own = own
        self._snapshot: Snapshot | None = None
        self._lock: Lock | None = None

    def serve(self) -> None:
        """Do what the speaker says until it is done. Raises what it failed with."""
        while True:
            command, *arguments = self._ranks.tell()
            if command == "done":
                (failure,) = arguments
                if failure is not None:
                    raise failure
                return
            self._answer(command, arguments)

    def release(self) -> None:
        """Give this rank's lock back, without the others."""
        self._do_leave()

    def done(self, failure: BaseException | None = None) -> None:
        """Let the others go on."""
        if failure is not None:
            known = isinstance(failure, Error)
            failure = type(failure)(str(failure)) if known else Error(f"rank 0 of the mesh failed: {failure!r}")
        self._ranks.tell(("done", failure))

    def all(self, command: str, *arguments: Any) -> list[Any]:
        """Have every rank do something; return the results, by rank. Raises what one of them failed with."""
        self._ranks.tell((command, *arguments))
        return self._answer(command, list(arguments))

    def _answer(self, command: str, arguments: list[Any]) -> list[Any]:
        failure: BaseException | None = None
        result = None
        try:
            result = getattr(self, f"_do_{command}")(*arguments)
        except Error as error:
            failure = error
        said = self._ranks.gather((result, None if failure is None else (type(failure), str(failure))))
        failures = [told for _, told in said if told is not None]
        if failures and self._ranks.speaks:
            if failure is not None:
                raise failure
            kind, text = failures[0]
            raise kind(text)
        return [each for each, _ in said]

    # ---- what each rank does

    def _do_store(self, name: str) -> None:
        self._own.refresh()
        self._own.store(self._client.open(name))

    def _do_seat(self, group: str, slot: int, incarnation: int, lease: float) -> None:
        if self._ranks.speaks:
            return
        lock, self._lock = self._lock, None
        if lock is not None:
            _release(lock)
        self._lock = rank_lock(self._client, group, slot, incarnation, self._ranks.rank, lease).acquire()

    def _do_leave(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            _release(lock)

    def _do_snapshot(self, wire: str) -> None:
        self._snapshot = Snapshot(self._own, wire)

    def _do_fetch(self, name: str) -> None:
        assert self._snapshot is not None
        self._snapshot.fetch(self._client.open(name))

    def _do_adopt(self) -> None:
        assert self._snapshot is not None
        self._own.refresh()
        self._snapshot.adopt()

    def _do_forget(self) -> None:
        assert self._snapshot is not None
        self._snapshot.forget()

    def _do_send(self, name: str) -> Norm:
        assert self._snapshot is not None
        self._own.refresh()
        return self._snapshot.send(self._client.open(name))

    # ---- Together, at the speaker

    def snapshot(self, wire: str) -> Snapshot:
        """Return what moves all parts."""
        self.all("snapshot", wire)
        return _MeshSnapshot(self)

    def store(self, weights: Buffer) -> None:
        """Each rank writes its own."""
        self.all("store", weights.name)

    def seated(self, group: Group) -> None:
        """Each other rank takes its lock; from then on the member is gone when one of them is."""
        if not isinstance(group.scheme, RoundScheme):
            raise _only_rounds()
        member = group.member
        self.all("seat", group.name, member.slot, member.incarnation, group.lease)
        group.table.write(member.row, t.RANKS, np.array([self._ranks.count]))

    def pieces(self) -> Iterator[tuple[int, Values]]:
        """No one process has them."""
        raise _only_rounds()

    def deltas(self, base: Values) -> Iterator[tuple[int, Values]]:
        """No one process has them."""
        raise _only_rounds()

    def fill(self, values: Values) -> None:
        """No one process has them."""
        raise _only_rounds()

    def subtract(self, difference: Values) -> None:
        """No one process has them."""
        raise _only_rounds()

    def keep_exact(self) -> None:
        """Elastic schemes only."""
        raise _only_rounds()


class _MeshSnapshot(Snapshot):
    """A snapshot whose parts lie in all ranks."""

    def __init__(self, mesh: MeshParameters) -> None:
        self._mesh = mesh

    def fetch(self, weights: Buffer) -> None:
        self._mesh.all("fetch", weights.name)

    def adopt(self) -> None:
        self._mesh.all("adopt")

    def forget(self) -> None:
        self._mesh.all("forget")

    def send(self, inbox: Buffer) -> Norm:
        found = Norm()
        for norm in self._mesh.all("send", inbox.name):
            found.count += norm.count
            found.square += norm.square
            found.bad += norm.bad
        return found


class MeshShared(Shared):
    """One rank's side of a member that is a mesh. Every rank makes it, steps, and closes it, as the others do."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        name: str,
        scheme: str | smb.train.Scheme | None,
        settings: dict[str, Any],
        client: Client,
        samples: int | None,
        options: dict[str, Any],
        mesh: DeviceMesh,
    ) -> None:
        self._ranks = Ranks(mesh)
        self._mesh: MeshParameters | None = None
        self._name = name
        self._steps = 0
        failure: Error | None = None
        try:
            parts = parts_of(model, optimizer, sharded=True)
            if parts.statistics:
                raise InvalidArgumentError(
                    f"smb.torch.join with mesh=: buffer {next(iter(parts.statistics))[0]!r} holds floating-point "
                    f"numbers: running statistics of ranks are not shared yet"
                )
            own = ShardParameters(parts.trained, self._ranks.rank)
            self._mesh = MeshParameters(client, self._ranks, own)
            own.verify = Check(model, optimizer, own.given, parts.frozen)
        except Error as error:
            failure = error
        failures = [each for each in self._ranks.gather(None if failure is None else str(failure)) if each is not None]
        if failures:
            raise failure or InvalidArgumentError(f"smb.torch.join: another rank of the mesh: {failures[0]}")
        super().__init__(model, optimizer, name, scheme, settings, client, samples, options)

    def _parts(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Parts:
        return parts_of(model, optimizer, sharded=True)

    def _parameters(self, parts: Parts) -> Any:
        return self._mesh

    def _join(self, *arguments: Any) -> None:
        assert self._mesh is not None
        with self._together():
            if self._ranks.speaks:
                super()._join(*arguments)
        interval = self.worker.scheme.interval() if self._ranks.speaks else None  # type: ignore[attr-defined]
        self._interval: int = self._ranks.tell(interval)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """At the speaker: do the block, and let the others go on. At the others: do what it says until then."""
        assert self._mesh is not None
        if not self._ranks.speaks:
            self._mesh.serve()
            yield
            return
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(UnavailableError):
                self._mesh.done(error)
            raise
        self._mesh.done()

    def _stepped(self) -> None:
        if not self._open:
            return
        self._steps += 1
        if self._steps % self._interval:
            return
        with self._together():
            if self._ranks.speaks:
                for _ in range(self._interval):  # all but the last one are only counted
                    self.worker.step(self.samples)

    def __repr__(self) -> str:
        return f"<smb.torch.MeshShared of training {self._name!r}, rank {self._ranks.rank} of {self._ranks.count}>"

    @property
    def scheme(self) -> smb.train.Scheme:
        """The group's scheme, with its settings."""
        return groups.view(self._client, self._name).scheme

    @property
    def progress(self) -> Progress:
        """How far the group is, as of its members' last exchanges. One small read, and more at other ranks than 0."""
        return progress_of(groups.view(self._client, self._name).table.read())

    def on_exchange(self, told: Callable[[smb.train.ExchangeEvent], object]) -> None:
        """Call `told` after each exchange, at rank 0 of the mesh; at others never."""
        if self._ranks.speaks:
            super().on_exchange(told)

    def batches(self, rows: int, size: int, *, epochs: int | None = None, seed: int = 0) -> Iterator[torch.Tensor]:
        """Not with a mesh."""
        raise InvalidArgumentError("batches with mesh=: give each rank its rows yourself, or use smb.train.WorkUnits")

    def state_dict(self) -> dict[str, Any]:
        """Not with a mesh."""
        raise InvalidArgumentError("state_dict with mesh=: use smb.torch.shared_state_dict(client, name)")

    def close(self, *, load: bool = True) -> None:
        """As Shared.close, with all ranks of the mesh."""
        if not self._open:
            return
        try:
            with self._together():
                if self._ranks.speaks:
                    self.worker.flush()
                    self.worker.close(load=load)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._open = False
        self._hook.remove()
        with contextlib.ExitStack() as last:
            last.push(self._owned)
            assert self._mesh is not None
            last.callback(self._mesh.release)
            if self._ranks.speaks:
                last.callback(self.worker.close)


def _release(lock: Lock) -> None:
    with contextlib.suppress(Error):
        lock.release()


def _only_rounds() -> InvalidArgumentError:
    return InvalidArgumentError(
        "smb.torch.join with mesh=: take a scheme of rounds: bsp, localsgd, diloco, asyncdiloco"
    )
