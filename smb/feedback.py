"""Error feedback: the rounding error of one accumulate is added to the next one."""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from smb import engine
from smb.arrays import memory as arrays
from smb.arrays.dtypes import DTYPES, WIRES
from smb.call.arguments import Arguments
from smb.errors import InvalidArgumentError

if TYPE_CHECKING:
    from smb.buffer import Buffer

Array = np.ndarray[Any, np.dtype[Any]]


class ErrorFeedback:
    """This client's residual for a float32 buffer: the part of its contributions that rounding has kept back so far.

    ```python
    residual = smb.ErrorFeedback(buffer)
    buffer.accumulate(gradient, wire="int4", feedback=residual)
    ```

    Let r be the residual (float32, of the buffer's shape and in its units, zeros at first) and Q the rounding of the
    wire. Then `buffer.accumulate(a, scale=s, wire=..., feedback=residual)` computes `t = s*a + r`, each step rounded to
    float32. It adds `Q(t)` to the buffer and keeps `r = t - Q(t)`. So the sum of the added values and the residual is
    exact, up to the roundings of float32 (Seide et al. 2014; Karimireddy et al. 2019).

    A call that fails with nothing applied leaves the residual as it was: repeat it. If a part was applied, `Q(t)` of
    the rest goes back into the residual, and the next call sends it. After a failure with unknown outcome the residual
    is as if all had been applied; buffer.settle(error) then puts back what was not, and returns []. So nothing is lost,
    and nothing counts twice. An infinity or NaN in the array stays in the residual until reset().

    Thread-safe: calls with one residual take turns. Client memory: the buffer's size.
    """

    def __init__(self, buffer: Buffer) -> None:
        if buffer.dtype != np.float32:
            raise InvalidArgumentError(
                f"ErrorFeedback of buffer {buffer.name!r}: the buffer must be float32, not {buffer.dtype}; others are "
                "not rounded"
            )
        self.buffer = buffer
        self.lock = threading.RLock()
        self._residual = np.zeros(buffer.size, np.float32)

    @property
    def residual(self) -> Array:
        """A copy of the residual, in the buffer's shape."""
        with self.lock:
            return self._residual.reshape(self.buffer.shape).copy()

    def reset(self) -> None:
        """Set the residual to zeros.

        ```python
        residual.reset()
        float(residual.residual.sum())  # 0.0
        ```
        """
        with self.lock:
            self._residual[:] = 0

    def top_k(self, array: Array, k: int, *, scale: float = 1.0) -> tuple[Array, Array]:
        """Return (indices, values) of the k largest elements by magnitude of `scale * array + residual`, and keep the
        rest.

        ```python
        indices, values = residual.top_k(gradient, k=100)
        buffer.accumulate_sparse(indices, values, feedback=residual)
        ```

        `array` is float32 with as many elements as the buffer, flat or of its shape. The returned elements leave the
        residual. Takes O(size) time, and calls no server.
        """
        memory = arrays.readable(array, DTYPES["float32"])
        try:
            k = operator.index(k)
        except TypeError as error:
            raise InvalidArgumentError(
                f"top_k of buffer {self.buffer.name!r}: k must be an integer, not {k!r}"
            ) from error
        if memory.count != self._residual.size or not 0 < k <= memory.count:
            raise InvalidArgumentError(
                f"top_k of buffer {self.buffer.name!r}: the array must have all {self._residual.size} elements of the "
                f"buffer, and k must be from 1 to that; it has {memory.count}, and k={k!r}"
            )
        Arguments(self.buffer.info).check_shape(memory.shape, "top_k", "the array")
        with self.lock:
            self._residual += np.float32(scale) * arrays.as_float32(memory)
            largest = np.argpartition(np.abs(self._residual), memory.count - k)[memory.count - k :]
            indices = np.sort(largest).astype(np.int64)
            values = self._residual[indices]
            self._residual[indices] = 0
        return indices, values

    def __repr__(self) -> str:
        return f"<smb.ErrorFeedback of buffer {self.buffer.name!r}>"

    # ---- for Buffer, which holds `lock` meanwhile

    def take(self, array: Array, offset: int, scale: float, wire: int) -> Sending:
        """Take the values to send out of the flat array and the residual at `offset`."""
        part = self._residual[offset : offset + array.size]
        before = part.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            total = array + part if scale == 1.0 else np.float32(scale) * array + part
            arrives = total if wire == WIRES["exact"] else _rounded(self.buffer, total, offset, wire)
            np.subtract(total, arrives, out=part)
        return Sending(self, offset, total, arrives, before)


def as_sent(buffer: Buffer, values: Array, offset: int) -> Array:
    """Return the values that these float32 values have after they arrive at `offset` of a float32 buffer, by its own
    wire.
    """
    return values if buffer.wire == "exact" else _rounded(buffer, values, offset, WIRES[buffer.wire])


def _rounded(buffer: Buffer, values: Array, offset: int, wire: int) -> Array:
    arrives = np.empty_like(values)
    source, sink = engine.memory_of(values), engine.memory_of(arrives)
    engine.round_as_sent(wire, source, values.size, 4 * offset, buffer.layout.chunk_bytes, sink)
    return arrives


class Sending:
    """The part of a residual that one call took out. `values` are sent."""

    def __init__(self, feedback: ErrorFeedback, offset: int, values: Array, arrives: Array, before: Array) -> None:
        self.values = values
        self.count: int = values.size
        self._feedback = feedback
        self._offset = offset
        self._arrives = arrives
        self._before = before

    def undo(self) -> None:
        """Restore the residual: the call was not made. The caller has held the lock since `take`."""
        self._feedback._residual[self._offset : self._offset + self.values.size] = self._before

    def put_back(self, missing: list[range]) -> None:
        """Add these elements to the residual again: they were not applied and never will be. The next call sends
        them.
        """
        with self._feedback.lock:
            for elements in missing:
                here = slice(elements.start - self._offset, elements.stop - self._offset)
                self._feedback._residual[elements.start : elements.stop] += self._arrives[here]


class SparseSending:
    """The part of a residual that accumulate_sparse sends."""

    def __init__(self, feedback: ErrorFeedback, indices: Array, values: Array) -> None:
        self.count = int(indices[-1] - indices[0]) + 1 if indices.size else 0
        self._feedback, self._indices, self._values = feedback, indices, values

    def put_back(self, missing: list[range]) -> None:
        """Add these elements to the residual again: they were not applied and never will be."""
        with self._feedback.lock:
            for elements in missing:
                low, high = np.searchsorted(self._indices, (elements.start, elements.stop))
                self._feedback._residual[self._indices[low:high]] += self._values[low:high]
