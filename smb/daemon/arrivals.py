"""Connections to the pages of a daemon until their requests are complete. No thread waits for a slow or silent peer:
one thread looks at all of them, and passes on each connection whose request has arrived.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

REQUEST_BYTES_MAX = 16 << 10  # request line and headers
REQUEST_S_MAX = 10.0  # until they have arrived
ARRIVING_MAX = 256  # connections at once; then the oldest one of the address that has the most is closed


@dataclass(frozen=True, slots=True)
class Arriving:
    """A connection whose request is not complete yet."""

    connection: socket.socket
    peer: tuple[str, int]
    until: float  # monotonic


class Arrivals:
    """Used by one thread. `poll` is the poll of that thread, which calls `look` if one of these can be read."""

    def __init__(self, poll: select.epoll, arrived: Callable[[socket.socket, tuple[str, int], bytes], None]) -> None:
        """`arrived` takes over a connection, in blocking mode, its peer, and what the request begins with. The request
        itself is still to be read.
        """
        self._poll = poll
        self._arrived = arrived
        self._by_fd: dict[int, Arriving] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._by_fd)

    def add(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        """Take over a connection."""
        if len(self._by_fd) >= ARRIVING_MAX:
            self._end(self._to_close())
        connection.setblocking(False)
        self._by_fd[connection.fileno()] = Arriving(connection, peer, time.monotonic() + REQUEST_S_MAX)
        # Edge-triggered: a part of a request is left in the socket, which would be reported again and again.
        self._poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def look(self, fd: int, events: int) -> None:
        """Look at a connection that the poll has reported."""
        arriving = self._by_fd.get(fd)
        if arriving is None:  # closed since the poll, to make room for another one
            return
        try:
            begins = arriving.connection.recv(REQUEST_BYTES_MAX, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            begins = b""
        if b"\r\n\r\n" in begins or b"\n\n" in begins:
            self._take_out(fd)
            arriving.connection.setblocking(True)
            self._arrived(arriving.connection, arriving.peer, begins)
        elif not begins or len(begins) == REQUEST_BYTES_MAX or events & (select.EPOLLRDHUP | select.EPOLLHUP):
            self._end(fd)

    def end_late(self) -> float | None:
        """Close the connections whose time is over. Returns the seconds until the next one's is; None: there are
        none.
        """
        now = time.monotonic()
        while self._by_fd:
            fd, oldest = next(iter(self._by_fd.items()))
            if oldest.until > now:
                return oldest.until - now
            self._end(fd)
        return None

    def close(self) -> None:
        """Close all of them."""
        for fd in list(self._by_fd):
            self._end(fd)

    def _to_close(self) -> int:
        most = Counter(each.peer[0] for each in self._by_fd.values()).most_common(1)[0][0]
        return next(fd for fd, each in self._by_fd.items() if each.peer[0] == most)

    def _take_out(self, fd: int) -> Arriving:
        self._poll.unregister(fd)
        return self._by_fd.pop(fd)

    def _end(self, fd: int) -> None:
        connection = self._take_out(fd).connection
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
