"""A worker's trained values, wherever they are stored: n float32 values that schemes move block by block.

A scheme keeps the arrays that it needs in host memory of its own (smb/train/exchange/). The blocks make up the group's
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


class Copies:
    """The number of bytes that exchanges have copied from one array of this process to another, outside of calls."""

    total_bytes = 0


class Parameters(ABC):
    """The trained values. One thread at a time. `size` is n, `origin` where in the group's buffers the first one is."""

    size: int
    copies: Copies | None = None  # their own, and that of their parts; None: they are not counted
    origin: int = 0
    table: TensorTable | None = None  # their tensors, if they are known
    # Whether several processes, which are one worker, have the values; this process speaks for all.
    in_ranks: ClassVar[bool] = False

    @abstractmethod
    def blocks(self) -> Iterator[tuple[int, Values]]:
        """Yield (begin, values from there on), in order. Do not change the values. A block is valid until the next one
        is asked for. The values are as exact as they are kept: see keep_exact.
        """

    @abstractmethod
    def deltas(self, base: Values, out: Values | None = None) -> Iterator[tuple[int, Values]]:
        """Yield (begin, changes from there on), in order, since the values were filled with `base`, (n,). No block has
        more than BLOCK_ELEMENTS.

        A block is the caller's until the next but one is asked for, so one block can be sent while the next is
        computed. With `out`, (n,), which may be `base` itself, the blocks are parts of it, and stay.
        """

    @abstractmethod
    def fill(self, values: Values) -> None:
        """Set all values to `values`, (n,), rounded if they are kept in fewer bits."""

    @abstractmethod
    def subtract(self, difference: Values) -> None:
        """Subtract `difference`, (n,), from the values."""

    @abstractmethod
    def keep_exact(self) -> None:
        """From now on, if the values have fewer bits, keep beside them what rounding leaves out
        in fill and subtract.
        """

    @property
    def array(self) -> Values | None:
        """All values as one float32 array, (n,), in the group's order, if they lie like that in host memory; else
        None. A call may then read and set them without a copy.
        """
        return None

    @property
    def placed(self) -> bool:
        """True if the values lay in one array at the last exchange. Any thread may ask."""
        return False

    def count_copy(self, values: Values) -> None:
        """Note that an exchange has copied these values from one array to another."""
        if self.copies is not None:
            self.copies.total_bytes += values.nbytes

    def hold(self, values: Values) -> None:  # noqa: ARG002 - a subclass's to use
        """Take note that this array, (n,), will be given to fill, deltas or subtract again and again."""
        return

    def give_up(self) -> None:
        """Let an exchange in another thread wait for no further part, because its worker is closed."""
        return

    # ---- their place in the group's buffers: the whole buffer in this order, unless a subclass says otherwise

    def store(self, weights: Buffer) -> None:
        """Write the present values exactly. Raises InvalidArgumentError if they are not finite."""
        for begin, block in self.blocks():
            if not np.isfinite(block).all():
                raise InvalidArgumentError(
                    f"join of training {weights.name!r}: the initial values must be finite; some are NaN or infinite"
                )
            weights.write(block, self.origin + begin, wire="exact")

    def read(self, buffer: Buffer, out: Values) -> None:
        """Read these values' part of a buffer exactly into `out`, (n,)."""
        buffer.read(self.origin, self.size, out=out, wire="exact")

    def write(self, buffer: Buffer, block: Values, begin: int) -> list[Future[Any]]:
        """Begin to write the part of a block that this process writes, by the buffer's wire."""
        return [buffer.write_async(part, run.there) for part, run in self.parts(block, begin)]

    def parts(self, block: Values, begin: int) -> Iterator[tuple[Values, Run]]:
        """Yield the parts of a block that this process writes, with their places."""
        yield block, Run(begin, self.origin + begin, block.size)

    @property
    def runs(self) -> Sequence[Run]:
        """The ranges that this process writes."""
        return (Run(0, self.origin, self.size),)

    @property
    def all_runs(self) -> Sequence[Run]:
        """The ranges that this process has; another process may write some of them."""
        return self.runs

    def part(self, offset: int, count: int) -> Parameters:
        """Return the values at `count` elements of the group's vector from `offset` on, as parameters of their own,
        which share memory with these. For the same thread. Raises InvalidArgumentError if the values can't be cut
        there.
        """
        raise InvalidArgumentError(
            f"{type(self).__name__} can't be cut into parts ({count} elements from {offset} on); use fragments=1"
        )

    def mover(self, group: Group, way: str, arrived: Callable[[], object] | None) -> Mover | None:  # noqa: ARG002
        """Return an object that moves the values between the worker and the group's buffers. None: use the one for
        arrays (mover.py).
        """
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
            raise InvalidArgumentError(f"{asked}: values must be without a mask: masked values would be trained, too")
        if not (values.flags.c_contiguous and values.flags.writeable):
            raise InvalidArgumentError(f"{asked}: values must be contiguous and writable: they are changed in place")
        self.size = values.size
        self.copies = Copies()
        self._values = values
        self._scratch: list[Values] = []

    def blocks(self) -> Iterator[tuple[int, Values]]:
        """Yield parts of the array itself."""
        for begin in range(0, self.size, BLOCK_ELEMENTS):
            yield begin, self._values[begin : begin + BLOCK_ELEMENTS]

    @property
    def array(self) -> Values:
        """The array."""
        return self._values

    @property
    def placed(self) -> bool:
        """They always do."""
        return True

    def deltas(self, base: Values, out: Values | None = None) -> Iterator[tuple[int, Values]]:
        """Yield values - base."""
        if out is None and not self._scratch:
            self._scratch = scratch(self.size)
        rooms = cycle(self._scratch)
        for begin, values in self.blocks():
            room = next(rooms)[: values.size] if out is None else out[begin : begin + values.size]
            yield begin, np.subtract(values, base[begin : begin + values.size], out=room)

    def fill(self, values: Values) -> None:
        self._values[:] = values

    def subtract(self, difference: Values) -> None:
        self._values -= difference

    def keep_exact(self) -> None: ...

    def part(self, offset: int, count: int) -> ArrayParameters:
        """Return a part of the same array."""
        part = ArrayParameters(self._values[offset : offset + count], "a part of values")
        part.origin, part.copies = offset, self.copies
        if not self._scratch:
            self._scratch = scratch(self.size)
        part._scratch = self._scratch
        return part


def scratch(size: int) -> list[Values]:
    """Return memory for blocks that are used in turn: two blocks, or one if all values fit one block."""
    return [np.zeros(min(size, BLOCK_ELEMENTS), np.float32) for _ in range(2 if size > BLOCK_ELEMENTS else 1)]
