"""A hook of mkdocs (mkdocs.yml): docs/reference/cli.md becomes the help of every command, as `--help` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from memserver.cli import app as memserver
from smb.tools.cli.main import app as smb

PAGE = "reference/cli.md"
_WIDTH = 100


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add the sections behind the text that the page has."""
    if page.file.src_uri != PAGE:
        return markdown
    sections = [
        f"## {name}\n\n```text\n{text}\n```" for name, text in (*_help(smb, "smb"), *_help(memserver, "smb-memserver"))
    ]
    return "\n\n".join([markdown, *sections])


def _help(app: typer.Typer, name: str) -> Iterator[tuple[str, str]]:
    yield from _of_command(typer.main.get_command(app), name, None)


def _of_command(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """Yield the command and those below it, each with its help."""
    context = command.context_class(command, info_name=name, parent=parent, terminal_width=_WIDTH)
    yield context.command_path, context.get_help()
    for below in getattr(command, "commands", {}):
        yield from _of_command(command.get_command(context, below), below, context)
