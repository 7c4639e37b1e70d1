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
        return {key: state.last for key, state in self._furthest_behind().items()}

    def reports(self, most: int) -> list[pb.StateReport]:
        """Return the reports to the coordinator, at most `most` of them. Costs are those of all objects of this client
        for a state and role.
        """
        costs: dict[tuple[str, str], list[StateCosts]] = {}
        for state in self._living():
            costs.setdefault((state.buffer.name, state.ROLE), []).append(state.costs)
        return [
            pb.StateReport(
                name=name,
                publishes=role == PUBLISHER,
                generation=state.last,
                source=state.source,
                times=sum(each.times for each in costs[name, role]),
                bytes=sum(each.bytes for each in costs[name, role]),
                copied_bytes=sum(each.copied_bytes or 0 for each in costs[name, role]),
                busy_ms=int(1000 * sum(each.seconds for each in costs[name, role])),
                age_ms=int(1000 * max(each.age for each in costs[name, role])),
                transports=sum(
                    REPORTED[each] for each in {way for each in costs[name, role] for way in each.transports}
                ),
            )
            for (name, role), state in list(self._furthest_behind().items())[:most]
            if (name, role) in costs
        ]

    def _living(self) -> list[PublishedState]:
        return [state for each in self._states if (state := each()) is not None]

    def _furthest_behind(self) -> dict[tuple[str, str], PublishedState]:
        found: dict[tuple[str, str], PublishedState] = {}
        for state in self._living():
            key = state.buffer.name, state.ROLE
            if key not in found or state.last < found[key].last:
                found[key] = state
        return found
