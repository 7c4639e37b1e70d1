"""The command `smb-memserver`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from memserver.daemon import ServerOptions, default_name, run
from smb.config.boot import boot_id
from smb.config.parse import parse_bytes
from smb.config.settings import SETTINGS, variables_of
from smb.daemon.log import start_log
from smb.daemon.process import clear_ready_file
from smb.errors import Error
from smb.security import credentials as found
from smb.tools.cli.options import Command, configured, option
from smb.tools.cli.output import checked_output

_LOOPS_DEFAULT_MAX = 8  # a loop moves several GB/s, so more of them would only compete for memory bandwidth

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=Command)
@configured
def memserver(
    coordinator: Annotated[str, option("cluster.coordinator")],
    listen: Annotated[str, option("memserver.listen")] = SETTINGS["memserver.listen"].default,
    capacity: Annotated[str, option("memserver.capacity")] = SETTINGS["memserver.capacity"].default,
    memory_dir: Annotated[Path, option("memserver.memory_dir")] = Path(SETTINGS["memserver.memory_dir"].default),
    metrics: Annotated[str, option("memserver.metrics")] = SETTINGS["memserver.metrics"].default,
    name: Annotated[str, option("memserver.name")] = SETTINGS["memserver.name"].default,
    loops: Annotated[int, option("memserver.loops")] = SETTINGS["memserver.loops"].default,
    weight: Annotated[float, option("memserver.weight")] = SETTINGS["memserver.weight"].default,
    copy_rate: Annotated[str, option("memserver.copy_rate")] = SETTINGS["memserver.copy_rate"].default,
    zone: Annotated[str, option("memserver.zone")] = SETTINGS["memserver.zone"].default,
    host_name: Annotated[str, option("memserver.host_name")] = SETTINGS["memserver.host_name"].default,
    advertise: Annotated[str, option("memserver.advertise")] = SETTINGS["memserver.advertise"].default,
    control: Annotated[str, option("memserver.control")] = SETTINGS["memserver.control"].default,
    verbs: Annotated[str, option("memserver.verbs")] = SETTINGS["memserver.verbs"].default,
    ready_file: Annotated[Path | None, option("memserver.ready_file")] = None,
    credentials: Annotated[Path | None, option("cluster.credentials")] = None,
    deny: Annotated[Path | None, option("cluster.deny")] = None,
    data_tls: Annotated[str, option("memserver.data_tls")] = SETTINGS["memserver.data_tls"].default,
    insecure: Annotated[bool, option("cluster.insecure")] = False,
    metrics_token_file: Annotated[Path | None, option("cluster.metrics_token_file")] = None,
    log_level: Annotated[str, option("memserver.log_level")] = SETTINGS["memserver.log_level"].default,
    log_format: Annotated[str, option("memserver.log_format")] = SETTINGS["memserver.log_format"].default,
) -> None:
    """Offer this host's memory to a cluster: serve segments until SIGTERM or Ctrl-C.

    Segments are files in --memory-dir. They stay after the stop and are served again by the next run under the same
    name.

    Example: smb-memserver --coordinator storage-1:7070 --listen 0.0.0.0:0 --capacity 64GiB --credentials lab/server-0
    """
    try:
        clear_ready_file(ready_file)
        start_log(log_level, log_format)
        run(
            ServerOptions(
                coordinator=coordinator,
                listen=listen,
                capacity_bytes=parse_bytes(capacity),
                memory_dir=memory_dir,
                metrics=metrics,
                name=name or default_name(),
                loops=loops or min(len(os.sched_getaffinity(0)), _LOOPS_DEFAULT_MAX),
                weight=weight,
                copy_rate=parse_bytes(copy_rate),
                zone=zone,
                host_name=host_name or boot_id(),
                advertise=advertise,
                ready_file=ready_file,
                verbs=variables_of("verbs") if verbs == "auto" else None,
                credentials=found.find(credentials, deny=deny),
                insecure=insecure,
                metrics_token_file=metrics_token_file,
                data_tls=data_tls,
                control=control,
            )
        )
    except Error as error:
        logging.getLogger("memserver").error("%s", error)
        raise typer.Exit(1) from None


def main() -> None:
    """Run the command. Exits with 0 after a clean stop, 1 if it could not serve, 2 for wrong usage."""
    try:
        with checked_output():
            app()
    except Error as error:  # in the configuration or in the output
        sys.stderr.write(f"smb-memserver: {error}\n")
        sys.exit(1)
