"""The interface between the coordinator and its dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from smb.coordinator.commit_log import Committed
from smb.coordinator.events import Event, Instant
from smb.coordinator.state import State
from smb.daemon.process import Answer
from smb.rpc import control_pb2 as pb


class TrainingReports(Protocol):
    """Receives workers' reports of their trainings."""

    def record_reports(self, session_id: int, reports: Iterable[pb.TrainingReport], now: Instant) -> None:
        """Replace a session's reports by these."""


class StateReports(Protocol):
    """Receives clients' reports of the states that they publish or read."""

    def record_reports(self, session_id: int, reports: Iterable[pb.StateReport], now: Instant) -> None:
        """Replace a session's reports by these."""


class Watch(Protocol):
    """Receives all events and load reports. It decides nothing."""

    @property
    def trainings(self) -> TrainingReports: ...

    @property
    def states(self) -> StateReports:
        """The receiver of reports of published states."""

    def failed(self, method: str, now: Instant) -> None:
        """Record a call that failed inside the coordinator."""

    def record_load(self, name: str, instance_id: int, load: pb.ServerLoad, now: Instant) -> None:
        """Record a server's load, from a renewal that was granted."""

    def saw(self, event: Event, before: State, committed: Committed, now: Instant) -> None:
        """Record an event that was stored."""


class Overview(Protocol):
    """Answers questions about the cluster as JSON, from any thread."""

    def all(self) -> bytes: ...

    def server(self, name: str) -> bytes:
        """Return the details of one server. Raises NotFoundError."""

    def buffer(self, name: str) -> bytes:
        """Return the details of one buffer. Raises NotFoundError."""

    def clients(self, after: str) -> bytes:
        """Return a page of the clients: those whose keys are greater than `after`."""

    def training(self, name: str) -> bytes:
        """Return the details of one training. Raises NotFoundError."""


class Dashboard(Protocol):
    """The whole dashboard: what it receives, what it answers, and its page."""

    @property
    def watch(self) -> Watch: ...

    @property
    def overview(self) -> Overview: ...

    def __call__(self, path: str, query: str) -> Answer | None:
        """Return the answer to GET path?query; None if no such page exists."""


# Returns why the store cannot be written (empty if it can) and the free bytes of its disk (None if unknown).
LookAtStore = Callable[[], tuple[str, int | None]]
