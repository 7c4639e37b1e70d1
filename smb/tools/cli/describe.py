"""Buffers and servers as text and as JSON, for the commands that show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smb import Buffer, BufferInfo, ServerInfo
    from smb.transport.base import SegmentLocation


def format_shape(shape: tuple[int, ...]) -> str:
    """Return "1000 x 1000", or "scalar" for ()."""
    return " x ".join(str(extent) for extent in shape) or "scalar"


def _info(buffer: Buffer | BufferInfo) -> BufferInfo:
    from smb.buffer_info import BufferInfo

    return buffer if isinstance(buffer, BufferInfo) else buffer.info


def copies_state(buffer: Buffer | BufferInfo) -> str:
    """Return the copies as `smb stat` shows them: "1", and whether the buffer moves or has moved; "2"; or "2, degraded:
    ..." with the progress of new copies.
    """
    info = _info(buffer)
    segments = info.layout.segments
    if info.replicas == 1:
        moving = [segment for segment in segments if segment.copying_to]
        if moving:
            return f"1, moving to another server: {_progress(moving)}"
        return "1, which has moved: reached through its servers alone" if info.movable else "1"
    lost = [segment for segment in segments if not segment.backup]
    if not lost:
        return "2"
    text = f"2, degraded: {len(lost)} of {len(segments)} segments have one"
    copying = [segment for segment in lost if segment.copying_to]
    if not copying:
        return f"{text}; none is being copied: another server must have room"
    return f"{text}; copying {len(copying)} of them: {_progress(copying)}"


def _progress(copying: Sequence[SegmentLocation]) -> str:
    done = sum(segment.copied * segment.nbytes for segment in copying) / sum(segment.nbytes for segment in copying)
    left = max(segment.copy_left_s for segment in copying)
    return f"{done:.0%}" + (f", about {math.ceil(left)} s left" if left else "")


def version_of(buffer: Buffer, servers: Iterable[ServerInfo]) -> int | None:
    """Return the latest version, None if some of its servers are gone or do not answer."""
    from smb.errors import Error

    alive = {server.name for server in servers if server.alive}
    if not alive.issuperset(server_names(buffer)):
        return None
    try:
        return buffer.version
    except Error:
        return None


def server_names(buffer: Buffer | BufferInfo) -> list[str]:
    """Return the servers that hold segments, in the layout's order, each once."""
    return list(dict.fromkeys(segment.server for segment in buffer.layout.segments))


def buffer_json(buffer: Buffer | BufferInfo) -> dict[str, Any]:
    """Return name, shape, dtype, size and placement for json.dumps."""
    layout = buffer.layout
    info = _info(buffer)
    return {
        "name": buffer.name,
        "shape": list(buffer.shape),
        "dtype": info.unknown_dtype or info.dtype.name,
        "wire": buffer.wire,
        "nbytes": buffer.nbytes,
        "epoch": layout.epoch,
        "stripe_bytes": layout.stripe_bytes,
        "chunk_bytes": layout.chunk_bytes,
        "replicas": info.replicas,
        "segments": [
            {"id": f"{segment.id:016x}", "server": segment.server, "nbytes": segment.nbytes}
            | ({"backup": segment.backup, "epoch": segment.epoch} if segment.epoch else {})
            | ({"copying_to": segment.copying_to, "copied": segment.copied} if segment.copying_to else {})
            for segment in layout.segments
        ],
    }


def server_json(server: ServerInfo) -> dict[str, Any]:
    """Return one server's state for json.dumps."""
    return {
        "name": server.name,
        "alive": server.alive,
        "address": server.address,
        "capacity_bytes": server.capacity,
        "used_bytes": server.used,
        "segments": server.segments,
        "last_seen": server.last_seen,
        "metrics": server.metrics,
        "weight": server.weight,
        "zone": server.zone,
        "host_name": server.host_name,
        "draining": server.draining,
        "unheard": server.unheard,
        "overdue": server.overdue,
        "maintenance_until": server.maintenance_until,
    }


def server_state(server: ServerInfo) -> str:
    """Return a server's state in a few words."""
    return "alive" if server.alive else "not heard of yet" if server.unheard else "gone"


def quarantined_json(servers: Iterable[ServerInfo]) -> list[dict[str, Any]]:
    """Return the memory that servers keep without a record, for json.dumps."""
    return [
        {
            "server": server.name,
            "segment": f"{each.segment_id:016x}",
            "buffer": each.buffer,
            "bytes": each.nbytes,
            "reason": each.reason,
        }
        for server in servers
        for each in server.quarantined
    ]
