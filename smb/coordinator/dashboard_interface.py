"""What the coordinator tells the room that shows it to people, and asks it for: the face of the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from smb.coordinator.commit_log import Committed
from smb.coordinator.events import Event, Instant
from smb.coordinator.state import State
from smb.daemon.process import Answer
from smb.rpc import control_pb2 as pb


class TrainingReports(Protocol):
    """Takes what workers say of their trainings."""

    def record_reports(self, session_id: int, reports: Iterable[pb.TrainingReport], now: Instant) -> None:
        """Store a session's reports, instead of those before."""


class StateReports(Protocol):
    """Takes what clients say of the states that they publish or read."""

    def record_reports(self, session_id: int, reports: Iterable[pb.StateReport], now: Instant) -> None:
        """Store a session's reports, instead of those before."""


class Watch(Protocol):
    """Sees every event and every load. Nothing is decided by it."""

    @property
    def trainings(self) -> TrainingReports: ...

    @property
    def states(self) -> StateReports:
        """Where reports of published states go."""

    def failed(self, method: str, now: Instant) -> None:
        """Take note of a call that failed inside the coordinator."""

    def lock_holder(self, server: str, segment_id: int) -> int:
        """Return the session that holds a segment's lock, by the server's last report; 0 if that names none."""

    def record_load(self, name: str, instance_id: int, load: pb.ServerLoad, now: Instant) -> None:
        """Take note of a server's load, from a renewal that was granted."""

    def saw(self, event: Event, before: State, committed: Committed, now: Instant) -> None:
        """Take note of an event that was stored."""


class Overview(Protocol):
    """Answers what is known, as JSON, from any thread."""

    def all(self) -> bytes: ...

    def server(self, name: str) -> bytes:
        """Return all of one server. Raises NotFoundError."""

    def buffer(self, name: str) -> bytes:
        """Return all of one buffer. Raises NotFoundError."""

    def training(self, name: str) -> bytes:
        """Return all of one training. Raises NotFoundError."""


class Dashboard(Protocol):
    """All of the room: what it sees, what it answers, and its page."""

    @property
    def watch(self) -> Watch: ...

    @property
    def overview(self) -> Overview: ...

    def __call__(self, path: str, query: str) -> Answer | None:
        """Return the answer to GET path?query, None if there is no such page."""


# Why the store can't be written, empty if it can, and the room of its disk where that is known.
LookAtStore = Callable[[], tuple[str, int | None]]
