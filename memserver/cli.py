"""The command `smb-memserver`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from memserver.daemon import Options, default_name, run
from memserver.engine import LOOPS_MAX
from smb import credentials as found
from smb.cli.options import CredentialsDirectory, Insecure
from smb.config import parse_bytes
from smb.daemon import start_log
from smb.errors import Error

_LOOPS_DEFAULT_MAX = 8  # a loop moves several GB/s: more of them would only compete for the memory's bandwidth

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def memserver(
    coordinator: Annotated[str, typer.Option(envvar="SMB_COORDINATOR", help="The coordinator, HOST:PORT.")],
    listen: Annotated[
        str, typer.Option(envvar="SMB_MEMSERVER_LISTEN", help="Where clients connect; port 0 picks a free one.")
    ] = "127.0.0.1:0",
    capacity: Annotated[
        str, typer.Option(envvar="SMB_MEMSERVER_CAPACITY", help="How much memory to offer, e.g. 512MiB or 64GiB.")
    ] = "1GiB",
    memory_dir: Annotated[
        Path,
        typer.Option(envvar="SMB_MEMSERVER_MEMORY_DIR", help="A directory on tmpfs or hugetlbfs for the segments."),
    ] = Path("/dev/shm"),  # noqa: S108 - the system's place for shared memory
    metrics: Annotated[
        str, typer.Option(envvar="SMB_MEMSERVER_METRICS", help="Where /metrics and /healthz are served.")
    ] = "127.0.0.1:0",
    name: Annotated[
        str,
        typer.Option(
            envvar="SMB_MEMSERVER_NAME",
            help="This server's name. It stays the same over restarts: segments and clients find it by its name.",
            show_default="the host's name",
        ),
    ] = "",
    loops: Annotated[
        int,
        typer.Option(
            envvar="SMB_MEMSERVER_LOOPS",
            help=f"Threads that serve data, 1 to {LOOPS_MAX}; 0: one per core, at most {_LOOPS_DEFAULT_MAX}.",
        ),
    ] = 0,
    weight: Annotated[
        float,
        typer.Option(
            envvar="SMB_MEMSERVER_WEIGHT",
            help="How much of the traffic of new buffers to take beside the other servers: its bandwidth, in any unit "
            "that all of them use.",
        ),
    ] = 1.0,
    advertise: Annotated[
        str,
        typer.Option(
            envvar="SMB_MEMSERVER_ADVERTISE",
            help="Host name or address by which clients reach this server.",
            show_default="--listen's host, or this host's address towards the coordinator where that is 0.0.0.0",
        ),
    ] = "",
    ready_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SMB_MEMSERVER_READY_FILE",
            help="Gets a JSON object (address, metrics, name, pid) once serving and registered; removed at the stop.",
        ),
    ] = None,
    credentials: CredentialsDirectory = None,
    data_tls: Annotated[
        bool,
        typer.Option(
            "--data-tls",
            envvar="SMB_MEMSERVER_DATA_TLS",
            help="Encrypt data on TCP too. Takes --credentials.",
        ),
    ] = False,
    insecure: Insecure = False,
    log_level: Annotated[
        str, typer.Option(envvar="SMB_MEMSERVER_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Offer this host's memory to a cluster: serve segments until SIGTERM or Ctrl-C.

    Segments are files in --memory-dir. They stay after the stop and are served again by the next run under the same
    name.
    """
    try:
        start_log(log_level)
        run(
            Options(
                coordinator=coordinator,
                listen=listen,
                capacity_bytes=parse_bytes(capacity),
                memory_dir=memory_dir,
                metrics=metrics,
                name=name or default_name(),
                loops=loops or min(len(os.sched_getaffinity(0)), _LOOPS_DEFAULT_MAX),
                weight=weight,
                advertise=advertise,
                ready_file=ready_file,
                credentials=found.find(credentials),
                insecure=insecure,
                data_tls=data_tls,
            )
        )
    except Error as error:
        logging.getLogger("memserver").error("%s", error)
        raise typer.Exit(1) from None


def main() -> None:
    """Run the command. Exits with 0 after a clean stop, 1 where it could not serve, 2 for wrong usage."""
    app()
