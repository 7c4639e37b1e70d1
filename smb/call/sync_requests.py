"""The client's side of requests that wait at a segment's server: for locks, barriers and versions.

The server defers such a request. The client's thread waits in the engine, in short turns, so that Ctrl-C and close()
are noticed. The request survives a lost connection and a restart of the server: the link sends it again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from smb.call.reaching import pauses, until_reached
from smb.call.recovery import Action, Facts, Heard, decide
from smb.call.session import Session
from smb.config import cancellation
from smb.config.backoff import Backoff
from smb.engine import AskOpcode, EngineError, Link, PendingRequest, Reply, Status
from smb.errors import (
    NOT_APPLIED,
    UNKNOWN,
    BrokenBarrierError,
    DeadlineError,
    Error,
    InvalidArgumentError,
    LockLostError,
    NotFoundError,
    OutOfMemoryError,
    PermissionDeniedError,
    TransportError,
    UnavailableError,
)
from smb.transport.base import Deadline, SegmentLocation

USER_LOCK, PUBLISHER_LOCK = 0, 1  # locks of a segment: csrc/sync/sync.h
SHARED_LOCK = USER_LOCK | 1 << 8  # in LOCK, UNLOCK and RENEW: the user's lock, held by several at once
# For errors: what lets a publisher wait longer for slow readers.
WAIT_FOR_READERS = "Buffer.publish(readers=SECONDS), or smb.torch.Publisher.publish(timeout=SECONDS)"
FOREVER_MS = 2**64 - 1
LOST = "its memory was lost (its host was restarted, or its files removed): delete the buffer and create it again"
LOST_WAIT_MS = 1000  # wait for a server that may have lost the memory: servers that have not answer by then
_TURN_MS = 200
_NAME_S = 1.0  # for the name of a client that is in the way
_LOOK_S = 1.0  # while there is no connection, the coordinator is asked this often whether the memory is lost
_WAITING_MAX = 4096  # csrc/server/waits.h: WAITS_PER_CONNECTION
_REPEATABLE_WAITS = (AskOpcode.LOCK, AskOpcode.AWAIT_VERSION)  # a barrier's timeout breaks the round
_PINS_MAX = 1024  # csrc/sync/pins.h: SESSION_PINS_MAX


def wait_ms(timeout: float | None) -> int:
    """Return a timeout in seconds (None: no limit) in milliseconds, as the server takes it."""
    return FOREVER_MS if timeout is None else max(0, round(timeout * 1000))


def _words_after(opcode: AskOpcode, words: tuple[int, ...], passed_s: float) -> tuple[int, ...]:
    """Return the words of a request that is made again `passed_s` seconds after the first time.

    The timeout becomes the rest of the timeout, and the time waited so far is added (docs/protocol.md).
    """
    if passed_s * 1000 < 1 or opcode not in _REPEATABLE_WAITS or len(words) < 2:
        return words
    passed_ms, (first, timeout_ms, *rest) = int(passed_s * 1000), words
    if opcode is AskOpcode.LOCK and rest:
        rest[0] += passed_ms
    return (first, timeout_ms if timeout_ms == FOREVER_MS else max(0, timeout_ms - passed_ms), *rest)


def outcome_unknown(error: BaseException) -> None:
    """Give an exception from a signal handler the outcome "unknown", unless it has an outcome."""
    if not hasattr(error, "outcome"):
        interrupt: Any = error
        interrupt.outcome = UNKNOWN


class SegmentMovedError(UnavailableError):
    """The server does not answer for the segment, which may have moved."""


class Obstacle(NamedTuple):
    """Why a lock was not granted in time: `client` (host:pid) holds it, or pins that version of the buffer."""

    client: str  # "": unknown
    version: int  # 0: it holds the lock


class _NotInTimeError(DeadlineError):
    """The server answered that the wait ended after the given time. Nothing was done."""

    def __init__(self, message: str, reply: Reply) -> None:
        super().__init__(message)
        self.session, self.version = reply.a, reply.b  # only for a lock


class _Refused(NamedTuple):
    """The end of a request that its server did not execute."""

    status: Status
    sent: bool = False


# The segment of a request that could not be sent may be elsewhere.
_STATUSES: Mapping[type[Error], Status] = {
    PermissionDeniedError: Status.DENIED,
    SegmentMovedError: Status.STALE_EPOCH,
    NotFoundError: Status.NOT_FOUND,
}


class Home:
    """A segment and its name in messages. `relocate` returns its present location, e.g. after its server moved."""

    def __init__(
        self,
        client: Session,
        what: str,
        location: SegmentLocation,
        epoch: int,
        relocate: Callable[[], SegmentLocation],
        *,
        name: str,
        named: bool = False,
    ) -> None:
        """`name`: of the buffer, lock or barrier. `named`: a standalone lock or barrier, which is freed when it is
        unused; `relocate` makes it anew then.
        """
        self.what = what
        self.named = named
        self._name = name
        self._client = client
        self._location = location
        self._epoch = epoch
        self._relocate = relocate
        self._link: Link | None = None

    @property
    def segment_id(self) -> int:
        """The segment whose lock, barrier or versions these are."""
        return self._location.id

    @property
    def in_session(self) -> bool:
        """Whether the session goes on in which this was opened, as far as this process knows. Does not block."""
        try:
            self._client.check_open()
        except Error:
            return False
        return True

    def ask(
        self,
        asked: str,
        opcode: AskOpcode,
        argument: int = 0,
        words: tuple[int, ...] = (),
        *,
        wait: float | None = 0.0,
        late: str = "timed out; nothing was done",
    ) -> Reply:
        """Return the server's answer. Blocks up to `wait` seconds (None: without limit) plus the client's timeout.

        Raises TimeoutError (with the text `late` if the server answered that the wait is over; otherwise the outcome is
        unknown), LockLostError, BrokenBarrierError, NotFoundError (deleted), UnavailableError (the server could not be
        reached within the client's timeout).
        """
        try:
            return self._ask_again(asked, opcode, argument, words, wait)
        except _NotInTimeError:
            raise DeadlineError(f"{asked}: {late}") from None

    def ask_lock(self, asked: str, argument: int, words: tuple[int, ...], wait: float | None) -> Reply | Obstacle:
        """As ask, for a LOCK. If the wait is over, returns what was in the way, by asking the coordinator for a
        name.
        """
        try:
            return self._ask_again(asked, AskOpcode.LOCK, argument, words, wait)
        except _NotInTimeError as error:
            client, session, version = "", error.session, error.version
        if session:
            with contextlib.suppress(Error):  # the coordinator is away, or does not let this client ask
                client = self._client.coordinator.lock_holder(self._name, session, _NAME_S)
        return Obstacle(client, version if client else 0)

    def _ask_again(
        self, asked: str, opcode: AskOpcode, argument: int, words: tuple[int, ...], wait: float | None
    ) -> Reply:
        """As ask, but raises _NotInTimeError."""
        first, reopened = time.monotonic(), False
        backoff, since = None, first  # its pauses begin with the first failure, but their deadline is counted from here
        while True:
            began = time.monotonic()
            passed_s = began - first
            left = None if wait is None else max(0.0, wait - passed_s)
            now = _words_after(opcode, words, passed_s)
            turn_s = cancellation.turn_s(left) if opcode in _REPEATABLE_WAITS else None
            try:
                if turn_s is None:
                    return self._ask(asked, opcode, argument, now, left)
                return self._ask(asked, opcode, argument, (now[0], wait_ms(turn_s), *now[2:]), turn_s)
            except _NotInTimeError:
                if turn_s is None:
                    raise
                cancellation.check()
                backoff, since, reopened = None, time.monotonic(), False
            except (PermissionDeniedError, SegmentMovedError, NotFoundError) as error:  # the server did nothing
                # the parties that had arrived are forgotten, too
                if opcode is AskOpcode.AWAIT_BARRIER and isinstance(error, NotFoundError):
                    raise BrokenBarrierError(
                        f"{asked}: {self._where()} no longer has the barrier: it was idle, or its memory was lost; "
                        f"the next round starts clean"
                    ) from error
                if (
                    isinstance(error, SegmentMovedError) and time.monotonic() - began > _TURN_MS / 1000
                ):  # the request has waited there
                    backoff, since = None, time.monotonic()
                backoff = backoff or pauses(Deadline(self._client.timeout, since))
                action = self._recover(asked, error, backoff, reopened=reopened)
                if action is Action.FAIL:
                    if isinstance(error, SegmentMovedError):
                        raise UnavailableError(str(error), outcome=error.outcome) from None
                    raise
                reopened |= action is Action.REOPEN

    def _recover(self, asked: str, error: Error, backoff: Backoff, *, reopened: bool) -> Action:
        """Do what decide() says after a server did not accept a request.

        Returns the action after which the request has to be made again, or FAIL if its error has to be raised. Raises a
        more precise error if there is one.
        """
        refused, heard = _Refused(_STATUSES[type(error)]), None
        read_only = self._client.coordinator.tokens.read_only(self._location.id)
        while True:
            facts = Facts(
                in_time=not backoff.over() or (heard is not None and heard.moved),  # the new location was not asked yet
                heard=heard,
                repeatable=not read_only,
                read_only=read_only,
                reopened=reopened,
                movable=bool(self._location.epoch),
                known_lost=self._location.lost,
                named=self.named,
                asks_first=True,
            )
            action = decide(refused, facts)
            match action:
                case Action.REFRESH:
                    heard = self._follow()
                case Action.REOPEN:
                    if refused.status is not Status.DENIED:
                        self._locate_again(backoff)
                        return Action.RETRY
                    if reopened:
                        time.sleep(backoff.next_s())
                    if self._open_again():
                        return action
                    heard = Heard(answered=False)
                case Action.RETRY:
                    if heard is None or not heard.moved:
                        self._link = None
                        time.sleep(backoff.next_s())
                    return action
                case _:
                    if refused.status is Status.NOT_FOUND and self._is_there():
                        raise self._lost(asked) from error
                    if refused.status is Status.STALE_EPOCH and heard is not None and heard.lost:
                        raise self._lost(asked) from None
                    return Action.FAIL

    def _follow(self) -> Heard:
        """Ask for the segment's present location and use it. Keeps the old one if there is no answer or the segment is
        gone.
        """
        try:
            found = self._relocate()
        except (UnavailableError, DeadlineError):
            return Heard(answered=False)
        except Error:
            return Heard(answered=True)
        # the name was made anew: a request that waited at the old lock or barrier must not go on at the new one
        if found.id != self._location.id:
            self._location = replace(self._location, lost=False)
            return Heard(answered=True)
        return self._go_to(found)

    def _go_to(self, found: SegmentLocation) -> Heard:
        before, self._location = self._location, found
        moved = (found.id, found.server, found.epoch) != (before.id, before.server, before.epoch)
        if moved:
            self._epoch = found.epoch or self._epoch
            self._link = None
        return Heard(True, moved, found.lost)

    def _is_there(self) -> bool:
        """Return True if the coordinator still lists a segment that its server does not have: its memory was lost."""
        try:
            return self._relocate().id == self._location.id
        except Error:
            return False

    def _lost(self, asked: str, *, sent: bool = False) -> UnavailableError:
        lost = "its memory was lost, and with it the record of its holder; use another name" if self.named else LOST
        outcome, done = (UNKNOWN, "outcome unknown") if sent else (NOT_APPLIED, "nothing was done")
        return UnavailableError(f"{asked}: {self._where()} has no such segment; {lost}; {done}", outcome=outcome)

    def _locate_again(self, backoff: Backoff) -> None:
        """Find the name's new location, or make the name anew. A name that is being retired keeps its old location for
        a moment.
        """
        before = self._location.id
        self._go_to(self._relocate())
        self._link = None
        if self._location.id == before:
            time.sleep(backoff.next_s())

    def _ask(self, asked: str, opcode: AskOpcode, argument: int, words: tuple[int, ...], wait: float | None) -> Reply:
        try:
            pending = self.start(opcode, argument, words, asked=asked)
            try:
                return self.finish(asked, pending, wait)
            finally:
                pending.end()
        except Error:
            raise
        except BaseException as error:  # a signal handler raised it; the server may have executed the request
            outcome_unknown(error)
            raise

    def _open_again(self) -> bool:
        """Request a newer token, which the next request presents. False if the coordinator does not answer."""
        try:
            self._go_to(self._relocate())
        except (UnavailableError, DeadlineError):
            return False
        self._link = None
        return True

    def start(
        self, opcode: AskOpcode, argument: int = 0, words: tuple[int, ...] = (), *, asked: str = ""
    ) -> PendingRequest:
        """Send the request and return at once. Call `finish` next, then `end` the result."""
        link = self._link
        if link is None or not link.alive():
            link = self._reach(asked or f"request {self.what}")
        return link.ask(opcode, self._location.id, self._epoch, argument, *words)

    def tell(self, opcode: AskOpcode, words: tuple[int, ...]) -> None:
        """Send a request whose answer does not matter, if there is a connection. Does not wait, raises nothing."""
        link = self._link
        if link is not None and link.connected():
            with contextlib.suppress(EngineError):
                # the engine sends the request before end() drops it
                link.ask(opcode, self._location.id, self._epoch, 0, *words).end()

    def finish(self, asked: str, pending: PendingRequest, wait: float | None) -> Reply:
        """Return the answer. Raises as `ask` does."""
        reply = pending.wait(_TURN_MS)
        if reply is None:
            reply = self._wait(asked, pending, wait)
        if reply.status is not Status.OK:
            raise self._error(asked, reply)
        return reply

    def _wait(self, asked: str, pending: PendingRequest, wait: float | None) -> Reply:
        patience = self._client.timeout
        began = connected = looked = time.monotonic()
        while True:
            reply = pending.wait(_TURN_MS)
            if reply is not None:
                return reply
            self._client.check_open()
            # A turn ends by itself, but not without a connection. What is answered at once is not left half done.
            if wait is None or wait > cancellation.TURN_S or (wait > 0 and not pending.link.connected()):
                cancellation.check()
            now = time.monotonic()
            if pending.link.connected():
                connected = looked = now
            elif now - looked > _LOOK_S and not self.named:
                looked, lost = now, False
                with contextlib.suppress(UnavailableError, DeadlineError, NotFoundError):
                    lost = self._relocate().lost
                if lost:
                    raise self._lost(asked, sent=True)
            if now - connected > patience:
                waiting = "" if wait == 0.0 else "; the request may still be waiting there"
                raise UnavailableError(
                    f"{asked}: {self._where()} could not be reached for {patience:g} s{waiting}", outcome=UNKNOWN
                )
            if wait is not None and now - began > wait + patience:
                raise DeadlineError(
                    f"{asked}: no answer from {self._where()} within {wait + patience:g} s; outcome unknown",
                    outcome=UNKNOWN,
                )

    def _reach(self, asked: str) -> Link:
        deadline = Deadline(self._client.timeout)

        def explain(error: Error, lost: bool) -> None:
            if lost:
                raise self._lost(asked) from error
            raise type(error)(f"{asked}: {error}") from error

        self._link = link = until_reached(self._attach, self, deadline, self._check, explain)
        return link

    def _check(self) -> None:
        cancellation.check()
        self._client.check_open()

    def _attach(self, deadline: Deadline) -> Link:
        return self._client.reach_waits(self._location, deadline)

    # ---- the methods of reaching.Sought, and messages

    @property
    def movable(self) -> bool:
        """True if the segment's server has a role, which may change."""
        return self._location.epoch > 0

    def look(self, _deadline: Deadline) -> Heard:
        """Ask where the segment is now, and use that location. Raises NotFoundError if it was deleted."""
        try:
            return self._go_to(self._relocate())
        except (UnavailableError, DeadlineError):
            return Heard(answered=False, lost=self._location.lost)

    def _where(self) -> str:
        return f"memory server {self._location.server} at {self._location.address}"

    def _error(self, asked: str, reply: Reply) -> Error:
        match reply.status:
            case Status.TIMEOUT:
                return _NotInTimeError(f"{asked}: timed out; nothing was done", reply)
            case Status.LOCK_LOST:
                return LockLostError(
                    f"{asked}: the lock's lease ran out, and another client may hold it now; take it again"
                )
            case Status.BROKEN:
                return BrokenBarrierError(
                    f"{asked}: one of the parties died, timed out or left; the next round starts clean"
                )
            case Status.NOT_FOUND:
                return NotFoundError(
                    f"{asked}: {self._where()} does not have the segment: it was deleted; if it was made anew, open or "
                    f"follow it again"
                )
            case Status.STALE_EPOCH:
                return SegmentMovedError(
                    f"{asked}: {self._where()} no longer answers for the segment; nothing was done"
                )
            case Status.INVALID:
                return InvalidArgumentError(f"{asked}: {self._where()} refused the request as invalid")
            case Status.DENIED:
                return PermissionDeniedError(f"{asked}: {self._where()} does not allow this session to do that")
            case Status.SESSION_ENDED:
                return UnavailableError(f"{asked}: {self._client.why_ended()}")
            case Status.DISCONNECTED | Status.LINK_LOST:
                lost = f"{asked}: the connection to {self._where()} was lost"
                if not reply.sent:
                    return SegmentMovedError(f"{lost}; nothing was done", outcome=NOT_APPLIED)
                return UnavailableError(f"{lost}; outcome unknown", outcome=UNKNOWN)
            case Status.OUT_OF_MEMORY:
                return OutOfMemoryError(
                    f"{asked}: {self._where()} has no room for the request: a connection may have {_WAITING_MAX} "
                    f"requests waiting there, a session {_PINS_MAX} pins, and as many shared holdings of a lock; if "
                    "there are fewer, memory ran out there or in this process"
                )
            case _:
                return TransportError(
                    f"{asked}: {self._where()}: {EngineError(reply.status, 0)}",
                    outcome=UNKNOWN if reply.sent else NOT_APPLIED,
                )


def raise_fences(homes: Sequence[Home], lock: int, token: int, asked: str) -> None:
    """Make these segments refuse lower tokens from now on, all at once. Raises what Home.finish raises."""
    pending_requests: list[tuple[Home, PendingRequest]] = []
    try:
        pending_requests.extend((home, home.start(AskOpcode.FENCE, lock, (token,))) for home in homes)
        for home, pending in pending_requests:
            try:
                home.finish(asked, pending, 0.0)
            except (PermissionDeniedError, SegmentMovedError, NotFoundError):
                home.ask(asked, AskOpcode.FENCE, lock, (token,))  # ask() gets a newer token, or follows the segment
    finally:
        for _, pending in pending_requests:
            pending.end()


SESSION_ENDED = (
    "this client's session has ended (its lease ran out while the process was stopped?); call client.reconnect(), or "
    "smb.connect again"
)
