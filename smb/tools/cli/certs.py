"""`smb certs DIR`: a certificate authority and a working set of certificates for a lab."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smb.errors import InvalidArgumentError
from smb.tools.cli.options import Command, usage_errors
from smb.tools.cli.output import console

if TYPE_CHECKING:
    from smb.security.lab_ca import Holder

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ARGUMENTS = "smb.certs.arguments"
_SERVERS = ("server-0", "server-1")  # the names that `smb up` gives


class InOrder(Command):
    """Keeps the arguments in their order, which decides to whom a --namespace belongs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Store the arguments, then parse them."""
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


def limits_of(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the namespaces of each --client and --reader: a --namespace applies to all of these directly before it.

    Raises InvalidArgumentError for a --namespace before any of them, and for a repeated name.
    """
    limits: dict[str, tuple[str, ...]] = {}
    named: list[str] = []  # names since the last --namespace
    limited = False
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in ("--client", "--reader", "--namespace"):
            continue
        value = value if equals else next(words, "")
        if flag != "--namespace":
            if limited:
                named, limited = [], False
            if value in limits:
                raise InvalidArgumentError(
                    f"{flag} {value}: this name was given twice; each name stands for one certificate"
                )
            limits[value] = ()
            named.append(value)
            continue
        if not named:
            raise InvalidArgumentError(f"--namespace {value} must follow the --client or --reader that it limits")
        limited = True
        for name in named:
            limits[name] += (value,)
    return limits


def _may(holder: Holder) -> str:
    """Return a description of a certificate's rights."""
    does = _DOES[holder.role.value]
    if holder.role.value == "server":
        return does.format(holder.name)
    return does.format(", ".join(f"{each}/..." for each in holder.namespaces) or "all buffers")


_DOES = {
    "coordinator": "is the coordinator",
    "server": "is the memory server {}",
    "client": "may create, read, change and delete {}",
    "reader": "may read {}",
    "operator": "may do all that clients may, in every namespace, and steer the cluster",
}


def certs(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory for the certificates; created if missing.")
    ],
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="NAME",
            help="A memory server, by its --name; repeat it.",
            show_default="server-0, server-1",
        ),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option("--client", metavar="NAME", help="Add a client, in DIR/NAME. May be repeated.")
    ] = None,
    reader: Annotated[
        list[str] | None,
        typer.Option("--reader", metavar="NAME", help="Add a client that may only read, in DIR/NAME. May be repeated."),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            metavar="NAME",
            help="Limit the --client or --reader before it to buffers whose names begin with NAME/.",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", metavar="N", min=1, max=3650, help="How long the certificates are good.")
    ] = 365,
) -> None:
    """Make a certificate authority and certificates for a lab.

    In DIR come ca (its key signs: keep it, and away from the cluster), coordinator, client, reader, operator, and one
    for each memory server; SMB_CREDENTIALS=DIR/client is what a client needs. Existing certificates stay as they are:
    run it again with --server, --client or --reader to add some.

    Example: smb certs lab --client alice --namespace vision
    """
    from smb.security.lab_ca import Holder, make_set
    from smb.security.roles import Role

    with usage_errors():
        for name in (*(server or ()), *(client or ()), *(reader or ()), *(namespace or ())):
            if not _NAME.fullmatch(name) or name in ("ca", ".", ".."):
                raise InvalidArgumentError(f'a name must have 1 to 64 characters of A-Z a-z 0-9 . _ -, not "{name}"')
        limits = limits_of(context.meta[_ARGUMENTS])
    holders = [
        *(Holder(role, "") for role in (Role.COORDINATOR, Role.CLIENT, Role.READER, Role.OPERATOR)),
        *(Holder(Role.SERVER, name) for name in server or _SERVERS),
        *(Holder(Role.CLIENT, name, limits.get(name, ())) for name in client or ()),
        *(Holder(Role.READER, name, limits.get(name, ())) for name in reader or ()),
    ]
    made = make_set(directory, holders, days)
    out = console()
    may = {holder.name or holder.role.value: _may(holder) for holder in holders}
    for where in made:
        out.print(f"made {where}: {may[where.name]}", soft_wrap=True)
    if not made:
        out.print(f"all of them are in {directory} already")
    out.print("\nThen, each where it runs (HOST: the coordinator's), with a copy of the one directory that it needs:\n")
    for line in _next_steps(directory, server or _SERVERS, [*(client or ()), *(reader or ()), "client"][0]):
        out.print(f"  {line}", soft_wrap=True)


def _next_steps(directory: Path, servers: Sequence[str], user: str) -> Iterator[str]:
    """Yield the commands that run a cluster with these certificates."""
    where = shlex.quote(str(directory))
    yield f"smb coordinator --listen 0.0.0.0:7070 --credentials {where}/coordinator"
    for name in servers:
        yield f"smb-memserver --coordinator HOST:7070 --listen 0.0.0.0:0 --name {name} --credentials {where}/{name}"
    yield f"export SMB_COORDINATOR=HOST:7070 SMB_CREDENTIALS={where}/{user}"
