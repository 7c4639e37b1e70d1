"""`smb certs DIR`: a certificate authority and a working set of certificates, for a lab."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from smb.cli.options import usage_errors
from smb.cli.output import console
from smb.errors import InvalidArgumentError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where they go; made if need be.")],
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
        list[str] | None, typer.Option("--client", metavar="NAME", help="One more client, in DIR/NAME; repeat it.")
    ] = None,
    reader: Annotated[
        list[str] | None,
        typer.Option("--reader", metavar="NAME", help="One more that may only read, in DIR/NAME; repeat it."),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            metavar="NAME",
            help="Limit those of --client and --reader to buffers whose names begin with NAME/; repeat it.",
        ),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="How long the certificates are good.")] = 365,
) -> None:
    """Make a certificate authority and certificates for a lab.

    In DIR come ca (its key signs: keep it, and away from the cluster), coordinator, client, reader, operator, and one
    for each memory server; SMB_CREDENTIALS=DIR/client is what a client needs. What is there already stays as it is: run
    it again with --server, --client or --reader to add some.
    """
    from smb.access import Role
    from smb.certificates import Holder, make_set

    namespaces = tuple(namespace or ())
    with usage_errors():
        for name in (*(server or ()), *(client or ()), *(reader or ()), *namespaces):
            if not _NAME.fullmatch(name) or name in ("ca", ".", ".."):
                raise InvalidArgumentError(f'"{name}" is no name: use 1 to 64 characters of A-Z a-z 0-9 . _ -')
        if namespaces and not (client or reader):
            raise InvalidArgumentError("--namespace limits those of --client and --reader: name one")
    holders = [
        *(Holder(role, "") for role in (Role.COORDINATOR, Role.CLIENT, Role.READER, Role.OPERATOR)),
        *(Holder(Role.SERVER, name) for name in server or ("server-0", "server-1")),
        *(Holder(Role.CLIENT, name, namespaces) for name in client or ()),
        *(Holder(Role.READER, name, namespaces) for name in reader or ()),
    ]
    made = make_set(directory, holders, days)
    out = console()
    for place in made:
        out.print(f"made {place}")
    if not made:
        out.print(f"all of them are in {directory} already")
    out.print("\nThen, each where it runs (copy the one directory there that it needs):\n")
    out.print(f"  smb coordinator --listen 0.0.0.0:7070 --credentials {directory}/coordinator")
    out.print(f"  smb-memserver --listen 0.0.0.0:0 --name server-0 --credentials {directory}/server-0")
    out.print(f"  export SMB_CREDENTIALS={directory}/client")
