"""A state that comes as pairs of names and tensors, one after the other: checked, and copied to the host, one by one.

Such an iterable can often be read only once, and makes each tensor when it is asked for it. So no function here holds
more than one tensor, and a check fails at the pair that it concerns. The caller publishes nothing after a failure.
"""

from __future__ import annotations

import errno
import hashlib
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from smb.arrays.dtypes import name_of
from smb.errors import InvalidArgumentError, OutOfMemoryError
from smb.tensors import ELEMENTS, TensorTable
from smb.torch.publishing.state_bytes import as_torch
from smb.torch.tensor_slices import is_sharded, local_of
from smb.torch.tensor_values import check_dense, plain

Pairs: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"
Form: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"


class PairReader:
    """Reads the pairs of one state. `names` and `kind` choose the names, and each tensor's dtype, as its Publisher."""

    def __init__(
        self,
        asked: str,
        names: frozenset[str] | Callable[[str], bool] | None,
        kind: Callable[[torch.Tensor], torch.dtype],
    ) -> None:
        self._asked = asked
        self._names = names
        self._kind = kind

    def check(self, pairs: object) -> None:
        """Raise InvalidArgumentError for an object that is not an iterable of pairs. Reads none of them."""
        if not isinstance(pairs, Iterable) or isinstance(pairs, torch.Tensor):
            raise InvalidArgumentError(
                f"{self._asked}: pass a model, a state_dict, or an iterable of pairs (name, tensor), not a "
                f"{type(pairs).__name__}"
            )

    def forms(self, pairs: Pairs) -> dict[str, Form]:
        """Return shape and dtype of each tensor of pairs that can be read again."""
        return {name: (tuple(tensor.shape), self._kind(tensor)) for name, tensor in self._chosen(pairs)}

    def on_host(self, pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name with its tensor in host memory, contiguous, of the dtype that is published."""
        for name, tensor in self._chosen(pairs):
            yield name, self._host(tensor)
            del tensor  # before the next one is made

    def stored(
        self, pairs: Pairs, table: Mapping[str, Any], tied: Mapping[str, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As on_host, but only tensors that are stored under their name, after comparing them with the `table`.

        A name of `tied` may be left out. If it comes, its values must be those of the tensor with which it is tied.
        Raises InvalidArgumentError: at once for a tensor that is not in the table, at the end for a missing one.
        """
        shared = {*tied, *tied.values()}
        digests: dict[str, bytes] = {}
        missing = dict.fromkeys(table)
        for name, tensor in self._chosen(pairs):
            info = table.get(tied.get(name, name))
            if info is None:
                raise self._differs(f"{name} is not in it")
            given, wanted = (tuple(tensor.shape), self._kind(tensor)), (info.shape, getattr(torch, info.dtype.name))
            if given != wanted:
                raise self._differs(f"{name} is {given}, not {wanted}")
            host = self._host(tensor)
            del tensor  # before the next one is made
            if name in shared:
                digests[name] = hashlib.blake2b(_bytes_of(host)).digest()
            if name in table:
                del missing[name]
                yield name, host
            del host
        if missing:
            raise self._differs(*(f"{name} is missing" for name in missing))
        for name, first in tied.items():
            if digests.get(name, digests[first]) != digests[first]:
                raise InvalidArgumentError(
                    f"{self._asked}: {name} and {first} were one tensor at the first time, and now they differ; tie "
                    f"them again, or publish under another name"
                )

    def _chosen(self, pairs: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the pairs whose names are to be published. Raises InvalidArgumentError for anything else than a pair,
        for a repeated name, and at the end for a name of names= that did not come.
        """
        seen: set[str] = set()
        number = 0
        for pair in pairs:  # without enumerate, which keeps the pair before
            if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
                raise InvalidArgumentError(
                    f"{self._asked}: item {number} is a {type(pair).__name__}, not a pair (name, tensor); pass a "
                    f"model, a state_dict, or an iterable of such pairs"
                )
            name, tensor = pair
            del pair
            number += 1
            if name in seen:
                raise InvalidArgumentError(f"{self._asked}: {name!r} comes twice; give each tensor one name")
            seen.add(name)
            if not (self._names(name) if callable(self._names) else self._names is None or name in self._names):
                continue
            yield name, self._checked(name, tensor)
            del tensor
        if isinstance(self._names, frozenset) and (absent := sorted(self._names - seen)):
            raise InvalidArgumentError(f"{self._asked}: names= has {absent[0]!r}, but the state has no such tensor")

    def _checked(self, name: str, tensor: Any) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(
                f"{self._asked}: {name!r} is a {type(tensor).__name__}, not a tensor; leave it out (names=)"
            )
        if is_in_several_ranks(tensor):
            raise InvalidArgumentError(
                f"{self._asked}: {name!r} lies in several ranks; pass {name}.full_tensor(), or make the Publisher with "
                f"the sharded model, and each rank publishes its own shards"
            )
        here: torch.Tensor = local_of(tensor)
        check_dense(self._asked, name, here)
        return here.detach()

    def _host(self, tensor: torch.Tensor) -> torch.Tensor:
        return plain(tensor.to("cpu", self._kind(tensor)))

    def _differs(self, *differences: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self._asked}: these are not the published tensors ({len(differences)} differ): "
            f"{'; '.join(differences[:3])}"
        )


class Spool:
    """Tensors in an unnamed temporary file, until their names and shapes are all known. Use it as a context manager."""

    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._file = tempfile.TemporaryFile(prefix="smb-state-")  # noqa: SIM115 # closed in __exit__
        self.forms: dict[str, Form] = {}

    def fill(self, pairs: Pairs) -> None:
        """Append tensors in host memory. Raises OutOfMemoryError if the disk is full."""
        try:
            for name, tensor in pairs:
                self.forms[name] = tuple(tensor.shape), tensor.dtype
                self._file.write(_bytes_of(tensor))
                del tensor
            self._file.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OutOfMemoryError(
                f"{self._asked}: the first publication keeps the tensors in a temporary file in "
                f"{tempfile.gettempdir()}, until it knows all shapes, and the disk is full; set TMPDIR to another "
                f"directory, or pass names and shapes: Publisher(client, name, {{name: (shape, dtype), ...}})"
            ) from error

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._file.seek(0)
        for name, (shape, dtype) in self.forms.items():
            memory = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
            self._file.readinto(memory.data)
            yield name, as_torch(memory, ELEMENTS[name_of(dtype)].numpy, shape)
            del memory

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor in host memory, contiguous."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def is_in_several_ranks(tensor: object) -> bool:
    """Return True for a DTensor of which this process may have a part only."""
    return is_sharded(tensor) and tensor.device_mesh.size() > 1


def is_repeatable(pairs: Pairs) -> bool:
    """Return True if the pairs can be read twice, at no cost."""
    return isinstance(pairs, Sequence)


def with_forms(asked: str, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tensors without values for a mapping of names to (shape, dtype), and any other mapping as it is."""
    if not state or not all(isinstance(each, tuple) for each in state.values()):
        return state
    return {
        name: torch.empty(info.shape, dtype=getattr(torch, info.dtype.name), device="meta")
        for name, info in TensorTable.of(state, asked).items()
    }
