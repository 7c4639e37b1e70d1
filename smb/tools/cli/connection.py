"""Connections of commands to their cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smb import Client
    from smb.rpc.coordinator_client import Coordinator


@contextmanager
def connect(coordinator: str | None) -> Iterator[Client]:
    """Connect to the coordinator for the duration of one command.

    The default address is $SMB_COORDINATOR, else 127.0.0.1:7070. Raises UnavailableError if nobody answers there.
    """
    import smb

    with smb.connect(coordinator) as client:
        yield client


@contextmanager
def coordinator_at(address: str | None) -> Iterator[Coordinator]:
    """Call the coordinator without becoming one of its clients, for the duration of one command.

    The default address is 127.0.0.1:7070.
    """
    from smb.config.parse import parse_addresses
    from smb.config.settings import DEFAULT_COORDINATOR
    from smb.rpc.coordinator_client import Coordinator
    from smb.security.credentials import find

    found = address or DEFAULT_COORDINATOR
    parse_addresses(found)
    coordinator = Coordinator(found, find())
    try:
        yield coordinator
    finally:
        coordinator.close()
