"""`smb status`: the memory servers of a cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smb.config.printable import printable
from smb.errors import Error
from smb.tools.cli.connection import connect, coordinator_at
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, counted, format_ago, format_duration, print_json, table

if TYPE_CHECKING:
    from rich.table import Table

    from smb import ServerInfo
    from smb.rpc import control_pb2 as pb

_LOOK_S = 1.0
_OVERVIEW_S = 5.0
_NAMES_MAX = 4
_QUARANTINED_MAX = 20
# Exit codes of --check, as monitoring systems that run plug-ins expect them.
_CODES = {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}


def status(
    coordinator: Coordinator = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Print what is wrong, for cron and monitoring. Exit code: 0 nothing, 1 warnings, 2 something "
            "critical, 3 the cluster's state is not known.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the memory servers, and which of several coordinators leads.

    Show the live servers, how much memory each lends, and how much of it is used. With --check, print the problems that
    `smb top` shows instead, one a line; with credentials this takes a certificate that is not limited to namespaces.

    Example: smb status --coordinator storage-1:7070
    """
    if check:
        raise typer.Exit(_check(coordinator, as_json))
    from smb.tools.cli.describe import quarantined_json, server_json

    with coordinator_at(coordinator) as all_of_them:
        coordinators = [_role(*each) for each in all_of_them.look(_LOOK_S)]
    with connect(coordinator) as client:
        servers = sorted(client.servers(), key=lambda server: server.name)
        buffers = client.list()
    alive = [server for server in servers if server.alive]
    quarantined = quarantined_json(servers)
    totals: dict[str, Any] = {
        "servers": len(servers),
        "alive": len(alive),
        "capacity_bytes": sum(server.capacity for server in alive),
        "used_bytes": sum(server.used for server in alive),
        "segments": sum(server.segments for server in alive),
        "buffers": len(buffers),
        "degraded": [info.name for info in buffers if info.degraded],
        "lost": [info.name for info in buffers if info.lost],
        "unheard": [server.name for server in servers if server.unheard],
        "quarantined_bytes": sum(each["bytes"] for each in quarantined),
    }
    if as_json:
        print_json(
            {
                "coordinators": coordinators,
                "servers": [server_json(server) for server in servers],
                "totals": totals,
                "quarantined": quarantined,
            }
        )
        return
    out = console()
    if len(coordinators) > 1 or coordinators[0]["role"] != "leader":
        out.print(_coordinators(coordinators))
    if not servers:
        out.print("No memory server has registered. Start one: smb-memserver --coordinator HOST:PORT")
        return
    out.print(_table(servers))
    out.print(_summary(totals))
    for key, what in (("degraded", "one copy of two in some part"), ("lost", "a part whose memory was lost")):
        if names := totals[key]:
            more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
            out.print(
                f"{counted(len(names), 'buffer')} with {what}: {', '.join(names[:_NAMES_MAX])}{more} (smb stat NAME)"
            )
    if quarantined:
        out.print(_quarantined(quarantined))


def _check(coordinator: str | None, as_json: bool) -> int:
    """Print the state of the cluster and its problems, and return the exit code. Blocks for some seconds at most."""
    problems: list[dict[str, str]] = []
    try:
        with coordinator_at(coordinator) as all_of_them:
            shown = json.loads(all_of_them.overview(_OVERVIEW_S))
            for address, reply in all_of_them.look(_LOOK_S) if "," in (coordinator or "") else ():
                if reply is None:
                    title = f"The coordinator at {address} does not answer"
                    problems.append({"severity": "warning", "title": title, "action": "Start it; another one leads."})
    except (Error, OSError) as error:  # also for credentials that cannot be read
        state, text = "unknown", str(error)
    else:
        keys = ("severity", "title", "action")
        problems += [{key: each[key] for key in keys} for each in shown["problems"] if each["severity"] in _CODES]
        problems.sort(key=lambda problem: -_CODES[problem["severity"]])
        state = problems[0]["severity"] if problems else "ok"
        totals = shown["totals"]
        text = f"{totals['alive']} of {totals['servers']} servers alive, {counted(totals['buffers'], 'buffer')}"
    if as_json:
        print_json({"state": state, "text": text, "problems": problems})
        return _CODES[state]
    out = console()
    out.print(f"{state.upper()}: {printable(text)}", soft_wrap=True)
    for problem in problems:
        action = f". What to do: {problem['action']}" if problem["action"] else ""
        out.print(printable(f"{problem['severity'].upper()} {problem['title']}{action}"), soft_wrap=True)
    return _CODES[state]


def _quarantined(found: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the memory that no record accounts for."""
    from smb.config.parse import format_bytes

    rows = table("QUARANTINED ON", "SEGMENT", "SIZE", "BUFFER", "WHY", right=("SIZE",))
    for each in found[:_QUARANTINED_MAX]:
        rows.add_row(
            each["server"], each["segment"], format_bytes(each["bytes"]), each["buffer"] or "-", each["reason"]
        )
    if len(found) > _QUARANTINED_MAX:
        rows.add_row("", "", "", "", f"{len(found) - _QUARANTINED_MAX} more: smb status --json")
    return rows


def _role(address: str, reply: pb.LeaderReply | None) -> dict[str, str]:
    role = "silent" if reply is None else "leader" if reply.leads else "standby"
    return {"address": address, "role": role, "leader": reply.address if reply is not None else ""}


def _coordinators(found: Sequence[dict[str, str]]) -> str:
    words = {"leader": "leads", "standby": "stands by", "silent": "does not answer"}
    return "Coordinators: " + ", ".join(f"{each['address']} {words[each['role']]}" for each in found) + "\n"


def _table(servers: Sequence[ServerInfo]) -> Table:
    from smb.config.parse import format_bytes

    numbers = ("CAPACITY", "USED", "SEGMENTS")
    rows = table("SERVER", "STATE", "ADDRESS", *numbers, "LAST SEEN", right=numbers)
    for server in servers:
        rows.add_row(
            server.name,
            _words(server),
            server.address,
            format_bytes(server.capacity),
            format_bytes(server.used),
            str(server.segments),
            format_ago(server.last_seen),
            style=None if server.alive else "yellow" if server.unheard else "red",
        )
    return rows


def _words(server: ServerInfo) -> str:
    """Return a server's state, and what an operator has asked for it."""
    from smb.tools.cli.describe import server_state

    left_s = server.maintenance_until - time.time()
    more = (
        "overdue" if server.overdue else "",
        "draining" if server.draining else "",
        f"maintenance for {format_duration(left_s)}" if left_s > 0 else "",
    )
    return ", ".join((server_state(server), *filter(None, more)))


def _summary(totals: dict[str, Any]) -> str:
    from smb.config.parse import format_bytes

    used = totals["used_bytes"] / totals["capacity_bytes"] if totals["capacity_bytes"] else 0.0
    return (
        f"\n{totals['alive']} of {totals['servers']} servers alive, "
        f"{format_bytes(totals['used_bytes'])} of {format_bytes(totals['capacity_bytes'])} used ({used:.0%}), "
        f"{counted(totals['buffers'], 'buffer')} in {counted(totals['segments'], 'segment')}"
    )
