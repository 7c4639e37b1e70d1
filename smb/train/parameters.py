"""A worker's trained values, wherever they are: n float32 values that schemes move by blocks, and never hold.

A scheme keeps what it needs of them in host memory of its own (smb/train/exchange/). The blocks make up the group's
vector: all trained values, in one order, float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import cycle
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smb.errors import InvalidArgumentError
from smb.train.ledger import BLOCK_ELEMENTS, Run, Values

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.tensors import TensorTable
    from smb.train.exchange.mover import Mover
    from smb.train.group import Group

__all__ = ["BLOCK_ELEMENTS", "ArrayParameters", "Parameters", "Values", "scratch"]


class Parameters(ABC):
    """The trained values. One thread at a time. `size` is n, `origin` where in the group's buffers the first one is."""

    size: int
    origin: int = 0
    table: TensorTable | None = None  # the tensors that they are, where that is known
    in_ranks: ClassVar[bool] = False  # several processes, which are one worker, have them; this one speaks for all

    @abstractmethod
    def blocks(self) -> Iterator[tuple[int, Values]]:
        """Yield (begin, values from there on), in order. Leave them alone; they are good until the next is asked for.

        As exact as they are kept: see keep_exact.
        """

    @abstractmethod
    def deltas(self, base: Values) -> Iterator[tuple[int, Values]]:
        """Yield (begin, what was done from there on), in order, since the values were filled with `base`, (n,).

        A block is the caller's until the next but one is asked for: one can be sent while the next is made.
        """

    @abstractmethod
    def fill(self, values: Values) -> None:
        """Set all to `values`, (n,), rounded where they are kept in fewer bits."""

    @abstractmethod
    def subtract(self, difference: Values) -> None:
        """Take `difference`, (n,), from the values."""

    @abstractmethod
    def keep_exact(self) -> None:
        """Keep beside values of fewer bits what rounding leaves out of fill and subtract, from now on."""

    def hold(self, values: Values) -> None:  # noqa: ARG002 - a subclass's to use
        """Take note that this array, (n,), will be given to fill, deltas or subtract time and again."""
        return

    def give_up(self) -> None:
        """Have an exchange in another thread wait for no further part: its worker is closed."""
        return

    # ---- their place in the group's buffers: all of them, in this order, unless a subclass says otherwise

    def store(self, weights: Buffer) -> None:
        """Write the present values, exact. Raises InvalidArgumentError if they are not finite."""
        for begin, block in self.blocks():
            if not np.isfinite(block).all():
                raise InvalidArgumentError(f"join of training {weights.name!r}: the first values are not finite")
            weights.write(block, self.origin + begin, wire="exact")

    def read(self, buffer: Buffer, out: Values) -> None:
        """Read what is theirs of a buffer, exact, into `out`, (n,)."""
        buffer.read(self.origin, self.size, out=out, wire="exact")

    def write(self, buffer: Buffer, block: Values, begin: int) -> list[Future[Any]]:
        """Begin to write what is this process's to write of a block, by the buffer's wire."""
        return [buffer.write_async(part, run.there) for part, run in self.parts(block, begin)]

    def parts(self, block: Values, begin: int) -> Iterator[tuple[Values, Run]]:
        """Yield what is this process's to write of a block, and where that is."""
        yield block, Run(begin, self.origin + begin, block.size)

    @property
    def runs(self) -> Sequence[Run]:
        """The ranges that this process writes."""
        return (Run(0, self.origin, self.size),)

    @property
    def all_runs(self) -> Sequence[Run]:
        """The ranges that this process has; some of them another one may write."""
        return self.runs

    def part(self, offset: int, count: int) -> Parameters:
        """Return the values in `count` elements of the group's vector from `offset` on, as parameters by themselves:
        the same values, not copies. For the thread that has these. Raises InvalidArgumentError if they can't be cut.
        """
        raise InvalidArgumentError(f"{type(self).__name__} can't be cut into parts ({count} elements from {offset} on)")

    def mover(self, group: Group, way: str, arrived: Callable[[], object] | None) -> Mover | None:  # noqa: ARG002
        """Return what moves them between the worker and the group's buffers; None: what moves an array (mover.py)."""
        return None

    def seated(self, group: Group) -> None:  # noqa: ARG002 - a subclass's to use
        """Take note that the worker has taken a slot."""
        return


class ArrayParameters(Parameters):
    """A flat float32 array at a fixed place in memory, changed in place."""

    def __init__(self, values: Values, asked: str) -> None:
        if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.ndim != 1 or not values.size:
            raise InvalidArgumentError(f"{asked}: values must be a numpy array, float32, of one dimension, not empty")
        if isinstance(values, np.ma.MaskedArray):
            raise InvalidArgumentError(f"{asked}: values must be without a mask: hidden ones are trained, too")
        if not (values.flags.c_contiguous and values.flags.writeable):
            raise InvalidArgumentError(f"{asked}: values must be contiguous and writable: they are changed in place")
        self.size = values.size
        self._values = values
        self._scratch: list[Values] = []

    def blocks(self) -> Iterator[tuple[int, Values]]:
        """Yield parts of the array itself."""
        for begin in range(0, self.size, BLOCK_ELEMENTS):
            yield begin, self._values[begin : begin + BLOCK_ELEMENTS]

    def deltas(self, base: Values) -> Iterator[tuple[int, Values]]:
        """Yield values - base."""
        if not self._scratch:
            self._scratch = scratch(self.size)
        for (begin, values), room in zip(self.blocks(), cycle(self._scratch), strict=False):
            yield begin, np.subtract(values, base[begin : begin + values.size], out=room[: values.size])

    def fill(self, values: Values) -> None:
        self._values[:] = values

    def subtract(self, difference: Values) -> None:
        self._values -= difference

    def keep_exact(self) -> None: ...

    def part(self, offset: int, count: int) -> ArrayParameters:
        """Return a part of the same array."""
        part = ArrayParameters(self._values[offset : offset + count], "a part of values")
        part.origin = offset
        if not self._scratch:
            self._scratch = scratch(self.size)
        part._scratch = self._scratch
        return part


def scratch(size: int) -> list[Values]:
    """Return memory for blocks that take turns: two, or one where there is but one block."""
    return [np.zeros(min(size, BLOCK_ELEMENTS), np.float32) for _ in range(2 if size > BLOCK_ELEMENTS else 1)]
