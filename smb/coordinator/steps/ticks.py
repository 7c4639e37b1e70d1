"""Leases that run out, and the start of a coordinator."""

from __future__ import annotations

import logging
from dataclasses import replace

from smb.coordinator import limits
from smb.coordinator.events import (
    Effect,
    EraseBuffer,
    EraseServer,
    Instant,
    Report,
    Restarted,
    SaveLineage,
    Ticked,
)
from smb.coordinator.records import BufferRecord
from smb.coordinator.replicas import fail_over
from smb.coordinator.state import State, Step, remove, without
from smb.coordinator.steps.copies import judge_copies
from smb.coordinator.steps.interrupted import interrupted
from smb.coordinator.steps.servers import forgettable
from smb.coordinator.steps.sessions import end_sessions


def restarted(state: State, event: Restarted, now: Instant) -> Step:
    """Take note of the creations that were interrupted, and let all leases run anew. A pending mirror is rolled back,
    as it has nothing that its source lacks.
    """
    effects: list[Effect] = []
    pending = [record for record in state.buffers.values() if not record.ready]
    for mirror in [record for record in pending if record.mirror_of][: event.changes_max]:
        state = remove(state, mirror)
        effects += [
            EraseBuffer(mirror.key),
            Report(logging.WARNING, f"took back {mirror.title}: half made at the stop"),
        ]
    state = interrupted(state, [record for record in pending if not record.mirror_of])
    lineage = state.lineage.begun(event.incarnation)
    if lineage is not state.lineage:
        effects.append(SaveLineage(lineage.terms_json()))
    # Servers are alive for one lease, so that creates go on, and suspected, so that each reports again what it holds.
    state = replace(
        state,
        server_leases=state.server_leases.grant_all(state.servers, now.monotonic),
        suspected=frozenset(state.servers),
        session_leases=state.session_leases.grant_all(state.client_names, now.monotonic),
        ended_sessions=replace(state.ended_sessions, incarnation=event.incarnation),
        lineage=lineage,
        began=now.monotonic,
    )
    return state, tuple(effects)


def ticked(state: State, event: Ticked, now: Instant) -> Step:
    """End sessions and servers whose leases ran out, and let other copies take over."""
    effects: list[Effect] = []

    def alive(name: str) -> bool:
        return state.server_leases.runs(name, now.monotonic)

    for name in state.server_leases.run_out(now.monotonic):
        state = replace(state, server_leases=state.server_leases.end(name))
        held = state.allocation(name).segments
        effects.append(Report(logging.WARNING, f'memory server "{name}" is gone: no renewal; it holds {held} segments'))
    gone = state.session_leases.run_out(now.monotonic)[: event.ends_max]
    for session_id in gone:
        effects.append(Report(logging.INFO, f"session of {state.client_names[session_id]} is gone: no renewal"))
    state, ends = end_sessions(state, gone)
    effects += ends

    def judge(record: BufferRecord) -> BufferRecord:
        if record.id in state.interrupted:  # the survivor may never have made its copy
            return record
        return fail_over(record, alive, lambda name: name not in event.silent and state.heard(name, now))

    state, saves = judge_copies(state, judge, event.ends_max)
    effects += saves
    forgotten = [
        server.name
        for server in state.servers.values()
        if now.wall - server.last_seen_at > limits.SERVER_FORGOTTEN_AFTER_S and forgettable(state, server.name, now)
    ][: event.ends_max]
    state = replace(
        state,
        servers=without(state.servers, *forgotten),
        progress=without(state.progress, *forgotten),
        unexplained=without(state.unexplained, *forgotten),
        missing=without(state.missing, *forgotten),
        others=without(state.others, *forgotten),
    )
    effects += map(EraseServer, forgotten)
    return state, tuple(effects)
