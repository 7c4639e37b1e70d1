"""What follows a try of a call to the coordinator that has failed: one table for all calls.

Pure code, as smb/call/recovery.py is for calls of buffers. The caller makes the tries, looks, sleeps and reads the
clock, and passes in what it learns.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from smb import errors

COMES_BACK_S = 2.0  # how long to wait for a coordinator that has never answered: its address may be wrong
STARTS_AGAIN_S = 10.0  # and for one that has. Not longer, whatever the timeout: callers may hold what others need
NO_PLACES_MAX = 5  # tries at a coordinator that has no place for the call, before the next one is asked


class Said(Enum):
    """How a try has failed."""

    BUSY = auto()  # the leader has too many calls in progress; this one was not begun
    STANDBY = auto()  # the coordinator does not lead
    REFUSED = auto()  # the leader's answer
    NOT_SENT = auto()  # the coordinator cannot be reached
    NO_TIME = auto()  # there was no answer in time
    NO_PLACE = auto()  # cancelled by a coordinator that stops, or by gRPC there, which has no place for more calls
    CUT_OFF = auto()  # the connection broke before the answer
    DEPOSED = auto()  # another coordinator leads by now, and the answer was not awaited any longer
    OTHER = auto()  # what no further try changes


class Then(Enum):
    """What the caller does next."""

    SAME = auto()  # pause, and ask the same coordinator again
    NEXT = auto()  # ask the next one, after a pause if all had their turn
    LOOK = auto()  # look whether the coordinator can be connected to, and call `looked`
    FAIL = auto()  # raise `error`


class FailedTry(NamedTuple):
    """A try that has failed. `failure`: the error for users; None if the call was not sent. `leader`: the term of the
    leader that a standby has named. `not_applied`: a standby has said that it did nothing.
    """

    said: Said
    address: str
    failure: errors.Error | None
    leader: str = ""
    not_applied: bool = False


class CoordinatorTries:
    """The tries of one call. All times are seconds of one clock."""

    def __init__(self, begun_s: float, timeout_s: float, *, several: bool, known: bool, repeatable: bool) -> None:
        """`several`: there are further addresses. `known`: a coordinator has answered this client before.
        `repeatable`: the call may be carried out twice without harm.
        """
        self.named = ""  # the term of the leader that a standby has named last
        self._end_s = begun_s + timeout_s
        self._timeout_s = timeout_s
        self._patience_s = timeout_s if several else STARTS_AGAIN_S if known else COMES_BACK_S
        self._repeatable = repeatable
        self._is_there = several or known
        self._failed_at_s: float | None = None  # the first failure
        self._last: FailedTry
        self._standby: FailedTry | None = None
        self._texts: dict[str, str] = {}  # by address: the last failure
        self._no_places = 0
        self._maybe_applied = False

    def after(self, failed: FailedTry, now_s: float) -> Then:
        """Return what follows this try, which has just ended."""
        standby = self._standby
        stood_by = standby is not None and standby.address == failed.address
        if failed.said in (Said.BUSY, Said.STANDBY):
            self._patience_s = self._timeout_s
        if failed.said is Said.STANDBY:
            self.named, self._standby = failed.leader, failed
        elif failed.said is Said.NOT_SENT and stood_by:
            self._standby = None
        elif failed.said is Said.NO_TIME and stood_by and _outcome(failed) == errors.NOT_APPLIED:
            # Asked again just before the timeout, it had no time to name the leader once more.
            assert standby is not None
            failed = failed._replace(failure=standby.failure)
        elif failed.said is Said.NO_PLACE:
            # It is there, also if it never answered before. If nothing is there any more, patience begins now.
            self._failed_at_s = None
            self._no_places += 1
        self._last = failed
        self._texts[failed.address] = "it cannot be reached" if failed.failure is None else str(failed.failure)
        self._failed_at_s = now_s if self._failed_at_s is None else self._failed_at_s
        self._maybe_applied |= _outcome(failed) == errors.UNKNOWN
        if failed.said is Said.NOT_SENT and self._failed_at_s + self._patience_s <= now_s < self._end_s:
            return Then.LOOK
        return self._then(now_s)

    def looked(self, *, connects: bool, now_s: float) -> Then:
        """Return what follows after a look. `now_s` is the time at which the try ended."""
        if connects:
            self._patience_s = self._timeout_s  # the address is right: connecting takes long, because very many connect
        return self._then(now_s)

    def _then(self, now_s: float) -> Then:
        assert self._failed_at_s is not None
        if not self._may_repeat() or now_s >= min(self._end_s, self._failed_at_s + self._patience_s):
            return Then.FAIL
        # One without a place may be the leader under a flood, so the others have their turn only after some tries.
        no_place = self._last.said is Said.NO_PLACE and self._no_places % NO_PLACES_MAX != 0
        return Then.SAME if no_place or self._last.said is Said.BUSY else Then.NEXT

    def _may_repeat(self) -> bool:
        match self._last.said:
            case Said.BUSY | Said.NOT_SENT:
                return True
            case Said.STANDBY:
                return self._last.not_applied or (self._is_there and self._repeatable)
            case Said.NO_PLACE:
                return self._repeatable
            case Said.CUT_OFF | Said.DEPOSED:
                return self._is_there and self._repeatable
            case _:
                return False

    def error(self, unreached: Callable[[], errors.Error]) -> errors.Error:
        """Return the error of the call after its last try. `unreached` returns that of one never sent."""
        answered = self._last.said in (Said.BUSY, Said.REFUSED)
        failure = self._last.failure or (self._standby.failure if self._standby is not None else None) or unreached()
        if self._standby is not None and not answered and len(self._texts) > 1:
            each = "; ".join(f"{address}: {text}" for address, text in self._texts.items())
            failure = type(failure)(
                f"no coordinator carried the call out within {self._timeout_s:g} s. What each said last: {each}",
                outcome=failure.outcome,
            )
        if self._maybe_applied and not answered and failure.outcome != errors.UNKNOWN:
            text = f"{failure}. An earlier attempt may have been carried out"
            failure = type(failure)(text, outcome=errors.UNKNOWN)
        return failure


def _outcome(failed: FailedTry) -> str | None:
    return None if failed.failure is None else failed.failure.outcome
