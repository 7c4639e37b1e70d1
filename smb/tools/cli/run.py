"""`smb run`: one training script in several processes, on this machine or over ssh on several hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from smb.daemon.launch import THIS_PYTHON
from smb.errors import InvalidArgumentError
from smb.security.credentials import CREDENTIALS_VARIABLE
from smb.tools.cli.options import Hosts, Python, SshWords, ssh_of, usage_errors
from smb.tools.cli.output import print_error
from smb.tools.cli.signals import interrupted_once

_COORDINATOR = "SMB_COORDINATOR"
_PROCESSES_MAX = 4096


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The Python program, at the same path on all hosts.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="What the program gets.")] = None,
    processes: Annotated[
        int | None,
        typer.Option("-n", "--processes", min=1, max=_PROCESSES_MAX, metavar="N", help="Default: one on each host."),
    ] = None,
    hosts: Hosts = None,
    mesh: Annotated[
        int,
        typer.Option(
            "--mesh", min=0, metavar="RANKS", help="Start each process by torchrun, with so many ranks on its host."
        ),
    ] = 0,
    python: Python = THIS_PYTHON,
    ssh: SshWords = "ssh",
) -> None:
    """Run a Python program in several processes that train together.

    The processes are spread over the hosts in turn, and find the cluster of $SMB_COORDINATOR with the certificate of
    $SMB_CREDENTIALS, which goes to the hosts over ssh. They start in this working directory, which must be on all
    hosts. One that fails does not end the others. All end at Ctrl-C, or when the connection to a host is lost. The exit
    code is 0, or that of a process that failed.

    Example: smb run -n 4 --hosts a,b train.py --epochs 3
    """
    from smb.tools.hosts import hosts_of, run_on

    with usage_errors():
        named = hosts_of(hosts) if hosts is not None else []
        environment = _environment(named)
    found = os.environ.get(CREDENTIALS_VARIABLE)
    with interrupted_once():
        try:
            status = run_on(
                ssh_of(ssh, python),
                named,
                [script, *(arguments or [])],
                processes=processes or max(1, len(named)),
                mesh=mesh,
                environment=environment,
                credentials=Path(found) if found else None,
                show=_show,
            )
        except KeyboardInterrupt:
            print_error("stopped; every process was ended")
            status = 130
    if status:
        raise typer.Exit(status if 0 < status < 256 else 1)


def _environment(hosts: Sequence[str]) -> dict[str, str]:
    """Return the variables of the processes. Raises InvalidArgumentError if the hosts could not reach the cluster."""
    from smb.config.parse import parse_address
    from smb.security.credentials import is_loopback
    from smb.tools.hosts import bare

    address = os.environ.get(_COORDINATOR) or None
    if address is None and hosts:
        raise InvalidArgumentError(
            f"{_COORDINATOR} is not set: start a cluster by `smb up --hosts ...`, which prints what to export"
        )
    for each in (address or "").split(","):
        host = parse_address(each)[0] if each and hosts else ""
        # `smb up --hosts localhost` is for a try on one machine.
        if host and {bare(name) for name in hosts} != {host} and is_loopback(host):
            raise InvalidArgumentError(
                f"{_COORDINATOR}={address} is this machine for each host, or no known host: start a cluster by "
                f"`smb up --hosts ...`"
            )
    return {_COORDINATOR: address} if address is not None else {}


def _show(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
