"""The TCP data port with TLS: takes connections, checks who is there, and hands the engine what smb.pump makes of them.

Threads: one accepts; each connection has one, first for its handshake and then to carry its bytes.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from smb import pump
from smb.credentials import Credentials
from smb.errors import Error, UnavailableError

HANDSHAKE_S = 5.0  # as the engine gives a stranger
HANDSHAKES_MAX = 256  # each is a thread; who comes when there are so many is closed, and tries again
_BACKLOG = 128

_log = logging.getLogger("memserver")


class TlsListener:
    """Listens. `close` it; connections that are there end with the engine."""

    def __init__(self, address: str, port: int, credentials: Credentials, adopt: Callable[[int], None]) -> None:
        """Listen on a numeric address; `adopt` takes over descriptors. Raises UnavailableError."""
        self._adopt = adopt
        self._context = credentials.server_context()
        self._handshakes = threading.BoundedSemaphore(HANDSHAKES_MAX)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise UnavailableError(f"cannot listen on {address} port {port}: {error.strerror or error}") from None
        self.port = int(self._socket.getsockname()[1])
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="tls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections."""
        self._closing = True
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                peer, _ = self._socket.accept()
            except OSError as error:
                if not self._closing:
                    _log.warning("a connection could not be taken: %s", error)
                continue
            if not self._handshakes.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(target=self._greet, args=(peer,), name="tls-handshake", daemon=True).start()

    def _greet(self, peer: socket.socket) -> None:
        try:
            peer.settimeout(HANDSHAKE_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.getpeername()  # see smb.transport.tls
            secured = self._context.wrap_socket(peer, server_side=True)
            self._adopt(pump.start(secured, "tls-pump"))
        except (OSError, Error) as error:
            _log.debug("a connection came to nothing: %s", error)
            peer.close()
        finally:
            self._handshakes.release()
