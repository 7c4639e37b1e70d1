"""The narrow view of a client that the modules of a call use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from smb.call.async_order import AsyncCalls, Turns
from smb.call.lock_renewals import Renewals
from smb.engine import EngineClient, Link, Switch
from smb.errors import InvalidArgumentError
from smb.rpc.coordinator_client import Coordinator
from smb.transport.base import Deadline, Rdma, SegmentLocation, SegmentPath


class Session(Protocol):
    """One process's session: its engine, its links, its coordinator."""

    timeout: float  # seconds, of each call
    timeout_ms: int
    switch: Switch  # is open while direct calls may begin
    engine: EngineClient
    coordinator: Coordinator
    calls: AsyncCalls
    renewals: Renewals
    verbs: Rdma

    def check_open(self) -> None:
        """Raise UnavailableError if the client was closed, Error in a child of fork."""

    def reach(self, locations: Sequence[SegmentLocation], epoch: int, deadline: Deadline) -> tuple[SegmentPath, ...]:
        """Return the path to each segment."""

    def reach_gated(self, location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
        """Return the links on which changes of a segment go through its server."""

    def reach_waits(self, location: SegmentLocation, deadline: Deadline) -> Link:
        """Return the link for requests that wait at a segment's server."""

    def server_of(self, location: SegmentLocation) -> str:
        """Return the server that a segment's calls go to."""

    def turns_of(self, buffer_id: int, itemsize: int) -> Turns:
        """Return the order of the async calls on a buffer."""

    def why_untrusted(self, server: str) -> str:
        """Return why the peer at a server's address is not trusted to be that server, empty if it is trusted."""


class Fence(Protocol):
    """The lock under which a change is made."""

    @property
    def owner(self) -> object:
        """The dispatcher of the buffer that the lock belongs to; None for a standalone lock."""

    @property
    def token(self) -> int:
        """The fencing token. Raises InvalidArgumentError unless the lock is held."""

    def lose(self, token: int) -> None:
        """Mark the holding with this token as lost."""


class FenceAsMade:
    """The lock of an async call, with the token that it had when the call was made.

    Before the call's turn the lock may be released and taken again. That is another holding, and other clients may have
    changed the buffer in between.
    """

    def __init__(self, fence: Any) -> None:
        self.owner: object = getattr(fence, "owner", None)  # None if `fence` is not a lock; the call refuses it
        self._fence = fence
        self._token, self._refused = 0, ""
        try:
            self._token = getattr(fence, "token", 0)
        except InvalidArgumentError as error:
            self._refused = str(error)  # the call's future raises it; the exception itself would keep this frame alive

    @property
    def token(self) -> int:
        """The fencing token. Raises InvalidArgumentError unless the lock was held."""
        if self._refused:
            raise InvalidArgumentError(self._refused)
        return self._token

    def lose(self, token: int) -> None:
        """Mark the lock as lost, if its present holding has this token."""
        self._fence.lose(token)
