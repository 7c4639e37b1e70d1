"""What follows after an attempt has failed: one table for calls of buffers, requests that wait, and paths.

Pure. Who acts on it asks the coordinator, sleeps and sends; it hands what it learns back as facts, and decides again.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple, Protocol

from smb.engine import Status

UNREACHED = frozenset({Status.DISCONNECTED, Status.LINK_LOST, Status.TIMEOUT})
WITHOUT_IT = frozenset({Status.NOT_FOUND, Status.STALE_EPOCH})  # the server lacks the segment, or the role for it


class Action(Enum):
    RETRY = auto()  # look for new paths and make another attempt, after a pause
    REFRESH = auto()  # ask the coordinator where the segments are now, and decide again
    REOPEN = auto()  # get newer tokens, or a name's new place, and make another attempt
    BRING = auto()  # read the sources here and send them along, as they lie on other servers
    SETTLE = auto()  # find out which parts were not applied, and do those
    FAIL = auto()  # raise the error


class Ended(Protocol):
    """The end of an attempt: an Outcome of a buffer's call, a Reply to a request that waits."""

    @property
    def status(self) -> Status:
        """Why it failed."""

    @property
    def sent(self) -> bool:
        """Whether a server may have received some of it: a change may have been applied then."""


class Heard(NamedTuple):
    """The coordinator's answer about the segments of a call."""

    answered: bool  # False: it is away, and the rest is what it said before
    moved: bool = False  # they are on another server, or may be: they can move, and none is lost
    lost: bool = False  # memory of some segment is lost


class Facts(NamedTuple):
    """What is known when an attempt has failed. The defaults are those of a usual call of one buffer."""

    in_time: bool  # time is left for another attempt
    alive: bool = True  # the links of its paths can still get a new connection
    heard: Heard | None = None  # None: the coordinator was not asked since the attempt
    repeatable: bool = True  # after a refusal the call may be made once more, without doing a part of it twice
    read_only: bool = False  # the coordinator gave this session no right to write
    reopened: bool = False  # an attempt before this one was refused, and got newer tokens
    changes_roles: bool = False  # other buffers of the call can move: their newest token may be too old again
    movable: bool = False  # some buffer of the call can move
    sources: bool = False  # servers were to read other buffers of the call
    has_state: bool = False  # other buffers of the call are an optimizer's state, and the values come from here
    known_lost: bool = False  # memory of some buffer of the call was lost, by the coordinator's last answer
    named: bool = False  # it is a lock by itself: to open its name makes it anew
    asks_first: bool = False  # paths are not looked for anew: the coordinator has to be asked here


def decide(ended: Ended, facts: Facts) -> Action:
    """Return what to do after an attempt that ended so. After REFRESH, and after a REOPEN that the coordinator did not
    answer, `heard` is given and the answer is another one.
    """
    status, heard = ended.status, facts.heard
    if status is Status.NOT_FOUND and facts.named:
        return Action.REOPEN if facts.in_time and not facts.known_lost else Action.FAIL
    if heard is None and _is_gone(status, facts):
        return Action.REFRESH
    if facts.sources and _may_lie_apart(status, facts):
        return Action.BRING
    if heard is None and status is Status.DENIED:
        another = not facts.reopened or (facts.changes_roles and not facts.read_only and facts.in_time)
        if another and facts.repeatable:
            return Action.REOPEN
        if another and not facts.read_only:
            return Action.REFRESH
    if heard is None and _may_be_lost(ended, facts):
        return Action.REFRESH
    if has_moved(ended, facts) and ended.sent and facts.in_time:
        return Action.SETTLE
    if ended.sent or not facts.in_time or is_lost(ended, facts) or not needs_paths(ended, facts):
        return Action.FAIL
    return Action.RETRY


def has_moved(ended: Ended, facts: Facts) -> bool:
    """Return whether a segment of the call is elsewhere by now, or may be."""
    status, heard = ended.status, facts.heard
    if status in (Status.STALE_EPOCH, Status.NAMESPACE) or (status is Status.APART and facts.has_state):
        return True
    if heard is None or status not in (Status.NOT_FOUND, Status.DENIED):
        return False
    # A server does not say of what it has no more. Without an answer a segment that is not found may be elsewhere.
    return heard.moved or (status is Status.NOT_FOUND and not heard.answered)


def is_lost(ended: Ended, facts: Facts) -> bool:
    """Return whether the attempt failed as memory is lost: not even a server that is away is waited for then."""
    status, heard = ended.status, facts.heard
    return heard is not None and heard.lost and (status in UNREACHED or status in WITHOUT_IT)


def needs_paths(ended: Ended, facts: Facts) -> bool:
    """Return whether the next attempt, or the next call, has to look for new paths."""
    return not facts.alive or has_moved(ended, facts) or is_lost(ended, facts)


def _is_gone(status: Status, facts: Facts) -> bool:
    """Whether the coordinator has to say first what has become of the buffers. An optimizer's state moves together with
    its buffer, so nothing of it can be brought.
    """
    return status is Status.NOT_FOUND or (status is Status.APART and facts.has_state)


def _may_lie_apart(status: Status, facts: Facts) -> bool:
    """Whether a server did not have the sources, or not to read: they have just moved."""
    return status is Status.APART or (facts.movable and status in (Status.NOT_FOUND, Status.DENIED))


def _may_be_lost(ended: Ended, facts: Facts) -> bool:
    if ended.status in UNREACHED:
        return True
    return ended.status in WITHOUT_IT and (ended.sent or facts.known_lost or facts.asks_first)


class Refusal(Enum):
    """Why a segment was not reached."""

    AWAY = auto()  # its server does not answer, or another run of it does
    DENIED = auto()  # its server does not let this session in, or does not have the segment
    NO_WAY = auto()  # no transport leads there


def decide_path(why: Refusal, before: Heard | None, facts: Facts) -> Action:
    """Return what to do after a segment was not reached: RETRY after a pause, REFRESH and decide again, REOPEN at once
    with what was heard, or FAIL. `before`: what the coordinator said just before the attempt; None: it was not asked.
    facts.heard: what it said since.
    """
    if why is Refusal.AWAY:
        lost = before is not None and before.answered and before.lost
        return Action.FAIL if lost or not facts.in_time else Action.RETRY
    heard = facts.heard
    if heard is None:
        return Action.REFRESH
    if before is None or heard.moved:  # newer tokens came with the answer
        return Action.REOPEN
    # A right is for the roles of copies, of which a server hears a moment later than we.
    early = why is Refusal.DENIED and facts.movable and before.answered
    return Action.RETRY if early and facts.in_time else Action.FAIL
