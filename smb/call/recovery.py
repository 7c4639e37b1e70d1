"""What follows a failed attempt: one decision table for buffer calls, waiting requests and the search for paths.

Pure code. The caller asks the coordinator, sleeps and sends, passes what it learns back as facts, and decides again.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple, Protocol

from smb.engine import Status

UNREACHED = frozenset({Status.DISCONNECTED, Status.LINK_LOST, Status.TIMEOUT})
# the server lacks the segment, or the role for the request
WITHOUT_IT = frozenset({Status.NOT_FOUND, Status.STALE_EPOCH})


class Action(Enum):
    RETRY = auto()  # pause, look for new paths and make another attempt
    REFRESH = auto()  # ask the coordinator where the segments are now, and decide again
    REOPEN = auto()  # get newer tokens, or a name's new location, and make another attempt
    BRING = auto()  # read the sources, which lie on other servers, and send their values along
    SETTLE = auto()  # find out which parts were not applied, and do those parts
    FAIL = auto()  # raise the error


class Ended(Protocol):
    """The end of an attempt: an Outcome of a buffer's call, or a Reply to a waiting request."""

    @property
    def status(self) -> Status:
        """Why the attempt failed."""

    @property
    def sent(self) -> bool:
        """True if a server may have received some of the request; a change may have been applied then."""


class Heard(NamedTuple):
    """The coordinator's answer about the segments of a call."""

    answered: bool  # False: the coordinator is away, and the other fields have its last answer
    moved: bool = False  # the segments are on another server, or may be: they can move, and none is lost
    lost: bool = False  # memory of some segment is lost


class Facts(NamedTuple):
    """The facts after a failed attempt. The defaults are those of an ordinary call of one buffer."""

    in_time: bool  # there is time for another attempt
    alive: bool = True  # the links of its paths can still get a new connection
    heard: Heard | None = None  # None: the coordinator was not asked since the attempt
    repeatable: bool = True  # after a refusal, the call may be repeated without doing a part twice
    read_only: bool = False  # the coordinator gave this session no right to write
    reopened: bool = False  # an earlier attempt was refused, and newer tokens were requested after it
    movable: bool = False  # a buffer of the call can move, so its newest token may already be too old
    sources: bool = False  # servers had to read other buffers of the call
    has_state: bool = False  # other buffers of the call are an optimizer's state, and the values come from this process
    known_lost: bool = False  # memory of a buffer of the call was lost, by the coordinator's last answer
    named: bool = False  # a standalone lock or barrier: opening its name again makes a new one
    asks_first: bool = False  # the next attempt reuses its paths, so the coordinator has to be asked first


def decide(ended: Ended, facts: Facts) -> Action:
    """Return what to do after an attempt that has ended.

    After REFRESH, and after a REOPEN without an answer from the coordinator, the caller sets `heard` and decides again;
    the result is another action then.
    """
    status, heard = ended.status, facts.heard
    if status is Status.NOT_FOUND and facts.named:
        return Action.REOPEN if facts.in_time and not facts.known_lost else Action.FAIL
    if heard is None and _is_gone(status, facts):
        return Action.REFRESH
    if facts.sources and _may_lie_apart(status, facts):
        return Action.BRING
    if heard is None and status is Status.DENIED:
        # A token is for the server and the roles in the coordinator's answer. Either may change once more before the
        # token is used, and the server may hear of its role later than the client.
        another = not facts.reopened or (facts.movable and facts.in_time)
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
    """Return True if a segment of the call is on another server by now, or may be."""
    status, heard = ended.status, facts.heard
    if status in (Status.STALE_EPOCH, Status.NAMESPACE) or (status is Status.APART and facts.has_state):
        return True
    if heard is None or status not in (Status.NOT_FOUND, Status.DENIED):
        return False
    # The server's answer does not name the missing segment. Without the coordinator's answer it may be elsewhere.
    return heard.moved or (status is Status.NOT_FOUND and not heard.answered)


def is_lost(ended: Ended, facts: Facts) -> bool:
    """Return True if the attempt failed because memory is lost. Servers that are away are not waited for then."""
    status, heard = ended.status, facts.heard
    return heard is not None and heard.lost and (status in UNREACHED or status in WITHOUT_IT)


def needs_paths(ended: Ended, facts: Facts) -> bool:
    """Return True if the next attempt, or the next call, has to look for new paths."""
    return not facts.alive or has_moved(ended, facts) or is_lost(ended, facts)


def _is_gone(status: Status, facts: Facts) -> bool:
    """Return True if the coordinator has to be asked first what became of the buffers.

    An optimizer's state moves together with its buffer, so none of it can be brought from elsewhere.
    """
    return status is Status.NOT_FOUND or (status is Status.APART and facts.has_state)


def _may_lie_apart(status: Status, facts: Facts) -> bool:
    """Return True if a server did not have the sources, or was not allowed to read them: they have just moved."""
    return status is Status.APART or (facts.movable and status in (Status.NOT_FOUND, Status.DENIED))


def _may_be_lost(ended: Ended, facts: Facts) -> bool:
    if ended.status in UNREACHED:
        return True
    return ended.status in WITHOUT_IT and (ended.sent or facts.known_lost or facts.asks_first)


class Refusal(Enum):
    """Why a segment could not be reached."""

    AWAY = auto()  # the server does not answer, or a new run of the daemon does
    DENIED = auto()  # the server refuses this session, or does not have the segment
    NO_WAY = auto()  # no transport leads to its server


def decide_path(why: Refusal, before: Heard | None, facts: Facts) -> Action:
    """Return what to do after a segment could not be reached: RETRY after a pause, REFRESH and decide again, REOPEN at
    once with the new answer, or FAIL.

    `before` is what the coordinator said just before the attempt, None if it was not asked; facts.heard is what it has
    said since.
    """
    if why is Refusal.AWAY:
        lost = before is not None and before.answered and before.lost
        return Action.FAIL if lost or not facts.in_time else Action.RETRY
    heard = facts.heard
    if heard is None:
        return Action.REFRESH
    if before is None or heard.moved:  # newer tokens came with the answer
        return Action.REOPEN
    # A token names the roles of copies. A server learns of new roles a moment later than clients.
    early = why is Refusal.DENIED and facts.movable and before.answered
    return Action.RETRY if early and facts.in_time else Action.FAIL
