"""Leases that run out, and the start of a coordinator."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from smb.config.limits import RENEWALS_PER_LEASE
from smb.coordinator import limits
from smb.coordinator.events import (
    Effect,
    EraseBuffer,
    EraseServer,
    HeldUp,
    Instant,
    LeaseShortened,
    Report,
    Restarted,
    SaveLineage,
    SaveServerLease,
    Ticked,
)
from smb.coordinator.placement import SERVERS_SHOWN_MAX
from smb.coordinator.records import BufferRecord
from smb.coordinator.replicas import fail_over
from smb.coordinator.state import Drops, Maintenance, State, Step, remove, without
from smb.coordinator.steps.copies import at_dead, judge_copies
from smb.coordinator.steps.interrupted import interrupted
from smb.coordinator.steps.maintenance import LASTS_S_MAX, over
from smb.coordinator.steps.servers import forgettable
from smb.coordinator.steps.sessions import end_sessions

# How often a silent server's lease is prolonged because the coordinator itself was held up. A coordinator that is held
# up all the time must not keep a dead server alive for ever.
PROLONGED_MAX = 10


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
    if state.former_lease_s < state.server_leases.duration_s:  # before any server serves for so long
        effects.append(SaveServerLease(state.server_leases.duration_s))
    # Servers are alive for one lease, so that creates go on, and suspected, so that each reports again what it holds.
    leases = state.server_leases.grant_all(state.servers, now.monotonic)
    state = replace(
        state,
        server_leases=leases.prolong(state.servers, now.monotonic + state.first_lease_s),
        former_lease_s=state.first_lease_s,
        maintenance={
            name: Maintenance(now.monotonic + min(planned.until_wall - now.wall, LASTS_S_MAX), planned.until_wall)
            for name, planned in state.maintenance.items()
        },
        suspected=frozenset(state.servers),
        session_leases=state.session_leases.grant_all(state.sessions, now.monotonic),
        ended_sessions=replace(state.ended_sessions, incarnation=event.incarnation),
        lineage=lineage,
        began=now.monotonic,
    )
    return state, tuple(effects)


def ticked(state: State, event: Ticked, now: Instant) -> Step:
    """End sessions and servers whose leases ran out, and let other copies take over."""
    state, effects = over(state, now)

    def alive(name: str) -> bool:
        return state.server_leases.runs(name, now.monotonic)

    late = state.late(now)
    unproven = [name for name in late if name not in state.overdue]
    if unproven and len(late) >= 2 and 2 * len(late) > len(state.server_leases.ends):
        # Rather this coordinator or its network is in trouble than most servers at once. Taking them for dead would
        # have all their copies made again, which costs more leases.
        state = _prolong(state, unproven, now)
        text = f"{len(late)} of {len(state.server_leases.ends)} memory servers are late at once: it waits a lease more"
        effects.append(Report(logging.WARNING, f"{text} for {_listed(unproven)}"))
    for name in state.server_leases.run_out(now.monotonic):
        state = state.without_lease(name)
        held = state.allocation(name).segments
        effects.append(Report(logging.WARNING, f'memory server "{name}" is gone: no renewal; it holds {held} segments'))
    gone = state.session_leases.run_out(now.monotonic)[: event.ends_max]
    for session_id in gone:
        effects.append(Report(logging.INFO, f"session of {state.client_name(session_id)} is gone: no renewal"))
    state, ends = end_sessions(state, gone)
    effects += ends

    def is_seen(name: str) -> bool:
        return event.seen is None or name in event.seen

    def judge(record: BufferRecord) -> BufferRecord:
        if record.id in state.interrupted:  # the survivor may never have made its copy
            return record
        return fail_over(record, alive, lambda name: is_seen(name) and state.heard(name, now))

    state, saves = judge_copies(state, judge, event.ends_max, of=at_dead(state, now))
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
        drops={name: Drops(each.count) if name in forgotten else each for name, each in state.drops.items()},
    )
    effects += map(EraseServer, forgotten)
    return state, tuple(effects)


def held_up(state: State, event: HeldUp, now: Instant) -> Step:
    """This process took no renewals for a while, so that leases ran out though their holders live. They run anew, as
    after a restart.
    """
    servers, sessions = state.server_leases, state.session_leases
    effects: list[Effect] = []
    if event.seconds >= servers.duration_s / RENEWALS_PER_LEASE:
        names = [name for name in servers.ends if state.overdue.get(name, 0) < PROLONGED_MAX]
        state = _prolong(state, names, now)
        if now.monotonic - event.seconds < state.began + state.first_lease_s:  # servers could not register either
            state = replace(state, began=state.began + event.seconds)
        effects.append(_held_up(event, "memory servers"))
    if event.seconds >= sessions.duration_s / RENEWALS_PER_LEASE:
        until = now.monotonic + sessions.granted_s
        state = replace(state, session_leases=sessions.prolong(tuple(sessions.ends), until))
        effects.append(_held_up(event, "clients' sessions"))
    return state, tuple(effects)


def _held_up(event: HeldUp, whose: str) -> Report:
    return Report(logging.WARNING, f"the coordinator was held up for {event.seconds:.1f} s: leases of {whose} run anew")


def lease_shortened(state: State, _: LeaseShortened, now: Instant) -> Step:
    """Store that servers' leases are shorter than in former terms. Too early, it changes nothing."""
    shorter = state.server_leases.duration_s
    if shorter >= state.former_lease_s or now.monotonic < state.began + state.former_lease_s:
        return state, ()
    return replace(state, former_lease_s=shorter), (SaveServerLease(shorter),)


def _prolong(state: State, names: Sequence[str], now: Instant) -> State:
    """Let servers' leases run for their whole duration from now on."""
    leases = state.server_leases.prolong(names, now.monotonic + state.server_leases.duration_s)
    times = {name: state.overdue.get(name, 0) + 1 for name in names}
    return replace(state, server_leases=leases, overdue={**state.overdue, **times})


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SERVERS_SHOWN_MAX} more" if len(names) > SERVERS_SHOWN_MAX else ""
    return ", ".join(names[:SERVERS_SHOWN_MAX]) + more
