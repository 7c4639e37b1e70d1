"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from smb.errors import InvalidArgumentError

Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        "-c",
        envvar="SMB_COORDINATOR",
        metavar="HOST:PORT",
        help="Address of the cluster's coordinator.",
    ),
]
# Of daemons; SMB_TLS_CA, SMB_TLS_CERT and SMB_TLS_KEY are the same, a file each (smb.credentials).
CredentialsDirectory = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        metavar="DIR",
        help="Directory with ca.pem, cert.pem and key.pem: only who has a certificate of that authority is let in. "
        "Default: $SMB_CREDENTIALS.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar="SMB_INSECURE",
        help="Listen to other machines without credentials: whoever reaches it may read, change and delete.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn InvalidArgumentError into wrong usage (exit code 2): for what is refused before anything is done."""
    try:
        yield
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from None


def parse_size(text: str) -> int:
    """Return the bytes that e.g. "256MiB" means; a usage error where it means none."""
    from smb.config import parse_bytes

    with usage_errors():
        return parse_bytes(text)
