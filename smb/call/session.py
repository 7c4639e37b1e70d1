"""What the modules of smb.call need of a client: protocols that its session and its locks implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from smb.call.lock_renewals import Renewals
from smb.call.turns import Turns
from smb.engine import EngineClient, Link, Switch
from smb.errors import InvalidArgumentError
from smb.rpc.coordinator_client import Coordinator
from smb.transport.base import Deadline, Rdma, SegmentLocation, SegmentPath

if TYPE_CHECKING:
    from smb.call.async_order import AsyncCalls


class Session(Protocol):
    """A client's session in one process, with its engine, its links to servers and its coordinator."""

    name: str  # the client's, as others see it
    timeout: float  # limit of each call, in seconds
    timeout_ms: int  # the same limit in milliseconds
    switch: Switch  # open while calls may begin on the direct path, from a buffer straight to the engine
    engine: EngineClient
    coordinator: Coordinator
    calls: AsyncCalls
    renewals: Renewals
    verbs: Rdma

    def check_open(self) -> None:
        """Raise UnavailableError if the client was closed or its session has ended, and Error in a child of fork."""

    def reach(self, locations: Sequence[SegmentLocation], epoch: int, deadline: Deadline) -> tuple[SegmentPath, ...]:
        """Return the path to each segment."""

    def reach_gated(self, location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
        """Return the links that carry changes of a segment to its server, which applies them: this path is used where
        changes in mapped memory are not allowed.
        """

    def reach_waits(self, location: SegmentLocation, deadline: Deadline) -> Link:
        """Return the link for requests that a segment's server answers late, such as a wait for a lock."""

    def server_of(self, location: SegmentLocation) -> str:
        """Return the server that handles calls on a segment."""

    def turns_of(self, buffer_id: int, itemsize: int) -> Turns:
        """Return the object that orders the async calls on a buffer. All Buffer objects of one buffer share it."""

    def why_untrusted(self, server: str) -> str:
        """Return why the peer at a server's address is not trusted to be that server; "" if it is trusted."""

    def why_ended(self) -> str:
        """Return why the session has ended, and what to do, as a sentence of an error. Blocks for at most a second."""


class Fence(Protocol):
    """A lock that protects a change: a server refuses the change once another client holds the lock."""

    @property
    def owner(self) -> object:
        """The dispatcher of the buffer that the lock belongs to; None for a standalone lock."""

    @property
    def token(self) -> int:
        """The fencing token. Raises InvalidArgumentError unless the lock is held."""

    def lose(self, token: int) -> None:
        """Mark the lock as lost, if its present holding has this token."""


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
