"""Sessions of clients: how they begin and end."""

from __future__ import annotations

from dataclasses import replace

from smb.coordinator import limits
from smb.coordinator.events import (
    ClientsKicked,
    EraseSession,
    Instant,
    SaveSession,
    SessionClosed,
    SessionRenewed,
    TellEnded,
)
from smb.coordinator.records import SessionRecord
from smb.coordinator.state import State, Step, without
from smb.errors import InvalidArgumentError, NotFoundError, OutOfMemoryError
from smb.rpc.coordinator_client import KICKED, SessionEndedError


def session_renewed(state: State, event: SessionRenewed, now: Instant) -> Step:
    """Open a session, or renew its lease. Raises SessionEndedError if the session has ended."""
    if event.session_id == 0:
        raise InvalidArgumentError("a session's id must not be 0")
    check_not_ended(state, event.session_id, event.client_name)
    known = state.sessions.get(event.session_id)
    if known is None and len(state.sessions) >= limits.SESSIONS_MAX:
        raise OutOfMemoryError(
            f"no place for a session of {event.client_name}: the cluster has {limits.SESSIONS_MAX} already; close "
            f"clients that are not needed"
        )
    if known is None:
        _check_room_of_certificate(state, event)
    leases = state.session_leases.grant(event.session_id, now.monotonic)
    if known is not None and known.holder == event.holder:
        return replace(state, session_leases=leases), ()
    since = now.wall if known is None else known.since
    session = SessionRecord(event.session_id, event.client_name, holder=event.holder, since=since)
    sessions = {**state.sessions, event.session_id: session}
    return replace(state, session_leases=leases, sessions=sessions), (SaveSession(session),)


def check_not_ended(state: State, session_id: int, client: str) -> None:
    """Raise SessionEndedError if the session of `client`, a name for people, has ended."""
    if session_id in state.kicked:
        raise SessionEndedError(
            f"{KICKED} of {client} (smb clients kick, by {state.kicked[session_id]}); its locks and other places were "
            f"given up. If this client may go on, connect again"
        )
    if session_id in state.ended_sessions:
        raise SessionEndedError(
            f"the session of {client} has ended: it was closed, or its lease ran out before it was renewed; its locks "
            f"and other places were given up, so connect again"
        )


def session_closed(state: State, event: SessionClosed, _: Instant) -> Step:
    """End a session as its client asked."""
    # An unknown session may be older than a loss of the records, and its servers still know it.
    if event.session_id == 0 or event.session_id in state.ended_sessions:
        return state, ()
    return end_sessions(state, (event.session_id,))


def clients_kicked(state: State, event: ClientsKicked, _: Instant) -> Step:
    """End sessions of a client. Raises NotFoundError if there is none."""
    found = tuple(number for number, session in state.sessions.items() if session.is_called(event.name))
    if not found:
        raise NotFoundError(
            f'no client that is connected has the name "{event.name}", in its certificate or of its own; '
            f"`smb clients` lists all"
        )
    return end_sessions(state, found[: event.ends_max], event.by)


def _check_room_of_certificate(state: State, event: SessionRenewed) -> None:
    key = event.holder.key
    if not key or len(state.sessions) < limits.SESSIONS_PER_CERTIFICATE_MAX:
        return
    if sum(each.holder.key == key for each in state.sessions.values()) >= limits.SESSIONS_PER_CERTIFICATE_MAX:
        raise OutOfMemoryError(
            f"no place for a session of {event.client_name}: its certificate has {limits.SESSIONS_PER_CERTIFICATE_MAX} "
            f"already; close clients, or give some of them a certificate of another name"
        )


def end_sessions(state: State, session_ids: tuple[int, ...], kicked_by: str = "") -> Step:
    """End sessions, and have their servers told. `kicked_by`: the operator who wanted it, if one did."""
    if not session_ids:
        return state, ()
    ended, forgotten = state.ended_sessions.end(session_ids)
    saves = [
        SaveSession(SessionRecord(session_id, "", ended.numbers[session_id], kicked_by=kicked_by))
        for session_id in session_ids
        if session_id in ended
    ]
    kicked = {**state.kicked, **dict.fromkeys(session_ids, kicked_by)} if kicked_by else state.kicked
    state = replace(
        state,
        session_leases=state.session_leases.end(*session_ids),
        sessions=without(state.sessions, *session_ids),
        kicked=without(kicked, *forgotten) if kicked and forgotten else kicked,
        ended_sessions=ended,
    )
    return state, (*saves, *map(EraseSession, forgotten), TellEnded(session_ids))
