"""The face of a client and a buffer for the rest of the package: what their users do not see, and others need.

Each function says who needs it and for what. A module that needs more adds a function here: none takes a private
attribute of a client or a buffer. Rooms beside the core (docs/architecture.md) also find here what they need of the
modules under a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from smb.call.sync_requests import LOST
from smb.engine import SOURCES_MAX, crc32c
from smb.rpc.metadata import encode
from smb.transport.reconnect import connections_for

if TYPE_CHECKING:
    from smb.call.cluster_session import ClusterSession
    from smb.call.session import Session
    from smb.call.versions import Versions

__all__ = [
    "LOST",  # what an error says whose memory is gone: files are not tried again then
    "SOURCES_MAX",  # sums of so many buffers in one call: the plan's model
    "Buffer",
    "Client",
    "connections_for",  # by a round trip: the plan's model
    "crc32c",  # of a snapshot's blocks
    "encode",  # a buffer's metadata, of the size that it will have: files
    "is_located",
    "note_name",
    "opened_by",
    "session_of",
    "versions_of",
]


class Client(Protocol):
    """A smb.Client, from inside."""

    _session: ClusterSession

    def _knows_lock(self, name: str) -> bool: ...


class Buffer(Protocol):
    """A smb.Buffer, from inside."""

    _session: Session
    _versions: Versions

    def _renamed(self, name: str) -> None: ...


def session_of(client: Client) -> ClusterSession:
    """Return a client's session: its coordinator, its counters, and the reports that its renewals carry.

    For metrics, relays, trainings and published states, which live as long as the session does.
    """
    return client._session


def opened_by(buffer: Buffer) -> Session:
    """Return the session of the client that opened a buffer. For queues: they take their own client's buffers only."""
    return buffer._session


def versions_of(buffer: Buffer) -> Versions:
    """Return a buffer's versions one by one: which copy has which, and publication in steps.

    For published states and their mirrors, which write a version in parts and read it into memory of their own.
    """
    return buffer._versions


def is_located(client: Client, lock: str) -> bool:
    """Return whether a lock of that name is found without the coordinator. Makes no call. For trainings, which ask
    about such locks first while the coordinator is away.
    """
    return client._knows_lock(lock)


def note_name(buffer: Buffer, name: str) -> None:
    """Take note of the name that this client has given a buffer, for messages; nobody is asked. For files, which make
    a buffer under a private name.
    """
    buffer._renamed(name)
