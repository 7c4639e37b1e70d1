"""The processes of a device mesh, and their communication over a gloo process group of their own, whatever the mesh
has.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smb.errors import UNKNOWN, CallOutcome, Error, InvalidArgumentError, UnavailableError
from smb.train.parameters import Values

_FOREVER = datetime.timedelta(days=30)  # a round may take long, and a dead rank's connections end at once


_of_frameworks: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def world() -> DeviceMesh | None:
    """Return the processes of this program's torch.distributed as a mesh; None if there is only one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    accelerator = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
    mesh = DeviceMesh(
        "cpu" if accelerator is None else accelerator.type, torch.arange(dist.get_world_size(), device="cpu")
    )
    _of_frameworks.add(mesh)
    return mesh


def keeps_alike(mesh: DeviceMesh) -> bool:
    """Return True if a framework with several processes made this mesh: it wraps the model itself, so all ranks step
    alike.
    """
    return mesh in _of_frameworks


_Key: TypeAlias = "tuple[str, tuple[int, ...]]"
_process_groups: dict[_Key, tuple[Any, Any]] = {}  # (torch.distributed's world, the gloo process group)


def _group_of(key: _Key) -> Any:
    """Return the gloo process group of these ranks for this purpose. It is made once, because PyTorch never closes its
    connections.
    """
    world, process_group = _process_groups.get(key, (None, None))
    if world is not dist.group.WORLD:
        process_group = dist.new_group(list(key[1]), timeout=_FOREVER, backend="gloo", use_local_synchronization=True)
        _process_groups[key] = dist.group.WORLD, process_group
    return process_group


class Ranks:
    """The processes of a mesh, and their communication. Messages for different purposes (a training, or publications in
    the background) are separate.
    """

    def __init__(self, mesh: DeviceMesh, purpose: str = "") -> None:
        everyone = mesh.mesh.flatten().tolist()
        if dist.get_rank() not in everyone:
            raise InvalidArgumentError("this process is not part of the mesh; call this only in the mesh's processes")
        self.mesh = mesh
        self.count = len(everyone)
        self.rank: int = everyone.index(dist.get_rank())
        self._everyone: list[int] = everyone
        self._first = everyone[0]
        self._key = purpose, tuple(everyone)
        self._process_group = _group_of(self._key)

    @property
    def speaks(self) -> bool:
        """True if this process acts for all."""
        return self.rank == 0

    def tell(self, what: Any = None) -> Any:
        """Return the speaker's `what` at all ranks. Raises UnavailableError if a rank is gone."""
        message = [what]
        with self._alive():
            dist.broadcast_object_list(message, src=self._first, group=self._process_group, device=torch.device("cpu"))
        return message[0]

    def gather(self, what: Any) -> list[Any]:
        """Return every rank's `what`, by rank, at all ranks. Raises as tell."""
        said: list[Any] = [None] * self.count
        with self._alive():
            dist.all_gather_object(said, what, group=self._process_group)
        return said

    def agree(self, failure: BaseException | None) -> None:
        """With all ranks: return if none of them failed. Otherwise raise at each rank its own failure, or else another
        rank's.
        """
        failures = self.gather(None if failure is None else _as_sent(failure, self.rank))
        if failure is not None:
            raise failure
        for each in failures:
            if each is not None:
                kind, text, outcome = each
                raise kind(text, outcome=outcome)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Run the block at all ranks. An error at one of them ends it at all."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for what became of it
            failure = error
        self.agree(failure)

    def swap(self, values: Values, gives: Mapping[int, Sequence[slice]], takes: Mapping[int, Sequence[slice]]) -> None:
        """Give parts of a vector to ranks, and take other parts from ranks. Both ranks name the same parts, in the same
        order.
        """
        vector = torch.from_numpy(values)
        with self._alive():
            under_way = [
                call(vector[part], self._everyone[rank], group=self._process_group, tag=number)
                for call, parts in ((dist.irecv, takes), (dist.isend, gives))
                for rank, of_rank in parts.items()
                for number, part in enumerate(of_rank)
            ]
            for each in under_way:
                each.wait()  # type: ignore[union-attr]

    def forget(self) -> None:
        """Forget the process group, because the ranks are no longer at the same place: a later
        join makes another one.
        """
        _process_groups.pop(self._key, None)

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
            self.forget()
            raise UnavailableError(f"a rank of the mesh is gone: {error}", outcome=UNKNOWN) from error


class Alone:
    """A process without others, in the place of Ranks."""

    count = 1
    rank = 0
    speaks = True

    def tell(self, what: Any = None) -> Any:
        """As Ranks.tell."""
        return what

    def gather(self, what: Any) -> list[Any]:
        """As Ranks.gather."""
        return [what]

    def agree(self, failure: BaseException | None) -> None:
        """As Ranks.agree."""
        if failure is not None:
            raise failure

    def agreed(self) -> contextlib.AbstractContextManager[None]:
        """As Ranks.agreed."""
        return contextlib.nullcontext()


def _as_sent(failure: BaseException, rank: int) -> tuple[type[Error], str, CallOutcome]:
    """Return a failure in the form that is sent to other ranks."""
    if isinstance(failure, Error):
        return type(failure), f"rank {rank} of the mesh: {failure}", failure.outcome
    return Error, f"rank {rank} of the mesh: {failure!r}", UNKNOWN
