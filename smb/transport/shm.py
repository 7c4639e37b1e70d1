"""Shared memory: the server's Unix socket passes the segment's file descriptor, and the segment is mapped.

Whether a server is on this host is not guessed from names: its socket must be here, answer, and give the instance id
that the coordinator knows. A mapping stays valid when the server dies; operations on it need no server.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import weakref
from collections.abc import Iterator

from smb.engine import EngineClient, EngineError, Lane, Link, Segment, Status
from smb.errors import NotFoundError, UnavailableError
from smb.transport.base import Deadline, NoAnswerError, NoPathError, SegmentLocation, SegmentPath, why_not_here
from smb.transport.reconnect import Links

# Statuses of an attaching link whose server died or does not answer.
_GONE = (Status.LINK_LOST, Status.DISCONNECTED, Status.TIMEOUT)


class SharedMemory:
    name = "shm"

    def __init__(self, client: EngineClient, links: Links, *, alone: bool = False) -> None:
        """`alone`: the client uses no other transport, so memory that it has mapped must not move."""
        self._client = client
        self._alone = alone
        self._resumable = links
        self._lock = threading.Lock()  # held during an attach: attaching is rare, and a link does one at a time
        self._links: dict[int, Link] = {}  # for attaching, by the server's instance
        self._mapped: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()

    def reach(self, location: SegmentLocation, epoch: int, deadline: Deadline) -> SegmentPath:
        with self._lock:
            segment = self._mapped.get(location.id)
            if segment is None or not segment.shared():
                if self._resumable.tokens.read_only(location.id):
                    raise NoPathError("this session may only read the segment, and a mapping could be written to")
                link = self._link(location, deadline)
                try:
                    self._resumable.tokens.show(link, location.id, deadline.left_ms())
                    segment = link.attach(location.id, epoch, deadline.left_ms())
                except EngineError as error:
                    if error.status is Status.STALE_EPOCH:
                        raise UnavailableError(
                            f"memory server {location.server} was told to move the segment"
                        ) from error
                    if error.status is Status.NOT_FOUND:
                        raise NotFoundError(f"memory server {location.server} has no such segment") from error
                    self._links.pop(location.instance_id, None)
                    refusal = NoAnswerError if error.status in _GONE else NoPathError
                    raise refusal(f"the socket at {location.unix_path} did not pass the segment: {error}") from error
                if self._alone and not segment.bind():
                    raise NoPathError("its server is being drained, so the segment may move to another server")
                self._mapped[location.id] = segment
        return SegmentPath(self.name, "same host", segment=segment)

    def gated(self, location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
        return (self._resume(location, Lane.UNIX_DATA, deadline),)

    def waits(self, location: SegmentLocation, deadline: Deadline) -> Link:
        return self._resume(location, Lane.UNIX_WAITS, deadline)

    def close(self) -> None:
        with self._lock:
            self._links.clear()

    def _link(self, location: SegmentLocation, deadline: Deadline) -> Link:
        link = self._links.get(location.instance_id)
        if link is not None and link.alive():
            return link
        with self._pending(location):
            link, instance_id = self._client.connect_unix(location.unix_path, Lane.UNIX_ATTACH, deadline.left_ms())
        if instance_id != location.instance_id:
            # The server was restarted, and the coordinator will know; or the socket belongs to another server.
            raise NoAnswerError(f"another run, or another server, answers at the socket {location.unix_path}")
        link.connect_once()
        self._links = {run: kept for run, kept in self._links.items() if kept.alive()} | {instance_id: link}
        return link

    def _resume(self, location: SegmentLocation, lane: Lane, deadline: Deadline) -> Link:
        with self._pending(location):
            try:
                return self._resumable.reach(location, lane, deadline)
            except UnavailableError as error:
                raise NoAnswerError(str(error)) from error

    @contextlib.contextmanager
    def _pending(self, location: SegmentLocation) -> Iterator[None]:
        """Translate the failure of a connection to a server's Unix socket."""
        if why := why_not_here(location.unix_path):
            raise NoPathError(why)
        try:
            yield
        except EngineError as error:
            # A killed server leaves a socket without a listener, or connections that nobody accepts; a stopped server
            # leaves a full queue.
            transient = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EAGAIN)
            if error.status is Status.TIMEOUT or error.errno in transient:
                raise NoAnswerError(f"nobody answers at the socket {location.unix_path}: {error}") from error
            raise NoPathError(f"the socket at {location.unix_path} refuses this process: {error}") from error
