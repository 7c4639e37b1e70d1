"""The processes of a device mesh, and how they talk: over a gloo process group of their own, whatever the mesh has."""

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

_FOREVER = datetime.timedelta(days=30)  # a round may take long; a dead rank's connections end at once


_of_frameworks: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def world() -> DeviceMesh | None:
    """Return the processes of this program's torch.distributed as a mesh; None if there is but one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    accelerator = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
    mesh = DeviceMesh(
        "cpu" if accelerator is None else accelerator.type, torch.arange(dist.get_world_size(), device="cpu")
    )
    _of_frameworks.add(mesh)
    return mesh


def keeps_alike(mesh: DeviceMesh) -> bool:
    """Whether a framework that has several processes sees to it that these step alike: it wraps the model itself."""
    return mesh in _of_frameworks


_Key: TypeAlias = "tuple[str, tuple[int, ...]]"
_process_groups: dict[_Key, tuple[Any, Any]] = {}  # (all of torch.distributed, the gloo process group)


def _group_of(key: _Key) -> Any:
    """Return the gloo process group of these ranks for that purpose. One is made once: PyTorch never closes
    its connections."""
    world, process_group = _process_groups.get(key, (None, None))
    if world is not dist.group.WORLD:
        process_group = dist.new_group(list(key[1]), timeout=_FOREVER, backend="gloo", use_local_synchronization=True)
        _process_groups[key] = dist.group.WORLD, process_group
    return process_group


class Ranks:
    """The processes of a mesh, and how they talk. Those who talk for different purposes (a training, or publications in
    the background) do not hear each other.
    """

    def __init__(self, mesh: DeviceMesh, purpose: str = "") -> None:
        everyone = mesh.mesh.flatten().tolist()
        if dist.get_rank() not in everyone:
            raise InvalidArgumentError("this process is no part of the mesh")
        self.mesh = mesh
        self.count = len(everyone)
        self.rank: int = everyone.index(dist.get_rank())
        self._everyone: list[int] = everyone
        self._first = everyone[0]
        self._key = purpose, tuple(everyone)
        self._process_group = _group_of(self._key)

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def tell(self, what: Any = None) -> Any:
        """Return, to all, what the speaker says. Raises UnavailableError if a rank is gone."""
        message = [what]
        with self._alive():
            dist.broadcast_object_list(message, src=self._first, group=self._process_group, device=torch.device("cpu"))
        return message[0]

    def gather(self, what: Any) -> list[Any]:
        """Return, to all, what each says, by rank. Raises as tell."""
        said: list[Any] = [None] * self.count
        with self._alive():
            dist.all_gather_object(said, what, group=self._process_group)
        return said

    def agree(self, failure: BaseException | None) -> None:
        """With all ranks: return if none of them failed; else raise, at each, what one failed with, its own first."""
        failures = self.gather(None if failure is None else _as_sent(failure, self.rank))
        if failure is not None:
            raise failure
        for each in failures:
            if each is not None:
                kind, text, outcome = each
                raise kind(text, outcome=outcome)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Do the block at all ranks; whatever it raises at one of them ends it at all."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for what became of it
            failure = error
        self.agree(failure)

    def swap(self, values: Values, gives: Mapping[int, Sequence[slice]], takes: Mapping[int, Sequence[slice]]) -> None:
        """Give ranks parts of a vector, and take other parts from ranks; two ranks name the same, in one order."""
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
        """The ranks are not at the same place any more: who joins later talks over another process group."""
        _process_groups.pop(self._key, None)

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
            self.forget()
            raise UnavailableError(f"a rank of the mesh is gone: {error}", outcome=UNKNOWN) from error


def _as_sent(failure: BaseException, rank: int) -> tuple[type[Error], str, CallOutcome]:
    """Return a failure as other ranks are told of it."""
    if isinstance(failure, Error):
        return type(failure), f"rank {rank} of the mesh: {failure}", failure.outcome
    return Error, f"rank {rank} of the mesh: {failure!r}", UNKNOWN
