"""The entries of a client's table of links. Each entry knows where its link leads and how to connect it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from smb.config.backoff import Backoff
from smb.engine import EngineClient, EngineError, Lane, Link, Status
from smb.errors import Error, UnavailableError
from smb.rpc.client_tokens import ClientTokens
from smb.transport.base import Deadline, SegmentLocation, is_here
from smb.transport.connector import ATTEMPT_MS, Connector, ServerAddress

PAUSE_FIRST_S = 0.01
PAUSE_MAX_S = 0.25
SENT_AWAY_S = 0.1
_UNIX = frozenset({Lane.UNIX_DATA, Lane.UNIX_WAITS})


class Dialer(Protocol):
    """Makes the connections of a lane that uses neither TCP nor Unix sockets."""

    def dial(self, server: str, where: ServerAddress, lane: int, timeout_ms: int) -> tuple[Link, int]:
        """Return a link and the server's instance. Raises EngineError, NoPathError."""

    def redial(
        self, link: Link, server: str, where: ServerAddress, accept_instance: int, timeout_ms: int
    ) -> int | None:
        """Give the link a new connection and return the server's instance; None if it should use TCP from now on.

        Raises EngineError, UnavailableError if that is not possible now.
        """


@dataclass(slots=True)
class Means:
    """The parts that make connections; see Links."""

    client: EngineClient
    connector: Connector
    tokens: ClientTokens
    locate: Callable[[str], ServerAddress | None]
    locate_copies: Callable[[SegmentLocation], SegmentLocation | None]
    dialers: dict[int, Dialer] = field(default_factory=dict)


class LinkEntry(ABC):
    level = logging.DEBUG  # the level at which outages are logged

    def __init__(self, means: Means, lane: int) -> None:
        self.lane = lane
        self.lock = threading.Lock()  # held during the first connection
        self.unused = False  # the link never had a connection, and nobody is making one
        self._means = means

    @property
    @abstractmethod
    def server(self) -> str:
        """The server that the link leads to now."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The last known address of that server."""

    @abstractmethod
    def link(self) -> Link | None:
        """Return the link, if there is one."""

    @abstractmethod
    def connect(self, location: SegmentLocation, deadline: Deadline) -> Link:
        """Make a link to the segment's server. Raises EngineError, UnavailableError."""

    @abstractmethod
    def attempt(self, link: Link, *, again: bool) -> int:
        """Try once to give the link a new connection; return the server's instance.

        `again` says that an earlier attempt has failed. Raises NotFoundError if there is nothing left to reach,
        EngineError, UnavailableError.
        """

    def sent_away(self) -> bool:
        """Return True if the server has just accepted a connection of this link and then refused its requests."""
        return False


class ServerEntry(LinkEntry):
    level = logging.INFO

    def __init__(self, means: Means, server: str, lane: int, where: ServerAddress) -> None:
        super().__init__(means, lane)
        self._server = server
        self.where = where
        self.held: Link | None = None
        self.further = 0  # number of further connections for data
        self.beside: Link | None = None  # the first link that uses a further connection
        self._known = 0  # the run that the coordinator has named in this outage

    @property
    def server(self) -> str:
        return self._server

    @property
    def address(self) -> str:
        """The server's last address."""
        return self.where.address

    def link(self) -> Link | None:
        """Return the link, if there is one."""
        return self.held

    def connect(self, location: SegmentLocation, deadline: Deadline) -> Link:
        where = whereabouts(location)
        if self.lane in _UNIX:
            at = where.unix_path
            link, instance_id = self._means.client.connect_unix(at, self.lane, deadline.left_ms())
        elif dialer := self._means.dialers.get(self.lane):
            at = where.address
            link, instance_id = dialer.dial(self._server, where, self.lane, deadline.left_ms())
        else:
            at = where.address
            link, instance_id = self._means.connector.connect(self._server, where, self.lane, deadline)
        _check_run(self._server, at, instance_id, where.instance_id)
        self.where = where
        return link

    def attempt(self, link: Link, *, again: bool) -> int:
        """Try the last address, and after a failure the address that the coordinator gives."""
        if not again:
            self._known = 0
        elif (found := self._means.locate(self._server)) is not None:
            self.where, self._known = found, found.instance_id
        where = self.where
        if self.lane in _UNIX:
            return link.resume_unix(where.unix_path, self._known, ATTEMPT_MS)
        if dialer := self._means.dialers.get(self.lane):
            instance_id = dialer.redial(link, self._server, where, self._known, ATTEMPT_MS)
            if instance_id is not None:
                return instance_id
        return self._means.connector.resume(link, self._server, where.address, where.tls, self._known)


class SegmentEntry(LinkEntry):
    """The link to a segment that has two copies. It leads to whichever server has the primary."""

    def __init__(self, means: Means, location: SegmentLocation, lane: int, may_be_local: bool) -> None:
        super().__init__(means, lane)
        self.location = location
        self._may_be_local = may_be_local
        self._held: weakref.ref[Link] | None = None  # weak: the buffers that use the link keep it alive
        self._resumed_at = 0.0

    @property
    def server(self) -> str:
        """The server on which the primary was found last."""
        return self.location.server

    @property
    def address(self) -> str:
        """The address of that server."""
        return self.location.address

    def link(self) -> Link | None:
        """Return the link while somebody uses it."""
        return self._held() if self._held is not None else None

    def abandoned(self) -> bool:
        """Return True if there was a link, and it is no longer used."""
        return self._held is not None and self._held() is None

    def unix_path(self, location: SegmentLocation) -> str:
        """Return the Unix socket of the segment's server if it is on this host, else ""."""
        return location.unix_path if self._may_be_local and is_here(location.unix_path) else ""

    def connect(self, location: SegmentLocation, deadline: Deadline) -> Link:
        """Make a link to the server of the primary."""
        self.location = location
        path = self.unix_path(location)
        try:
            if path:
                link, instance_id = self._means.client.connect_unix(path, self.lane, deadline.left_ms())
            else:
                link, instance_id = self._means.connector.connect(
                    location.server, whereabouts(location), self.lane, deadline
                )
        except EngineError as error:
            if not path or error.status is not Status.UNTRUSTED:
                raise
            self._may_be_local = False  # another user listens at that socket
            return self.connect(location, deadline)
        _check_run(location.server, path or location.address, instance_id, location.instance_id)
        link.set_epoch(location.epoch)
        self._held = weakref.ref(link)
        return link

    def attempt(self, link: Link, *, again: bool) -> int:  # noqa: ARG002 - each attempt asks
        """Connect to the server that has the primary now, by the coordinator's answer."""
        return self.go_to(link, self._means.locate_copies(self.location) or self.location)

    def go_to(self, link: Link, found: SegmentLocation) -> int:
        """Give the link a connection to the server of this location."""
        link.set_epoch(found.epoch)
        self._means.tokens.keep(link, found.id)
        path = self.unix_path(found)
        if path:
            try:
                instance_id = link.resume_unix(path, found.instance_id, ATTEMPT_MS)
            except EngineError as error:
                if error.status is not Status.UNTRUSTED:
                    raise
                self._may_be_local = False  # the next attempt uses TCP
                raise UnavailableError(f"another user's process listens at {path}") from error
        else:
            connector = self._means.connector
            instance_id = connector.resume(link, found.server, found.address, found.tls, found.instance_id)
        self.location, self._resumed_at = found, time.monotonic()
        return instance_id

    def show(self, link: Link, deadline: Deadline, closing: threading.Event) -> None:
        """Present the segment's token to the server of its primary. Raises EngineError.

        Repeats this until the deadline if the server denies the token: another server may have had the primary just
        before.
        """
        backoff = Backoff(PAUSE_FIRST_S, PAUSE_MAX_S, deadline.left)
        while True:
            try:
                self._means.tokens.show(link, self.location.id, deadline.left_ms())
            except EngineError as error:
                if error.status is not Status.DENIED or deadline.left() == 0.0 or closing.wait(backoff.next_s()):
                    raise
                with contextlib.suppress(Error):
                    found = self._means.locate_copies(self.location)
                    if found is not None and found.server != self.location.server:
                        self.go_to(link, found)
            else:
                return

    def sent_away(self) -> bool:
        """Return True if that is so: a server that does not know its role yet accepts the connection first."""
        return time.monotonic() - self._resumed_at <= SENT_AWAY_S


def whereabouts(location: SegmentLocation) -> ServerAddress:
    """Return the server's location from that of a segment."""
    return ServerAddress(
        location.address, location.unix_path, location.instance_id, location.control_address, location.tls
    )


def _check_run(server: str, at: str, answered: int, known: int) -> None:
    """Raise UnavailableError if another run or another server answers there; the coordinator will know the new
    address.
    """
    if answered != known:
        raise UnavailableError(f"the process that answers at {at} is not the known run of memory server {server}")
