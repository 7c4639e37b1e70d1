"""What became of a call that an error, or a signal's handler, ended: its outcome, and the account that settle() takes.

A handler may raise at any place of Python's code, so what is known of a call is put where it is found here before the
next step is begun. An error keeps its dispatcher alive, so nothing here keeps an error.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Protocol

from smb.call.arguments import Arguments
from smb.call.outcomes import Failed, outcome_of
from smb.call.session import Session
from smb.engine import EngineError, Opcode, Outcome, Request, Status, take_interrupt
from smb.errors import APPLIED, NOT_APPLIED, UNKNOWN, CallOutcome, Error


class _Here(threading.local):
    """Of each thread: the change that its last call made, all of it."""

    finished: Request | None = None


here = _Here()


class CallingDispatcher(Protocol):
    """The dispatcher whose call it is."""

    @property
    def session(self) -> Session:
        """The client's."""

    @property
    def arguments(self) -> Arguments:
        """The buffer's."""


def outcome_of_change(calls: CallingDispatcher, failed: Outcome, nbytes: int, wait_ms: int) -> CallOutcome:
    """Return the outcome of a change of so many bytes that was sent: known now, or learnt within that time."""
    if failed.unknown is None:
        return UNKNOWN
    try:
        parts = calls.session.engine.resolve(failed.unknown, wait_ms)
    except EngineError:
        return UNKNOWN
    return outcome_of(parts, failed.bytes_applied, nbytes)


def account_interrupt(
    calls: CallingDispatcher, error: BaseException, request: Request, done: Outcome | int | None, *, touched: bool
) -> None:
    """Say in what a signal's handler raised what became of the call that it ended. `done`: how the engine's part of the
    call ended; None: it did not begin.
    """
    failed: Any = error
    if getattr(error, "smb_account", None) is not None:
        return
    take_interrupt()  # another handler's: it would end the next call
    ended = done if isinstance(done, Outcome) and done.status is not Status.OK else None
    if request.opcode is Opcode.READ:
        failed.outcome = NOT_APPLIED
    elif done is not None and ended is None:
        failed.outcome = APPLIED
    elif ended is None or not ended.sent:
        failed.outcome = UNKNOWN if touched else NOT_APPLIED
    else:
        failed.outcome = outcome_of_change(calls, ended, request.nbytes, 0)
    failed.smb_account = Failed(calls, calls.arguments.elements(request), None if ended is None else ended.unknown)


def account_outside(
    calls: CallingDispatcher, error: BaseException, before: Request | None, asked: range | None
) -> None:
    """Do the same for what was raised before a call began, or after it had returned. `before`: what this thread had
    finished before; `asked`: the elements of the call, None if they are not known.
    """
    failed: Any = error
    if getattr(error, "smb_account", None) is not None:
        return
    finished = here.finished
    if finished is not None and finished is not before:
        failed.outcome, failed.smb_account = APPLIED, Failed(calls, calls.arguments.elements(finished))
    elif asked is not None:
        failed.outcome, failed.smb_account = NOT_APPLIED, Failed(calls, asked)


def account_later(
    calls: CallingDispatcher, error: BaseException, future: Future[Any] | None, asked: range | None
) -> None:
    """Do the same for what was raised while an async call was made. `future`: None if the engine has no such call."""
    failed: Any = error
    if getattr(error, "smb_account", None) is not None or asked is None:
        return
    failed.outcome = NOT_APPLIED if future is None else UNKNOWN
    failed.smb_account = Failed(calls, asked, future=future)


def account_part(
    calls: CallingDispatcher,
    error: BaseException,
    request: Request,
    left: list[range],
    change: Request | None,
    what: str,
) -> None:
    """Say of a call that failed at left[0] what it means for all of it. All but `left` was applied. `change`: the last
    one that was begun, of left[0] unless a handler raised after it; `what`: of the call, for people.
    """
    failed: Any = error
    elements = calls.arguments.elements(request)
    touched = sum(map(len, left)) < len(elements)
    begun = bool(left) and change is not None and _is_of(calls.arguments.elements(change), left[0])
    if not left:  # a handler raised after the last one
        failed.outcome, failed.smb_account = APPLIED, Failed(calls, elements)
        return
    if begun and getattr(error, "smb_account", None) is None:  # outside of that call
        failed.outcome = APPLIED if here.finished is change else NOT_APPLIED
    found: CallOutcome = getattr(error, "outcome", UNKNOWN) if begun else NOT_APPLIED
    account = getattr(error, "smb_account", None) if begun else None
    unknown = account.unknown if account is not None else None
    inner = list(account.missing) if account is not None else []  # of a part that was cut again
    if inner:
        missing = [*inner, *left[1:]]
    elif found == UNKNOWN and unknown is None:
        missing = []  # it can't be known
    else:
        missing = left if found == NOT_APPLIED and unknown is None else left[1:]
    failed.smb_account = Failed(calls, elements, unknown, missing=tuple(missing))
    # The outcome of one piece is that of the call if all other pieces had the same, or there are no others.
    same = (not touched and (len(left) == 1 or found == NOT_APPLIED)) or (found == APPLIED and len(left) == 1)
    failed.outcome = found if same else UNKNOWN
    if isinstance(error, Error):
        rest = "" if failed.outcome == found else "; of the whole call buffer.settle(error) tells"
        error.args = (f"{calls.arguments.asked_by(request)}, {what}: {error}{rest}",)


def _is_of(elements: range, part: range) -> bool:
    """Whether a change is that of a part: sparse ones begin and end inside of it."""
    return part.start <= elements.start and elements.stop <= part.stop
