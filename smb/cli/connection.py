"""How a command gets to its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from smb.errors import Error

if TYPE_CHECKING:
    from smb import Client


@contextmanager
def connect(coordinator: str | None) -> Iterator[Client]:
    """Connect to the coordinator for the length of one command.

    Raises Error where no address is given, UnavailableError where nobody answers there; both say how to get a cluster.
    """
    import smb

    if coordinator is None:
        raise Error("which cluster? pass --coordinator HOST:PORT or set SMB_COORDINATOR; `smb up` starts a local one")
    with smb.connect(coordinator) as client:
        yield client
