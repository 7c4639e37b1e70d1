"""The renewal of the locks that a client holds, from one thread."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

from smb.config.conditions import condition
from smb.engine import PendingRequest
from smb.errors import Error

_log = logging.getLogger("smb")

Holding = tuple[int, int]  # token, and the name at the server of a holding that is shared; no two are equal
NO_HOLDING: Holding = (0, 0)


class Renewed(Protocol):
    """What the renewals need of a lock."""

    @property
    def holding(self) -> Holding:
        """The present holding. NO_HOLDING after the release."""

    @property
    def held(self) -> bool:
        """True while the lock is held, as far as this process knows."""

    def start_renewal(self, holding: Holding) -> PendingRequest: ...

    def finish_renewal(self, holding: Holding, pending: PendingRequest, began: float) -> None:
        """Process the answer to a renewal. Raises LockLostError, UnavailableError."""


class Renewals:
    """Renews a client's held locks from one thread. The first lock starts the thread."""

    def __init__(self) -> None:
        self._changed = condition()
        self._due: dict[int, tuple[float, float, weakref.ref[Renewed]]] = {}
        self._wakes_at = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._busy: set[int] = set()  # ids of locks whose renewal is in progress
        self.lost = 0  # number of locks lost since the start

    def held(self) -> list[Renewed]:
        """Return the locks that are held, as far as this process knows."""
        with self._changed:
            locks = [ref() for _, _, ref in self._due.values()]
        return [lock for lock in locks if lock is not None and lock.held]

    def add(self, lock: Renewed, every_s: float) -> None:
        """Renew the lock every `every_s` seconds from now on."""
        at = time.monotonic() + every_s
        with self._changed:
            self._due[id(lock)] = (at, every_s, weakref.ref(lock))
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="smb-locks", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    del self._due[id(lock)]
                    raise Error(f"cannot start a thread to renew the lock: {error}") from error
                # stored only after the start: if no thread can be started, the next lock tries again
                self._thread = thread
            elif at < self._wakes_at:
                self._changed.notify()

    def remove(self, lock: Renewed) -> None:
        with self._changed:
            self._due.pop(id(lock), None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                self._wakes_at = min((at for at, _, _ in self._due.values()), default=now + 3600.0)
                if self._wakes_at > now:
                    self._changed.wait(self._wakes_at - now)
                    continue
                due = [(key, every, ref()) for key, (at, every, ref) in self._due.items() if at <= now]
                for key, every, lock in due:
                    if lock is None:
                        del self._due[key]
                    else:
                        self._due[key] = (now + every, every, weakref.ref(lock))
            for key, _, lock in due:
                if lock is not None and key not in self._busy:
                    # One thread for each renewal: a server that does not answer must not cost the locks at other
                    # servers.
                    self._busy.add(key)
                    try:
                        threading.Thread(target=self._renew, args=(key, lock), name="smb-renewal", daemon=True).start()
                    # no thread can be started: this one renews the lock, and the others wait
                    except RuntimeError as error:
                        _log.warning("cannot start another thread (%s): locks are renewed one after the other", error)
                        self._renew(key, lock)
            del due, lock

    def _renew(self, key: int, lock: Renewed) -> None:
        began, holding = time.monotonic(), lock.holding
        try:
            if holding == NO_HOLDING:
                return
            pending = lock.start_renewal(holding)
            try:
                lock.finish_renewal(holding, pending, began)
            finally:
                pending.end()
        except Error as error:
            if lock.holding == holding:  # else it was released meanwhile, so it need not be renewed
                _log.warning("%s", error)
        finally:
            self._busy.discard(key)
