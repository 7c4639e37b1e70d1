"""The entry point `smb`: the commands, and the handling of their errors."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from smb.config import log
from smb.errors import Error
from smb.security.credentials import CREDENTIALS_VARIABLE
from smb.tools.cli.bench import bench
from smb.tools.cli.certs import InOrder, certs
from smb.tools.cli.clients import clients, kick
from smb.tools.cli.config import config
from smb.tools.cli.coordinator import coordinator, migrate
from smb.tools.cli.copy import cp, restore, snapshot
from smb.tools.cli.create import create
from smb.tools.cli.demo import demo
from smb.tools.cli.doctor import doctor
from smb.tools.cli.drain import drain, forget, maintenance, rebalance, undrain
from smb.tools.cli.explain import explain
from smb.tools.cli.ls import ls
from smb.tools.cli.mount import mount, umount
from smb.tools.cli.options import Command, Config, configured
from smb.tools.cli.output import checked_output, print_error
from smb.tools.cli.plan import plan
from smb.tools.cli.relay import relay
from smb.tools.cli.rm import rm
from smb.tools.cli.run import run
from smb.tools.cli.stat import stat
from smb.tools.cli.status import status
from smb.tools.cli.targets import targets
from smb.tools.cli.top import top
from smb.tools.cli.train import train
from smb.tools.cli.up import up

_GROUPS: dict[str, tuple[Any, ...]] = {
    "A cluster": (up, coordinator, status, top, clients, drain, undrain, maintenance, rebalance, forget),
    "Trainings": (train, run, explain, plan, demo),
    "Buffers": (ls, stat, create, rm, relay, cp, snapshot, restore),
    "Buffers as files": (mount, umount),
    "Tools": (doctor, bench, config, certs, targets),
}


class Sections(TyperGroup):
    """Lists the commands in groups by purpose."""

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write one list for each group."""
        for title, commands in _GROUPS.items():
            names = ["train" if command is train else command.__name__ for command in commands]
            shown = [(name, self.commands[name]) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(limit=66)) for name, command in shown])


app = typer.Typer(
    name="smb",
    cls=Sections,
    help="Soft Memory Box: named arrays on memory servers, shared by training processes that come and go.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (command for commands in _GROUPS.values() for command in commands):
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name="train")
    elif _command is coordinator:
        # This command also has a subcommand.
        _coordinator = typer.Typer(rich_markup_mode=None)
        _coordinator.callback(invoke_without_command=True)(configured(coordinator))
        _coordinator.command(cls=Command)(configured(migrate))
        app.add_typer(_coordinator, name="coordinator")
    elif _command is clients:
        _clients = typer.Typer(rich_markup_mode=None)
        _clients.callback(invoke_without_command=True)(configured(clients))
        _clients.command(cls=Command)(configured(kick))
        app.add_typer(_clients, name="clients")
    else:
        # What follows the script of `smb run` is the script's own.
        settings = {"allow_interspersed_args": False} if _command is run else None
        kind = InOrder if _command is certs else Command
        app.command(cls=kind, context_settings=settings)(configured(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"smb {version('soft-memory-box')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
    _config: Config = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            "--credentials", metavar="DIR", help="Directory with this user's certificate. Default: $SMB_CREDENTIALS."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log to standard error.")] = False,
) -> None:
    if credentials is not None:
        os.environ[CREDENTIALS_VARIABLE] = str(credentials)
    if not verbose:
        log.start(training=logging.WARNING)  # a command's own output says what it did
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Run the command line. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""
    try:
        with checked_output():
            app()
    except Error as error:
        print_error(error)
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            raise
        print_error(f"{error.filename2 or error.filename}: {error.strerror}")
        sys.exit(1)


if __name__ == "__main__":
    main()
