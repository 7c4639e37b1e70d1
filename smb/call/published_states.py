"""The states that a client publishes or follows, for its metrics and the coordinator's dashboard."""

from __future__ import annotations

import threading
import weakref
from typing import Any, ClassVar, Protocol

from smb.config.transports import REPORTED
from smb.rpc import control_pb2 as pb
from smb.state_costs import StateCosts

PUBLISHER, READER = "publisher", "reader"


class PublishedState(Protocol):
    ROLE: ClassVar[str]
    """PUBLISHER or READER."""

    costs: StateCosts
    """What it has cost so far."""

    @property
    def buffer(self) -> Any:
        """The state's buffer, which has its `name`."""

    @property
    def last(self) -> int:
        """The generation that was published, or read, last; 0 before the first. Makes no call."""

    @property
    def source(self) -> str:
        """The mirror that the state is read from; "" for the state's own buffer and for a publisher. Makes no call."""


class PublishedStates:
    """The published states of one client. A state is forgotten with its Publisher or Follower."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: list[weakref.ref[PublishedState]] = []

    def add(self, state: PublishedState) -> None:
        """Include the state for as long as its object exists."""
        with self._lock:
            self._states = [each for each in self._states if each() is not None] + [weakref.ref(state)]

    def generations(self) -> dict[tuple[str, str], int]:
        """Return the generation by state and role. Of several readers of a state the one furthest behind counts."""
        return {key: min(state.last for state in states) for key, states in self._living().items()}

    def reports(self, most: int) -> list[pb.StateReport]:
        """Return the reports to the coordinator, at most `most` of them. Costs are those of all objects of this client
        for a state and role.
        """
        return [_report(name, role, states) for (name, role), states in list(self._living().items())[:most]]

    def _living(self) -> dict[tuple[str, str], list[PublishedState]]:
        """Return the objects by state and role."""
        found: dict[tuple[str, str], list[PublishedState]] = {}
        for each in self._states:
            if (state := each()) is not None:
                found.setdefault((state.buffer.name, state.ROLE), []).append(state)
        return found


def _report(name: str, role: str, states: list[PublishedState]) -> pb.StateReport:
    last, costs = min(states, key=lambda state: state.last), [state.costs for state in states]
    return pb.StateReport(
        name=name,
        publishes=role == PUBLISHER,
        generation=last.last,
        source=last.source,
        times=sum(each.times for each in costs),
        bytes=sum(each.bytes for each in costs),
        copied_bytes=sum(each.copied_bytes or 0 for each in costs),
        busy_ms=int(1000 * sum(each.seconds for each in costs)),
        age_ms=int(1000 * max(each.age for each in costs)),
        transports=sum(REPORTED[way] for way in {way for each in costs for way in each.transports}),
    )
