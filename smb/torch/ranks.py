"""The processes of a device mesh, and how they talk: over a gloo group of their own, whatever the mesh's backend is."""

from __future__ import annotations

import contextlib
import datetime
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smb.errors import InvalidArgumentError, UnavailableError
from smb.train.parameters import Values

_FOREVER = datetime.timedelta(days=30)  # a round may take long; a dead rank's connections end at once


def world() -> DeviceMesh | None:
    """Return the processes of this program's torch.distributed as a mesh; None if there is but one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    accelerator = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
    return DeviceMesh("cpu" if accelerator is None else accelerator.type, torch.arange(dist.get_world_size()))


_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}  # (all of torch.distributed, the gloo group)


def _group_of(ranks: list[int]) -> Any:
    """Return the gloo group of these ranks. One is made once: PyTorch does not take one's connections away."""
    world, group = _groups.get(tuple(ranks), (None, None))
    if world is not dist.group.WORLD:
        group = dist.new_group(ranks, timeout=_FOREVER, backend="gloo", use_local_synchronization=True)
        _groups[tuple(ranks)] = dist.group.WORLD, group
    return group


class Ranks:
    """The processes of a mesh, and how they talk."""

    def __init__(self, mesh: DeviceMesh) -> None:
        everyone = mesh.mesh.flatten().tolist()
        if dist.get_rank() not in everyone:
            raise InvalidArgumentError("smb.torch.join: this process is no part of the mesh")
        self.mesh = mesh
        self.count = len(everyone)
        self.rank: int = everyone.index(dist.get_rank())
        self._everyone: list[int] = everyone
        self._first = everyone[0]
        self._group = _group_of(everyone)

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def tell(self, what: Any = None) -> Any:
        """Return, to all, what the speaker says. Raises UnavailableError if a rank is gone."""
        message = [what]
        with self._alive():
            dist.broadcast_object_list(message, src=self._first, group=self._group, device=torch.device("cpu"))
        return message[0]

    def gather(self, what: Any) -> list[Any]:
        """Return, to all, what each says, by rank. Raises as tell."""
        said: list[Any] = [None] * self.count
        with self._alive():
            dist.all_gather_object(said, what, group=self._group)
        return said

    def swap(self, values: Values, gives: Mapping[int, Sequence[slice]], takes: Mapping[int, Sequence[slice]]) -> None:
        """Give ranks parts of a vector, and take other parts from ranks; two ranks name the same, in one order."""
        vector = torch.from_numpy(values)
        with self._alive():
            under_way = [
                call(vector[place], self._everyone[rank], group=self._group, tag=number)
                for call, places in ((dist.irecv, takes), (dist.isend, gives))
                for rank, of_rank in places.items()
                for number, place in enumerate(of_rank)
            ]
            for each in under_way:
                each.wait()  # type: ignore[union-attr]

    def forget(self) -> None:
        """The ranks are not at the same place any more: who joins later talks over another group."""
        _groups.pop(tuple(self._everyone), None)

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
            self.forget()
            raise UnavailableError(f"a rank of the mesh is gone: {error}") from error
