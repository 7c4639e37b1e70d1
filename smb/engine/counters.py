"""A client's counters, which the engine keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smb._engine import ffi, lib
from smb.engine.enums import KINDS, TRANSPORTS, status_name


@dataclass(frozen=True, slots=True)
class Latency:
    """A histogram of durations: counts between the edges of metric_names.LATENCY_EDGES, and the sum of all durations in
    seconds.
    """

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True)
class ClientCounters:
    """A client's counters since counting began: by (transport, kind); failed calls by status."""

    operations: dict[tuple[str, str], int]
    transferred_bytes: dict[tuple[str, str], int]
    failed: dict[str, int]
    repeated_total: int
    spoilt_total: int
    latencies: dict[tuple[str, str], Latency]


def latencies_of(raw: Any, transports: Mapping[int, str], kinds: Mapping[int, str]) -> dict[tuple[str, str], Latency]:
    """Read a struct smb_latencies; entries without any event are left out."""
    width = lib.SMB_LATENCY_BUCKETS + 1
    numbers = memoryview(ffi.buffer(raw)).cast("B").cast("Q")
    found = {}
    for cell in range(len(numbers) // width):
        *counts, sum_ns = numbers[cell * width : (cell + 1) * width]
        if any(counts):
            transport, kind = divmod(cell, lib.SMB_OPCODE_COUNT)
            found[transports[transport], kinds[kind]] = Latency(tuple(counts), sum_ns / 1e9)
    return found


def counters_of(client: Any) -> ClientCounters:
    """Read the counters of a struct smb_client."""
    raw = ffi.new("struct smb_client_counters *")
    lib.smb_client_counters(client, raw)
    cells = [(t, transport, k, kind) for t, transport in TRANSPORTS.items() for k, kind in KINDS.items()]
    return ClientCounters(
        operations={(over, kind): int(raw.operations[t][k]) for t, over, k, kind in cells if raw.operations[t][k]},
        transferred_bytes={(over, kind): int(raw.bytes[t][k]) for t, over, k, kind in cells if raw.operations[t][k]},
        failed={status_name(s): int(raw.failed[s]) for s in range(lib.SMB_STATUS_COUNT) if raw.failed[s]},
        repeated_total=int(raw.repeated_total),
        spoilt_total=int(raw.spoilt_total),
        latencies=latencies_of(ffi.addressof(raw, "latencies"), TRANSPORTS, KINDS),
    )
