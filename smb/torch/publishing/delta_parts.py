"""The delta of one generation: its parts, and a table of them, from which a reader learns which ones it needs.

A delta begins with the number of parts (4 bytes, little-endian) and the CRC-32C of the table's rows (4). A row of 24
bytes follows for each part: the first element that it may change (8), the element behind the last one (8), its bytes
(4) and their CRC-32C (4). The parts follow (csrc/kernels/delta.h), in the order of the rows. Each rank of a mesh makes
the parts of its own shards, so they lie in the order of the ranks. A delta without changes has no bytes.

Elements are units of `width` bytes of the state's buffer (state_bytes.py). The parts of a shard whose rows are cut
interleave: each covers elements of other ranks, which it does not change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from smb.engine import DELTA_PART_MAX, Runs, crc32c, delta_encode

if TYPE_CHECKING:
    import torch

    from smb.torch.publishing.state_bytes import PartBytes, StateBytes

ROW = np.dtype([("first", "<u8"), ("end", "<u8"), ("nbytes", "<u4"), ("crc", "<u4")])
Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"
ReadRange: TypeAlias = Callable[[int, int], "np.ndarray[Any, np.dtype[np.uint8]]"]  # (first byte of the delta, bytes)

_HEAD = np.dtype([("count", "<u4"), ("crc", "<u4")])
_FIRST_LOOK = 4096  # bytes that a reader of a table takes at once: all of most tables
_GAP_MAX = 1 << 14  # bytes between two parts that are read with them, since another read would take longer
_PART_ELEMENTS = min(1 << 20, DELTA_PART_MAX)  # elements that a thread compares at a time
_PART_SPAN = 2**32 - 1  # gaps have 4 bytes
_THREADS_MAX = 8


@dataclass(frozen=True, slots=True)
class DeltaParts:
    """The parts of one process."""

    rows: Rows
    data: bytes
    added: int  # to the state's sum


def pieces_of(memory: StateBytes | PartBytes) -> dict[str, list[Runs]]:
    """Return the elements of each tensor in a memory, cut for parts."""
    return {name: list(cut(memory.runs_of(name))) for name in memory.tensors}


def compare(
    memory: StateBytes | PartBytes,
    pieces: Mapping[str, Sequence[Runs]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    nbytes_max: int,
) -> DeltaParts | None:
    """Copy tensors into memory that has an earlier state. Return what changed; None if that takes more bytes.

    `pieces` are those of `pieces_of`.
    """
    rows: list[tuple[int, int, int, int]] = []
    data: list[bytes] = []
    nbytes = added = 0
    fits = True
    with ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1), "smb-deltas") as threads:
        for name, tensor in tensors:
            if name not in pieces:
                continue  # another rank has it
            fresh = memory.host(name, tensor)  # kept while its address is in use
            old, address = memory.tensors[name].data_ptr(), fresh.data_ptr()

            def encode(runs: Runs, old: int = old, address: int = address) -> tuple[Runs, bytes | None, int]:
                room = np.empty(int(runs[:, 2].sum()) * memory.width // 2 + 512, np.uint8)
                found = delta_encode(memory.width, old, address, runs, room)
                return (runs, None, 0) if found is None else (runs, room[: found[0]].tobytes(), found[2])

            several = len(pieces[name]) > 1
            for runs, part, more in threads.map(encode, pieces[name]) if several else map(encode, pieces[name]):
                nbytes += 0 if part is None else len(part)
                fits = fits and part is not None and nbytes <= nbytes_max
                if part and fits:
                    rows.append((int(runs[0, 0]), int(runs[-1, 0] + runs[-1, 2]), len(part), crc32c(part)))
                    data.append(part)
                    added += more
            del fresh, tensor  # before the next one is made
    return DeltaParts(np.array(rows, ROW), b"".join(data), added) if fits else None


def cut(runs: Runs) -> Iterator[Runs]:
    """Yield runs of the same elements, for one part each."""
    began, count = 0, 0
    found: list[tuple[int, int, int]] = []
    for there, here, left in runs.tolist():
        while left:
            if found and (count == _PART_ELEMENTS or there >= began + _PART_SPAN - _PART_ELEMENTS):
                yield np.array(found, np.int64)
                found = []
            if not found:
                began, count = there, 0
            taken = min(left, _PART_ELEMENTS - count)
            found.append((there, here, taken))
            there, here, left, count = there + taken, here + taken, left - taken, count + taken
    if found:
        yield np.array(found, np.int64)


def table_of(rows: Rows) -> bytes:
    """Return the bytes of a table."""
    content = rows.tobytes()
    return np.array([(len(rows), crc32c(content))], _HEAD).tobytes() + content


def rows_of(data: bytes) -> Rows:
    """Parse Rows.tobytes()."""
    return np.frombuffer(data, ROW)


class Choice:
    """What to read of one delta: the parts that may change elements of some runs."""

    def __init__(self, read: ReadRange, nbytes: int, runs: Runs | None) -> None:
        """Read the table of a delta of that many bytes. Without `runs` all is wanted, and nothing is read yet."""
        self._read = read
        self._nbytes = nbytes
        self._rows: Rows | None = None
        self._offsets: Sequence[int] = ()
        self.is_valid = True
        if nbytes == 0 or runs is None:
            return
        head = read(0, min(nbytes, _FIRST_LOOK))
        start = _start(head, nbytes)
        if start is None:
            self.is_valid = False
            return
        if start > head.size:
            head = np.concatenate([head, read(head.size, start - head.size)])
        content = head[_HEAD.itemsize : start].tobytes()
        rows = rows_of(content)
        ends = start + np.cumsum(rows["nbytes"], dtype=np.int64)
        self.is_valid = bool(len(rows) and ends[-1] == nbytes and crc32c(content) == _head(head)["crc"])
        wanted = _overlap(rows, runs)
        self._rows, self._offsets = rows[wanted], (ends - rows["nbytes"])[wanted].tolist()

    @property
    def nbytes(self) -> int:
        """Bytes that `parts` reads, without those in between."""
        return self._nbytes if self._rows is None else int(self._rows["nbytes"].sum())

    def parts(self) -> np.ndarray[Any, Any] | bytes | None:
        """Read the parts, for delta_apply. Return None if these are not the bytes that were published."""
        if self._rows is not None:
            return self._parts(self._rows)
        if self._nbytes == 0:
            return b""
        delta = self._read(0, self._nbytes)
        start = _start(delta, self._nbytes)
        return None if start is None else delta[start:]

    def _parts(self, rows: Rows) -> bytes | None:
        found: list[bytes] = []
        sizes, crcs, offsets = rows["nbytes"].tolist(), rows["crc"].tolist(), self._offsets
        at = 0
        while at < len(sizes):
            start, end, last = offsets[at], offsets[at] + sizes[at], at + 1
            while last < len(sizes) and offsets[last] - end <= _GAP_MAX:
                end, last = offsets[last] + sizes[last], last + 1
            block = self._read(start, end - start)
            for offset, size, crc in zip(offsets[at:last], sizes[at:last], crcs[at:last], strict=True):
                part = block[offset - start : offset - start + size].tobytes()
                if crc32c(part) != crc:
                    return None
                found.append(part)
            at = last
        return b"".join(found)


def _overlap(rows: Rows, runs: Runs) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which parts may change elements of the runs."""
    behind = np.searchsorted(runs[:, 0] + runs[:, 2], rows["first"].astype(np.int64), "right")
    begins = np.append(runs[:, 0], np.iinfo(np.int64).max)[behind]
    return np.asarray(begins < rows["end"].astype(np.int64))


def _start(head: np.ndarray[Any, Any], nbytes: int) -> int | None:
    """Return where the parts begin in a delta of that many bytes, from its first bytes; None for invalid bytes."""
    if head.size < _HEAD.itemsize:
        return None
    start = _HEAD.itemsize + int(_head(head)["count"]) * ROW.itemsize
    return start if start <= nbytes else None


def _head(delta: np.ndarray[Any, Any]) -> Any:
    return np.frombuffer(delta[: _HEAD.itemsize].tobytes(), _HEAD)[0]
