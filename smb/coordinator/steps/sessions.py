"""Sessions of clients: how they begin and end."""

from __future__ import annotations

from dataclasses import replace

from smb.coordinator import limits
from smb.coordinator.events import EraseSession, Instant, SaveSession, SessionClosed, SessionRenewed, TellEnded
from smb.coordinator.records import SessionRecord
from smb.coordinator.state import State, Step, without
from smb.errors import InvalidArgumentError, OutOfMemoryError
from smb.rpc.coordinator_client import SessionEndedError


def session_renewed(state: State, event: SessionRenewed, now: Instant) -> Step:
    """Open a session, or renew its lease. Raises SessionEndedError if the session has ended."""
    if event.session_id == 0:
        raise InvalidArgumentError("a session's id must not be 0")
    if event.session_id in state.ended_sessions:
        raise SessionEndedError(
            f"the session of {event.client_name} has ended: it was closed, or its lease ran out before it was renewed; "
            f"its locks and other places were given up, so connect again"
        )
    if len(state.client_names) >= limits.SESSIONS_MAX and event.session_id not in state.client_names:
        raise OutOfMemoryError(
            f"no place for a session of {event.client_name}: the cluster has {limits.SESSIONS_MAX} already; close "
            f"clients that are not needed"
        )
    if event.session_id not in state.client_names:
        _check_room_of_certificate(state, event)
    leases = state.session_leases.grant(event.session_id, now.monotonic)
    if event.session_id in state.client_names:
        return replace(state, session_leases=leases), ()
    names = {**state.client_names, event.session_id: event.client_name}
    owners = {**state.session_owners, event.session_id: event.owner} if event.owner else state.session_owners
    session = SessionRecord(event.session_id, event.client_name, owner=event.owner)
    state = replace(state, session_leases=leases, client_names=names, session_owners=owners)
    return state, (SaveSession(session),)


def session_closed(state: State, event: SessionClosed, _: Instant) -> Step:
    """End a session as its client asked."""
    # An unknown session may be older than a loss of the records, and its servers still know it.
    if event.session_id == 0 or event.session_id in state.ended_sessions:
        return state, ()
    return end_sessions(state, (event.session_id,))


def _check_room_of_certificate(state: State, event: SessionRenewed) -> None:
    if not event.owner or len(state.session_owners) < limits.SESSIONS_PER_CERTIFICATE_MAX:
        return
    if sum(owner == event.owner for owner in state.session_owners.values()) >= limits.SESSIONS_PER_CERTIFICATE_MAX:
        raise OutOfMemoryError(
            f"no place for a session of {event.client_name}: its certificate has {limits.SESSIONS_PER_CERTIFICATE_MAX} "
            f"already; close clients, or give some of them a certificate of another name"
        )


def end_sessions(state: State, session_ids: tuple[int, ...]) -> Step:
    """End sessions, and have their servers told."""
    if not session_ids:
        return state, ()
    ended, forgotten = state.ended_sessions.end(session_ids)
    saves = [
        SaveSession(SessionRecord(session_id, "", ended.numbers[session_id]))
        for session_id in session_ids
        if session_id in ended
    ]
    state = replace(
        state,
        session_leases=state.session_leases.end(*session_ids),
        client_names=without(state.client_names, *session_ids),
        session_owners=without(state.session_owners, *session_ids),
        ended_sessions=ended,
    )
    return state, (*saves, *map(EraseSession, forgotten), TellEnded(session_ids))
