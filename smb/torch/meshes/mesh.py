"""The room of meshes: the ranks of a device mesh as one member. Each rank moves its own shards, and the first one, the
speaker, acts for all. smb/torch/training/joining.py imports this module.

The speaker runs the scheme. Each operation of the scheme on the parameters is a call of all ranks (rank_calls.py),
which each rank makes for its own shards (mesh_rank.py). Every rank except the speaker holds a lock with the member's
lease. A worker that waits for the member notices a dead rank by this lock, and then the whole member counts as dead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import smb.train
from smb.errors import Error, InvalidArgumentError
from smb.html_tables import described
from smb.torch.meshes.mesh_rank import MeshRank
from smb.torch.meshes.rank_calls import RankCalls
from smb.torch.meshes.shards import ShardParameters
from smb.torch.ranks import Ranks, keeps_alike
from smb.torch.tensor_values import lasting
from smb.torch.training.batches import Batches, BatchUnits
from smb.torch.training.model_tensors import ModelCheck, ModelTensors, Named, Statistics, parts_of
from smb.torch.training.own_joins import OwnJoin
from smb.torch.training.shared_model import Shared, counted
from smb.torch.training.shared_values import state_with, values_of
from smb.train import group as groups
from smb.train import member_table as t
from smb.train.exchange.mover import ArrayMover, Mover
from smb.train.guards import Norm
from smb.train.members import member_name
from smb.train.parameters import Parameters, Values
from smb.train.progress import Progress, progress_of
from smb.train.steps import there

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.client import Client
    from smb.train.group import Group


_log = logging.getLogger("smb.train")


class MeshParameters(Parameters):
    """All ranks' parameters, as the speaker's scheme sees them."""

    in_ranks = True

    def __init__(self, ranks: Ranks, own: ShardParameters, here: MeshRank, calls: RankCalls) -> None:
        """`own` are this rank's shards, `here` is this rank, and `calls` are made by all ranks together."""
        self.size = own.whole.size
        self.table = own.whole
        self.entries = own.given
        self._ranks = ranks
        self._own = own
        self._here = here
        self._calls = calls

    def mover(self, group: Group, way: str, arrived: Callable[[], object] | None) -> Mover:
        """Return the mover of all ranks' values. A difference has arrived when the speaker's part of it has."""
        self._here.arrived = arrived
        self._calls.all(MeshRank.make_mover, way, group.weights.name)
        return _RanksMover(self._calls, group.weights, group.sent_bytes, spread=self._own.replicated)

    def look(self, weights: Buffer) -> None:
        """Let every rank read its part of the shared model into MeshRank.seen."""
        self._calls.all(MeshRank.look, weights.name)
        if self._own.replicated:
            self._calls.all(MeshRank.spread_seen)

    def statistics(self) -> Values:
        """Return the mean of the running statistics over all ranks."""
        mean: Values = np.mean(self._calls.all(MeshRank.collect_statistics), axis=0, dtype=np.float32)
        return mean

    def store(self, weights: Buffer) -> None:
        """Let each rank write its own parameters."""
        self._calls.all(MeshRank.store, weights.name)

    def seated(self, group: Group) -> None:
        """Let each other rank take its lock. From then on the member counts as dead when one of its ranks is dead."""
        member = group.member
        name = member_name(group.name, member.slot, member.incarnation)
        self._calls.all(MeshRank.seat, name, group.lease, group.weights.info.replicas)
        group.table.write(member.row, t.RANKS, np.array([self._ranks.count]))

    def keep_exact(self) -> None:
        """See Parameters.keep_exact; for every rank."""
        self._calls.all(MeshRank.keep_exact)

    def blocks(self) -> Iterator[tuple[int, Values]]:
        """Raise Error: no single process has all values."""
        raise _apart()

    def deltas(self, base: Values, out: Values | None = None) -> Iterator[tuple[int, Values]]:
        """Raise Error: no single process has all values."""
        raise _apart()

    def fill(self, values: Values) -> None:
        """Raise Error: no single process has all values."""
        raise _apart()

    def subtract(self, difference: Values) -> None:
        """Raise Error: no single process has all values."""
        raise _apart()


class _RanksMover(Mover):
    """Moves values that lie in all ranks: each rank moves its own. If the call fails at one rank, it fails at all, and
    no rank takes over the values that came back.
    """

    def __init__(self, calls: RankCalls, weights: Buffer, sent_bytes: int, *, spread: bool) -> None:
        """`spread`: whether several ranks have the same values, so that the rank that fetched them gives them to the
        others.
        """
        super().__init__(weights, sent_bytes)
        self._calls = calls
        self._spread = spread
        self._started = False

    def fetch(self, weights: Buffer) -> None:
        self._calls.all(MeshRank.move_buffer, ArrayMover.fetch, weights.name)
        self._spread_fetched()

    def adopt(self) -> None:
        self._calls.all(MeshRank.move, ArrayMover.adopt)

    def forget(self) -> None:
        self._calls.all(MeshRank.move, ArrayMover.forget)

    def write(self, inbox: Buffer) -> Norm:
        return _sum(self._calls.all(MeshRank.move_buffer, ArrayMover.write, inbox.name))

    def take(self) -> Norm:
        return _sum(self._calls.all(MeshRank.move, ArrayMover.take))

    def add(self, fetch: bool) -> None:
        self._calls.all(MeshRank.move, ArrayMover.add, fetch)
        if fetch:
            self._spread_fetched()

    def add_missing(self) -> bool:
        return any(self._calls.all(MeshRank.move, ArrayMover.add_missing))

    def form(self, alpha: float) -> Norm:
        return _sum(self._calls.all(MeshRank.move, ArrayMover.form, alpha))

    def pay(self) -> None:
        self._calls.all(MeshRank.move, ArrayMover.pay)

    @property
    def under_way(self) -> bool:
        return self._started

    def start(self) -> None:
        self._started = True
        self._calls.all(MeshRank.move, ArrayMover.start)

    def wait(self) -> None:
        if self._started:
            self._calls.all(MeshRank.move, ArrayMover.wait)
            self._started = False

    def abandon(self) -> None:
        self._calls.all(MeshRank.move, ArrayMover.abandon)
        self._started = False

    def release(self) -> None:
        self._calls.all(MeshRank.move, ArrayMover.release)

    def _spread_fetched(self) -> None:
        if self._spread:
            self._calls.all(MeshRank.spread_fetched)


def _sum(norms: Sequence[Norm]) -> Norm:
    found = Norm()
    for norm in norms:
        found.join(norm)
    return found


class MeshShared(Shared):
    """One rank's side of a member that is a mesh. All ranks make, step and close it together."""

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
        if not isinstance(mesh, DeviceMesh):
            raise InvalidArgumentError(
                f"smb.torch.join of {name!r}: mesh must be a DeviceMesh, not {mesh!r}; make one: "
                f'torch.distributed.device_mesh.init_device_mesh("cuda", (ranks,))'
            )
        self._ranks = Ranks(mesh)
        self._parted = False  # whether all ranks have left together
        self._samples_left: list[int | None] = []  # samples of each step that the worker has not counted yet
        with self._ranks.agreed():
            parts = parts_of(model, optimizer, sharded=True)
            if sharded := [names[0] for names, tensor in parts.statistics.items() if isinstance(tensor, DTensor)]:
                raise InvalidArgumentError(
                    f"smb.torch.join with mesh=: buffer {sharded[0]!r} is sharded; only parameters can be, so make it "
                    f"a plain tensor"
                )
            self._shards = ShardParameters(parts.trained)
            self._here = MeshRank(client, self._ranks, self._shards, Statistics(parts.statistics))
            self._calls = RankCalls(self._ranks, self._here)
            self._mesh = MeshParameters(self._ranks, self._shards, self._here, self._calls)
            self._shards.verify = ModelCheck(model, optimizer, self._shards.given, parts.frozen)
        self._shards.meet(self._ranks)
        if self._ranks.speaks and self._ranks.count > 1 and not _steps_alike(model, mesh):
            _log.warning(
                "training %r: mesh= has %d ranks, but the model is neither sharded nor in DistributedDataParallel. If "
                "nothing else averages its gradients, the ranks train apart, and only rank 0's steps count: wrap the "
                "model, or let each process join by itself, without mesh=",
                name,
                self._ranks.count,
            )
        try:
            super().__init__(model, optimizer, name, scheme, settings, client, samples, options)
        except BaseException:
            self._here.release()
            raise

    def _tensors(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, overlap: str
    ) -> tuple[ModelTensors, Any, Statistics]:
        parts = parts_of(model, optimizer, sharded=True)
        return parts, self._mesh, _MeshStatistics(parts.statistics, self._mesh)

    def _batch_units(self) -> BatchUnits:
        return _MeshBatchUnits(self._client, self._name, self._mixed.mix_rest, self._ranks, self._calls)

    def _own_join(self, optimizer: torch.optim.Optimizer) -> OwnJoin:
        # Ranks are processes of their own, which come and go together.
        entries, units = self._trained.entries, self._units
        return OwnJoin(self._name, self._client, None, entries, optimizer, units, self.abandon, waits=False)

    def _join(self, *arguments: Any) -> None:
        with self._calls.together():
            if self._ranks.speaks:
                super()._join(*arguments)
        interval = self.worker.scheme.interval() if self._ranks.speaks else None
        self._interval: int = self._ranks.tell(interval)
        self._take_statistics(True)

    def _take_statistics(self, loaded: bool) -> None:
        """Take over the running statistics that the speaker has loaded, if there are any."""
        values = self._ranks.tell(self._statistics.values if loaded and self._mixed.buffer is not None else None)
        if values is not None:
            self._statistics.values[:] = values
            self._statistics.spread()

    def _stepped(self) -> None:
        if not self._open:
            return
        self._samples_left.append(self.samples)
        if len(self._samples_left) < self._interval:
            return
        samples_left, self._samples_left = self._samples_left, []
        with self._calls.together():
            if self._ranks.speaks:
                for samples in samples_left:  # all steps except the last one are only counted
                    self.worker.step(samples)
                self._mixed.stepped()

    def __repr__(self) -> str:
        return f"<smb.torch.MeshShared of training {self._name!r}, rank {self._ranks.rank} of {self._ranks.count}>"

    def _repr_html_(self) -> str:
        rank = f"{self._ranks.rank} of {self._ranks.count}"
        state = "trains" if self._open else "closed"
        return described("MeshShared", {"training": self._name, "rank": rank, "state": state})

    @property
    def scheme(self) -> smb.train.Scheme:
        """The group's scheme, with its settings."""
        return groups.view(self._client, self._name).scheme

    @property
    def progress(self) -> Progress:
        """How far the group is, as of its members' last exchanges. One small read; ranks other
        than 0 make a few more. After close(), as of then.
        """
        if self._last is not None:
            return self._last
        if self._ranks.speaks and self._open:
            return self.worker.progress
        return progress_of(groups.view(self._client, self._name).table.read())

    def _steps_so_far(self) -> int:
        """Return the same number at every rank."""
        return int(self._ranks.tell(self.worker.progress.steps if self._ranks.speaks else None))

    def explain(self) -> NoReturn:
        """Raise InvalidArgumentError: what each rank copies is not counted."""
        raise InvalidArgumentError(
            f"explain() is not for the ranks of a mesh, which do not count their copies; smb explain {self._name} "
            f"tells transport, bytes and time"
        )

    def on_exchange(self, listener: Callable[[smb.train.ExchangeEvent], object]) -> None:
        """Call `listener` after each exchange, at rank 0 of the mesh only."""
        if self._ranks.speaks:
            super().on_exchange(listener)

    def batches(
        self,
        rows: int,
        size: int,
        *,
        epochs: int | None = None,
        seed: int = 0,
        dims: str | Sequence[str] | None = None,
    ) -> Batches:
        """As Shared.batches, with all ranks: a batch of `size` rows is the member's, and is divided over its ranks.

        `dims` names the dimensions of the mesh over which the batch is divided (None: all of them). Name the dimensions
        of data parallelism: ranks that differ only in other dimensions, such as tensor parallelism, get the same rows.
        If a batch can't be divided evenly, some of its rows are used twice, so that each rank has the same number of
        rows.
        """
        share, shares = self._share(dims)

        def begin() -> tuple[Iterator[tuple[int, torch.Tensor]], int]:
            self._check_open()
            batches, left = self._units.begin(rows, size, epochs, seed)
            return ((epoch, _part_of(batch, share, shares)) for epoch, batch in counted(self, batches)), left

        return Batches(begin)

    def _share(self, dims: str | Sequence[str] | None) -> tuple[int, int]:
        """Return this rank's share of a batch, and the number of shares."""
        mesh = self._ranks.mesh
        names = mesh.mesh_dim_names or ()
        if dims is None:
            return self._ranks.rank, self._ranks.count
        share, shares = 0, 1
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for name in (dims,) if isinstance(dims, str) else dims:
            if name not in names:
                raise InvalidArgumentError(
                    f"batches: the mesh has no dimension {name!r}; its dimensions are {', '.join(names)}"
                )
            size = mesh.mesh.shape[names.index(name)]
            share, shares = share * size + coordinate[names.index(name)], shares * size
        return share, shares

    @lasting
    def state_dict(self) -> dict[str, Any]:
        """As Shared.state_dict, with all ranks. Tensors that are sharded in the model are sharded in the result, for
        torch.distributed.checkpoint.
        """
        self._check_open()
        self._check.model()
        statistics = None
        with self._calls.together():
            if self._ranks.speaks:
                with there(self.worker.group):
                    self.worker.group.read_by(self._mesh.look)
                if self._mixed.buffer is not None:
                    self._mixed.wait()
                    statistics = self._mixed.buffer.read(wire="exact")
        statistics = self._ranks.tell(statistics)
        seen, self._here.seen = self._here.seen, None
        assert seen is not None
        values = self._shards.of_tensors(seen)
        if statistics is not None:
            values |= values_of(self._statistics.entries, torch.from_numpy(statistics))
        return state_with(self._model, values)

    def close(self, *, load: bool = True) -> None:
        """As Shared.close, with all ranks of the mesh."""
        if not self._open:
            return
        loaded = False
        try:
            with self._calls.together():
                if self._ranks.speaks:
                    loaded = self._finish(load=load)
            self._take_statistics(loaded)
            self._parted = True
        finally:
            self._leave()

    def _leave(self) -> None:
        if not self._parted:
            self._ranks.forget()
        with contextlib.ExitStack() as last:
            last.callback(self._here.release)
            if self._ranks.speaks:
                super()._leave()
                return
            self._open = False
            self._own.end()
            self._hook.remove()
            last.push(self.owned)


class _MeshStatistics(Statistics):
    """The running statistics of a member that is a mesh: the mean over its ranks."""

    def __init__(self, tensors: Named, mesh: MeshParameters) -> None:
        super().__init__(tensors)
        self._mesh = mesh

    def collect(self) -> None:
        """Take the mean of all ranks' values."""
        self.values[:] = self._mesh.statistics()


class _MeshBatchUnits(BatchUnits):
    """The work units of a member that is a mesh: the speaker takes them, and tells the other ranks."""

    def __init__(self, client: Client, name: str, at_end: Callable[[], object], ranks: Ranks, calls: RankCalls) -> None:
        super().__init__(client, name, at_end)
        self._ranks, self._calls = ranks, calls

    def _open(self, rows: int, size: int, epochs: int | None, seed: int) -> tuple[smb.train.WorkUnits | None, int]:
        units, left = None, None
        with self._calls.together():
            if self._ranks.speaks:
                units, left = super()._open(rows, size, epochs, seed)
        return units, int(self._ranks.tell(left))

    def _take(self, units: smb.train.WorkUnits | None) -> smb.train.Unit | None:
        unit = None
        with self._calls.together():
            if self._ranks.speaks:
                unit = super()._take(units)
        found: smb.train.Unit | None = self._ranks.tell(unit)
        return found


def _steps_alike(model: torch.nn.Module, mesh: DeviceMesh) -> bool:
    """Return True if the ranks' steps are known to be one step."""
    return (
        keeps_alike(mesh)
        or any(isinstance(parameter, DTensor) for parameter in model.parameters())
        or any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in model.modules())
    )


def _part_of(batch: torch.Tensor, share: int, shares: int) -> torch.Tensor:
    """Return one of `shares` equal shares; the last ones begin again at the first rows."""
    each = -(-len(batch) // shares)
    return batch[torch.arange(share * each, (share + 1) * each, device=batch.device) % len(batch)]


def _apart() -> Error:
    return Error(
        "smb.torch.join with mesh=: a scheme asked for the values of all ranks in one place; report this as a bug"
    )
