"""`smb train save | load`: trainings into files, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator, configured
from smb.tools.cli.output import console

train = typer.Typer(help="Keep trainings in files.", no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The training's name.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A .safetensors, whatever its name is.")]


@train.command()
@configured
def save(name: Name, file: File, coordinator: Coordinator = None) -> None:
    """Write a training into a file, while it goes on: weights, outer state, round, settings.

    FILE appears when it is whole. safetensors opens it for the weights.
    """
    import smb.train

    with connect(coordinator) as client:
        number = smb.train.save(client, name, file)
    console().print(f"training {name!r}, round {number}: {file}")


@train.command()
@configured
def load(name: Name, file: File, coordinator: Coordinator = None) -> None:
    """Make a training of a file that `smb train save` wrote. Who joins NAME goes on from there."""
    import smb.train

    with connect(coordinator) as client:
        number = smb.train.load(client, name, file)
    console().print(f"training {name!r}, round {number}, from {file}")
