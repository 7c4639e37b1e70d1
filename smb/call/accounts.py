"""Records what became of a call that an error or a signal handler ended: its outcome, and the account for settle().

A signal handler may raise at any point of the Python code. So each step stores here what is known of the call before
the next step begins. An error keeps its dispatcher alive, so this module keeps no reference to an error.
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
    """The last change that each thread finished, as the caller asked for it."""

    finished: Request | None = None


here = _Here()


class CallingDispatcher(Protocol):
    """The dispatcher that makes the call."""

    @property
    def session(self) -> Session:
        """The client's session."""

    @property
    def arguments(self) -> Arguments:
        """The buffer's argument checks."""


def outcome_of_change(calls: CallingDispatcher, failed: Outcome, nbytes: int, wait_ms: int) -> CallOutcome:
    """Return the outcome of a change of `nbytes` bytes that was sent. Waits up to `wait_ms` to learn an unknown
    outcome.
    """
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
    """Store in an exception from a signal handler the outcome and the account of the call that it interrupted.

    `done` says how the engine's part of the call ended; it is None if that part did not begin.
    """
    failed: Any = error
    if getattr(error, "smb_account", None) is not None:
        return
    take_interrupt()  # a second interrupt, from another handler, would end the next call
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
    """Store the outcome in an exception that was raised before the call began or after it had returned.

    `before` is the change that this thread had finished last before the call. `asked` has the call's elements, None if
    they are not known.
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
    """Store the outcome in an exception that was raised while an async call was submitted.

    `future` is None if the engine does not have the call.
    """
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
    """Store in the error of a part, left[0], what it means for the whole call. All elements but `left` were applied.

    `change` is the last change that was begun: that of left[0], unless a handler raised after it. `what` describes the
    call in the message.
    """
    failed: Any = error
    elements = calls.arguments.elements(request)
    touched = sum(map(len, left)) < len(elements)
    begun = bool(left) and change is not None and _is_of(calls.arguments.elements(change), left[0])
    if not left:  # a handler raised after the last part
        failed.outcome, failed.smb_account = APPLIED, Failed(calls, elements)
        return
    if begun and getattr(error, "smb_account", None) is None:  # the handler raised outside of that change
        failed.outcome = APPLIED if here.finished is change else NOT_APPLIED
    found: CallOutcome = getattr(error, "outcome", UNKNOWN) if begun else NOT_APPLIED
    account = getattr(error, "smb_account", None) if begun else None
    unknown = account.unknown if account is not None else None
    # parts of left[0] that were missing already: it was itself done in parts
    inner = list(account.missing) if account is not None else []
    if inner:
        missing = [*inner, *left[1:]]
    elif found == UNKNOWN and unknown is None:
        missing = []  # unknown, and settle() cannot find out
    else:
        missing = left if found == NOT_APPLIED and unknown is None else left[1:]
    failed.smb_account = Failed(calls, elements, unknown, missing=tuple(missing))
    # The outcome of one piece is that of the call if all other pieces had the same, or there are no others.
    same = (not touched and (len(left) == 1 or found == NOT_APPLIED)) or (found == APPLIED and len(left) == 1)
    failed.outcome = found if same else UNKNOWN
    if isinstance(error, Error):
        rest = "" if failed.outcome == found else "; buffer.settle(error) finds out what the whole call applied"
        error.args = (f"{calls.arguments.asked_by(request)}, {what}: {error}{rest}",)


def _is_of(elements: range, part: range) -> bool:
    """True if the change belongs to the part. A sparse change begins and ends inside its part."""
    return part.start <= elements.start and elements.stop <= part.stop
