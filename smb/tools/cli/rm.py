"""`smb rm NAME...`: buffers deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smb.errors import Error
from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator
from smb.tools.cli.output import console
from smb.tools.cli.train import group_of

if TYPE_CHECKING:
    from smb import Client


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The buffers' names.")],
    missing_ok: Annotated[bool, typer.Option("--missing-ok", help="Ignore names without a buffer.")] = False,
    coordinator: Coordinator = None,
) -> None:
    """Delete buffers.

    With all that is in them; a published state goes with its deltas. Stops at the first that can't be deleted. Buffers
    of a training are refused: `smb train rm` deletes the whole training.

    Example: smb rm weights
    """
    with connect(coordinator) as client:
        for name in names:
            training = group_of(client, name)
            if training is not None:
                raise Error(
                    f'buffer "{name}" belongs to training "{training}"; delete all of it: smb train rm {training}'
                )
            beside = _beside(client, name)
            # the state last: a later call finds through the state what a failed one has left
            for each in (*beside, name):
                client.delete(each, missing_ok=missing_ok or each != name)
            if beside:
                console().print(f"published state {name!r} is deleted, with its deltas")


def _beside(client: Client, name: str) -> tuple[str, ...]:
    """Return the buffers that a published state has beside its own."""
    from smb import NotFoundError, PermissionDeniedError
    from smb.published import beside

    try:
        return beside(client.open(name))
    except (NotFoundError, PermissionDeniedError):  # the deletion reports the error
        return ()
