"""Builds the exception for a failed call, with what `settle` needs to resolve it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from smb.call.sync_requests import LOST, SESSION_ENDED
from smb.engine import Opcode, Outcome, PartOutcome, Status, UnknownParts
from smb.errors import (
    APPLIED,
    NOT_APPLIED,
    UNKNOWN,
    CallOutcome,
    DeadlineError,
    Error,
    InvalidArgumentError,
    LockLostError,
    OutOfMemoryError,
    PermissionDeniedError,
    TransportError,
    UnavailableError,
)

_ONE_LOST = "this buffer's memory or the other's was lost: read both to see which"


class TakenOut(Protocol):
    """The part of a residual that a call took out."""

    @property
    def count(self) -> int:
        """Elements from the first to the last."""

    def put_back(self, missing: list[range]) -> None:
        """These elements were not applied and never will be."""


@dataclass(slots=True)
class Failed:
    """A call that failed, of which its error tells settle."""

    calls: object  # the dispatcher that made it
    elements: range  # all of the call
    unknown: UnknownParts | None = None
    missing: tuple[range, ...] = ()  # beside `unknown`: not applied, nor ever will be
    sending: TakenOut | None = None  # what it took out of a residual; put back once
    settled: bool = False
    future: Future[Any] | None = None  # of an async call that goes on: how it ends is how the call ended


def ranges_of(parts: list[tuple[int, int]], itemsize: int) -> list[range]:
    """(offset, length) in bytes as ranges of elements, sorted, neighbours joined."""
    ranges: list[range] = []
    for at, length in sorted(parts):
        start, stop = at // itemsize, (at + length) // itemsize
        if ranges and ranges[-1].stop == start:
            ranges[-1] = range(ranges[-1].start, stop)
        else:
            ranges.append(range(start, stop))
    return ranges


def outcome_of(parts: Sequence[tuple[int, int, PartOutcome]], confirmed_bytes: int, nbytes: int) -> CallOutcome:
    """Return the outcome of a change of `nbytes`; `parts`, (offset, length, state), were not confirmed at once."""
    states = {state for _, _, state in parts}
    if states == {PartOutcome.NOT_APPLIED} and confirmed_bytes == 0:
        return NOT_APPLIED
    if states == {PartOutcome.APPLIED} and confirmed_bytes + sum(length for _, length, _ in parts) >= nbytes > 0:
        return APPLIED
    return UNKNOWN


def error_of(
    opcode: Opcode,
    outcome: Outcome,
    asked: str,
    where: str,
    applied: str,
    *,
    reader: bool,
    timeout: float,
    why: str = "",
    moved: bool = False,
) -> Error:
    """Return what to raise: what was `asked`, of `where`, why it failed (`timeout`: seconds; `reader`: the session may
    read it only; `why` the peer there is not trusted; `moved`: its segments move,
    and the coordinator knows of none whose memory is lost), and what of it was `applied`.
    """
    if outcome.status is Status.TIMEOUT:
        return DeadlineError(f"{asked}: no answer from {where} within {timeout:g} s; {applied}")
    if outcome.status is Status.NOT_FOUND and moved:
        return UnavailableError(
            f"{asked}: this was on its way to a server that has the segment no more; no memory is known to be lost, so "
            f"the segment has moved; {applied}"
        )
    if outcome.status is Status.NOT_FOUND:
        lost = _ONE_LOST if opcode in (Opcode.ACCUMULATE_FROM, Opcode.APPLY) else LOST
        return UnavailableError(f"{asked}: {where} has no such segment; {lost}; {applied}")
    if outcome.status is Status.NAMESPACE:
        return UnavailableError(
            f"{asked}: {where} has moved to another PID namespace, so its memory can't be mapped any more; "
            f"the next call looks for another path; {applied}"
        )
    if outcome.status in (Status.DISCONNECTED, Status.LINK_LOST, Status.STALE_EPOCH):
        return UnavailableError(
            f"{asked}: the connection to {where} was lost, and not made again within {timeout:g} s"
            f"{f' (who answers there is not it, or does not take us: {why})' if why else ''}; {applied}"
        )
    if outcome.status is Status.LOCK_LOST:
        return LockLostError(
            f"{asked}: the lock that it is fenced with was lost, and may be another's; nothing was applied"
        )
    if outcome.status is Status.EVICTED:
        return UnavailableError(f"{asked}: {where} has forgotten how far this session had come; {applied}")
    if outcome.status is Status.SESSION_ENDED:
        return UnavailableError(f"{asked}: {SESSION_ENDED}; {applied}")
    if outcome.status is Status.INVALID:
        return InvalidArgumentError(f"{asked}: {where} refused it as invalid; {applied}")
    if outcome.status is Status.DENIED:
        why = "it may only read it" if reader else "its right has expired and the coordinator gave no newer one"
        return PermissionDeniedError(f"{asked}: {where} does not let this session do it: {why}; {applied}")
    if outcome.status is Status.APART:
        return UnavailableError(f"{asked}: its source lies on other servers than {where}; {applied}")
    if outcome.status is Status.VERSION and opcode is Opcode.APPLY:
        return TransportError(f"{asked}: {where} is of a release that takes no gradient from a client; {applied}")
    if outcome.status is Status.VERSION:
        return TransportError(
            f"{asked}: {where} is of a release that does not know this wire; run newer memory servers, or pass "
            f"wire='int8'; {applied}"
        )
    if outcome.status is Status.OUT_OF_MEMORY:
        no_memory = f"{where} has no memory for it (its file system is full?), or this process has none"
        return OutOfMemoryError(f"{asked}: {no_memory}; {applied}")
    return TransportError(f"{asked}: {where}: {outcome.status.name.lower()}; {applied}")
