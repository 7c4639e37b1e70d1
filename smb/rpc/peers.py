"""The coordinators of a cluster at their addresses: one leads, the others stand by, and the leader may change.

Threads: any. Two threads that notice a change of the leader at once each look for the next leader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from smb.config.request_ids import Metadata
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from smb.rpc.uninterrupted_calls import aside
from smb.security.credentials import COORDINATOR_NAME, Credentials, Current, channel

# Metadata of a call that found no leader: for how many milliseconds a coordinator that stands by may keep the call in
# case it becomes the leader, and the term of the leader that it has named.
PATIENCE = "smb-patience"


def patience(seconds: float, term: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata; empty if no term was named."""
    return ((PATIENCE, f"{round(1000 * seconds)} {term}"),) if term else ()


_LOOK_S = 1.0  # a leader answers within milliseconds, so after this time look whether another one leads meanwhile
_LOOK_PART = 0.1  # of the time waited so far, since very many clients may wait for very long
_PROBE_S = 1.0


class LeaderMovedError(Exception):
    """Another coordinator leads, and the one that was asked does not answer any more."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A coordinator's index and address, and the channel and stub to reach it."""

    index: int
    address: str
    channel: grpc.Channel
    stub: Any


class Peers:
    """All coordinators. Call `close` at the end."""

    def __init__(self, addresses: Sequence[str], credentials: Credentials | None) -> None:
        self._addresses = addresses
        self._current = Current(credentials) if credentials is not None else None
        self._used = credentials
        self._lock = threading.Lock()  # guards the channels below
        self.closed = False
        self._made: list[list[Peer]] = []  # one list per certificate; the last list is current
        self._connect()
        self._at = 0

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def credentials(self) -> Credentials | None:
        """The credentials of the current connections."""
        return self._used

    def close(self) -> None:
        """Close all channels; calls in progress fail."""
        with self._lock:
            self.closed = True
            for peers in self._made:
                _close(peers)

    def _connect(self) -> None:
        peers = []
        for index, address in enumerate(self._addresses):
            each = channel(address, COORDINATOR_NAME, self._used)
            peers.append(Peer(index, address, each, CoordinatorStub(each)))  # type: ignore[no-untyped-call]
        self._made.append(peers)

    def take_new_certificate(self) -> None:
        """Reconnect if the certificate's files have changed. Calls in progress end on the channel on which they began,
        unless the certificate is replaced twice meanwhile.
        """
        found = self._current.now() if self._current is not None else None
        with self._lock:
            if found is self._used or self.closed:
                return
            self._used = found
            self._connect()
            if len(self._made) > 2:
                _close(self._made.pop(0))

    @property
    def now(self) -> Peer:
        return self._made[-1][self._at]

    def go_on(self, peer: Peer) -> bool:
        """Ask the coordinator after `peer` from now on. Returns whether all of them had their turn."""
        if self._at == peer.index:
            self._at = (self._at + 1) % len(self)
        return self._at == 0

    def ask(
        self, peer: Peer, method: str, request: Any, timeout: float, patience_s: float, term: str, about: Metadata = ()
    ) -> Any:
        """Return the answer to a call, which has the metadata `about`. A coordinator that stands by may keep the call
        for `patience_s`, if the leader of that `term` is the last one that it knows. Raises grpc.RpcError, and
        LeaderMovedError if another coordinator leads before the answer.
        """
        return aside(lambda: self._ask(peer, method, request, timeout, patience_s, term, about))

    def _ask(
        self, peer: Peer, method: str, request: Any, timeout: float, patience_s: float, term: str, about: Metadata
    ) -> Any:
        call: Callable[..., Any] = getattr(peer.stub, method)
        metadata = (*patience(patience_s, term), *about)
        if len(self) == 1:
            return call(request, timeout=timeout, metadata=metadata)
        answer = call.future(request, timeout=timeout, metadata=metadata)  # type: ignore[attr-defined]
        begun = time.monotonic()
        other = failure = None
        try:
            while True:
                look_s = max(_LOOK_S, patience_s / 2 if term else 0.0, _LOOK_PART * (time.monotonic() - begun))
                if other is not None:
                    # The call may have been answered by now. A coordinator that keeps the call hears of the new leader
                    # a little later than we do, and then refuses it. Without that refusal the outcome is unknown.
                    look_s = _LOOK_S if term else 0.0
                try:
                    failure = answer.exception(timeout=look_s)
                except grpc.FutureCancelledError:
                    raise ValueError("the channel was closed") from None  # as a call on a closed channel raises
                except grpc.FutureTimeoutError:
                    if other is not None:
                        raise LeaderMovedError from None
                else:
                    if failure is not None:
                        raise failure
                    return answer.result()
                other = self._leader(but=peer, timeout=min(_PROBE_S, max(0.01, begun + timeout - time.monotonic())))
                if other is not None:
                    self._at = other.index
        finally:
            answer.cancel()
            # The exception is the answer object itself: it and this frame would keep each other and callers' variables.
            del answer, failure

    def look(self, timeout: float) -> list[tuple[str, pb.LeaderReply | None]]:
        """Return what the coordinator at each address says about the leader; None: it does not answer."""
        return aside(lambda: [(peer.address, reply) for peer, reply in self._probe(self._made[-1], timeout)])

    def _leader(self, but: Peer, timeout: float) -> Peer | None:
        others = [peer for peer in self._made[-1] if peer.index != but.index]
        return next((peer for peer, reply in self._probe(others, timeout) if reply and reply.leads), None)

    def _probe(self, peers: Sequence[Peer], timeout: float) -> list[tuple[Peer, pb.LeaderReply | None]]:
        asked = [(peer, peer.stub.Leader.future(pb.LeaderRequest(), timeout=timeout)) for peer in peers]
        found: list[tuple[Peer, pb.LeaderReply | None]] = []
        for peer, answer in asked:
            try:
                failure = answer.exception()  # not raised, for the reason in `_ask`
            except grpc.FutureCancelledError:
                found.append((peer, None))
                continue
            if failure is None:
                found.append((peer, answer.result()))
            else:  # a coordinator of a release without standby leads if it answers
                old = failure.code() is grpc.StatusCode.UNIMPLEMENTED
                found.append((peer, pb.LeaderReply(leads=True, address=peer.address) if old else None))
        return found


def _close(peers: Sequence[Peer]) -> None:
    def close() -> None:
        for peer in peers:
            peer.channel.close()

    aside(close)
