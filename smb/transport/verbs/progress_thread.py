"""The thread that drives RDMA: one in a client, one in a daemon, and none if verbs is not used.

After an event it polls for a short while, since a wake-up costs more than a poll. Then it sleeps until a descriptor is
ready, so an idle process uses no processor time. It releases the GIL after each round.

A card notices the loss of its peer only when it sends something. So a side that waits for an answer lets the card probe
the peer once a second; otherwise it would wait for ever for a server that died between request and answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

_SPIN_S = 50e-6
PROBE_S = 1.0

_log = logging.getLogger("smb")


class RelayTask(Protocol):
    """A relay that the progress thread drives. Only that thread calls these methods, until `closed`."""

    closed: bool

    def queue_fd(self) -> int:
        """Return the descriptor that becomes readable when a completion arrives after `arm`."""

    def socket_fd(self) -> int:
        """Return the descriptor of the engine's socket."""

    def hang_up(self) -> None:
        """Called after the engine has shut down its direction of the socket."""

    def wants_socket(self) -> bool:
        """Return True if the relay would read from the socket now."""

    def turn(self) -> bool:
        """Move what can be moved without waiting; return True if anything was moved."""

    def arm(self) -> None:
        """Make queue_fd readable at the next completion."""

    def take_event(self) -> None:
        """Called when queue_fd is readable."""

    def short(self) -> bool:
        """Return True if the last turn stopped because other relays use all of a shared resource."""

    def awaits(self) -> bool:
        """Return True if the peer owes an answer."""

    def probe(self) -> None:
        """Let the card check that the peer is still there; the queue pair fails if it is not."""

    def close(self) -> None:
        """Release everything; `closed` is true from here on."""


class ProgressThread:
    """The thread and the relays that it drives."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._relays: dict[int, RelayTask] = {}  # by both descriptors
        self._active: dict[RelayTask, float] = {}  # with the time of the last progress
        self._reading: dict[RelayTask, bool] = {}
        self._short: set[RelayTask] = set()  # asleep until another relay makes progress
        self._probe_at = 0.0
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._wake)
            self._epoll.close()
            raise

    def add(self, relay: RelayTask) -> None:
        """Drive this relay from now on; close it if the thread has been closed."""
        self._call(lambda: self._take(relay))

    def close_relay(self, relay: RelayTask, timeout: float = 10.0) -> None:
        """Close the relay and wait for that; its memory is not accessed after the return. Do not call this on the
        thread itself.
        """
        done = threading.Event()

        def close() -> None:
            self._drop(relay)
            done.set()

        self._call(close)
        done.wait(timeout)

    def close(self) -> None:
        """Close all relays and end the thread."""
        with self._lock:
            self._stopping = True
            if not self._ended:  # otherwise the descriptor is closed, and its number may belong to another file
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    def _call(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended:
                self._calls.append(call)
                os.eventfd_write(self._wake, 1)
                return
        call()  # the thread has ended, so no one else uses the relays

    def _take(self, relay: RelayTask) -> None:
        if self._ended:
            relay.close()
            return
        for fd in (relay.queue_fd(), relay.socket_fd()):
            self._relays[fd] = relay
        self._epoll.register(relay.queue_fd(), select.EPOLLIN)
        self._epoll.register(relay.socket_fd(), select.EPOLLIN | select.EPOLLRDHUP)
        self._reading[relay] = True
        self._active[relay] = time.monotonic()

    def _drop(self, relay: RelayTask) -> None:
        for fd in [fd for fd, owner in self._relays.items() if owner is relay]:
            del self._relays[fd]
            with contextlib.suppress(OSError):  # a relay that closed itself is not registered any more
                self._epoll.unregister(fd)
        self._active.pop(relay, None)
        self._reading.pop(relay, None)
        self._short.discard(relay)
        if not relay.closed:
            relay.close()
        self._wake_short()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
        finally:
            with self._lock:
                self._ended = True
                calls = self._calls
            for call in calls:
                call()
            for relay in set(self._relays.values()):
                self._drop(relay)
            self._epoll.close()
            os.close(self._wake)

    def _round(self) -> None:
        for fd, events in self._epoll.poll(0 if self._active else self._patience()):
            if fd == self._wake:
                os.eventfd_read(self._wake)
                with self._lock:
                    calls, self._calls = self._calls, []
                for call in calls:
                    call()
                continue
            relay = self._relays.get(fd)
            if relay is not None and relay.closed:  # closed by an earlier event of this round
                self._drop(relay)
            elif relay is not None:
                if fd == relay.queue_fd():
                    relay.take_event()
                elif events & (select.EPOLLRDHUP | select.EPOLLHUP):
                    relay.hang_up()
                self._active[relay] = time.monotonic()
        now = time.monotonic()
        if now >= self._probe_at:
            self._probe(now)
        for relay, since in list(self._active.items()):
            if self._turn(relay):
                self._active[relay] = now
            elif relay.closed:
                self._drop(relay)
            elif now - since > _SPIN_S:
                relay.arm()
                if not self._turn(relay):  # completions that came before it was armed
                    self._active.pop(relay, None)
                    if relay.short():
                        self._short.add(relay)
                if relay.closed:
                    self._drop(relay)
        if self._active:
            time.sleep(0)

    def _wake_short(self) -> None:
        """Wake the relays that lack a resource: another relay may have released it, which causes no event of their
        own.
        """
        now = time.monotonic()
        for relay in self._short:
            self._active[relay] = now
        self._short.clear()

    def _patience(self) -> float:
        """Return the longest time to sleep, in seconds; -1: until something happens."""
        if not any(relay.awaits() for relay in self._relays.values()):
            return -1
        return max(0.0, self._probe_at - time.monotonic())

    def _probe(self, now: float) -> None:
        self._probe_at = now + PROBE_S
        for relay in set(self._relays.values()):
            if not relay.closed and relay.awaits():
                relay.probe()
                self._active[relay] = now

    def _turn(self, relay: RelayTask) -> bool:
        if relay.closed:
            return False
        try:
            moved = relay.turn()
        except Exception:  # noqa: BLE001 - an error in one relay must not stop the others
            _log.exception("closing an RDMA connection after an internal error")
            relay.close()
            return False
        if moved:
            self._wake_short()
        if not relay.closed and relay.wants_socket() != self._reading[relay]:
            self._reading[relay] = not self._reading[relay]
            events = select.EPOLLRDHUP | (select.EPOLLIN if self._reading[relay] else 0)
            self._epoll.modify(relay.socket_fd(), events)
        return moved
