"""Creations that an earlier run of the coordinator began, and of which the records do not show the end.

Either that run stopped within the creation, or the records are older than its last ones: a backup was restored, or a
power failure took their end. In the second case clients may have used the buffer since. Its servers know more. The
buffer counts as made if each of its segments is whole where the records have it, or newer elsewhere. It is taken back
if nothing was ever written to it, and a segment is nowhere, or not on a server that should have it and has run all
along: what is dropped then has nothing that a client was told of. If a segment is nowhere and others were used, the
buffer counts as made, and that segment as lost. While a server that may have a segment has not been heard of, nothing
is decided, clients do not see the buffer, none of its copies takes over from another, and a primary that was restarted
does not lead again (`State.copies`). Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from smb.coordinator.drop_rules import dropped, epoch_of
from smb.coordinator.events import Effect, EraseBuffer, Instant, Report, SaveBuffer, ServerRegistered, WakeOpeners
from smb.coordinator.records import UNKNOWN_EPOCH, BufferRecord, Held
from smb.coordinator.replicas import come_back
from smb.coordinator.state import Interrupted, State, Step, end_copies_beside, remove, without
from smb.coordinator.steps.copies import judge_copies, with_former_primaries
from smb.drop_reasons import Ground


def interrupted(state: State, pending: Iterable[BufferRecord]) -> State:
    """Return the state in which these creations wait for what servers say."""
    known = {
        record.id: Interrupted(
            {
                copy.server: state.servers[copy.server].instance_id
                for copy in record.copies
                if copy.server in state.servers
            }
        )
        for record in pending
        if record.id not in state.interrupted
    }
    return replace(state, interrupted={**state.interrupted, **known})


def heard_from(state: State, event: ServerRegistered) -> State:
    """Return the state with what the server says about the segments of interrupted creations."""
    waiting = dict(state.interrupted)
    for record in _records(state):
        known = waiting[record.id]
        here = {each.id: event.held[each.id] for each in record.segments if each.id in event.held}
        if not here and event.server.name not in known.runs:
            continue
        whole = frozenset(number for number, each in here.items() if not each.begun)
        newer = {
            each.id for each in record.segments if each.id in whole and here[each.id].epoch > epoch_of(record, each)
        }
        waiting[record.id] = replace(
            known,
            newer=known.newer | newer,
            held={**known.held, event.server.name: whole},
            leads=known.leads - {event.server.name} | _leading(event, known, here),
            # What is being made, or copied, has nothing that its source lacks, and clients do not reach it.
            used=known.used or not all(each.untouched or each.begun for each in here.values()),
        )
    return replace(state, interrupted=waiting) if waiting else state


def _leading(event: ServerRegistered, known: Interrupted, here: Mapping[int, Held]) -> frozenset[str]:
    """Return the server's name if its process has been the primary of a part since that was made: it has forgotten
    nothing. A server of an older release does not say that, and is known by its process alone.
    """
    name, run = event.server.name, event.server.instance_id
    same_run = known.runs.get(name) == run
    leads = any(each.primary or (each.epoch == UNKNOWN_EPOCH and same_run) for each in here.values())
    return frozenset({name} if leads else ())


def interrupted_judged(state: State, changes_max: int | None, now: Instant) -> Step:
    """Decide what can be decided, for at most `changes_max` buffers."""
    if not state.interrupted or not state.every_server_was_heard(now):
        return state, ()
    effects: list[Effect] = []
    heard = frozenset(name for name in state.servers if state.heard(name, now))
    decided: set[str] = set()  # servers of buffers that count as made now
    ends = 0
    for record in _records(state):
        if ends == changes_max:
            break
        known = state.interrupted[record.id]
        # A server that has died since its report may have lost what it held.
        held = {name: numbers for name, numbers in known.held.items() if name in heard}
        nowhere = {
            segment.id
            for segment in record.segments
            if segment.id not in known.newer
            and not any(segment.id in held.get(name, ()) for name in (segment.server, segment.backup))
        }
        # A server that has run all along and lacks its copy never made it: the creation had not ended. To go on with
        # the other copy alone would part a bundle from a primary that lives, and that answers reads until it is told.
        never_made = all(copy.server in held for copy in record.copies) and any(
            known.runs.get(copy.server) == state.servers[copy.server].instance_id and copy.id not in held[copy.server]
            for copy in record.copies
            if copy.id not in known.newer
        )
        if any(copy.server not in held for copy in record.copies if copy.id in nowhere):
            continue
        if (nowhere or never_made) and not known.used:
            state, ended = _taken_back(state, record)
        else:
            before = state
            state, ended = _made(state, record, known, held)
            state = with_former_primaries(before, state, ended)
            decided |= known.held.keys()
        effects += ended
        ends += 1
    # They register again, so that what they hold is judged by the records.
    return replace(state, suspected=state.suspected | decided), tuple(effects)


def _records(state: State) -> list[BufferRecord]:
    return [record for record in state.buffers.values() if record.id in state.interrupted] if state.interrupted else []


def _taken_back(state: State, record: BufferRecord) -> Step:
    effects = (
        EraseBuffer(record.key),
        dropped(record.copies, Ground.NEVER_MADE, state.unexplained),
        WakeOpeners(record.key),
        Report(logging.WARNING, f"took back {record.title}: it was half made at the stop"),
    )
    state = end_copies_beside(remove(state, record), record)
    return replace(state, interrupted=without(state.interrupted, record.id)), effects


def _made(state: State, record: BufferRecord, known: Interrupted, heard: Mapping[str, frozenset[int]]) -> Step:
    """What the servers' reports showed is judged now: no later registration shows that a server was restarted since the
    record was stored. `heard`: by server, what it has of the buffer.
    """
    made = replace(record, ready=True)
    state = replace(
        state,
        buffers=state.buffers.changed((made,)),
        interrupted=without(state.interrupted, made.id),
    )
    text = f"{made.title} counts as made: the coordinator was stopped within its creation, or its records were older"
    effects: list[Effect] = [SaveBuffer(made), WakeOpeners(made.key), Report(logging.WARNING, text)]
    restarted = heard.keys() - known.leads
    # First what is missing: no server takes over with a copy that it does not have.
    for name, again in [*((name, False) for name in heard), *((name, True) for name in sorted(restarted))]:
        judge = partial(_come_back, made.id, name, heard[name], heard.keys(), again)
        state, saves = judge_copies(state, judge, None, contested=known.newer, of=(state.buffers[made.key],))
        effects += saves
    return state, tuple(effects)


def _come_back(
    buffer_id: int, server: str, held: frozenset[int], heard: Collection[str], restarted: bool, record: BufferRecord
) -> BufferRecord:
    """Return that buffer's record after a server came back with these segments of it; other records as they are."""
    if record.id != buffer_id:
        return record
    missing = {segment.id for segment in record.segments} - held
    return come_back(record, server, missing, heard.__contains__, restarted=restarted)
