"""`smb coordinator`: the daemon that knows names, layouts and who is alive."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from smb import credentials as found
from smb.cli.options import CredentialsDirectory, Insecure
from smb.coordinator.process import Options, run
from smb.coordinator.quotas import parse_quotas
from smb.coordinator.state import SESSION_LEASE_S
from smb.coordinator.tokens import LIFETIME_S
from smb.daemon import start_log
from smb.errors import Error


def coordinator(
    listen: Annotated[
        str,
        typer.Option(
            envvar="SMB_COORDINATOR_LISTEN", help="Where clients and memory servers connect; port 0: a free one."
        ),
    ] = "127.0.0.1:7070",
    state: Annotated[
        str,
        typer.Option(
            envvar="SMB_COORDINATOR_STATE", help="Directory for what must survive a restart; made if need be."
        ),
    ] = "./smb-state",
    metrics: Annotated[
        str, typer.Option(envvar="SMB_COORDINATOR_METRICS", help="Where /metrics and /healthz are served.")
    ] = "127.0.0.1:9470",
    ready_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SMB_COORDINATOR_READY_FILE",
            help="Gets a JSON object (address, metrics, name, pid) once serving; removed at the stop.",
        ),
    ] = None,
    session_lease: Annotated[
        float,
        typer.Option(
            envvar="SMB_SESSION_LEASE",
            metavar="SECONDS",
            help="How long a client may stay silent before its session is over and what it holds is given up.",
        ),
    ] = SESSION_LEASE_S,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            "--quota",
            envvar="SMB_QUOTA",
            metavar="NAMESPACE=BYTES[,BUFFERS]",
            help="How much buffers whose names begin with NAMESPACE/ may take together, and how many there may be; *: "
            "each namespace that is not named. Repeat it; in the variable they are separated by spaces.",
        ),
    ] = None,
    token_lifetime: Annotated[
        float,
        typer.Option(
            envvar="SMB_TOKEN_LIFETIME",
            metavar="SECONDS",
            help="With credentials: how long the right to a buffer is good, unless its client renews it.",
        ),
    ] = LIFETIME_S,
    credentials: CredentialsDirectory = None,
    insecure: Insecure = False,
    log_level: Annotated[
        str, typer.Option(envvar="SMB_COORDINATOR_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Run the coordinator until SIGTERM or Ctrl-C.

    Data never passes through it: clients and memory servers go on while it is down, and a restart on the same --state
    and --listen brings everything back.
    """
    try:
        start_log(log_level)
        run(
            Options(
                listen=listen,
                state=state,
                metrics=metrics,
                ready_file=ready_file,
                session_lease_s=session_lease,
                credentials=found.find(credentials),
                insecure=insecure,
                token_lifetime_s=token_lifetime,
                quotas=parse_quotas(quota or ()),
            )
        )
    except Error as error:
        logging.getLogger("coordinator").error("%s", error)
        raise typer.Exit(1) from None
