"""Pure computations of the engine: kernels, layouts, sums, sizes. No connection, no shared memory."""

from __future__ import annotations

import os
from typing import Any

from smb._engine import ffi, lib
from smb.engine.enums import Status, check
from smb.errors import InvalidArgumentError


def isa_names() -> list[str]:
    """Return the instruction sets that the kernels can use on this processor, narrowest first."""
    return [ffi.string(lib.smb_isa_name(isa)).decode() for isa in range(lib.smb_isa_count())]


def check_isa() -> None:
    """Raise InvalidArgumentError if SMB_ISA names an instruction set that this processor or this build has not.

    Callers of the kernels call it first, and not the import: commands then report it in one line.
    """
    wanted, names = os.environ.get("SMB_ISA"), isa_names()
    if wanted and wanted not in names:
        raise InvalidArgumentError(
            f"SMB_ISA={wanted}: on this processor it is one of {', '.join(names)}; without SMB_ISA the fastest is taken"
        )


def op_accepts(dtype_number: int, op: int, scale: float) -> bool:
    """Whether the operation is defined for the dtype with this scale."""
    return bool(lib.smb_op_accepts(dtype_number, op, scale))


SOURCES_MAX = int(lib.SMB_SOURCES_MAX)  # of one accumulate_from


def apply_op(dtype_number: int, op: int, target: Any, source: Any, count: int, scale: float) -> None:
    """Combine `count` elements at `source` into those at `target`, as a server does it."""
    check(lib.smb_kernel_apply(dtype_number, op, target, source, count, scale))


def crc32c(data: Any, crc: int = 0) -> int:
    """Return the CRC-32C of contiguous bytes that follow those of which `crc` is it."""
    memory = memoryview(data)
    return int(lib.smb_crc32c(crc, ffi.from_buffer(memory), memory.nbytes))


def round_as_sent(wire: int, source: Any, count: int, offset: int, chunk_bytes: int, sink: Any) -> None:
    """Write what `count` float32 elements at byte `offset` of a buffer are when they arrive."""
    check(lib.smb_kernel_round(wire, source, count, offset, chunk_bytes, sink))


DELTA_PART_MAX = int(lib.SMB_DELTA_PART_MAX)  # elements


def delta_encode(width: int, old: int, fresh: int, count: int, first: int, to: Any) -> tuple[int, int, int] | None:
    """Write one part of a delta into the bytes `to`: (its bytes, elements changed, what they add to the state's sum).

    `old` and `fresh` are addresses of `count` elements of `width` bytes, element `first` of the state and those that
    follow; `old` becomes `fresh`. None if there is no room; `old` has become it all the same.
    """
    delta = ffi.new("struct smb_delta *")
    room = ffi.from_buffer(to, require_writable=True)
    status = lib.smb_delta_encode(
        width, ffi.cast("void *", old), ffi.cast("void *", fresh), count, first, room, len(room), delta
    )
    if status == Status.OUT_OF_MEMORY:
        return None
    check(status)
    return int(delta.bytes), int(delta.changes), int(delta.sum)


def delta_apply(width: int, state: Any, delta: Any, total: int) -> int | None:
    """Apply a delta to the bytes `state`, whose sum is `total`; return the sum by then. None if it is no delta."""
    memory = ffi.from_buffer(state, require_writable=True)
    added, data = ffi.new("uint64_t *", total), ffi.from_buffer(delta)
    status = lib.smb_delta_apply(width, memory, len(memory) // width, data, len(data), added)
    return int(added[0]) if status == Status.OK else None


def state_sum(state: Any) -> int:
    """Return the sum of a state's bytes, a multiple of 8: see csrc/memory/delta.h."""
    memory = ffi.from_buffer(state)
    return int(lib.smb_state_sum(memory, len(memory) // 8))


def segment_file_bytes(nbytes: int, chunk_bytes: int) -> int:
    """Memory that a segment of `nbytes` of data takes on its server, in bytes: what counts against the capacity."""
    return int(lib.smb_segment_file_bytes(nbytes, chunk_bytes))


def believes(user: int) -> bool:
    """Whether this process, as a client, believes that user's listener at a Unix socket: see smb_believes."""
    return bool(lib.smb_believes(user))


def segment_bytes(nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int, index: int) -> int:
    """Bytes of a buffer of `nbytes` that live on segment `index`."""
    return int(lib.smb_layout_segment_bytes(layout_of(nbytes, stripe_bytes, chunk_bytes, segment_count), index))


def layout_piece(
    nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int, offset: int, bytes_max: int
) -> tuple[int, int, int]:
    """(segment index, offset in the segment, length) of the piece that starts at a byte offset of the buffer."""
    piece = ffi.new("struct smb_piece *")
    layout = layout_of(nbytes, stripe_bytes, chunk_bytes, segment_count)
    check(lib.smb_layout_piece(layout, offset, bytes_max, piece))
    return int(piece.segment), int(piece.segment_offset), int(piece.bytes)


def layout_of(nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int) -> Any:
    """Return a checked struct smb_layout. Raises InvalidArgumentError."""
    layout = ffi.new("struct smb_layout *", (nbytes, stripe_bytes, chunk_bytes, segment_count))
    if lib.smb_layout_check(layout) != Status.OK:
        raise InvalidArgumentError(
            f"no layout has {nbytes} bytes in stripes of {stripe_bytes} and chunks of {chunk_bytes} "
            f"on {segment_count} segments"
        )
    return layout
