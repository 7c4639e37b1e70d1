"""How a command gets to its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from smb.errors import Error

if TYPE_CHECKING:
    from smb import Client
    from smb.rpc.coordinator_client import Coordinator


@contextmanager
def connect(coordinator: str | None) -> Iterator[Client]:
    """Connect to the coordinator for the length of one command.

    Raises Error where no address is given, UnavailableError where nobody answers there; both say how to get a cluster.
    """
    import smb

    with smb.connect(_address(coordinator)) as client:
        yield client


@contextmanager
def coordinator_at(address: str | None) -> Iterator[Coordinator]:
    """Speak to the coordinator without becoming one of its clients, for the length of one command.

    Raises Error where no address is given.
    """
    from smb.config.parse import parse_addresses
    from smb.rpc.coordinator_client import Coordinator
    from smb.security.credentials import find

    found = _address(address)
    parse_addresses(found)
    coordinator = Coordinator(found, find())
    try:
        yield coordinator
    finally:
        coordinator.close()


def _address(given: str | None) -> str:
    if given is None:
        raise Error("which cluster? pass --coordinator HOST:PORT or set SMB_COORDINATOR; `smb up` starts a local one")
    return given
