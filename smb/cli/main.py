"""The entry point `smb`: the commands, and what becomes of their errors."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from smb.cli.bench import bench
from smb.cli.coordinator import coordinator
from smb.cli.copy import cp, restore, snapshot
from smb.cli.create import create
from smb.cli.demo import demo
from smb.cli.ls import ls
from smb.cli.mount import mount, umount
from smb.cli.output import print_error
from smb.cli.rm import rm
from smb.cli.stat import stat
from smb.cli.status import status
from smb.cli.up import up
from smb.errors import Error

app = typer.Typer(
    name="smb",
    help="Soft Memory Box: named arrays on memory servers, shared by training processes that come and go.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (up, coordinator, status, ls, stat, create, rm, cp, snapshot, restore, mount, umount, bench, demo):
    app.command()(_command)


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
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to standard error.")] = False,
) -> None:
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Run the command line. Exit codes: 0 it worked, 1 it did not, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except Error as error:
        print_error(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
