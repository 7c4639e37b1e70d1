"""Builds the exception for a failed call, with what `settle` needs to resolve it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from smb.call.sync_requests import LOST
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

_ONE_LOST = "the memory of one of the call's buffers was lost: read each to see which"


class TakenOut(Protocol):
    """The part that a call took out of a residual."""

    @property
    def count(self) -> int:
        """The number of elements from the first to the last."""

    def put_back(self, missing: list[range]) -> None:
        """Add these elements to the residual again: they were not applied and never will be."""


@dataclass(slots=True)
class Failed:
    """The account of a failed call: what settle() needs to know. The call's error carries it."""

    calls: object  # the dispatcher that made the call
    elements: range  # all elements of the call
    unknown: UnknownParts | None = None
    missing: tuple[range, ...] = ()  # elements that were not applied and will not be, in addition to `unknown`
    sending: TakenOut | None = None  # taken out of a residual; put back at most once
    settled: bool = False
    future: Future[Any] | None = None  # set for an async call that goes on; the call's outcome is the future's


def ranges_of(parts: list[tuple[int, int]], itemsize: int) -> list[range]:
    """Return (offset, length) in bytes as ranges of elements, sorted, with neighbours joined."""
    ranges: list[range] = []
    for at, length in sorted(parts):
        start, stop = at // itemsize, (at + length) // itemsize
        if ranges and ranges[-1].stop == start:
            ranges[-1] = range(ranges[-1].start, stop)
        else:
            ranges.append(range(start, stop))
    return ranges


def outcome_of(parts: Sequence[tuple[int, int, PartOutcome]], confirmed_bytes: int, nbytes: int) -> CallOutcome:
    """Return the outcome of a change of `nbytes` bytes. `parts` are the (offset, length, state) of what was not
    confirmed at once.
    """
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
    warden: str = "",
) -> Error:
    """Return the exception for a failed call.

    `asked` names the call, `where` the server, and `applied` says what was applied. `timeout` is in seconds. `reader`:
    the session may only read the segment. `why`: why the peer there is not trusted, or why the session has ended.
    `moved`: the segments have moved, and the coordinator knows of no lost memory. `warden`: the other buffer whose lock
    was passed as fence=.
    """
    if outcome.status is Status.TIMEOUT:
        return DeadlineError(f"{asked}: no answer from {where} within {timeout:g} s; {applied}")
    if outcome.status is Status.NOT_FOUND and moved:
        return UnavailableError(
            f"{asked}: the request went to a server that no longer has the segment; no memory is known to be lost, so "
            f"the segment has moved; {applied}"
        )
    if outcome.status is Status.NOT_FOUND:
        lost = _ONE_LOST if opcode in (Opcode.ACCUMULATE_FROM, Opcode.APPLY) else LOST
        return UnavailableError(f"{asked}: {where} has no such segment; {lost}; {applied}")
    if outcome.status is Status.NAMESPACE:
        return UnavailableError(
            f"{asked}: {where} now runs in another PID namespace, so its memory can no longer be mapped; "
            f"the next call looks for another path; {applied}"
        )
    if outcome.status in (Status.DISCONNECTED, Status.LINK_LOST, Status.STALE_EPOCH):
        return UnavailableError(
            f"{asked}: the connection to {where} was lost, and could not be made again within {timeout:g} s"
            f"{f' (the peer at that address was not accepted, or did not accept this client: {why})' if why else ''}; "
            f"{applied}"
        )
    if outcome.status is Status.LOCK_LOST:
        return LockLostError(
            f"{asked}: the lock passed as fence= was lost, and another client may hold it; nothing was applied"
        )
    if outcome.status is Status.EVICTED:
        return UnavailableError(f"{asked}: {where} no longer has this session's completion records; {applied}")
    if outcome.status is Status.SESSION_ENDED:
        return UnavailableError(f"{asked}: {why}; {applied}")
    if outcome.status in (Status.INVALID, Status.APART) and warden:
        return InvalidArgumentError(
            f"{asked}: {where} cannot check the lock of buffer {warden!r} for this buffer, since one of the two may "
            f"leave the server without the other; {applied}; pass this buffer's own lock"
        )
    if outcome.status is Status.VERSION and warden:
        return TransportError(
            f"{asked}: {where} runs a release that knows fence= with the buffer's own lock alone; run newer memory "
            f"servers, or pass that lock; {applied}"
        )
    if outcome.status is Status.INVALID:
        return InvalidArgumentError(f"{asked}: {where} refused the request as invalid; {applied}")
    if outcome.status is Status.DENIED:
        why = (
            "the session may only read the buffer"
            if reader
            else "its token has expired and the coordinator gave no other"
        )
        return PermissionDeniedError(f"{asked}: {where} does not allow this session to do that: {why}; {applied}")
    if outcome.status is Status.APART:
        return UnavailableError(f"{asked}: the source does not lie on {where}, where the target lies; {applied}")
    if outcome.status is Status.VERSION and opcode is Opcode.APPLY:
        return TransportError(
            f"{asked}: {where} runs a release that cannot take a gradient from a client; run newer memory servers; "
            f"{applied}"
        )
    if outcome.status is Status.VERSION and opcode in (Opcode.FETCH_ADD, Opcode.COMPARE_SWAP):
        return TransportError(
            f"{asked}: {where} runs a release that knows this call for int64 buffers alone; run newer memory servers; "
            f"{applied}"
        )
    if outcome.status is Status.VERSION:
        return TransportError(
            f"{asked}: {where} runs a release that does not know this wire or op; run newer memory servers, or pass "
            f"another, e.g. wire='int8'; {applied}"
        )
    if outcome.status is Status.OUT_OF_MEMORY:
        no_memory = f"{where} (is its file system full?) or this process ran out of memory"
        return OutOfMemoryError(f"{asked}: {no_memory}; {applied}")
    return TransportError(f"{asked}: {where}: {outcome.status.name.lower()}; {applied}")
