"""`smb rm NAME...`: buffers deleted."""

from __future__ import annotations

from typing import Annotated

import typer

from smb.errors import Error
from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator
from smb.tools.cli.train import group_of


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The buffers' names.")],
    missing_ok: Annotated[bool, typer.Option("--missing-ok", help="Names that are not there are no error.")] = False,
    coordinator: Coordinator = None,
) -> None:
    """Delete buffers.

    With all that is in them. Stops at the first that can't be deleted. Buffers of a training are refused: `smb train
    rm` deletes the whole training.

    Example: smb rm weights
    """
    with connect(coordinator) as client:
        for name in names:
            training = group_of(client, name)
            if training is not None:
                raise Error(
                    f'buffer "{name}" belongs to training "{training}"; delete all of it: smb train rm {training}'
                )
            client.delete(name, missing_ok=missing_ok)
