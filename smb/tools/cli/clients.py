"""`smb clients`: who is connected. `smb clients kick NAME`: end a client's sessions."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from smb.config.printable import printable
from smb.tools.cli.connection import coordinator_at
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, counted, format_ago, print_json, table

_CALL_S = 10.0


def clients(context: typer.Context, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show who is connected, and end sessions.

    Each program that is connected has a row: its own name, the name, role and namespaces in its certificate, since when
    it is connected, its data connections, and the locks that it holds.

    Example: smb clients
    """
    if context.invoked_subcommand is not None:
        return
    with coordinator_at(coordinator) as cluster:
        rows = sorted(cluster.clients(_CALL_S), key=lambda row: (row["certificate"], row["name"], row["since"]))
    if as_json:
        print_json({"clients": rows})
        return
    if not rows:
        console().print("No client is connected.")
        return
    numbers = ("CONNECTIONS",)
    shown = table("CLIENT", "CERTIFICATE", "ROLE", "NAMESPACES", "SINCE", "HEARD", *numbers, "HOLDS", right=numbers)
    for row in rows:
        shown.add_row(
            printable(_own_name(row)),
            printable(row["certificate"]) or "-",
            row["role"] or "-",
            printable(", ".join(row["namespaces"])) or "all",
            format_ago(row["since"]) if row["since"] else "-",
            format_ago(time.time() - row["silent_s"]),
            str(row["connections"]),
            printable(_holds(row)),
        )
    console().print(shown)
    console().print(f"\n{counted(len(rows), 'client')}")


def kick(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name as in smb clients: of the certificate, or the client's own."),
    ],
    coordinator: Coordinator = None,
) -> None:
    """End all sessions of a client, at once.

    Its connections are closed, and its locks, barrier seats and pins are given up. Its calls fail with an error that
    says so, and it stays out until its program connects again. To keep it out, deny its certificate first: docs/run.md.

    Example: smb clients kick alice
    """
    with coordinator_at(coordinator) as cluster:
        reply = cluster.kick_clients(name, _CALL_S)
    for client in reply.clients:
        sys.stderr.write(f"ended: {printable(client)}\n")
    if reply.session_count > len(reply.clients):
        sys.stderr.write(f"and {reply.session_count - len(reply.clients)} more\n")
    console().print(f"{counted(reply.session_count, 'session')} of {printable(name)} ended")


def _own_name(row: dict[str, Any]) -> str:
    certificate = row["certificate"] or row["role"]
    return str(row["name"]).removesuffix(f" ({certificate})") if certificate else str(row["name"])


def _holds(row: dict[str, Any]) -> str:
    more = row["holds"] - len(row["held"])
    return ", ".join(row["held"]) + (f" and {more} more" if more else "") or "-"
