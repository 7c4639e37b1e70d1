"""`smb up`: a whole cluster on this machine, in the foreground."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smb.tools.cli.options import option, parse_size
from smb.tools.cli.output import console, print_error
from smb.tools.cli.signals import interrupted_once

if TYPE_CHECKING:
    from rich.console import Console

    from smb import LocalCluster

_LOOK_INTERVAL_SECONDS = 0.5


def up(
    servers: Annotated[int, typer.Option("--servers", min=1, help="How many memory servers.")] = 2,
    capacity: Annotated[str, typer.Option("--capacity", metavar="SIZE", help="Memory of each server.")] = "1GiB",
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="The coordinator's address, port 0: a free one. The memory servers listen on the same host.",
        ),
    ] = "127.0.0.1:7070",
    credentials: Annotated[
        Path | None,
        typer.Option(
            "--credentials",
            metavar="DIR",
            help="What `smb certs DIR` made: only who has a certificate of it is let in.",
        ),
    ] = None,
    insecure: Annotated[bool, option("cluster.insecure")] = False,
) -> None:
    """Run a cluster on this machine, until Ctrl-C.

    One coordinator and some memory servers, as real processes; nothing of them is left at the end. For processes on
    other machines: --listen with this machine's address, or 0.0.0.0, and --credentials; or --insecure in a network that
    you trust, where whoever reaches it may read and write.
    """
    import smb
    from smb.daemon.process import end_with_owner

    capacity_bytes = parse_size(capacity)
    out = console()
    with interrupted_once():
        try:
            end_with_owner()
            with smb.LocalCluster(
                servers=servers, capacity=capacity_bytes, listen=listen, credentials=credentials, insecure=insecure
            ) as cluster:
                _greet(out, cluster, capacity_bytes, credentials)
                _watch(cluster)
        except KeyboardInterrupt:
            out.print("stopped")


def _greet(out: Console, cluster: LocalCluster, capacity_bytes: int, credentials: Path | None) -> None:
    from smb.config.parse import format_bytes, parse_address
    from smb.security.credentials import is_loopback

    out.print(f"coordinator at {cluster.address}, its page at http://{cluster.coordinator.metrics}/")
    for server in cluster.servers:
        out.print(f"{server.name} at {server.address}, {format_bytes(capacity_bytes)}, pid {server.pid}")
    if credentials is not None:
        out.print(f"Only who has a certificate of the authority in {credentials} is let in.")
    elif is_loopback(parse_address(cluster.address)[0]):
        out.print("Reached from this machine alone; --listen HOST:PORT opens it to others.")
    else:
        out.print("WARNING: whoever reaches these ports may read, change and delete. Only in a network that you trust!")
    out.print("\nIn another terminal:\n")
    out.print(f"  export SMB_COORDINATOR={cluster.address}")
    if credentials is not None:
        out.print(f"  export SMB_CREDENTIALS={credentials}/client")
    out.print("  smb top")
    out.print("  smb create weights --shape 1000,1000")
    out.print("\nCtrl-C stops the cluster and frees its memory.")
    # Also into a pipe, where nobody would see it before the end.
    out.file.flush()


def _watch(cluster: LocalCluster) -> None:
    """Say once of each daemon if it ends; the others go on. Never returns: a signal ends it."""
    daemons = [cluster.coordinator, *cluster.servers]
    while True:
        for daemon in [each for each in daemons if not each.running]:
            print_error(f"{daemon.name} (pid {daemon.pid}) has ended; the others go on")
            daemons.remove(daemon)
        time.sleep(_LOOK_INTERVAL_SECONDS)
