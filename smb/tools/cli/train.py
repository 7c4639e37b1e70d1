"""`smb train ls | stat | rm | save | load`: the trainings of a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smb.errors import Error
from smb.tools.cli.connection import connect
from smb.tools.cli.options import Command, Coordinator, Json, configured
from smb.tools.cli.output import console, counted, format_ago, print_json, table
from smb.tools.cli.train_files import load, save

if TYPE_CHECKING:
    from smb import Client
    from smb.train import GroupStatus

train = typer.Typer(help="List, show, delete, save and load trainings.", no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The training's name.")]


def groups_in(buffers: Iterable[str]) -> list[str]:
    """Return the names that may be trainings, sorted: those whose buffers beside the weights exist."""
    names = set(buffers)
    return sorted(name for name in names if {f"{name}/members", f"{name}/tick"} <= names)


def show_workers(found: GroupStatus) -> None:
    """Print the workers of a training, if it has any."""
    if not found.workers:
        return
    numbers = ("WORKER", "PID", "ROUND", "CONTRIBUTIONS", "REFUSED", "STALENESS", "SAMPLES")
    rows = table("WORKER", "STATE", "HOST", "PID", "JOINED", *numbers[2:], right=numbers)
    for worker in found.workers:
        rows.add_row(
            str(worker.slot),
            "alive" if worker.alive else "finished" if worker.finished else "lost",
            worker.host,
            str(worker.pid),
            format_ago(worker.joined),
            *(str(number) for number in (worker.clock, worker.contributions, worker.refused, worker.staleness)),
            str(worker.samples) if worker.samples else "-",  # samples are not counted
            style=None if worker.alive else "dim",
        )
    console().print(rows)


@train.command(cls=Command)
@configured
def ls(coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List the trainings.

    With scheme, round, epochs done of Shared.batches, workers alive, samples so far, and the size of the model.

    Example: smb train ls
    """
    with connect(coordinator) as client:
        found = [
            status
            for name in groups_in(info.name for info in client.list())
            if (status := _status(client, name)) is not None
        ]
    if as_json:
        print_json([_json(status) for status in found])
        return
    if not found:
        console().print("No training. In a script: smb.torch.join(model, optimizer, NAME, scheme=...)")
        return
    numbers = ("ROUND", "EPOCHS", "WORKERS", "SAMPLES", "SIZE")
    rows = table("TRAINING", "SCHEME", *numbers, right=numbers)
    from smb.config.parse import format_bytes

    for status in found:
        rows.add_row(
            status.name,
            status.scheme,
            _round(status),
            _epochs(status),
            str(_alive(status)),
            _samples(status),
            format_bytes(4 * status.size),
        )
    console().print(rows)


@train.command(cls=Command)
@configured
def stat(name: Name, coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show one training: its settings, and every worker.

    Samples above the workers are the training's: of those whose places others have now, too. SAMPLES is "-" where the
    script does not tell how many a step trains. "finished" is a worker that has left by itself, and one between two
    epochs of its batches, which comes back with its next step.

    Example: smb train stat digits
    """
    from smb.config.parse import format_bytes
    from smb.train import status as status_of

    with connect(coordinator) as client:
        found = status_of(client, name)
    if as_json:
        print_json(_json(found))
        return
    out = console()
    facts = table("", "")
    facts.show_header = False
    settings = ", ".join(f"{key}={value}" for key, value in found.settings.items())
    guards = ", ".join(f"{key}={value}" for key, value in found.guards.items())
    for key, value in (
        ("training", found.name),
        ("scheme", f"{found.scheme}({settings})"),
        ("guards", guards),
        ("lease", f"{found.lease:g} s"),
        ("wire", found.wire),
        ("round", _round(found)),
        ("epochs", _epochs(found)),
        ("samples", _samples(found)),
        ("model", f"{found.size:,} parameters, {format_bytes(4 * found.size)}"),
        ("workers", f"{_alive(found)} alive"),
        *([("gone workers", f"keep {format_bytes(found.gone_bytes)} until others join")] if found.gone_bytes else []),
    ):
        facts.add_row(key, value)
    out.print(facts)
    if found.workers:
        out.print()
        show_workers(found)


@train.command(cls=Command)
@configured
def rm(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, even if workers are alive.")] = False,
    missing_ok: Annotated[bool, typer.Option("--missing-ok", help="Succeed if there is no such training.")] = False,
    coordinator: Coordinator = None,
) -> None:
    """Delete a training: its model, and all that belongs to it.

    If workers are alive, it asks first. They end with "training 'NAME' was deleted".

    Example: smb train rm digits
    """
    from smb import NotFoundError
    from smb.train import delete, status

    with connect(coordinator) as client:
        alive = 0
        # parts may remain of a training that was not created or loaded completely
        with contextlib.suppress(NotFoundError):
            alive = _alive(status(client, name))
        if (
            alive
            and not yes
            and not typer.confirm(f"{counted(alive, 'worker')} of {name!r} may be alive. Delete it (or --yes)?")
        ):
            raise typer.Exit(1)
        try:
            delete(client, name)
        except NotFoundError:
            if not missing_ok:
                raise
        else:
            console().print(f"training {name!r} is deleted, with its model")


def _status(client: Client, name: str) -> GroupStatus | None:
    """Return the status of a training; None if the name is not a training, is being deleted, or its server is away."""
    from smb.train import status

    try:
        return status(client, name)
    except Error:
        return None


def _round(found: GroupStatus) -> str:
    from smb.train.scheme import SCHEMES
    from smb.train.traits import ROUNDS

    return str(found.round) if SCHEMES[found.scheme].TRAITS.way == ROUNDS else "-"


def _epochs(found: GroupStatus) -> str:
    return "-" if found.epochs is None else f"{found.epochs}, all done" if found.done else str(found.epochs)


def _samples(found: GroupStatus) -> str:
    return str(found.samples) if found.samples else "-"  # samples are not counted


def _alive(found: GroupStatus) -> int:
    return sum(worker.alive for worker in found.workers)


def _json(found: GroupStatus) -> dict[str, Any]:
    return dataclasses.asdict(found)


def group_of(client: Client, name: str) -> str | None:
    """Return the training to which a buffer belongs, among those that this client may see."""
    from smb import NotFoundError, PermissionDeniedError
    from smb.train.group import METADATA

    parts = name.split("/")
    for count in range(len(parts), 0, -1):
        folder = "/".join(parts[:count])
        try:
            if METADATA in client.open(folder).metadata:
                return folder
        except (NotFoundError, PermissionDeniedError):  # a client limited to team/... may not look at "team"
            continue
    return None


for _command in (save, load):
    train.command(cls=Command)(configured(_command))
