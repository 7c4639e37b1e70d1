"""Tries to reach a segment until it is reached, is known to be lost, or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from smb.call.recovery import Action, Facts, Heard, Refusal, decide_path
from smb.config.backoff import Backoff
from smb.errors import Error, PermissionDeniedError, TransportError, UnavailableError
from smb.transport.base import Deadline

_RETRY_FIRST_S, _RETRY_MAX_S = 0.02, 0.5

Reached = TypeVar("Reached")


class Sought(Protocol):
    """The segments to reach: those of a buffer, or a single one."""

    @property
    def movable(self) -> bool:
        """True if the segments' servers have roles, which may change."""

    def look(self, deadline: Deadline) -> Heard:
        """Ask the coordinator where the segments are now; `moved`: elsewhere than before. Raises NotFoundError if they
        were deleted.
        """


def pauses(deadline: Deadline) -> Backoff:
    """Return the pauses between the attempts of a call."""
    return Backoff(_RETRY_FIRST_S, _RETRY_MAX_S, deadline.left)


def until_reached(
    attach: Callable[[Deadline], Reached],
    sought: Sought,
    deadline: Deadline,
    check_open: Callable[[], None],
    explain: Callable[[Error, bool], None],
    *,
    ask_first: bool = False,
) -> Reached:
    """Return the result of `attach`. Waits for servers that come back, and asks the coordinator where they are.

    Blocks up to the deadline. Raises the last failure, or what `explain` raises for that failure and for whether memory
    is lost.
    """
    backoff = pauses(deadline)
    check_open()
    before = sought.look(deadline) if ask_first else None
    while True:
        try:
            return attach(deadline)
        except (PermissionDeniedError, TransportError, UnavailableError) as error:
            why, heard = _why(error), None
            action = Action.REFRESH
            while action is Action.REFRESH:
                facts = Facts(not backoff.over(), heard=heard, movable=sought.movable)
                action = decide_path(why, before, facts)
                if action is Action.REFRESH:
                    heard = sought.look(deadline)
            if action is Action.FAIL:
                lost = why is Refusal.AWAY and before is not None and before.answered and before.lost
                explain(error, lost)
                raise
        if action is Action.RETRY:
            time.sleep(backoff.next_s())
            check_open()
            heard = sought.look(deadline)
        check_open()
        before = heard


def _why(error: Error) -> Refusal:
    if isinstance(error, UnavailableError):
        return Refusal.AWAY
    return Refusal.DENIED if isinstance(error, PermissionDeniedError) else Refusal.NO_WAY
