"""Requests that wait at a segment's server, from the client's side: for locks, barriers and versions.

A request that waits is deferred at the server. Its thread here waits in the engine, in short turns, so that Ctrl-C and
close() get through. It survives a lost connection and a restart of the server: the link sends it again.
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

USER_LOCK, PUBLISHER_LOCK = 0, 1  # of a segment: csrc/memory/sync.h
FOREVER_MS = 2**64 - 1
LOST = "its memory was lost (its host was restarted, or its files removed): delete the buffer and create it again"
LOST_WAIT_MS = 1000  # for a server that may have lost what is asked for: others than the lost one answer by then
_TURN_MS = 200
_LOOK_S = 1.0  # without a connection the coordinator is asked so often whether the memory is lost
_WAITING_MAX = 4096  # csrc/server/waits.h: WAITS_PER_CONNECTION
_PINS_MAX = 1024  # csrc/memory/pins.h: SESSION_PINS_MAX


def wait_ms(timeout: float | None) -> int:
    """Return a timeout in seconds, None for none, as the server takes it."""
    return FOREVER_MS if timeout is None else max(0, round(timeout * 1000))


def _words_after(opcode: AskOpcode, words: tuple[int, ...], passed_s: float) -> tuple[int, ...]:
    """Return the words of a request that was made so long ago and is made again: what is left of its timeout, and how
    long it has waited (docs/protocol.md).
    """
    if passed_s * 1000 < 1 or opcode not in (AskOpcode.LOCK, AskOpcode.AWAIT_VERSION) or len(words) < 2:
        return words
    passed_ms, (first, timeout_ms, *rest) = int(passed_s * 1000), words
    if opcode is AskOpcode.LOCK and rest:
        rest[0] += passed_ms
    return (first, timeout_ms if timeout_ms == FOREVER_MS else max(0, timeout_ms - passed_ms), *rest)


def outcome_unknown(error: BaseException) -> None:
    """Give what a signal's handler raised the outcome "unknown", unless it has one."""
    if not hasattr(error, "outcome"):
        interrupt: Any = error
        interrupt.outcome = UNKNOWN


class SegmentMovedError(UnavailableError):
    """The server does not answer for the segment: it may have moved."""


class NotInTimeError(DeadlineError):
    """The server answered: what was waited for did not come within the time given. Nothing was done."""


class _Refused(NamedTuple):
    """The end of a request of which its server did nothing."""

    status: Status
    sent: bool = False


# A request that was not sent is one whose segment may be elsewhere.
_STATUSES: Mapping[type[Error], Status] = {
    PermissionDeniedError: Status.DENIED,
    SegmentMovedError: Status.STALE_EPOCH,
    NotFoundError: Status.NOT_FOUND,
}


class Home:
    """A segment and what it is called. `relocate` returns where it is now, e.g. after its server moved."""

    def __init__(
        self,
        client: Session,
        what: str,
        location: SegmentLocation,
        epoch: int,
        relocate: Callable[[], SegmentLocation],
        *,
        named: bool = False,
    ) -> None:
        """`named`: of a lock or barrier by itself. It is freed when nobody uses it, and `relocate` makes it anew."""
        self.what = what
        self.named = named
        self._client = client
        self._location = location
        self._epoch = epoch
        self._relocate = relocate
        self._link: Link | None = None

    def ask(
        self, asked: str, opcode: AskOpcode, argument: int = 0, words: tuple[int, ...] = (), *, wait: float | None = 0.0
    ) -> Reply:
        """Return the server's answer; blocks `wait` seconds (None: without end), and the client's timeout on top of
        that.

        Raises NotInTimeError, TimeoutError (of unknown outcome: no answer), LockLostError, BrokenBarrierError,
        NotFoundError (it was deleted), UnavailableError (the server was not reached for the client's timeout).
        """
        first, reopened = time.monotonic(), False
        backoff = pauses(Deadline(self._client.timeout))
        while True:
            began = time.monotonic()
            passed_s = began - first
            try:
                left = None if wait is None else max(0.0, wait - passed_s)
                return self._ask(asked, opcode, argument, _words_after(opcode, words, passed_s), left)
            except (PermissionDeniedError, SegmentMovedError, NotFoundError) as error:  # nothing was done
                if opcode is AskOpcode.AWAIT_BARRIER and isinstance(error, NotFoundError):  # with who had arrived
                    raise BrokenBarrierError(
                        f"{asked}: {self._where()} does not have it any more: it was idle, or its memory was lost; "
                        f"the next round starts clean"
                    ) from error
                if (
                    isinstance(error, SegmentMovedError) and time.monotonic() - began > _TURN_MS / 1000
                ):  # it has waited there
                    backoff = pauses(Deadline(self._client.timeout))
                action = self._recover(asked, error, backoff, reopened=reopened)
                if action is Action.FAIL:
                    raise
                reopened |= action is Action.REOPEN

    def _recover(self, asked: str, error: Error, backoff: Backoff, *, reopened: bool) -> Action:
        """Act on what decide() says of a request that its server did not take. Return what was done before the request
        is made again; FAIL: its error is to be raised. Raises what says more than that error.
        """
        refused, heard = _Refused(_STATUSES[type(error)]), None
        read_only = self._client.coordinator.tokens.read_only(self._location.id)
        while True:
            facts = Facts(
                in_time=not backoff.over() or (heard is not None and heard.moved),  # where it is now nobody was asked
                heard=heard,
                repeatable=not read_only,
                read_only=read_only,
                reopened=reopened,
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
        """Go where the segment is now. It stays where it was if it is gone, or the coordinator does not answer."""
        try:
            found = self._relocate()
        except (UnavailableError, DeadlineError):
            return Heard(answered=False)
        except Error:
            return Heard(answered=True)
        if found.id != self._location.id:  # a name made anew: who was waiting at the old one must not go on at this one
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
        """Whether the coordinator still has a segment that its server does not have: then its memory was lost."""
        try:
            return self._relocate().id == self._location.id
        except Error:
            return False

    def _lost(self, asked: str, *, sent: bool = False) -> UnavailableError:
        lost = "its memory was lost, with who held it; use another name" if self.named else LOST
        outcome, done = (UNKNOWN, "outcome unknown") if sent else (NOT_APPLIED, "nothing was done")
        return UnavailableError(f"{asked}: {self._where()} has no such segment; {lost}; {done}", outcome=outcome)

    def _locate_again(self, backoff: Backoff) -> None:
        """Find the name's new place, or make it. For a moment it is retired and has its old one still."""
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
        except BaseException as error:  # a signal's handler raised it; the server may have done what was asked
            outcome_unknown(error)
            raise

    def _open_again(self) -> bool:
        """Get a newer token, which the next request shows; False if the coordinator does not answer."""
        try:
            self._go_to(self._relocate())
        except (UnavailableError, DeadlineError):
            return False
        self._link = None
        return True

    def start(
        self, opcode: AskOpcode, argument: int = 0, words: tuple[int, ...] = (), *, asked: str = ""
    ) -> PendingRequest:
        """Send the request and return at once; `finish` it, then `end` it."""
        link = self._link
        if link is None or not link.alive():
            link = self._reach(asked or f"request {self.what}")
        return link.ask(opcode, self._location.id, self._epoch, argument, *words)

    def tell(self, opcode: AskOpcode, words: tuple[int, ...]) -> None:
        """Send a request whose answer does not matter, where there is a connection. Does not wait, raises nothing."""
        link = self._link
        if link is not None and link.connected():
            with contextlib.suppress(EngineError):
                link.ask(opcode, self._location.id, self._epoch, 0, *words).end()  # the engine sends before it gives up

    def finish(self, asked: str, pending: PendingRequest, wait: float | None) -> Reply:
        """Return the answer. Raises as `ask`."""
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
                waiting = "" if wait == 0.0 else "; it may be waiting there"
                raise UnavailableError(
                    f"{asked}: {self._where()} can't be reached for {patience:g} s{waiting}", outcome=UNKNOWN
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

        self._link = link = until_reached(self._attach, self, deadline, self._client.check_open, explain)
        return link

    def _attach(self, deadline: Deadline) -> Link:
        return self._client.reach_waits(self._location, deadline)

    # ---- what is to be reached, and how

    @property
    def movable(self) -> bool:
        """Whether its server has a role, which may change."""
        return self._location.epoch > 0

    def look(self, _deadline: Deadline) -> Heard:
        """Ask where the segment is now, and go there. Raises NotFoundError if it is gone."""
        try:
            return self._go_to(self._relocate())
        except (UnavailableError, DeadlineError):
            return Heard(answered=False, lost=self._location.lost)

    def _where(self) -> str:
        return f"memory server {self._location.server} at {self._location.address}"

    def _error(self, asked: str, reply: Reply) -> Error:
        match reply.status:
            case Status.TIMEOUT:
                return NotInTimeError(f"{asked}: not within the time given")
            case Status.LOCK_LOST:
                return LockLostError(f"{asked}: its lease ran out; another may hold the lock now; take it again")
            case Status.BROKEN:
                return BrokenBarrierError(
                    f"{asked}: one of the parties died, gave up or left; the next round starts clean"
                )
            case Status.NOT_FOUND:
                return NotFoundError(f"{asked}: {self._where()} does not have it (any more): it was deleted")
            case Status.STALE_EPOCH:
                return SegmentMovedError(f"{asked}: {self._where()} does not answer for it any more; nothing was done")
            case Status.INVALID:
                return InvalidArgumentError(f"{asked}: {self._where()} refused it as invalid")
            case Status.DENIED:
                return PermissionDeniedError(f"{asked}: {self._where()} does not let this session do it")
            case Status.SESSION_ENDED:
                return UnavailableError(f"{asked}: {SESSION_ENDED}")
            case Status.DISCONNECTED | Status.LINK_LOST:
                lost = f"{asked}: the connection to {self._where()} was lost"
                if not reply.sent:
                    return SegmentMovedError(f"{lost}; nothing was done", outcome=NOT_APPLIED)
                return UnavailableError(f"{lost}; outcome unknown", outcome=UNKNOWN)
            case Status.OUT_OF_MEMORY:
                return OutOfMemoryError(
                    f"{asked}: no room for it at {self._where()}: a connection may have {_WAITING_MAX} requests "
                    f"waiting there, a session {_PINS_MAX} pins; with fewer, memory ran out there or in this process"
                )
            case _:
                return TransportError(
                    f"{asked}: {self._where()}: {EngineError(reply.status, 0)}",
                    outcome=UNKNOWN if reply.sent else NOT_APPLIED,
                )


def raise_fences(homes: Sequence[Home], lock: int, token: int, asked: str) -> None:
    """Have these segments refuse lower tokens from now on; all at once. Raises what Home.finish raises."""
    pending_requests: list[tuple[Home, PendingRequest]] = []
    try:
        pending_requests.extend((home, home.start(AskOpcode.FENCE, lock, (token,))) for home in homes)
        for home, pending in pending_requests:
            try:
                home.finish(asked, pending, 0.0)
            except (PermissionDeniedError, SegmentMovedError, NotFoundError):
                home.ask(asked, AskOpcode.FENCE, lock, (token,))  # which gets a newer token, or goes where it is
    finally:
        for _, pending in pending_requests:
            pending.end()


SESSION_ENDED = (
    "this client's session has ended (its lease ran out while the process was stopped?); call smb.connect again"
)
