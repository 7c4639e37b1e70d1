"""The interface of a client and a buffer for the rest of the package. Users do not see it.

Each function says which modules need it and for what. A module that needs more adds a function here, instead of using a
private attribute of a client or a buffer. Rooms beside the core (docs/architecture.md) also find here what they need
from the modules under a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from smb.buffer_info import BufferInfo
from smb.call.sync_requests import LOST
from smb.config.limits import STRIPE_BYTES_MULTIPLE
from smb.engine import SOURCES_MAX, crc32c, memory_of, segment_file_bytes
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2 import TrainingReport
from smb.rpc.metadata import encode
from smb.transport.reconnect import connections_for

if TYPE_CHECKING:
    from smb.call.cluster_session import ClusterSession
    from smb.call.session import Session
    from smb.call.versions import Versions

__all__ = [
    "LOST",  # in an error about lost memory: files do not try again then
    "SOURCES_MAX",  # the number of buffers that one call sums: for the plan's model, and for the closing of a round
    "BufferInside",
    "ClientInside",
    "TrainingReport",  # of a worker, for the page: renewals of the session carry it
    "connections_for",  # by round trip: for the plan's model
    "crc32c",  # for a snapshot's blocks
    "encode",  # a buffer's metadata, in its final size: for files
    "is_located",
    "look_up",
    "memory_of",  # of a block that a restore writes into a version
    "note_name",
    "opened_by",
    "rename_file",
    "session_of",
    "smallest_buffer_bytes",
    "versions_of",
]


class ClientInside(Protocol):
    """A smb.Client, seen from inside the package."""

    _session: ClusterSession

    def _knows_lock(self, name: str) -> bool: ...


class BufferInside(Protocol):
    """A smb.Buffer, seen from inside the package."""

    _session: Session
    _versions: Versions

    def _renamed(self, name: str) -> None: ...


def session_of(client: ClientInside) -> ClusterSession:
    """Return a client's session: its coordinator, its counters, and the reports that its renewals carry.

    For metrics, relays, trainings and published states, which live as long as the session does.
    """
    return client._session


def opened_by(buffer: BufferInside) -> Session:
    """Return the session of the client that opened a buffer. For queues, which accept only their own client's
    buffers.
    """
    return buffer._session


def versions_of(buffer: BufferInside) -> Versions:
    """Return a buffer's versions: which slot has which version, and publication in steps.

    For published states, their mirrors and restores, which write a version in parts and read it into memory of their
    own.
    """
    return buffer._versions


def is_located(client: ClientInside, lock: str) -> bool:
    """Return True if a lock of that name is found without the coordinator. Makes no call.

    For trainings, which ask for such locks first while the coordinator is away.
    """
    return client._knows_lock(lock)


def note_name(buffer: BufferInside, name: str) -> None:
    """Store the name that this client has given a buffer, for messages. Makes no request.

    For files, which make a buffer under a private name.
    """
    buffer._renamed(name)


def smallest_buffer_bytes() -> int:
    """Return the memory in bytes that a buffer of one page takes on its server, with all that the server keeps beside
    it. A smaller one takes as much.

    For files, which say how many of them there is room for.
    """
    return segment_file_bytes(STRIPE_BYTES_MULTIPLE, STRIPE_BYTES_MULTIPLE)


def look_up(client: ClientInside, names: Sequence[str], folder: str) -> list[BufferInfo] | None:
    """Return those of these buffers that exist, and one buffer in the folder if there is one.

    For files, which look for a name that their listing lacks. None if the coordinator is of an older release, which
    only lists everything.
    """
    session = session_of(client)
    session.check_open()
    found = session.coordinator.look_up(names, folder, session.timeout)
    return None if found is None else [BufferInfo.of(each) for each in found]


def rename_file(
    client: ClientInside,
    buffer: tuple[str, int],
    new_name: str,
    *,
    replace: bool = False,
    displaced_name: str = "",
    attributes: bytes | None = None,
    before: bytes | None = None,
) -> bool:
    """Rename as Client.rename and displace do, and store the attributes of the buffer's file in the same step. Return
    False if the coordinator is of an older release, which stores no attributes.

    For files; other modules do not know the attributes' format. `buffer` is a name and an id, 0 for any. `new_name`
    may be the present name. None leaves the attributes that are stored; `before` are those that they rest on, and
    AlreadyExistsError is raised if others are stored by now. Raises as Client.rename, InvalidArgumentError
    for more than 4096 bytes of attributes, and OutOfMemoryError.
    """
    session = session_of(client)
    session.check_open()
    request = pb.RenameBufferRequest(
        name=buffer[0], new_name=new_name, replace=replace, displaced_name=displaced_name, id=buffer[1],
        file_attributes=attributes, attributes_before=before,
    )  # fmt: skip
    return session.coordinator.rename_buffer(request, session.timeout)
