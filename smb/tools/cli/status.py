"""`smb status`: the memory servers of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, counted, format_ago, print_json, table

if TYPE_CHECKING:
    from rich.table import Table

    from smb import ServerInfo


def status(coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show the memory servers.

    Who is alive, how much memory each lends, and how much of it is used.

    Example: smb status --coordinator storage-1:7070
    """
    from smb.tools.cli.describe import server_json

    with connect(coordinator) as client:
        servers = sorted(client.servers(), key=lambda server: server.name)
        buffers = client.list()
    alive = [server for server in servers if server.alive]
    totals = {
        "servers": len(servers),
        "alive": len(alive),
        "capacity_bytes": sum(server.capacity for server in alive),
        "used_bytes": sum(server.used for server in alive),
        "segments": sum(server.segments for server in alive),
        "buffers": len(buffers),
    }
    if as_json:
        print_json({"servers": [server_json(server) for server in servers], "totals": totals})
        return
    out = console()
    if not servers:
        out.print("No memory server has registered. Start one: smb-memserver --coordinator HOST:PORT")
        return
    out.print(_table(servers))
    out.print(_summary(totals))


def _table(servers: Sequence[ServerInfo]) -> Table:
    from smb.config.parse import format_bytes

    numbers = ("CAPACITY", "USED", "SEGMENTS")
    rows = table("SERVER", "STATE", "ADDRESS", *numbers, "LAST SEEN", right=numbers)
    for server in servers:
        rows.add_row(
            server.name,
            "alive" if server.alive else "gone",
            server.address,
            format_bytes(server.capacity),
            format_bytes(server.used),
            str(server.segments),
            format_ago(server.last_seen),
            style=None if server.alive else "red",
        )
    return rows


def _summary(totals: dict[str, int]) -> str:
    from smb.config.parse import format_bytes

    used = totals["used_bytes"] / totals["capacity_bytes"] if totals["capacity_bytes"] else 0.0
    return (
        f"\n{totals['alive']} of {totals['servers']} servers alive, "
        f"{format_bytes(totals['used_bytes'])} of {format_bytes(totals['capacity_bytes'])} used ({used:.0%}), "
        f"{counted(totals['buffers'], 'buffer')} in {counted(totals['segments'], 'segment')}"
    )
