"""Rows of buffers as a map-style data set: one copy in memory for all workers of a host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import smb.client
from smb.buffer import Buffer
from smb.errors import Error, InvalidArgumentError, TransportError

Row = tuple[torch.Tensor, ...]


class Rows(Dataset[Any]):
    """Row i of each of several buffers as sample i, for a DataLoader.

    ```python
    samples = Rows("digits/images", "digits/labels", coordinator="127.0.0.1:7070")
    loader = torch.utils.data.DataLoader(samples, batch_size=64, shuffle=True, num_workers=4, persistent_workers=True)
    for images, labels in loader: ...
    ```

    `names`: of buffers with the same first extent, which is the number of samples. A sample is a tuple of tensors in
    the dtypes of the buffers, copies of the rows; `transform`, if given, is called with this tuple in the process that
    loads the sample, and returns the sample. `coordinator`: as in smb.connect; `timeout`: seconds for each call.

    A buffer on this host is mapped, so all workers, forked or spawned, read the servers' own memory, and later samples
    show changes of the buffer, and zeros once it is deleted. A buffer that cannot be mapped (on another host, of two
    copies, or with versions, of which the latest counts) is read once, when the data set is made, into shared memory,
    which goes to all workers; later changes are not seen. `mapped` has the names of the former.

    The data set may be pickled. Raises NotFoundError, InvalidArgumentError if the first extents differ; in a worker
    Error if a mapped buffer was replaced since the data set was made.
    """

    def __init__(
        self,
        *names: str,
        coordinator: str | None = None,
        transform: Callable[[Row], Any] | None = None,
        timeout: float = 10.0,
    ) -> None:
        if not names:
            raise InvalidArgumentError("Rows: give the names of one or more buffers")
        self._names, self._coordinator, self._transform, self._timeout = names, coordinator, transform, timeout
        self._ids: dict[str, int] = {}  # of the mapped buffers
        self._copies: dict[str, torch.Tensor] = {}  # of the others, in shared memory
        self._here: list[torch.Tensor] | None = None  # in the order of names; a forked worker has them, too
        with smb.client.connect(coordinator, timeout=timeout) as client:  # a mapping outlives its client
            self._here = self._opened({name: client.open(name) for name in names})
        self._length = len(self._here[0])

    def _opened(self, buffers: dict[str, Buffer]) -> list[torch.Tensor]:
        """Check the buffers, map or copy each, and return their tensors."""
        lengths = {name: buffer.shape[0] if buffer.shape else 0 for name, buffer in buffers.items()}
        if len(set(lengths.values())) > 1 or not all(buffer.shape for buffer in buffers.values()):
            shapes = ", ".join(f"{name} {list(buffer.shape)}" for name, buffer in buffers.items())
            raise InvalidArgumentError(f"Rows: the buffers must have the same number of rows, and have {shapes}")
        found: dict[str, torch.Tensor] = {}
        for name, buffer in buffers.items():
            try:
                found[name] = _tensor_of(buffer.view())
                self._ids[name] = buffer.info.id
            except (TransportError, InvalidArgumentError):  # on another host, or its memory may move
                found[name] = self._copies[name] = _shared_copy(buffer)
        return [found[name] for name in self._names]

    @property
    def mapped(self) -> tuple[str, ...]:
        """The buffers of which no copy is made: their memory is on this host."""
        return tuple(self._ids)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`, from 0; negative ones count from the end. Raises IndexError."""
        if not -self._length <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        row = tuple(tensor[index].clone() for tensor in self._tensors())
        return row if self._transform is None else self._transform(row)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, gathered at once; DataLoader calls it for each batch."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        gathered = [tensor[rows] for tensor in self._tensors()]
        samples = list(zip(*gathered, strict=True))
        return samples if self._transform is None else [self._transform(sample) for sample in samples]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_here": None}

    def _tensors(self) -> list[torch.Tensor]:
        """Return this process's tensors. A process that got the data set by pickling maps the buffers itself."""
        if self._here is None:
            self._here = self._mapped_again() if self._ids else [self._copies[name] for name in self._names]
        return self._here

    def _mapped_again(self) -> list[torch.Tensor]:
        found = dict(self._copies)
        with smb.client.connect(self._coordinator, timeout=self._timeout) as client:
            for name, number in self._ids.items():
                buffer = client.open(name)
                if buffer.info.id != number:
                    raise Error(f"Rows: buffer {name!r} was replaced since the data set was made; make it anew")
                found[name] = _tensor_of(buffer.view())
        return [found[name] for name in self._names]


def _tensor_of(memory: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the same memory as a tensor, also of bfloat16 and float8, which numpy's dtypes of torch lack."""
    kind = getattr(torch, memory.dtype.name)
    if not memory.size:
        return torch.empty(memory.shape, dtype=kind)
    return torch.from_numpy(memory.reshape(-1).view(np.uint8)).view(kind).view(memory.shape)


def _shared_copy(buffer: Buffer) -> torch.Tensor:
    """Return the buffer's content in shared memory, which torch hands to the processes that it starts."""
    copy = torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype.name))
    copy.share_memory_()  # type: ignore[no-untyped-call]
    if copy.numel():
        buffer.read(out=copy)
    return copy
