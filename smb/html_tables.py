"""The tables that notebooks show of buffers, servers, clients, clusters and trainings, by `_repr_html_`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, TypeAlias

from smb.config.parse import format_bytes

if TYPE_CHECKING:
    from smb.buffer_info import BufferInfo
    from smb.server_info import ServerInfo

Row: TypeAlias = Mapping[str, object]


def listed(rows: Sequence[Row], nothing: str) -> str:
    """Return a table with a column for each key; `nothing` is said if there are no rows."""
    if not rows:
        return f"<em>{escape(nothing)}</em>"
    head = "".join(f"<th>{escape(key)}</th>" for key in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in row.values())}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def described(title: str, row: Row) -> str:
    """Return a table with a line for each key of one object."""
    lines = "".join(f"<tr><th>{escape(key)}</th><td>{escape(str(value))}</td></tr>" for key, value in row.items())
    return f"<table><caption>{escape(title)}</caption><tbody>{lines}</tbody></table>"


def buffer_row(info: BufferInfo) -> Row:
    """Return what a table says of a buffer."""
    servers = dict.fromkeys(segment.server for segment in info.layout.segments)
    return {
        "name": info.name,
        "shape": info.shape,
        "dtype": info.dtype_name,
        "size": format_bytes(info.nbytes),
        "versions": info.versions,
        "copies": f"{info.replicas}, one lost" if info.degraded else info.replicas,
        "servers": ", ".join(servers) + (" (memory lost)" if info.lost else ""),
    }


class BufferList(list["BufferInfo"]):
    """A list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return listed([buffer_row(info) for info in self], "no buffers")


class ServerList(list["ServerInfo"]):
    """A list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return listed([_server_row(info) for info in self], "no memory servers")


def _server_row(info: ServerInfo) -> Row:
    state = "alive" if info.alive else "not heard of yet" if info.unheard else "gone"
    return {
        "name": info.name,
        "address": info.address,
        "state": f"{state}, draining" if info.draining else state,
        "used": f"{format_bytes(info.used)} of {format_bytes(info.capacity)}",
        "segments": info.segments,
        "zone": info.zone,
    }
