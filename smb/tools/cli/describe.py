"""Buffers and servers in words and in JSON, for the commands that show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smb import Buffer, BufferInfo, ServerInfo


def format_shape(shape: tuple[int, ...]) -> str:
    """Return "1000 x 1000", or "scalar" for ()."""
    return " x ".join(str(extent) for extent in shape) or "scalar"


def server_names(buffer: Buffer | BufferInfo) -> list[str]:
    """Return the servers that hold segments, in the layout's order, each once."""
    return list(dict.fromkeys(segment.server for segment in buffer.layout.segments))


def buffer_json(buffer: Buffer | BufferInfo) -> dict[str, Any]:
    """Return name, shape, dtype, size and placement as what json.dumps takes."""
    layout = buffer.layout
    from smb.buffer_info import BufferInfo

    info = buffer if isinstance(buffer, BufferInfo) else buffer.info
    return {
        "name": buffer.name,
        "shape": list(buffer.shape),
        "dtype": str(buffer.dtype),
        "wire": buffer.wire,
        "nbytes": buffer.nbytes,
        "epoch": layout.epoch,
        "stripe_bytes": layout.stripe_bytes,
        "chunk_bytes": layout.chunk_bytes,
        "replicas": info.replicas,
        "segments": [
            {"id": f"{segment.id:016x}", "server": segment.server, "nbytes": segment.nbytes}
            | ({"backup": segment.backup, "epoch": segment.epoch} if segment.epoch else {})
            for segment in layout.segments
        ],
    }


def server_json(server: ServerInfo) -> dict[str, Any]:
    """Return one server's state as what json.dumps takes."""
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
    }
