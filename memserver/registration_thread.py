"""Tells the coordinator that this server is here: registers, renews, registers again, leaves. It has one thread, which
makes the calls that memserver/registrant.py decides on.

The data plane never waits for any of this: while the coordinator is down, the server goes on serving and keeps trying.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import grpc

from memserver.registrant import Registrant
from memserver.replication import Replication
from smb.rpc.control_pb2_grpc import CoordinatorStub
from smb.security.credentials import COORDINATOR_NAME, Credentials, Current, channel

if TYPE_CHECKING:
    from memserver.relays import Relays

LEAVE_S = 1.0

_log = logging.getLogger("memserver")


class Registration:
    """Keeps this server registered at the coordinator. Call `close` at the end."""

    def __init__(
        self,
        registrant: Registrant,
        credentials: Credentials | None = None,
        replication: Replication | None = None,
        relays: Relays | None = None,
    ) -> None:
        """Start. News of `replication` and `relays` makes the next turn come at once."""
        self._registrant = registrant
        self._stop = threading.Event()
        self._hurry = threading.Event()  # set when the next renewal is due now
        for component in (replication, relays):
            if component is not None:
                component.on_news = self._hurry.set
        self._current = Current(credentials) if credentials is not None else None
        self._used, self._connected_to = credentials, ""
        self._connect(registrant.coordinator)
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)
        self._thread.start()

    @property
    def leases_lost(self) -> int:
        """How often the coordinator did not know this server any more."""
        return self._registrant.leases_lost

    def connected(self) -> bool:
        """Whether the coordinator answered the last call."""
        return self._registrant.connected

    def close(self) -> None:
        """Tell the coordinator that this server leaves, if it can be reached. Blocks for a few seconds at most."""
        self._registrant.stops = True
        self._stop.set()
        self._hurry.set()
        self._thread.join()
        request = self._registrant.leaving()
        if self.connected():
            try:
                self._stub.LeaveServer(request, timeout=LEAVE_S)
            except grpc.RpcError as error:
                _log.warning("could not tell the coordinator that this server leaves: %s", error.details())
        self._channel.close()

    def _connect(self, address: str) -> None:
        self._connected_to = address
        self._channel = channel(address, COORDINATOR_NAME, self._used)
        self._stub = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]

    def _connect_again(self) -> None:
        """Connect with the current certificate, to the coordinator that is asked now. One thread makes all calls, so
        none is in progress.
        """
        found = self._current.now() if self._current is not None else None
        if found is not self._used or self._registrant.coordinator != self._connected_to:
            self._used = found
            self._channel.close()
            self._connect(self._registrant.coordinator)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._hurry.wait(self._turn())
            self._hurry.clear()

    def _turn(self) -> float:
        turn = self._registrant.turn()
        try:
            call = next(turn)
            while True:
                try:
                    self._connect_again()
                    reply = getattr(self._stub, call.method)(call.request, **call.options)
                # Any other exception than an answer of the coordinator is a bug, which the turn logs.
                except Exception as error:  # noqa: BLE001
                    call = turn.throw(error)
                else:
                    call = turn.send(reply)
        except StopIteration as ended:
            return float(ended.value)
