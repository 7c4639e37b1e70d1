"""TCP: one link to each server, shared by all buffers and threads of the client."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field

from smb.config import parse_address
from smb.engine import EngineClient, EngineError, Link, Status
from smb.errors import Error, TransportError, UnavailableError
from smb.layout import SegmentPlace
from smb.transport.base import Deadline, Way


@dataclass(slots=True)
class _Server:
    lock: threading.Lock = field(default_factory=threading.Lock)
    link: Link | None = None
    address: str = ""


class Tcp:
    """Transport `tcp`."""

    name = "tcp"

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._servers: dict[str, _Server] = {}

    def reach(self, place: SegmentPlace, epoch: int, deadline: Deadline) -> Way:  # noqa: ARG002 - frames carry it
        """See Transport."""
        with self._lock:
            server = self._servers.setdefault(place.server, _Server())
        with server.lock:  # one connects, the others wait for its link
            if server.link is None or not server.link.alive() or server.address != place.address:
                server.link = self._connect(place, deadline)
                server.address = place.address
            return Way(self.name, place.address, link=server.link)

    def close(self) -> None:
        """See Transport."""
        with self._lock:
            self._servers.clear()

    def _connect(self, place: SegmentPlace, deadline: Deadline) -> Link:
        host, port = parse_address(place.address)
        try:
            numeric = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise UnavailableError(
                f"memory server {place.server}: no address for {host!r}: {error.strerror}"
            ) from error
        try:
            link, instance_id = self._client.connect_tcp(numeric, port, deadline.left_ms())
        except EngineError as error:
            raise _refused(place, error) from error
        if instance_id != place.instance_id:
            # It was restarted, or another one has its port: the coordinator will know.
            raise UnavailableError(
                f"at {place.address} answers another run than the memory server {place.server} known"
            )
        return link


def _refused(place: SegmentPlace, error: EngineError) -> Error:
    text = f"memory server {place.server} at {place.address} can't be reached: {error}"
    if error.status in (Status.VERSION, Status.PROTOCOL):
        return TransportError(text)
    return UnavailableError(text)
