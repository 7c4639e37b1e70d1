"""`smb train save | load`: trainings into files, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator
from smb.tools.cli.output import console

Name = Annotated[str, typer.Argument(metavar="NAME", help="The training's name.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A file in the safetensors format; any name.")]


def save(name: Name, file: File, coordinator: Coordinator = None) -> None:
    """Write a training into a file, while it goes on.

    Weights, outer state, round and settings are in it. FILE appears when it is whole. safetensors opens it for the
    weights.

    Example: smb train save run run.safetensors
    """
    import smb.train

    with connect(coordinator) as client:
        number = smb.train.save(client, name, file)
    console().print(f"training {name!r}, round {number}: {file}")


def load(
    name: Name,
    file: File,
    wire: Annotated[
        str | None,
        typer.Option("--wire", metavar="NAME", help="Encoding of contributions. [default: as in the saved training]"),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            metavar="N",
            min=1,
            max=2,
            help="Copies, on different servers. [default: as in the saved training]",
        ),
    ] = None,
    coordinator: Coordinator = None,
) -> None:
    """Make a training of a file.

    `smb train save` wrote it. A worker that joins NAME goes on from there.

    Example: smb train load run run.safetensors
    """
    import smb.train

    with connect(coordinator) as client:
        wishes = {key: value for key, value in (("wire", wire), ("replicas", replicas)) if value}
        number = smb.train.load(client, name, file, **wishes)
    console().print(f"training {name!r}, round {number}, from {file}")
