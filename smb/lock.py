"""Locks: mutual exclusion between processes, one writer or many readers, with a lease and a fencing token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import NoReturn

from smb.call.lock_renewals import NO_HOLDING, Holding, Renewals
from smb.call.sync_requests import (
    SHARED_LOCK,
    USER_LOCK,
    Home,
    Obstacle,
    SegmentMovedError,
    outcome_unknown,
    raise_fences,
    wait_ms,
)
from smb.config import cancellation
from smb.config.pickling import refuse_pickle
from smb.engine import AskOpcode, PendingRequest
from smb.errors import (
    DeadlineError,
    Error,
    InvalidArgumentError,
    LockLostError,
    NotFoundError,
)

_TTL_MIN_S, _TTL_MAX_S = 0.01, 86400.0
_RENEWALS_PER_TTL = 3

_log = logging.getLogger("smb")


def check_times(asked: str, ttl: object, timeout: object) -> None:
    """Raise InvalidArgumentError for a ttl or a timeout that a lock cannot have."""
    if not isinstance(ttl, (int, float)) or not _TTL_MIN_S <= ttl <= _TTL_MAX_S:
        raise InvalidArgumentError(f"{asked}: ttl must be between {_TTL_MIN_S} and {_TTL_MAX_S:g} s, not {ttl!r}")
    if timeout is not None and (not isinstance(timeout, (int, float)) or not timeout >= 0):  # NaN fails, too
        raise InvalidArgumentError(f"{asked}: timeout must be at least 0, not {timeout!r}")


def _of_an_older_release(error: InvalidArgumentError) -> InvalidArgumentError:
    return InvalidArgumentError(f"{error}: it is of a release without shared locks; update it")


class Lock:
    """A lock that one client at a time holds, in the order in which clients asked. Made by Client.lock and Buffer.lock.

    Use it as a context manager: entering takes it, leaving releases it. While it is held, a thread renews it in the
    background. A holder that dies, or is stopped for longer than `ttl`, loses it, and the next waiter gets it; leaving
    the block then raises LockLostError. Changes of the buffer with fence=lock are refused after that, so that no change
    of a former holder mixes with those of the present one. Not reentrant. Use one object in one thread at a time.
    In a coroutine use `async with`: the event loop goes on meanwhile, and a cancelled task no longer waits.

    ```python
    with buffer.lock() as lock:
        buffer.write(array, fence=lock)
    ```

    With shared=True any number of clients hold the lock at once, and none holds it alone meanwhile. A client that asks
    for it while another one waits to have it alone waits behind that one. A client that shares it already does not: it
    may share it again at once, since otherwise it could wait for itself. Who waits to have the lock alone therefore
    waits until each client has released all its shared holdings. All holders at one time have the same token.
    A shared holding is lost once its lease has ended, whoever else shares the lock: from then on check(), release() and
    changes with fence=lock may raise LockLostError, and they all do once another client has had the lock alone. A
    client that holds a lock shared cannot have it alone as well: release the shared holding first.

    ```python
    with buffer.lock(shared=True) as lock:
        buffer.accumulate(array, fence=lock)
    ```
    """

    def __init__(
        self,
        homes: Sequence[Home],
        renewals: Renewals,
        ttl: float,
        timeout: float | None,
        owner: object = None,
        *,
        shared: bool = False,
    ) -> None:
        check_times(f"lock {homes[0].what}", ttl, timeout)
        if not isinstance(shared, bool):
            raise InvalidArgumentError(f"lock {homes[0].what}: shared must be True or False, not {shared!r}")
        self.shared = shared
        self._which = SHARED_LOCK if shared else USER_LOCK
        self._home, self._others = homes[0], homes[1:]
        self._renewals = renewals
        self._ttl_ms = round(ttl * 1000)
        self._timeout = timeout
        # The token, and a shared holding's name at the server. Always read or changed as one: later holdings of this
        # object may have the same token.
        self._holding = NO_HOLDING
        self._expires = 0.0
        self._lost = False
        self._released = False
        self.owner = owner

    def __repr__(self) -> str:
        held = "shared" if self.shared else "held"
        token = self._holding[0]
        state = "lost" if self._lost else f"{held}, token {token}" if token else "not held"
        return f"<smb.Lock {self._home.what}, {state}>"

    def __reduce__(self) -> NoReturn:
        refuse_pickle(repr(self), "take the lock of a client or buffer of its own")

    @property
    def token(self) -> int:
        """The fencing token of this holding: every later one is higher, and those who share the lock have the same one.
        Raises InvalidArgumentError unless the lock is taken.
        """
        return self._present()[0]

    def _present(self) -> Holding:
        holding = self._holding
        if holding == NO_HOLDING:
            when = "was released; take it again" if self._released else "is not held; enter it first"
            raise InvalidArgumentError(f"lock {self._home.what}: the lock {when} (with lock: ...)")
        return holding

    @property
    def held(self) -> bool:
        """True if this client holds the lock, as far as it knows without asking. False once it knows that its session
        has ended, since that gave up the lock. Does not block.
        """
        known = self._holding != NO_HOLDING and not self._lost
        return known and time.monotonic() < self._expires and self._home.in_session

    def acquire(self) -> Lock:
        """Take the lock. Blocks for at most the lock's `timeout` seconds. Raises TimeoutError, UnavailableError.

        If the server has not answered, the error's outcome is "unknown": the lock may stay taken until its ttl is over.
        The same holds for an exception that a signal handler raises in here, usually KeyboardInterrupt. This object
        does not hold the lock then.

        ```python
        lock = client.lock("checkpoint", timeout=60)
        lock.acquire()
        lock.held  # True
        ```
        """
        asked = f"lock {self._home.what}"
        if self._holding != NO_HOLDING:
            raise InvalidArgumentError(
                f"{asked}: this object already holds the lock; use another Lock object to wait for it"
            )
        if not self.shared and any(
            isinstance(lock, Lock) and lock.shared and lock._home.segment_id == self._home.segment_id
            for lock in self._renewals.held()
        ):
            raise InvalidArgumentError(
                f"{asked}: this client holds the lock shared and would wait for itself; release the shared holding "
                f"first, or use another client; nothing was done"
            )
        words = (self._ttl_ms, wait_ms(self._timeout), 0)
        try:
            reply = self._home.ask_lock(asked, self._which, words, self._timeout)
            if isinstance(reply, Obstacle):
                raise self._late_error(asked, reply.client)  # no variable here: it and the error would keep each other
            self._lost, self._holding = False, (reply.a, reply.b if self.shared else 0)
            self._expires = time.monotonic() + self._ttl_ms / 1000
            if self._others:  # do this before anything is changed under the lock: servers must refuse lower tokens
                raise_fences(self._others, USER_LOCK, reply.a, asked)
            self._renewals.add(self, self._ttl_ms / 1000 / _RENEWALS_PER_TTL)
        except BaseException as error:
            self._give_up(asked)
            outcome_unknown(error)
            if self.shared and isinstance(error, InvalidArgumentError):
                raise _of_an_older_release(error) from error
            raise
        return self

    def _give_up(self, asked: str) -> None:
        """Release the lock after a failed acquire, if it was taken. If that fails, the lock ends with its ttl."""
        holding, self._holding = self._holding, NO_HOLDING
        if holding == NO_HOLDING:
            return
        self._renewals.remove(self)
        with contextlib.suppress(Error):
            self._home.ask(f"release of {asked}", AskOpcode.UNLOCK, self._which, self._words(holding))

    def release(self) -> None:
        """Release the lock. Raises LockLostError if it was lost before, InvalidArgumentError if it was not taken.

        An exception that a signal handler raises in here has the outcome "unknown": the lock may stay taken until its
        ttl is over.

        ```python
        lock = client.lock("checkpoint").acquire()
        lock.release()
        lock.held  # False
        ```
        """
        holding = self._present()
        try:
            self._renewals.remove(self)
            self._holding, self._released = NO_HOLDING, True
            if self._lost:
                raise self._lost_error("release")
            asked = f"release of lock {self._home.what}"
            self._home.ask(asked, AskOpcode.UNLOCK, self._which, self._words(holding))
        except Error:
            raise
        except BaseException as error:
            outcome_unknown(error)
            raise

    def _words(self, holding: Holding, *words: int) -> tuple[int, ...]:
        """Return the words of a request about this holding."""
        token, name = holding
        return (token, *words, name) if self.shared else (token, *words)

    def check(self) -> None:
        """Ask the server whether this client still holds the lock, and renew it. Raises LockLostError,
        UnavailableError.

        ```python
        with client.lock("checkpoint") as lock:
            lock.check()  # None: the lock is still held
        ```
        """
        holding = self._present()
        if self._lost:
            raise self._lost_error("check")
        began = time.monotonic()
        pending = self.start_renewal(holding)
        try:
            self.finish_renewal(holding, pending, began)
        finally:
            pending.end()

    def __enter__(self) -> Lock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except Error:
            if error is None:
                raise
            _log.warning("lock %s was lost, or could not be released, while an error left its block", self._home.what)

    async def __aenter__(self) -> Lock:
        try:
            return await cancellation.to_thread(self.acquire)
        except asyncio.CancelledError:
            if self._holding != NO_HOLDING:  # cancelled at the moment at which the lock was granted
                await cancellation.finished(partial(self.__exit__, None, None, None))
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancellation.finished(partial(self.__exit__, kind, error, trace))

    def __index__(self) -> int:
        return operator.index(self.token)

    # ---- for Renewals and Buffer

    @property
    def holding(self) -> Holding:
        """The present holding, NO_HOLDING if there is none."""
        return self._holding

    def start_renewal(self, holding: Holding) -> PendingRequest:
        """Send a renewal of that holding."""
        return self._home.start(AskOpcode.RENEW, self._which, self._words(holding, self._ttl_ms))

    def finish_renewal(self, holding: Holding, pending: PendingRequest, began: float) -> None:
        """Receive the reply to that renewal. Raises LockLostError, UnavailableError."""
        asked = f"renewal of lock {self._home.what}"
        try:
            try:
                self._home.finish(asked, pending, 0.0)
            except (SegmentMovedError, NotFoundError) as error:
                if self._home.named and not isinstance(error, SegmentMovedError):
                    raise
                # ask() follows the segment
                self._home.ask(asked, AskOpcode.RENEW, self._which, self._words(holding, self._ttl_ms))
        except LockLostError:
            self._lose_holding(holding)
            raise
        except InvalidArgumentError as error:
            if not self.shared:
                raise
            raise _of_an_older_release(error) from error
        except NotFoundError as error:
            if not self._home.named:
                raise
            self._lose_holding(holding)  # only a lock that nobody holds is freed
            raise self._lost_error("renewal") from error
        if self._holding == holding:
            self._expires = began + self._ttl_ms / 1000

    def _lose_holding(self, holding: Holding) -> None:
        if self._holding == holding:
            self.lose(holding[0])

    def lapse(self) -> None:
        """Renew the holding no more; the server frees it when its lease has ended. Makes no call and takes no lock of
        threads, so a finalizer may call it.
        """
        self._holding, self._released = NO_HOLDING, True

    def lose(self, token: int) -> None:
        """Note that the coordinator or a server has reported the token as lost, and with it all who share it."""
        if self._holding[0] == token and not self._lost:
            self._lost = True
            self._renewals.lost += 1

    def _late_error(self, asked: str, holder: str) -> DeadlineError:
        held = f"{holder} holds it" if holder else "another client holds it, or waited for longer"
        late = DeadlineError(
            f"{asked}: not acquired within {self._timeout or 0:g} s: {held}; nothing was done; pass a longer timeout=, "
            f"or end that client: its lock is free ttl seconds later"
        )
        late.holder = holder or "another client"
        return late

    def _lost_error(self, call: str) -> LockLostError:
        return LockLostError(
            f"{call} of lock {self._home.what}: its lease of {self._ttl_ms / 1000:g} s ran out before it was renewed; "
            f"another client may hold it now; changes made under it without fence= may be mixed with those of others"
        )
