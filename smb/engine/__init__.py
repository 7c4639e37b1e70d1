"""The engine with Python types: the only part of `smb` that uses cffi's `lib`. csrc/smb/ says what each call does.

Every call here releases the GIL while it runs; a direct method's only if it takes longer than handing over the GIL.
Objects free their C side when they are collected. A buffer handle keeps its client, links and segments alive.
"""

from __future__ import annotations

from pathlib import Path

try:
    from smb._direct import Direct, DirectTarget, Switch, take_interrupt
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: the compiled engine is not in {Path(__file__).parents[1]}. If this is a checkout of the project, "
        f"and the package is installed elsewhere, start Python in another folder; or install the checkout where it "
        f"is: pip install -e .",
        name=error.name,
    ) from None

from smb.engine.arithmetic import (
    DELTA_PART_MAX,
    SOURCES_MAX,
    SUM_PRIME,
    Runs,
    apply_op,
    believes,
    check_isa,
    crc32c,
    delta_apply,
    delta_encode,
    isa_names,
    layout_piece,
    op_accepts,
    round_as_sent,
    segment_bytes,
    segment_file_bytes,
    state_sum,
)
from smb.engine.async_operations import AsyncEvent, AsyncEventKind, AsyncOperations, Window
from smb.engine.buffers import BufferHandle, direct, unmap
from smb.engine.calls import (
    NOWHERE,
    Attempt,
    Outcome,
    Request,
    UnknownParts,
    address_of,
    direct_call,
    memory_at,
    memory_of,
)
from smb.engine.counters import ClientCounters, Latency, latencies_of
from smb.engine.enums import (
    DEFAULT_CHUNK_BYTES,
    HELLO,
    KINDS,
    LANES_FURTHER_MAX,
    PAGE_BYTES,
    RECORD_BYTES,
    SEGMENTS_MAX,
    TRANSPORTS,
    AskOpcode,
    EngineError,
    Lane,
    Opcode,
    PartOutcome,
    Status,
    status_name,
)
from smb.engine.links import (
    LATEST,
    ROLES,
    DamagedListsError,
    EngineClient,
    Link,
    PendingRequest,
    Reply,
    Segment,
    Tls,
    Token,
)

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "DELTA_PART_MAX",
    "HELLO",
    "KINDS",
    "LANES_FURTHER_MAX",
    "LATEST",
    "NOWHERE",
    "PAGE_BYTES",
    "RECORD_BYTES",
    "ROLES",
    "SEGMENTS_MAX",
    "SOURCES_MAX",
    "SUM_PRIME",
    "TRANSPORTS",
    "AskOpcode",
    "AsyncEvent",
    "AsyncEventKind",
    "AsyncOperations",
    "Attempt",
    "BufferHandle",
    "ClientCounters",
    "DamagedListsError",
    "Direct",
    "DirectTarget",
    "EngineClient",
    "EngineError",
    "Lane",
    "Latency",
    "Link",
    "Opcode",
    "Outcome",
    "PartOutcome",
    "PendingRequest",
    "Reply",
    "Request",
    "Runs",
    "Segment",
    "Status",
    "Switch",
    "Tls",
    "Token",
    "UnknownParts",
    "Window",
    "address_of",
    "apply_op",
    "believes",
    "check_isa",
    "crc32c",
    "delta_apply",
    "delta_encode",
    "direct",
    "direct_call",
    "isa_names",
    "latencies_of",
    "layout_piece",
    "memory_at",
    "memory_of",
    "op_accepts",
    "round_as_sent",
    "segment_bytes",
    "segment_file_bytes",
    "state_sum",
    "status_name",
    "take_interrupt",
    "unmap",
]  # fmt: skip
