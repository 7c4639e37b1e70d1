"""`smb rm NAME...`: buffers deleted."""

from __future__ import annotations

from typing import Annotated

import typer

from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The buffers' names.")],
    missing_ok: Annotated[bool, typer.Option("--missing-ok", help="Names that are not there are no error.")] = False,
    coordinator: Coordinator = None,
) -> None:
    """Delete buffers.

    With all that is in them. Stops at the first that can't be deleted.
    """
    with connect(coordinator) as client:
        for name in names:
            client.delete(name, missing_ok=missing_ok)
