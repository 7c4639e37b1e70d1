"""Locks: mutual exclusion between processes, with a lease and a fencing token."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Sequence
from types import TracebackType

from smb.call.lock_renewals import Renewals
from smb.call.sync_requests import (
    USER_LOCK,
    Home,
    NotInTimeError,
    SegmentMovedError,
    outcome_unknown,
    raise_fences,
    wait_ms,
)
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


class Lock:
    """A lock that one client at a time holds, in the order in which they asked. Made by Client.lock and Buffer.lock.

    A context manager: entering takes it, leaving releases it. While it is held it is renewed in the background; a
    holder that dies, or is stopped for longer than `ttl`, loses it, and the next one gets it. Leaving then raises
    LockLostError. Changes of the buffer made with fence=lock are refused, so that no change of a former holder mixes
    with those of the present one. Not reentrant; one object belongs to one thread at a time.
    """

    def __init__(
        self, homes: Sequence[Home], renewals: Renewals, ttl: float, timeout: float | None, owner: object = None
    ) -> None:
        if not _TTL_MIN_S <= ttl <= _TTL_MAX_S:
            raise InvalidArgumentError(
                f"lock {homes[0].what}: ttl={ttl!r} is not between {_TTL_MIN_S} and {_TTL_MAX_S:g} s"
            )
        if timeout is not None and timeout < 0:
            raise InvalidArgumentError(f"lock {homes[0].what}: timeout={timeout!r} is less than 0")
        self._home, self._others = homes[0], homes[1:]
        self._renewals = renewals
        self._ttl_ms = round(ttl * 1000)
        self._timeout = timeout
        self._token = 0
        self._expires = 0.0
        self._lost = False
        self._released = False
        self.owner = owner

    def __repr__(self) -> str:
        state = "lost" if self._lost else f"held, token {self._token}" if self._token else "not held"
        return f"<smb.Lock {self._home.what}, {state}>"

    @property
    def token(self) -> int:
        """The fencing token of this holding: every later one is higher. Raises InvalidArgumentError unless taken."""
        if self._token == 0:
            when = "was released; take it again" if self._released else "is not taken; enter it first"
            raise InvalidArgumentError(f"lock {self._home.what}: it {when} (with lock: ...)")
        return self._token

    @property
    def held(self) -> bool:
        """Whether we hold it, as far as can be known here without asking."""
        return self._token != 0 and not self._lost and time.monotonic() < self._expires

    def acquire(self) -> Lock:
        """Take it. Blocks until it is ours, at most `timeout` seconds. Raises TimeoutError, UnavailableError.

        If the server has not answered, the outcome is "unknown": the lock may stay taken until its ttl is over. The
        same holds for what a signal's handler raises in here, KeyboardInterrupt mostly; this object does not hold the
        lock then.
        """
        asked = f"lock {self._home.what}"
        if self._token != 0:
            raise InvalidArgumentError(f"{asked}: it is taken already, by this object; make another one to wait for it")
        words = (self._ttl_ms, wait_ms(self._timeout), 0)
        try:
            reply = self._home.ask(asked, AskOpcode.LOCK, USER_LOCK, words, wait=self._timeout)
            self._token, self._lost = reply.a, False
            self._expires = time.monotonic() + self._ttl_ms / 1000
            if self._others:  # before anything is done under the lock: lower tokens are to be refused
                raise_fences(self._others, USER_LOCK, self._token, asked)
            self._renewals.add(self, self._ttl_ms / 1000 / _RENEWALS_PER_TTL)
        except NotInTimeError as error:
            raise DeadlineError(
                f"{asked}: not ours within {self._timeout:g} s: another holds it, or waited longer"
            ) from error
        except BaseException as error:
            self._give_up(asked)
            outcome_unknown(error)
            raise
        return self

    def _give_up(self, asked: str) -> None:
        """Release it after a failed acquire, if we got it. Without an answer its ttl ends it."""
        token, self._token = self._token, 0
        if token == 0:
            return
        self._renewals.remove(self)
        with contextlib.suppress(Error):
            self._home.ask(f"release of {asked}", AskOpcode.UNLOCK, USER_LOCK, (token,))

    def release(self) -> None:
        """Give it back. Raises LockLostError if it was lost before, InvalidArgumentError if it was not taken.

        What a signal's handler raises in here has the outcome "unknown": the lock may stay taken until its ttl is over.
        """
        token = self.token
        try:
            self._renewals.remove(self)
            self._token, self._released = 0, True
            if self._lost:
                raise self._lost_error("release")
            self._home.ask(f"release of lock {self._home.what}", AskOpcode.UNLOCK, USER_LOCK, (token,))
        except Error:
            raise
        except BaseException as error:
            outcome_unknown(error)
            raise

    def check(self) -> None:
        """Ask the server whether we still hold it, and renew it. Raises LockLostError, UnavailableError."""
        token = self.token
        if self._lost:
            raise self._lost_error("check")
        began = time.monotonic()
        pending = self.start_renewal()
        try:
            self.finish_renewal(pending, token, began)
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
            _log.warning("lock %s was lost, or could not be released, on the way out of an error", self._home.what)

    def __index__(self) -> int:
        return operator.index(self.token)

    # ---- for Renewals and Buffer

    def start_renewal(self) -> PendingRequest:
        """Send a renewal."""
        return self._home.start(AskOpcode.RENEW, USER_LOCK, (self._token, self._ttl_ms))

    def finish_renewal(self, pending: PendingRequest, token: int, began: float) -> None:
        """Take its answer. Raises LockLostError, UnavailableError."""
        asked = f"renewal of lock {self._home.what}"
        try:
            try:
                self._home.finish(asked, pending, 0.0)
            except (SegmentMovedError, NotFoundError) as error:
                if self._home.named and not isinstance(error, SegmentMovedError):
                    raise
                self._home.ask(asked, AskOpcode.RENEW, USER_LOCK, (token, self._ttl_ms))  # goes where it is
        except LockLostError:
            self.lose(token)
            raise
        except NotFoundError as error:
            if not self._home.named:
                raise
            self.lose(token)  # only what nobody holds is freed
            raise self._lost_error("renewal") from error
        if self._token == token:
            self._expires = began + self._ttl_ms / 1000

    def lose(self, token: int) -> None:
        """It is known to be lost."""
        if self._token == token and not self._lost:
            self._lost = True
            self._renewals.lost += 1

    def _lost_error(self, call: str) -> LockLostError:
        return LockLostError(
            f"{call} of lock {self._home.what}: its lease of {self._ttl_ms / 1000:g} s ran out before it was renewed; "
            f"another may hold it now; what you did under it without fence= may have met others' changes"
        )
