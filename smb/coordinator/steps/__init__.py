"""The coordinator's decisions: step(state, event, now) -> (state, effects). Pure: no I/O, no clock, no randomness.

A refused event raises one of smb.errors and changes nothing. The segments that an event has servers drop are checked by
an assertion against the rule of drop_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from smb.coordinator.drop_rules import check
from smb.coordinator.events import (
    BackupsLost,
    BufferDeleted,
    BufferFailed,
    BufferMade,
    BufferRenamed,
    BufferWanted,
    ClientsKicked,
    CopiesEnded,
    CopyBegun,
    CopyDropped,
    Event,
    HeldUp,
    Instant,
    LeadsLater,
    LeaseShortened,
    MaintenanceEnded,
    MaintenancePlanned,
    MoveAllowed,
    NamesFreed,
    Restarted,
    RolesSwitched,
    SaveBuffer,
    SaveSequence,
    SegmentsForgotten,
    ServerCounted,
    ServerDied,
    ServerDrained,
    ServerLeft,
    ServerRegistered,
    ServerRenewed,
    ServerReturned,
    ServerSuspected,
    SessionClosed,
    SessionRenewed,
    Ticked,
    UnexplainedJudged,
)
from smb.coordinator.state import State, Step
from smb.coordinator.steps import copies, creation, maintenance, names, servers, sessions, ticks, unexplained

_STEPS: dict[type, Callable[[State, Any, Instant], Step]] = {
    Restarted: ticks.restarted,
    Ticked: ticks.ticked,
    HeldUp: ticks.held_up,
    LeaseShortened: ticks.lease_shortened,
    ServerRegistered: servers.server_registered,
    ServerRenewed: servers.server_renewed,
    ServerLeft: servers.server_left,
    ServerDied: servers.server_died,
    ServerDrained: servers.server_drained,
    MaintenancePlanned: maintenance.maintenance_planned,
    MaintenanceEnded: maintenance.maintenance_ended,
    ServerReturned: copies.server_returned,
    UnexplainedJudged: unexplained.unexplained_judged,
    SegmentsForgotten: unexplained.segments_forgotten,
    BackupsLost: copies.backups_lost,
    LeadsLater: copies.leads_later,
    CopyBegun: copies.copy_begun,
    CopyDropped: copies.copy_dropped,
    MoveAllowed: copies.move_allowed,
    RolesSwitched: copies.roles_switched,
    CopiesEnded: copies.copies_ended,
    ServerCounted: servers.server_counted,
    ServerSuspected: servers.server_suspected,
    BufferWanted: creation.buffer_wanted,
    BufferMade: creation.buffer_made,
    BufferFailed: creation.buffer_failed,
    BufferDeleted: names.buffer_deleted,
    BufferRenamed: names.buffer_renamed,
    NamesFreed: names.names_freed,
    SessionRenewed: sessions.session_renewed,
    SessionClosed: sessions.session_closed,
    ClientsKicked: sessions.clients_kicked,
}
# These events end a buffer, a creation or a name themselves, and so acknowledge what they drop.
_ENDINGS = (BufferDeleted, BufferRenamed, BufferFailed, NamesFreed)


def step(state: State, event: Event, now: Instant) -> Step:
    """Return the state after the event, and the effects. Raises smb.errors.Error if the event is refused."""
    state, effects = _STEPS[type(event)](state, event, now)
    if not isinstance(event, _ENDINGS):
        registering = event.server.name if isinstance(event, ServerRegistered) else ""
        check(effects, state.where, lambda name, number: state.confirmed(name, number, now), registering)
    # A deletion is not numbered: a store that lacks it drops nothing. So deletions work in a store without room.
    if any(isinstance(effect, SaveBuffer) for effect in effects):
        state = replace(state, lineage=state.lineage.changed())
        effects = (*effects, SaveSequence(state.lineage.sequence))
    return state, effects
