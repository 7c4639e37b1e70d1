"""The thread that moves what RDMA needs moved: one in a client, one in a daemon, and none where verbs is not used.

It looks again for a short while after something happened, as a wake-up costs more than a look, and then sleeps until a
descriptor is ready: no processor is used by whoever has nothing to do. It gives the GIL up after each round.

A card says that its peer is gone only where it has something to send. So who waits for a peer's answer and nothing else
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


class Pump(Protocol):
    """What is moved. All of it is called by the progress thread, until `closed`."""

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
        """Return whether its last turn ended for want of what other pumps have in use."""

    def awaits(self) -> bool:
        """Return whether the peer owes an answer."""

    def probe(self) -> None:
        """Have the card find out whether the peer is still there; the queue pair fails if not."""

    def close(self) -> None:
        """Let go of everything; `closed` from here on."""


class Progress:
    """The thread, and what it moves."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._pumps: dict[int, Pump] = {}  # by both descriptors
        self._active: dict[Pump, float] = {}  # and when it last moved something
        self._reading: dict[Pump, bool] = {}
        self._short: set[Pump] = set()  # asleep, until another one moves something
        self._probe_at = 0.0
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, pump: Pump) -> None:
        """Move this one too, from now on; once all are closed, close it."""
        self._call(lambda: self._take(pump))

    def close_pump(self, pump: Pump, timeout: float = 10.0) -> None:
        """Close it, and return when it is: its memory is not touched any more. Not by the thread itself."""
        done = threading.Event()

        def close() -> None:
            self._drop(pump)
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

    def _take(self, pump: Pump) -> None:
        if self._ended:
            pump.close()
            return
        for fd in (pump.queue_fd(), pump.socket_fd()):
            self._pumps[fd] = pump
        self._epoll.register(pump.queue_fd(), select.EPOLLIN)
        self._epoll.register(pump.socket_fd(), select.EPOLLIN | select.EPOLLRDHUP)
        self._reading[pump] = True
        self._active[pump] = time.monotonic()

    def _drop(self, pump: Pump) -> None:
        for fd in [fd for fd, owner in self._pumps.items() if owner is pump]:
            del self._pumps[fd]
            with contextlib.suppress(OSError):  # one that has closed itself is out of it already
                self._epoll.unregister(fd)
        self._active.pop(pump, None)
        self._reading.pop(pump, None)
        self._short.discard(pump)
        if not pump.closed:
            pump.close()
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
            for pump in set(self._pumps.values()):
                self._drop(pump)
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
            pump = self._pumps.get(fd)
            if pump is not None and pump.closed:  # by what came before in this round
                self._drop(pump)
            elif pump is not None:
                if fd == pump.queue_fd():
                    pump.take_event()
                elif events & (select.EPOLLRDHUP | select.EPOLLHUP):
                    pump.hang_up()
                self._active[pump] = time.monotonic()
        now = time.monotonic()
        if now >= self._probe_at:
            self._probe(now)
        for pump, since in list(self._active.items()):
            if self._turn(pump):
                self._active[pump] = now
            elif pump.closed:
                self._drop(pump)
            elif now - since > _SPIN_S:
                pump.arm()
                if not self._turn(pump):  # what came before it was armed
                    self._active.pop(pump, None)
                    if pump.short():
                        self._short.add(pump)
                if pump.closed:
                    self._drop(pump)
        if self._active:
            time.sleep(0)

    def _wake_short(self) -> None:
        """What one pump gives back may be what others wait for, and nothing of their own will tell them."""
        now = time.monotonic()
        for pump in self._short:
            self._active[pump] = now
        self._short.clear()

    def _patience(self) -> float:
        """Return how long to sleep at most, in seconds; -1: until something happens."""
        if not any(pump.awaits() for pump in self._pumps.values()):
            return -1
        return max(0.0, self._probe_at - time.monotonic())

    def _probe(self, now: float) -> None:
        self._probe_at = now + PROBE_S
        for pump in set(self._pumps.values()):
            if not pump.closed and pump.awaits():
                pump.probe()
                self._active[pump] = now

    def _turn(self, pump: Pump) -> bool:
        if pump.closed:
            return False
        try:
            moved = pump.turn()
        except Exception:  # noqa: BLE001 - a fault of ours must not stop the others
            _log.exception("an RDMA connection is closed after a fault")
            pump.close()
            return False
        if moved:
            self._wake_short()
        if not pump.closed and pump.wants_socket() != self._reading[pump]:
            self._reading[pump] = not self._reading[pump]
            events = select.EPOLLRDHUP | (select.EPOLLIN if self._reading[pump] else 0)
            self._epoll.modify(pump.socket_fd(), events)
        return moved
