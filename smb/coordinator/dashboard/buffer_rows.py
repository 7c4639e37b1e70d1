"""What the dashboard says of buffers: state, size, traffic, and where their parts and copies lie. Pure.

smb/coordinator/dashboard/overview.py has the rest, and the units.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from smb.coordinator.dashboard.history import LoadRates
from smb.coordinator.dashboard.moment import Json, Moment
from smb.coordinator.records import BufferRecord
from smb.rpc import metadata

BUFFERS_MAX = 500
TENSORS_MAX = 1000  # of one buffer
TENSORS = "smb.tensors"  # the key of named tensors (smb/tensors.py)
PARTS_MAX = 32  # servers shown for one buffer in the list of all


def first_buffers(view: Moment, buffers: Sequence[BufferRecord]) -> list[BufferRecord]:
    """Return the buffers by traffic, then by name. If they are too many: the unhealthy ones, then those with most
    traffic, then the largest."""
    traffic = {record.key: view.load_of(record).bytes for record in buffers}
    if len(buffers) > BUFFERS_MAX:
        buffers = sorted(
            buffers, key=lambda record: (health_of(view, record) == "ok", -traffic[record.key], -record.nbytes)
        )[:BUFFERS_MAX]
    return sorted(buffers, key=lambda record: (-traffic[record.key], record.name))


def buffer_row(view: Moment, record: BufferRecord) -> Json:
    parts = parts_of(view, record)
    return {
        "name": record.name,
        "state": health_of(view, record),
        "shape": list(record.shape),
        "dtype": record.dtype,
        "size": record.nbytes,
        "versions": record.versions,
        "wire": record.wire,
        "stripe": record.stripe_bytes,
        "servers": len(parts),
        "segments": len(record.segments),
        "parts": parts[:PARTS_MAX],
        "created": record.created_at,
        "replicas": record.replicas,
        "degraded": sum(not segment.backup for segment in record.segments) if record.replicas > 1 else 0,
        "rates": rates_row(view.load_of(record)),
        "skew": _skew(parts),
        "training": view.training_of(record.name),
    }


def rates_row(busy: LoadRates) -> Json:
    return {"operations": round(busy.operations, 1), "bytes": round(busy.bytes)}


def tensors_of(record: BufferRecord) -> Json:
    """Return the first named tensors of a buffer."""
    text = metadata.unpack(record.metadata)
    found = json.loads(text).get(TENSORS) if f'"{TENSORS}"' in text else None
    table = found.items() if isinstance(found, dict) else ()
    tensors = [
        {"name": name, "dtype": str(entry.get("dtype", "")), "shape": _extents(entry.get("shape"))}
        for name, entry in table
        if isinstance(entry, dict)
    ]
    return {"tensors": tensors[:TENSORS_MAX], "tensors_left_out": max(0, len(tensors) - TENSORS_MAX)}


def _extents(shape: Any) -> list[int]:
    """Return a shape from metadata, whose contents are unchecked because any program may have stored them."""
    return [extent for extent in shape if isinstance(extent, int)] if isinstance(shape, list) else []


def health_of(view: Moment, record: BufferRecord) -> str:
    """Return ok, unheard or gone (of a server), or lost (a server came back without the memory)."""
    if view.lost and any(segment.id in view.lost for segment in record.segments):
        return "lost"
    states = {view.server_state(segment.server) for segment in record.segments}
    return "ok" if states <= {"alive", "late"} else "unheard" if states <= {"alive", "late", "unheard"} else "gone"


def parts_of(view: Moment, record: BufferRecord) -> list[Json]:
    """Return the buffer's part on each server, and the bytes per second that its users move there, in the layout's
    order."""
    sizes: dict[str, int] = defaultdict(int)
    rates: dict[str, float] = defaultdict(float)
    for segment in record.segments:
        sizes[segment.server] += segment.nbytes
        rates[segment.server] += view.busy.get((segment.server, segment.id), LoadRates()).bytes
    return [{"server": server, "size": size, "rate": round(rates[server])} for server, size in sizes.items()]


def copies_of(view: Moment, record: BufferRecord) -> list[Json]:
    """Return where the second copies lie. `copying`: bytes of copies that are being made."""
    sizes: dict[str, int] = defaultdict(int)
    copying: dict[str, int] = defaultdict(int)
    for segment in record.segments:
        if segment.backup:
            sizes[segment.backup] += segment.nbytes
        if segment.copying_to:
            copying[segment.copying_to] += segment.nbytes
    return [
        {
            "server": server,
            "size": sizes.get(server, 0),
            "copying": copying.get(server, 0),
            "state": view.server_state(server),
        }
        for server in sorted({*sizes, *copying})
    ]


def _skew(parts: Sequence[Json]) -> float | None:
    """Return how uneven the servers of a buffer are used: the traffic of the busiest one, over the mean. 1: even. None
    for one server, or without traffic."""
    rates = [part["rate"] for part in parts]
    return round(max(rates) * len(rates) / sum(rates), 2) if len(rates) > 1 and sum(rates) else None


def held_row(view: Moment, record: BufferRecord, server: str) -> Json:
    """Return the server's part of a buffer, lock or barrier; 0 segments if it has none."""
    sizes = [segment.nbytes for segment in record.segments if segment.server == server]
    return {
        "name": record.name,
        "kind": record.kind.value,
        "size": sum(sizes),
        "segments": len(sizes),
        "state": health_of(view, record),
    }
