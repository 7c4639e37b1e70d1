"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from smb.config.settings import CONFIG_VARIABLE, SETTINGS, use_file
from smb.errors import InvalidArgumentError

if TYPE_CHECKING:
    from smb.tools.hosts import Ssh


def option(name: str, *short: str) -> Any:
    """Return the option for a setting of the table, such as "memserver.capacity"."""
    setting = SETTINGS[name]
    return typer.Option(setting.flag, *short, envvar=setting.variable, metavar=setting.metavar, help=setting.help)


def _use_config(path: Path | None) -> None:
    if path is not None:
        use_file(path)


# Eager: the file's settings count as variables, so they must be loaded before other options look for theirs.
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar=CONFIG_VARIABLE,
        metavar="FILE",
        help="TOML file for settings without a flag or a variable; `smb config` shows all that apply.",
        callback=_use_config,
        is_eager=True,
    ),
]


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option --config to a command."""

    @functools.wraps(command)
    def run(*, _config: Path | None = None, **options: Any) -> None:
        command(**options)

    signature = inspect.signature(command, eval_str=True)
    config = inspect.Parameter("_config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Config)
    parameters = [*signature.parameters.values(), config]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class Command(TyperCommand):
    """A command whose help shows arguments by name only, not as `{NAME...} <list[str]>`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if parameter.param_type_name != "argument":
                continue
            shown = (parameter.metavar or str(parameter.name).upper()) + ("..." if parameter.nargs != 1 else "")
            shown = shown if parameter.required else f"[{shown}]"
            record = (shown, getattr(parameter, "help", None) or "")
            for method, answer in (("get_usage_pieces", [shown]), ("get_help_record", record)):
                setattr(parameter, method, lambda *_, _answer=answer: _answer)


Coordinator = Annotated[str | None, option("cluster.coordinator", "-c")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn InvalidArgumentError into wrong usage (exit code 2), for arguments that are refused before anything is
    done.
    """
    try:
        yield
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from None


Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="LIST",
        help="Hosts that ssh reaches without a password: a,b,user@c; @FILE: one on each line; slurm: this job's nodes.",
    ),
]
Python = Annotated[
    str,
    typer.Option(
        "--python", metavar="PATH", show_default=False,
        help="The Python on the hosts that has this package. Default: the path of this one.",
    ),
]  # fmt: skip
SshWords = Annotated[
    str, typer.Option("--ssh", metavar="COMMAND", help="How a host is reached, as in 'ssh -F config'.")
]


def ssh_of(words: str, python: str) -> Ssh:
    """Return how hosts are reached; a usage error if there is no command in the words."""
    import shlex

    from smb.tools.hosts import Ssh

    try:
        split = tuple(shlex.split(words))
    except ValueError as error:
        raise typer.BadParameter(f"--ssh {words}: {error}") from None
    if not split:
        raise typer.BadParameter("--ssh must be a command, as in 'ssh -F config'")
    return Ssh(split, python)


def parse_size(text: str) -> int:
    """Return the bytes that e.g. "256MiB" stands for; a usage error for other text."""
    from smb.config.parse import parse_bytes

    with usage_errors():
        return parse_bytes(text)
