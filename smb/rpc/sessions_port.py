"""The leading coordinator's port for renewals of sessions and tokens, as one client uses it. Threads: any."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import grpc

from smb.config.parse import format_address, parse_address
from smb.config.request_ids import Metadata
from smb.rpc.peers import Peers
from smb.rpc.trailers import ANSWERED, BUSY, STANDBY, trailers_of
from smb.security.credentials import Credentials

# Before a port that did not answer is tried again: a firewall may close it for good, or it was slow for a while.
_AGAIN_S = 60.0
# A port that has answered may be closed later. It is left alone, too, if it was silent so often in a row and the port
# for all then answered.
_MISSES_MAX = 3

_log = logging.getLogger("smb")


class SessionsPort:
    """Call `close` at the end."""

    def __init__(self, credentials: Credentials | None) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()  # guards all below
        self._address = ""  # empty: no such port is known, or it is left alone for now
        self._peers: Peers | None = None
        self._answered = False  # at this address
        self._misses = 0  # calls since its last answer that got none in time
        self._again_at: dict[str, float] = {}  # by address: when one that did not answer is tried again
        self._closed = False

    def learn(self, coordinator: str, port: int) -> None:
        """Use the port that the coordinator at this address has named; 0: it has none."""
        address = format_address(parse_address(coordinator)[0], port) if port else ""
        with self._lock:
            if self._closed or time.monotonic() < self._again_at.get(address, 0.0):
                return
            if address != self._address:
                former = self._use(address)
            elif address and self._misses >= _MISSES_MAX:
                former = self._leave_alone(address)
            else:
                return
        if former is not None:
            former.close()

    def ask(self, method: str, request: Any, timeout: float, about: Metadata) -> Any:
        """Return the answer to a call; None if there is none from here, and the port for all has to be asked. Raises
        grpc.RpcError if the leader has refused the call. Blocks up to `timeout` seconds.
        """
        with self._lock:
            address = self._address
            if not address or self._closed:
                return None
            if self._peers is None:
                self._peers = Peers([address], self._credentials)
            peers = self._peers
        try:
            peers.take_new_certificate()
            answer = peers.ask(peers.now, method, request, timeout, 0.0, "", about)
        except ValueError:  # another thread has closed the channel
            return None
        except grpc.RpcError as error:
            trailers = trailers_of(error)
            if ANSWERED in trailers and STANDBY not in trailers and BUSY not in trailers:
                self._has_answered(address)
                raise
            if BUSY not in trailers:
                self._failed(address, error.code(), standby=STANDBY in trailers)
            return None
        self._has_answered(address)
        return answer

    def close(self) -> None:
        """Close the channel; calls in progress fail."""
        with self._lock:
            self._closed = True
            former = self._use("")
        if former is not None:
            former.close()

    def _use(self, address: str) -> Peers | None:
        """Use that address from now on, and return what is to be closed. The caller holds the lock."""
        former, self._peers = self._peers, None
        self._address, self._answered, self._misses = address, False, 0
        return former

    def _leave_alone(self, address: str) -> Peers | None:
        """Use no such port until an answer names one again, and this one not before a while. Returns what is to be
        closed. The caller holds the lock.
        """
        self._again_at = {address: time.monotonic() + _AGAIN_S}
        _log.info(
            "the coordinator's port for sessions, %s, cannot be reached; other clients' calls may hold up this "
            "session's renewals: open the port, or name another one (smb coordinator --sessions)",
            address,
        )
        return self._use("")

    def _has_answered(self, address: str) -> None:
        with self._lock:
            if address == self._address:  # another thread may use another one by now
                self._answered, self._misses = True, 0

    def _failed(self, address: str, code: grpc.StatusCode, *, standby: bool) -> None:
        """Leave the port alone until an answer names one again. One that has answered is kept while it is only slow."""
        with self._lock:
            if address != self._address:
                return
            if self._answered and code is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._misses += 1
                return
            former = self._use("") if self._answered or standby else self._leave_alone(address)
        if former is not None:
            former.close()
