"""TLS on the data plane: a thread carries bytes between a TLS connection and the socketpair that the engine uses as if
it were the connection. The engine knows nothing of it.

It costs a thread for each connection and two copies more of each byte, beside the encryption; docs/threat-model.md says
how much. OpenSSL works with Python's lock released; what is between its calls, once in 16 KiB, holds it.
"""

from __future__ import annotations

import functools
import operator
import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

_PIECE_BYTES = 256 << 10
_BUFFER_BYTES = 4 << 20  # of the socketpair: a chunk and more, in each direction
_READ, _WRITE = select.POLLIN, select.POLLOUT
_GONE = (OSError, ValueError)  # of either side; a closed socket's number is -1


def start(secured: ssl.SSLSocket, name: str) -> int:
    """Carry bytes between a connection whose handshake is done and a new descriptor, which is returned and is the
    caller's; both end when either does.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    threading.Thread(target=_run, args=(secured, ours), name=name, daemon=True).start()
    return theirs.detach()


def _run(secured: ssl.SSLSocket, plain: socket.socket) -> None:
    secured.setblocking(False)
    plain.setblocking(False)
    with secured, plain, suppress(*_GONE):
        _carry(secured, plain)


def _carry(secured: ssl.SSLSocket, plain: socket.socket) -> None:
    """Until one side ends. What one direction waits for never holds up the other."""
    inbound, outbound = _Way(secured, plain), _Way(plain, secured)
    poll = select.poll()
    poll.register(secured, 0)
    poll.register(plain, 0)
    while True:
        moved = inbound.move()
        moved |= outbound.move()
        if inbound.ended or outbound.ended:
            return
        if not moved:
            for side in (secured, plain):
                wanted = (way.waits_how for way in (inbound, outbound) if way.waits_for is side)
                poll.modify(side, functools.reduce(operator.or_, wanted, 0))
            poll.poll()


class _Way:
    """One direction: a piece is received, then sent, as the sides let it."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self._source = source
        self._sink = sink
        self._memory = memoryview(bytearray(_PIECE_BYTES))
        self._left = self._memory[:0]
        self.ended = False
        self.waits_for, self.waits_how = source, _READ

    def move(self) -> bool:
        """Do what can be done now; whether anything could."""
        moved = False
        if not self._left:
            count = self._try(self._source, lambda: self._source.recv_into(self._memory), _READ)
            if count is None:
                return False
            if count == 0:
                self.ended = True
                return True
            self._left, moved = self._memory[:count], True
        sent = self._try(self._sink, lambda: self._sink.send(self._left), _WRITE)
        if sent is None:
            return moved
        self._left = self._left[sent:]
        return True

    def _try(self, side: socket.socket, act: Callable[[], int], how: int) -> int | None:
        try:
            return act()
        except ssl.SSLWantReadError:
            self.waits_for, self.waits_how = side, _READ
        except ssl.SSLWantWriteError:
            self.waits_for, self.waits_how = side, _WRITE
        except BlockingIOError:
            self.waits_for, self.waits_how = side, how
        return None
