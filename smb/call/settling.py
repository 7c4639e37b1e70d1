"""Finds out what became of a failed call: Buffer.settle."""

from __future__ import annotations

from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from smb.call.dispatcher import Dispatcher
from smb.call.outcomes import Failed, TakenOut, ranges_of
from smb.call.session import Session
from smb.call.sync_requests import LOST, LOST_WAIT_MS
from smb.engine import EngineError, PartOutcome
from smb.errors import (
    APPLIED,
    NOT_APPLIED,
    UNKNOWN,
    DeadlineError,
    Error,
    InvalidArgumentError,
    UnavailableError,
)
from smb.transport.base import Deadline

_LOST_WITH_IT = f"the outcome cannot be found out: {LOST}"


def settle(error: BaseException, session: Session, calls: Dispatcher, deadline: Deadline) -> list[range]:
    """Return the elements to which a call of `calls` was not applied, and never will be; see Buffer.settle."""
    asked = calls.arguments.asked("settle")
    # an interrupt in the middle of a call, e.g. KeyboardInterrupt, has an account and an outcome, too
    failed: Any = error
    account = getattr(failed, "smb_account", None)
    if not isinstance(account, Failed) or account.calls is not calls:
        raise InvalidArgumentError(
            f"{asked}: {error!r} does not come from a call of this Buffer object that reached its elements; nothing to "
            "settle"
        )
    if account.future is not None:
        return _settle_future(failed, account, session, calls, deadline)
    if account.unknown is None and not account.missing:
        if failed.outcome == UNKNOWN:
            raise UnavailableError(f"{asked}: no account of that call was kept, so its outcome cannot be found out")
        return [] if account.settled or failed.outcome == APPLIED else [account.elements]
    try:
        unknown = account.unknown
        # A server that has lost the memory may never answer.
        wait_ms = min(deadline.left_ms(), LOST_WAIT_MS) if calls.info.lost else deadline.left_ms()
        parts = session.engine.resolve(unknown, wait_ms) if unknown is not None else []
    except EngineError as failure:
        if calls.paths.is_lost():
            raise UnavailableError(f"{asked}: {_LOST_WITH_IT}") from failure
        raise DeadlineError(f"{asked}: a server that knows the outcome did not answer in time; try again") from failure
    if any(state is PartOutcome.UNKNOWN for _, _, state in parts):
        if calls.paths.is_lost():
            raise UnavailableError(f"{asked}: {_LOST_WITH_IT}")
        raise UnavailableError(
            f"{asked}: a server no longer has this session's completion records, so the outcome cannot be found out"
        )
    missing = [(at, length) for at, length, state in parts if state is PartOutcome.NOT_APPLIED]
    itemsize = calls.arguments.itemsize
    missing += [(part.start * itemsize, len(part) * itemsize) for part in account.missing]
    ranges = ranges_of(missing, itemsize)
    if not ranges:
        failed.outcome = APPLIED
    elif sum(map(len, ranges)) == len(account.elements):
        failed.outcome = NOT_APPLIED
    sending, account.sending = account.sending, None
    if sending is None:
        return [] if account.settled else ranges
    account.settled = True
    sending.put_back(ranges)
    return []


def _settle_future(
    failed: Any, account: Failed, session: Session, calls: Dispatcher, deadline: Deadline
) -> list[range]:
    """Do the same for an async call that goes on although a signal handler ended it for its caller."""
    future = account.future
    assert future is not None
    try:
        ended = future.exception(deadline.left())
    except CancelledError:  # the client was closed before the call began
        failed.outcome = NOT_APPLIED
        return [account.elements]
    except FutureTimeoutError as late:
        asked = calls.arguments.asked("settle")
        raise DeadlineError(f"{asked}: the async call has not ended in time; try again") from late
    if ended is None:
        failed.outcome = APPLIED
        return []
    missing = settle(ended, session, calls, deadline)
    failed.outcome = getattr(ended, "outcome", UNKNOWN)
    return missing


def leave_to_settle(error: BaseException, session: Session, calls: Dispatcher, sending: TakenOut) -> bool:
    """Keep for settle() what a failed call took out of a residual. False if no part of it was or will be applied."""
    failed = getattr(error, "smb_account", None)
    if failed is None or getattr(error, "outcome", UNKNOWN) == NOT_APPLIED:
        return False
    try:
        missing = settle(error, session, calls, Deadline(0))
    except Error:
        failed.sending = sending  # treated as applied until settle() finds out
        return True
    if sum(map(len, missing)) == sending.count:
        return False
    failed.settled = True
    sending.put_back(missing)
    return True
