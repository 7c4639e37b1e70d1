"""`smb coordinator`: the daemon that knows names, layouts and which parts are alive."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from smb.config.parse import parse_bytes
from smb.config.quotas import parse_quotas
from smb.config.settings import SETTINGS
from smb.errors import Error
from smb.security import credentials as found
from smb.tools.cli.options import option
from smb.tools.cli.output import console

_LEASE_S = SETTINGS["coordinator.session_lease"].default
_SERVER_LEASE_S = SETTINGS["coordinator.server_lease"].default
_BALANCE_AFTER_S = SETTINGS["coordinator.balance_after"].default
_TOKEN_LIFETIME_S = SETTINGS["coordinator.token_lifetime"].default


def coordinator(
    context: typer.Context,
    listen: Annotated[str, option("coordinator.listen")] = SETTINGS["coordinator.listen"].default,
    servers: Annotated[str | None, option("coordinator.servers")] = None,
    sessions: Annotated[str | None, option("coordinator.sessions")] = None,
    state: Annotated[str, option("coordinator.state")] = SETTINGS["coordinator.state"].default,
    metrics: Annotated[str, option("coordinator.metrics")] = SETTINGS["coordinator.metrics"].default,
    ready_file: Annotated[Path | None, option("coordinator.ready_file")] = None,
    session_lease: Annotated[float, option("coordinator.session_lease")] = _LEASE_S,
    server_lease: Annotated[float, option("coordinator.server_lease")] = _SERVER_LEASE_S,
    idle_names: Annotated[float | None, option("coordinator.idle_names")] = None,
    balance_after: Annotated[float, option("coordinator.balance_after")] = _BALANCE_AFTER_S,
    stripe: Annotated[str | None, option("coordinator.stripe")] = None,
    checksum: Annotated[bool, option("coordinator.checksum")] = SETTINGS["coordinator.checksum"].default,
    quota: Annotated[list[str] | None, option("coordinator.quota")] = None,
    etcd_credentials: Annotated[Path | None, option("coordinator.etcd_credentials")] = None,
    leader_lease: Annotated[int, option("coordinator.leader_lease")] = SETTINGS["coordinator.leader_lease"].default,
    token_lifetime: Annotated[float, option("coordinator.token_lifetime")] = _TOKEN_LIFETIME_S,
    credentials: Annotated[Path | None, option("cluster.credentials")] = None,
    deny: Annotated[Path | None, option("cluster.deny")] = None,
    insecure: Annotated[bool, option("cluster.insecure")] = False,
    metrics_token_file: Annotated[Path | None, option("cluster.metrics_token_file")] = None,
    log_level: Annotated[str, option("coordinator.log_level")] = SETTINGS["coordinator.log_level"].default,
    log_format: Annotated[str, option("coordinator.log_format")] = SETTINGS["coordinator.log_format"].default,
    audit_log: Annotated[Path | None, option("coordinator.audit_log")] = None,
) -> None:
    """Run the coordinator until SIGTERM or Ctrl-C.

    Data never passes through it: clients and memory servers go on while it is down, and a restart on the same --state
    and --listen brings everything back. Several with the same --state in etcd stand by for each other: one leads.

    Example: smb coordinator --listen 0.0.0.0:7070 --state /var/lib/smb --credentials lab/coordinator
    """
    if context.invoked_subcommand is not None:
        return
    from smb.coordinator.options import CoordinatorOptions
    from smb.coordinator.process import run
    from smb.daemon.log import start_log
    from smb.daemon.process import clear_ready_file

    try:
        clear_ready_file(ready_file)
        start_log(log_level, log_format, audit_log)
        options = CoordinatorOptions(
            listen=listen,
            servers=servers,
            sessions=sessions,
            state=state,
            metrics=metrics,
            ready_file=ready_file,
            session_lease_s=session_lease,
            server_lease_s=server_lease,
            idle_names_s=idle_names,
            balance_after_s=balance_after,
            stripe_bytes=parse_bytes(stripe or 0),
            checksum=checksum,
            credentials=found.find(credentials, deny=deny),
            insecure=insecure,
            metrics_token_file=metrics_token_file,
            token_lifetime_s=token_lifetime,
            quotas=parse_quotas(quota or ()),
            etcd_credentials=etcd_credentials,
            leader_lease_s=leader_lease,
        )
        run(options)
    except Error as error:
        logging.getLogger("coordinator").error("%s", error)
        raise typer.Exit(1) from None


def migrate(
    source: Annotated[str, typer.Option("--from", metavar="STATE", help="Where the records are, as --state has it.")],
    target: Annotated[str, typer.Option("--to", metavar="STATE", help="Where they are to be; nothing else is there.")],
    etcd_credentials: Annotated[Path | None, option("coordinator.etcd_credentials")] = None,
) -> None:
    """Move a coordinator's records: from a directory to etcd, or back.

    No coordinator of either runs meanwhile; memory servers and clients go on. Every record is read again and compared.
    The old place is marked, so that no coordinator serves it any more. Cut off, the same call does it again.

    Example: smb coordinator migrate --from /var/lib/smb --to etcd://etcd-1:2379/smb
    """
    import asyncio

    from smb.coordinator.etcd.migrate import migrate as move

    count = asyncio.run(move(source, target, etcd_credentials))
    console().print(f"{count} records are in {target} now, each compared; start coordinators with: --state {target}")
