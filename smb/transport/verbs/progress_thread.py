"""The thread that moves what RDMA needs moved: one in a client, one in a daemon, and none if verbs is not used.

It polls for a short while after something happened, as a wake-up costs more than a poll. Then it sleeps until a
descriptor is ready: an idle process uses no processor time. It gives the GIL up after each round.

A card says that its peer is gone only if it has something to send. So who waits for a peer's answer and nothing else
has the card ask, once a second: else a server that dies between a request and its answer would be waited for for ever.
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
    """The relays that are moved. All of it is called by the progress thread, until `closed`."""

    closed: bool

    def queue_fd(self) -> int:
        """Return the descriptor that is readable once a completion came after `arm`."""

    def socket_fd(self) -> int:
        """Return the descriptor of the engine's socket."""

    def hang_up(self) -> None:
        """Called when the engine has shut its direction of the socket."""

    def wants_socket(self) -> bool:
        """Return whether it would read from the socket now."""

    def turn(self) -> bool:
        """Move what can be moved, without waiting; return whether anything was."""

    def arm(self) -> None:
        """Have the next completion make queue_fd readable."""

    def take_event(self) -> None:
        """Called when queue_fd is readable."""

    def short(self) -> bool:
        """Return whether its last turn ended for want of what other relays have in use."""

    def awaits(self) -> bool:
        """Return whether the peer owes an answer."""

    def probe(self) -> None:
        """Have the card find out whether the peer is still there; the queue pair fails if not."""

    def close(self) -> None:
        """Let go of everything; `closed` from here on."""


class ProgressThread:
    """The thread, and what it moves."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._relays: dict[int, RelayTask] = {}  # by both descriptors
        self._active: dict[RelayTask, float] = {}  # and when it last moved something
        self._reading: dict[RelayTask, bool] = {}
        self._short: set[RelayTask] = set()  # asleep, until another one moves something
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
        """Move this one too, from now on; once all are closed, close it."""
        self._call(lambda: self._take(relay))

    def close_relay(self, relay: RelayTask, timeout: float = 10.0) -> None:
        """Close it, and return when it is: its memory is not touched any more. Not by the thread itself."""
        done = threading.Event()

        def close() -> None:
            self._drop(relay)
            done.set()

        self._call(close)
        done.wait(timeout)

    def close(self) -> None:
        """Close all of them, and end the thread."""
        with self._lock:
            self._stopping = True
            if not self._ended:  # else the descriptor is closed, and its number may be somebody else's
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    def _call(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended:
                self._calls.append(call)
                os.eventfd_write(self._wake, 1)
                return
        call()  # nobody else touches anything any more

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
            with contextlib.suppress(OSError):  # one that has closed itself is out of it already
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
            if relay is not None and relay.closed:  # by what came before in this round
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
                if not self._turn(relay):  # what came before it was armed
                    self._active.pop(relay, None)
                    if relay.short():
                        self._short.add(relay)
                if relay.closed:
                    self._drop(relay)
        if self._active:
            time.sleep(0)

    def _wake_short(self) -> None:
        """One relay may give back what others wait for, and no event of their own would wake them."""
        now = time.monotonic()
        for relay in self._short:
            self._active[relay] = now
        self._short.clear()

    def _patience(self) -> float:
        """Return how long to sleep at most, in seconds; -1: until something happens."""
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
        except Exception:  # noqa: BLE001 - a fault of ours must not stop the others
            _log.exception("an RDMA connection is closed after a fault")
            relay.close()
            return False
        if moved:
            self._wake_short()
        if not relay.closed and relay.wants_socket() != self._reading[relay]:
            self._reading[relay] = not self._reading[relay]
            events = select.EPOLLRDHUP | (select.EPOLLIN if self._reading[relay] else 0)
            self._epoll.modify(relay.socket_fd(), events)
        return moved
