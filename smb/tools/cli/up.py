"""`smb up`: a whole cluster on this machine, in the foreground."""

from __future__ import annotations

import shlex
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smb.config.settings import DEFAULT_COORDINATOR
from smb.daemon.launch import THIS_PYTHON
from smb.tools.cli.options import Hosts, Python, SshWords, option, parse_size, ssh_of, usage_errors
from smb.tools.cli.output import console, print_error
from smb.tools.cli.signals import interrupted_once

if TYPE_CHECKING:
    from rich.console import Console

    from smb import LocalCluster
    from smb.tools.hosts import Ssh

_LOOK_INTERVAL_SECONDS = 0.5
_PAGE = "127.0.0.1:9470"  # the default of `smb coordinator`


def up(
    context: typer.Context,
    servers: Annotated[int, typer.Option("--servers", min=1, metavar="N", help="How many memory servers.")] = 2,
    capacity: Annotated[str, typer.Option("--capacity", metavar="SIZE", help="Memory of each server.")] = "1GiB",
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="The coordinator's address, port 0: a free one. The memory servers listen on the same host.",
        ),
    ] = DEFAULT_COORDINATOR,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="HOST:PORT",
            help=f"The dashboard's address. Default: {_PAGE}, if that is free.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Keep names and state in DIR, and the memory, for the next `smb up --data-dir DIR`. Default: nothing.",
        ),
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            "--credentials",
            metavar="DIR",
            help="Directory that `smb certs` made. Only clients with a certificate of it may connect.",
        ),
    ] = None,
    insecure: Annotated[bool, option("cluster.insecure")] = False,
    hosts: Hosts = None,
    python: Python = THIS_PYTHON,
    ssh: SshWords = "ssh",
) -> None:
    """Run a cluster on this machine, or on several hosts, until Ctrl-C.

    One coordinator and some memory servers, as real processes; one that dies is started again. Nothing of them is left
    at the end, unless --data-dir keeps it: then all is there again at the next start, until this machine restarts. For
    processes on other machines: --listen with this machine's address, or 0.0.0.0, and --credentials; or --insecure in a
    network that you trust, where everybody on it may read and write.

    With --hosts a coordinator runs on the first host, at --listen's port, and a memory server on each. They are started
    over ssh, with certificates made for them, and end at Ctrl-C or when a connection is lost. --credentials keeps the
    certificates in DIR.

    Example: smb up --servers 2 --capacity 4GiB --data-dir ~/smb
    """
    import smb
    from smb.daemon.process import end_with_owner

    capacity_bytes = parse_size(capacity)
    out = console()
    if hosts is not None:
        for name in ("servers", "data_dir", "insecure"):
            source = context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT":
                raise typer.BadParameter(
                    f"--{name.replace('_', '-')} is for a cluster on this machine, not for --hosts"
                )
        _up_on_hosts(out, hosts, capacity_bytes, listen, metrics, credentials, ssh_of(ssh, python))
        return
    with interrupted_once():
        try:
            end_with_owner()
            with smb.LocalCluster(
                servers=servers,
                capacity=capacity_bytes,
                listen=listen,
                metrics=metrics or _free(_PAGE, listen),
                data_dir=data_dir,
                credentials=credentials,
                insecure=insecure,
            ) as cluster:
                _greet(out, cluster, capacity_bytes, credentials, kept=data_dir is not None)
                _watch(cluster)
        except KeyboardInterrupt:
            out.print("stopped")


def _up_on_hosts(
    out: Console, hosts: str, capacity_bytes: int, listen: str, metrics: str | None, credentials: Path | None, ssh: Ssh
) -> None:
    from smb.config.parse import format_bytes, parse_address
    from smb.tools.hosts import HostsCluster, check_servers, hosts_of

    with usage_errors():
        named = hosts_of(hosts)
        check_servers(named)
        port = parse_address(listen)[1]
    with interrupted_once():
        try:
            with HostsCluster(
                ssh,
                named,
                capacity=capacity_bytes,
                port=port,
                metrics=metrics or "127.0.0.1:0",
                credentials=credentials.absolute() if credentials else None,
                show=print_error,
            ) as cluster:
                out.print(f"coordinator at {cluster.address}, its page on that host at http://{cluster.page}/")
                out.print(f"memory servers, {format_bytes(capacity_bytes)} each: {', '.join(named)}", soft_wrap=True)
                out.print("\nIn another terminal (for other machines copy the directory of credentials):\n")
                out.print(f"  export SMB_COORDINATOR={cluster.address}")
                out.print(f"  export SMB_CREDENTIALS={shlex.quote(str(cluster.client))}", soft_wrap=True)
                out.print("  smb top")
                out.print(f"  smb run --hosts {shlex.quote(hosts)} train.py", soft_wrap=True)
                out.print("\nCtrl-C stops the cluster on all hosts and frees its memory.")
                out.file.flush()
                cluster.watch()
        except KeyboardInterrupt:
            out.print("stopped")


def _free(wanted: str, listen: str) -> str:
    """Return the dashboard's address: the usual one, or a free one if that is taken or the coordinator's port is free,
    too.
    """
    from smb.config.parse import parse_address

    host, port = parse_address(wanted)
    if parse_address(listen)[1] == 0:
        return f"{host}:0"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return f"{host}:0"
    return wanted


def _greet(out: Console, cluster: LocalCluster, capacity_bytes: int, credentials: Path | None, *, kept: bool) -> None:
    from smb.config.parse import format_bytes, parse_address
    from smb.security.credentials import is_loopback

    out.print(f"coordinator at {cluster.address}, its page at http://{cluster.coordinator.metrics}/")
    out.print(
        f"state in {cluster.state_directory}, memory in {cluster.memory_directory}; "
        + ("both stay when it stops" if kept else "both go when it stops (--data-dir DIR keeps them)"),
        soft_wrap=True,
    )
    for server in cluster.servers:
        out.print(f"{server.name} at {server.address}, {format_bytes(capacity_bytes)}, pid {server.pid}")
    if credentials is not None:
        out.print(f"Only who has a certificate of the authority in {credentials} is let in.")
    elif is_loopback(parse_address(cluster.address)[0]):
        out.print("Reached from this machine alone; --listen HOST:PORT opens it to others.")
    else:
        out.print(
            "WARNING: everybody who reaches these ports may read, change and delete. Only in a network that you trust!"
        )
    out.print("\nIn another terminal:\n")
    out.print(f"  export SMB_COORDINATOR={cluster.address}")
    if credentials is not None:
        out.print(f"  export SMB_CREDENTIALS={credentials}/client")
    out.print("  smb top")
    out.print("  smb create weights --shape 1000,1000")
    out.print('  in a PyTorch script: smb.torch.join(model, optimizer, NAME, scheme="localsgd", every=20)')
    out.print('  with transformers: Trainer(..., callbacks=[smb.torch.hf.Callback(NAME, scheme="localsgd", every=20)])')
    out.print("\nCtrl-C stops the cluster" + (", and keeps what it has." if kept else " and frees its memory."))
    # Also for a pipe, whose reader would otherwise see it only at the end.
    out.file.flush()


def _watch(cluster: LocalCluster) -> None:
    """Restart daemons that end, however often; the others go on. Never returns: a signal ends it."""
    from smb.cluster import Supervisor

    supervisors = [Supervisor(daemon, print_error) for daemon in (cluster.coordinator, *cluster.servers)]
    while True:
        for supervisor in supervisors:
            supervisor.look()
        time.sleep(_LOOK_INTERVAL_SECONDS)
