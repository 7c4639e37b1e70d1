"""Where an open file's bytes are: in the memory servers, or in a copy of one version. For staged files see
staged_file.py.
"""

from __future__ import annotations

import errno
from typing import Any, Protocol

import numpy as np

from smb.buffer import Buffer
from smb.errors import LockLostError
from smb.files.error_codes import refuse
from smb.files.formats import FileView

Octets = np.ndarray[Any, np.dtype[np.uint8]]  # one-dimensional, contiguous
_SNAPSHOT_TRIES = 5
_PIN_S = 30.0


class Reads(Protocol):
    """The source from which bytes are copied."""

    nbytes: int

    def read_into(self, offset: int, out: Octets) -> int:
        """Fill `out` from a byte on; return how much was filled, which is less at the end."""
        ...


class BufferBytes:
    """A buffer's elements as bytes. Offsets and lengths need not be whole elements.

    Whole elements are transferred without a copy. If an end of a range cuts an element, that element is read, and for a
    write changed and written back. Changes that others make in the meantime to the *other* bytes of that one element
    are lost. Nothing else is touched.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._dtype = buffer.dtype
        self._itemsize = buffer.dtype.itemsize
        self._exact: dict[str, Any] = {} if buffer.wire == "exact" else {"wire": "exact"}  # files are never rounded

    def read_into(self, start: int, out: Octets) -> None:
        """Fill `out` with the bytes from `start` on."""
        count, itemsize = out.size, self._itemsize
        if start % itemsize == 0 and count % itemsize == 0:
            self.buffer.read(start // itemsize, count // itemsize, out=out.view(self._dtype), **self._exact)
            return
        for first, last, whole in self._cut(start, count):
            if whole:
                self.read_into(start + first, out[first:last])
            else:
                element, at = self._element(start + first)
                out[first:last] = element[at : at + last - first]

    def write(self, start: int, data: Octets) -> None:
        """Replace the bytes from `start` on."""
        count, itemsize = data.size, self._itemsize
        if start % itemsize == 0 and count % itemsize == 0:
            self.buffer.write(data.view(self._dtype), start // itemsize, **self._exact)
            return
        for first, last, whole in self._cut(start, count):
            if whole:
                self.write(start + first, data[first:last])
            else:
                element, at = self._element(start + first)
                element[at : at + last - first] = data[first:last]
                self.buffer.write(element.view(self._dtype), (start + first) // itemsize, **self._exact)

    def _element(self, at: int) -> tuple[Octets, int]:
        """Return the bytes of the element that contains byte `at`, and the position of that byte in it."""
        element = np.empty(1, self._dtype)
        self.buffer.read(at // self._itemsize, 1, out=element, **self._exact)
        return element.view(np.uint8), at % self._itemsize

    def _cut(self, start: int, count: int) -> list[tuple[int, int, bool]]:
        """Return the range in parts, as (from, to, True if these are whole elements)."""
        itemsize = self._itemsize
        head = min(-start % itemsize, count)
        tail = max(head, count - (start + count) % itemsize)
        cuts = [(0, head, False), (head, tail, True), (tail, count, False)]
        return [(first, last, whole) for first, last, whole in cuts if first < last]


class Live:
    """The buffer itself: reads and writes go to its servers, and are done when they return."""

    def __init__(self, buffer: Buffer, view: FileView) -> None:
        self.buffer = buffer
        self.nbytes = view.nbytes
        self._view = view
        self._bytes = BufferBytes(buffer)
        only = view.extents[0] if len(view.extents) == 1 and not view.extents[0].header else None
        self._plain = only is not None and only.start == 0

    def read_into(self, offset: int, out: Octets) -> int:
        """Fill `out` from a byte of the file on; return how much was filled, which is less at the file's end."""
        length = max(0, min(out.size, self.nbytes - offset))
        if self._plain:
            if length:
                self._bytes.read_into(offset, out if length == out.size else out[:length])
            return length
        for first, last, extent, inside in self._view.parts(offset, length):
            if extent.header:
                out[first:last] = np.frombuffer(extent.header, np.uint8)[inside : inside + last - first]
            else:
                self._bytes.read_into(extent.start + inside, out[first:last])
        return length

    def write(self, offset: int, data: Octets) -> None:
        """Replace bytes inside the file. A header accepts only the bytes that it has already; EINVAL for others."""
        if self._plain:
            self._bytes.write(offset, data)
            return
        parts = list(self._view.parts(offset, data.size))
        for first, last, extent, inside in parts:
            if extent.header and extent.header[inside : inside + last - first] != data[first:last].tobytes():
                raise refuse(
                    errno.EINVAL,
                    f"the header of buffer {self.buffer.name!r} gives its dtype and shape, which cannot change",
                )
        for first, last, extent, inside in parts:
            if not extent.header:
                self._bytes.write(extent.start + inside, data[first:last])

    def takes(self, source: Reads) -> bool:
        """Return True if these bytes can replace the file's: same length, same header."""
        for extent in self._view.extents:
            header = np.empty(len(extent.header), np.uint8)
            if source.nbytes != self.nbytes or source.read_into(extent.at, header) != header.size:
                return False
            if header.tobytes() != extent.header:
                return False
        return source.nbytes == self.nbytes

    def publish(self, source: Reads) -> None:
        """Publish bytes that `takes` accepts as the next version of the buffer."""
        values = np.zeros(self.buffer.nbytes, np.uint8)
        for extent in self._view.extents:
            if not extent.header:
                source.read_into(extent.at, values[extent.start : extent.start + extent.length])
        self.buffer.publish(values.view(self.buffer.dtype))


class Frozen:
    """One version of a buffer, copied when the first file on it is opened. It never changes."""

    def __init__(
        self, buffer: Buffer, version: int | None, *, or_zeros: bool = False, memory: Octets | None = None
    ) -> None:
        """`or_zeros` allows a buffer without a publication, as zeros: the caller is about to write the first one.
        `memory` has the bytes of `version` already.
        """
        self.buffer = buffer
        if memory is not None and version is not None:
            self.version, self.memory = version, memory
        elif or_zeros and buffer.version == 0:
            self.version, self.memory = 0, np.zeros(buffer.nbytes, np.uint8)
        else:
            self.version, self.memory = _copied(buffer, version)


class FrozenFile:
    def __init__(self, frozen: Frozen, view: FileView, *, by_version: bool = False) -> None:
        """`by_version`: the path names the version, so all openings of that path read the same."""
        self.buffer = frozen.buffer
        self.by_version = by_version
        self.nbytes = view.nbytes
        self._frozen = frozen
        self._view = view

    def read_into(self, offset: int, out: Octets) -> int:
        for first, last, extent, inside in self._view.parts(offset, out.size):
            source = np.frombuffer(extent.header, np.uint8) if extent.header else self._frozen.memory
            begin = extent.start + inside
            out[first:last] = source[begin : begin + last - first]
        return max(0, min(out.size, self.nbytes - offset))


def _copied(buffer: Buffer, version: int | None) -> tuple[int, Octets]:
    """Return (number, bytes) of a version, by default the latest. NotFoundError if the buffer does not have it."""
    memory = np.empty(buffer.nbytes, np.uint8)
    for _ in range(_SNAPSHOT_TRIES):
        with buffer.pin(version, ttl=_PIN_S) as pin:
            try:
                pin.read(out=memory.view(buffer.dtype), wire="exact")
            except LockLostError:  # the copy took longer than a pin lasts
                continue
            return pin.version, memory
    raise refuse(errno.ESTALE, f"buffer {buffer.name!r} is published faster than it can be copied; publish less often")
