"""The entry point `smb`: the commands, and the handling of their errors."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from smb.config import log
from smb.config.settings import SETTINGS
from smb.errors import Error
from smb.tools.cli.options import Command, Config, configured
from smb.tools.cli.output import checked_output, print_error

_GROUPS = {
    "A cluster": (
        "up", "coordinator", "status", "top", "clients", "drain", "undrain", "maintenance", "rebalance", "forget",
    ),
    "Trainings": ("train", "run", "explain", "plan", "demo"),
    "Buffers": ("ls", "stat", "create", "rm", "relay", "cp", "snapshot", "restore"),
    "Buffers as files": ("mount", "umount"),
    "Tools": ("doctor", "bench", "config", "certs", "targets"),
}  # fmt: skip
# Several commands have one file; the others have one each, of their name.
_FILES = dict.fromkeys(("undrain", "maintenance", "rebalance", "forget"), "drain")
_FILES |= dict.fromkeys(("cp", "snapshot", "restore"), "copy") | {"umount": "mount"}
_NAMES = tuple(name for names in _GROUPS.values() for name in names)
_BELOW = {"coordinator": "migrate", "clients": "kick"}  # commands that have a command below them


class Commands(Mapping[str, Any]):
    """The commands by name. A command is imported when somebody asks for it: all of them take as long as Python's
    start.
    """

    def __init__(self) -> None:
        self._made: dict[str, TyperCommand | TyperGroup] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = _command(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


def _command(name: str) -> Any:
    module = importlib.import_module(f"smb.tools.cli.{_FILES.get(name, name)}")
    command = getattr(module, name)
    whole = typer.Typer(rich_markup_mode=None)
    if isinstance(command, typer.Typer):
        whole.add_typer(command, name=name)
    elif name in _BELOW:
        both = typer.Typer(rich_markup_mode=None)
        both.callback(invoke_without_command=True)(configured(command))
        both.command(cls=Command)(configured(getattr(module, _BELOW[name])))
        whole.add_typer(both, name=name)
    else:
        # What follows the script of `smb run` is the script's own.
        settings = {"allow_interspersed_args": False} if name == "run" else None
        kind = module.InOrder if name == "certs" else Command
        whole.command(cls=kind, context_settings=settings)(configured(command))
    return typer.main.get_group(whole).commands[name]


class Sections(TyperGroup):
    """Lists the commands by purpose."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast(Any, Commands())

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write one list for each purpose."""
        for title, names in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=66)) for name in names])


app = typer.Typer(
    name="smb",
    cls=Sections,
    help="Soft Memory Box: named arrays on memory servers, shared by training processes that come and go.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
        os.environ[SETTINGS["cluster.credentials"].variable] = str(credentials)
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
