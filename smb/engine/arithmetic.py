"""Pure computations of the engine: kernels, layouts, sums, sizes. They use no connection and no shared memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias

from smb._engine import ffi, lib
from smb.engine.enums import Status, check
from smb.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np


def isa_names() -> list[str]:
    """Return the instruction sets that the kernels can use on this processor, narrowest first."""
    return [ffi.string(lib.smb_isa_name(isa)).decode() for isa in range(lib.smb_isa_count())]


def check_isa() -> None:
    """Raise InvalidArgumentError if SMB_ISA names an instruction set that this processor or this build does not have.

    Callers of the kernels call this first. It is not done at import, so that commands can report the error in one line.
    """
    wanted, names = os.environ.get("SMB_ISA"), isa_names()
    if wanted and wanted not in names:
        raise InvalidArgumentError(
            f"SMB_ISA must be one of {', '.join(names)} on this processor, not {wanted}; without SMB_ISA the fastest "
            "is used"
        )


def op_accepts(dtype_number: int, op: int, scale: float) -> bool:
    """Return True if the operation is defined for the dtype with this scale."""
    return bool(lib.smb_op_accepts(dtype_number, op, scale))


SOURCES_MAX = int(lib.SMB_SOURCES_MAX)  # limit of one accumulate_from


def apply_op(dtype_number: int, op: int, target: Any, source: Any, count: int, scale: float) -> None:
    """Combine `count` elements at `source` into those at `target`, as a server does."""
    check(lib.smb_kernel_apply(dtype_number, op, target, source, count, scale))


def crc32c(data: Any, crc: int = 0) -> int:
    """Return the CRC-32C of contiguous bytes that follow bytes with the CRC `crc`."""
    memory = memoryview(data)
    return int(lib.smb_crc32c(crc, ffi.from_buffer(memory), memory.nbytes))


def round_as_sent(wire: int, source: Any, count: int, offset: int, chunk_bytes: int, sink: Any) -> None:
    """Write to `sink` the values that `count` float32 elements at byte `offset` of a buffer have after a transfer with
    this wire.
    """
    check(lib.smb_kernel_round(wire, source, count, offset, chunk_bytes, sink))


DELTA_PART_MAX = int(lib.SMB_DELTA_PART_MAX)  # elements
SUM_PRIME = int(lib.SMB_SUM_PRIME)  # sums of states, and what changes add to them, are added modulo this prime

# Runs of a state's elements that some memory has: int64 rows (first element in the state, first element in the memory,
# number of elements), in the order of the state, without overlaps.
Runs: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def delta_encode(width: int, old: int, fresh: int, runs: Runs, to: Any) -> tuple[int, int, int] | None:
    """Write one part of a delta into the bytes `to`. Returns (its bytes, elements changed, their contribution to the
    state's sum).

    `old` and `fresh` are addresses of memory that has these runs of a state with elements of `width` bytes; `old`
    becomes equal to `fresh`. Together they have at most DELTA_PART_MAX elements, and span less than 2^32 elements of
    the state. Returns None if `to` is too small; `old` has become equal all the same.
    """
    delta = ffi.new("struct smb_delta *")
    room = ffi.from_buffer(to, require_writable=True)
    of, count = _runs(runs)
    status = lib.smb_delta_encode(
        width, ffi.cast("void *", old), ffi.cast("void *", fresh), of, count, room, len(room), delta
    )
    if status == Status.OUT_OF_MEMORY:
        return None
    check(status)
    return int(delta.bytes), int(delta.changes), int(delta.sum)


def delta_apply(width: int, memory: Any, runs: Runs, count: int, delta: Any, total: int) -> int | None:
    """Apply a delta to memory that has these runs of a state of `count` elements; other elements are left out.
    `total` is the sum of the runs; return the new sum. None if the bytes are not a delta; the memory may have changed.
    """
    here = ffi.from_buffer(memory, require_writable=True)
    added, data = ffi.new("uint64_t *", total), ffi.from_buffer(delta)
    status = lib.smb_delta_apply(width, here, *_runs(runs), count, data, len(data), added)
    return int(added[0]) if status == Status.OK else None


def state_sum(width: int, memory: Any, runs: Runs) -> int:
    """Return the sum of these runs of a state; csrc/kernels/delta.h defines it."""
    return int(lib.smb_state_sum(width, ffi.from_buffer(memory), *_runs(runs)))


def _runs(runs: Runs) -> tuple[Any, int]:
    return ffi.from_buffer("struct smb_run[]", runs), len(runs)


def segment_file_bytes(nbytes: int, chunk_bytes: int) -> int:
    """Return the memory in bytes that a segment with `nbytes` of data takes on its server; the capacity counts
    these.
    """
    return int(lib.smb_segment_file_bytes(nbytes, chunk_bytes))


def believes(user: int) -> bool:
    """Return True if this process, as a client, trusts that user's listener at a Unix socket; see smb_believes."""
    return bool(lib.smb_believes(user))


def segment_bytes(nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int, index: int) -> int:
    """Return how many bytes of a buffer of `nbytes` lie on segment `index`."""
    return int(lib.smb_layout_segment_bytes(layout_of(nbytes, stripe_bytes, chunk_bytes, segment_count), index))


def layout_piece(
    nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int, offset: int, bytes_max: int
) -> tuple[int, int, int]:
    """Return (segment index, offset in the segment, length) of the piece that begins at a byte offset of the buffer."""
    piece = ffi.new("struct smb_piece *")
    layout = layout_of(nbytes, stripe_bytes, chunk_bytes, segment_count)
    check(lib.smb_layout_piece(layout, offset, bytes_max, piece))
    return int(piece.segment), int(piece.segment_offset), int(piece.bytes)


def layout_of(nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int) -> Any:
    """Return a checked struct smb_layout. Raises InvalidArgumentError."""
    layout = ffi.new("struct smb_layout *", (nbytes, stripe_bytes, chunk_bytes, segment_count))
    if lib.smb_layout_check(layout) != Status.OK:
        raise InvalidArgumentError(
            f"{nbytes} bytes cannot be laid out in stripes of {stripe_bytes} and chunks of {chunk_bytes} "
            f"on {segment_count} segments"
        )
    return layout
