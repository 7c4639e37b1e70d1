"""smb.call.cluster_session: the session's renewal, without a cluster."""

from __future__ import annotations

import threading
import weakref
from typing import cast

from smb.call.cluster_session import ClusterSession, _renew
from smb.call.published_states import PublishedStates
from smb.errors import UnavailableError
from smb.rpc import control_pb2 as pb
from smb.rpc.client_tokens import ClientTokens
from smb.rpc.coordinator_client import Coordinator

LEASE_S = 0.003


class Member:
    """Stands for a client: something that can be forgotten."""

    def __init__(self) -> None:
        self.reports: dict[int, object] = {}
        self.published = PublishedStates()


class FakeCoordinator:
    """Fails the first renewals; does `last` at the one after."""

    def __init__(self, failures: int, last: threading.Event | None = None) -> None:
        self.renewals = 0
        self.closed, self.ended = False, 0
        self.tokens = ClientTokens(lambda kind, name: pb.Buffer())
        self._failures = failures
        self._last = last

    def renew_session(
        self, session_id: int, client_name: str, timeout: float, reports: object = (), states: object = ()
    ) -> float:
        assert (session_id, client_name) == (7, "me")
        assert timeout < LEASE_S
        self.renewals += 1
        if self.renewals <= self._failures:
            raise UnavailableError("away")
        if self._last is not None:
            self._last.set()
        return LEASE_S

    def close_session(self, session_id: int, timeout: float, reports: object = ()) -> None:
        self.ended = session_id

    def close(self) -> None:
        self.closed = True


def renew(member: weakref.ref[Member], stop: threading.Event, coordinator: FakeCoordinator) -> None:
    _renew(cast("weakref.ref[ClusterSession]", member), stop, cast(Coordinator, coordinator), 7, "me", LEASE_S)


def test_renewal_goes_on_while_the_coordinator_is_away() -> None:
    """Failed renewals are repeated until one succeeds; then the client's close() ends it, which closes the channel."""
    member, stop = Member(), threading.Event()
    coordinator = FakeCoordinator(failures=5, last=stop)
    renew(weakref.ref(member), stop, coordinator)
    assert coordinator.renewals == 6
    assert not coordinator.closed


def test_renewal_ends_with_a_forgotten_client() -> None:
    """Where nobody holds the client any more, nothing is renewed and the channel is closed."""
    coordinator = FakeCoordinator(failures=0)
    member = Member()
    reference = weakref.ref(member)
    del member
    renew(reference, threading.Event(), coordinator)
    assert coordinator.renewals == 0
    assert coordinator.closed
