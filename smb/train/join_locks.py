"""The locks under which trainings are made, joined and deleted. Each is held for a moment, by one process after the
other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from smb.client import Client
from smb.errors import DeadlineError, Error
from smb.lock import Lock

_SETUP_S = 30.0
_SILENT_S = 10.0  # a longer wait is logged

_log = logging.getLogger("smb")


def setup_lock(client: Client, name: str, copies: int | None) -> Lock:
    """Return the lock under which the training or work units `name` are made, joined and deleted. Acquiring it takes at
    most 30 s, or the client's timeout if that is longer: workers that join at once do so one after the other.
    """
    return client.lock(f"{name}/setup", timeout=_longest_s(client), replicas=copies or 1)


@contextlib.contextmanager
def keeping(client: Client, name: str, copies: int | None, ttl: float = 10.0) -> Iterator[Lock]:
    """Hold the lock `name` of joining while the block runs. If it was lost, or can't be released, that is only logged.

    The block's work is done by then and counts: slots are kept by the members' own locks, and this lock ends with its
    lease. Waits for as long as setup_lock does, and says after 10 s for whom. Raises TimeoutError, which names the
    holder, and UnavailableError.
    """
    lock = _acquired(client, name, copies or 1, ttl)
    with giving_back(lock, "joining"):
        yield lock


@contextlib.contextmanager
def giving_back(lock: Lock, doing: str) -> Iterator[None]:
    """Release a lock that is held after the block. A failure is logged."""
    try:
        yield
    finally:
        try:
            lock.release()
        except Error as error:
            _log.warning("%s: could not release its lock, which ends with its lease: %s", doing, error)


def _acquired(client: Client, name: str, copies: int, ttl: float) -> Lock:
    """Take the lock. Who is told of the wait then waits behind those that have asked meanwhile."""
    try:
        return client.lock(name, ttl=ttl, timeout=_SILENT_S, replicas=copies).acquire()
    except DeadlineError as error:
        if not error.holder:  # the server did not answer
            raise
        left = _longest_s(client) - _SILENT_S
        _log.warning(
            "lock %r: for %.0f s this worker has waited for %s, which joins or makes the same training now; waiting "
            "for up to %.0f s more",
            name,
            _SILENT_S,
            error.holder,
            left,
        )
    return client.lock(name, ttl=ttl, timeout=left, replicas=copies).acquire()


def _longest_s(client: Client) -> float:
    return max(_SETUP_S, client.timeout)
