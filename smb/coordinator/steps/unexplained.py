"""Segments that servers hold beside the records: taken up, dropped or kept as more servers are heard of.

An operator may give them up. The rule is in smb/coordinator/drop_rules.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from smb.coordinator.bundles import Bundles, bundle_of
from smb.coordinator.drop_rules import Confirmed, Where, dropped, epoch_of, ground_to_drop, is_newer
from smb.coordinator.events import (
    DropSegments,
    Effect,
    EndQuarantine,
    Instant,
    Report,
    SaveBuffer,
    SegmentsForgotten,
    UnexplainedJudged,
)
from smb.coordinator.records import BufferRecord, Held, SegmentRecord
from smb.coordinator.state import State, Step, put, without
from smb.coordinator.steps.copies import CHANGED_BYTES_MAX
from smb.coordinator.steps.interrupted import interrupted_judged
from smb.drop_reasons import Ground
from smb.errors import NotFoundError, UnavailableError


def unexplained_judged(state: State, event: UnexplainedJudged, now: Instant) -> Step:
    """Take up segments that are newer than the records; drop those of which another server has a copy.

    Nothing is taken up in the first lease of a term, or while some server has not been heard of: that server may have a
    later copy, of which the records may not even know. If creations end (interrupted.py), the rest waits for the next
    judgement.
    """
    state, ended = interrupted_judged(state, event.changes_max, now)
    if ended or not any(state.unexplained.values()):
        return state, ended
    effects: list[Effect] = []
    if state.knows_all_memory(now):
        state, taken_up = _take_up(state, event.changes_max, now)
        effects += taken_up
    where = state.where()
    judged = state

    def confirmed(other: str, number: int) -> bool:
        return (other, number) not in event.unproven and judged.confirmed(other, number, now)

    for server, held in state.unexplained.items():
        if not state.heard(server, now):
            continue
        gone = [
            segment_id
            for segment_id, each in held.items()
            if (server, segment_id) not in event.making and _superseded(server, segment_id, each, where, confirmed)
        ]
        effects += (_drop_of(state, server, segment_id, held[segment_id], where) for segment_id in gone)
        state = _explained(state, server, gone)
    return state, tuple(effects)


def _superseded(server: str, segment_id: int, held: Held, where: Where, confirmed: Confirmed) -> bool:
    if segment_id in where and any(copy.server == server for copy in _copies(*where[segment_id])):
        return False  # the record has it there, so it is in use
    return ground_to_drop(server, segment_id, held, where, confirmed, covered=True) is not None


def _copies(record: BufferRecord, segment: SegmentRecord) -> Iterator[SegmentRecord]:
    return (copy for copy in record.copies if copy.id == segment.id)


def _drop_of(state: State, server: str, segment_id: int, held: Held, where: Where) -> DropSegments:
    if segment_id not in where:  # its buffer was deleted meanwhile
        gone = SegmentRecord(segment_id, server, 0, held.nbytes)
        return dropped((gone,), Ground.DELETED, {})
    record, segment = where[segment_id]
    drop = dropped((replace(segment, server=server),), Ground.SUPERSEDED, state.unexplained, epoch_of(record, segment))
    # An incomplete copy never began or was given up, and is dropped whatever its epoch is.
    return replace(drop, epoch=max(held.epoch, drop.epoch), room=True) if held.begun else drop


def _explained(state: State, server: str, segment_ids: Collection[int]) -> State:
    left = without(state.unexplained[server], *segment_ids)
    return replace(state, unexplained={**state.unexplained, server: left})


def _take_up(state: State, changes_max: int | None, now: Instant) -> Step:
    """Bring records up to the state of the servers, because the store is older than they are."""
    effects: list[Effect] = []
    left, left_bytes = (changes_max // 2, CHANGED_BYTES_MAX) if changes_max is not None else (sys.maxsize, sys.maxsize)
    taking = _TakingUp(state, now)
    former: dict[int, frozenset[str]] = {}
    newest = taking.newest_claims(state.contested())
    # All members of a bundle follow the one that is judged first. That is the one with the newest claim: records that
    # were restored before may not have had the others, whose roles did not change since then.
    for segment_id in sorted(newest, key=lambda each: (-newest[each], each)):
        record, segment = taking.where[segment_id]
        claims = taking.claims(record, segment)
        if not claims:
            continue
        bundles = taking.bundles_of(record)
        bundle = _Members(taking, bundles, record, segment)
        taken = _as_claimed(segment, claims, bundle)
        judged = replace(record, segments=tuple(taken if each.id == segment_id else each for each in record.segments))
        changed = (judged, *bundles.followers(judged))
        left -= len(changed)
        left_bytes -= sum(len(each.to_json()) for each in changed)
        if effects and (left < 0 or left_bytes < 0):
            break
        members = [each.id for of in changed for each in of.segments if bundle_of(each) == bundle_of(taken)]
        effects += map(SaveBuffer, changed)
        taking.put(changed)
        primaries = {server for server, held in claims.items() if held.primary}
        if segment_id not in taking.missing.get(segment.server, ()):
            primaries.add(segment.server)  # it leads by the records, as it was told in this term
        if primaries - {taken.server}:
            former |= dict.fromkeys(members, frozenset(primaries - {taken.server}))
        alike = [
            server
            for server, held in claims.items()
            if server not in (taken.server, taken.backup)
            and held.epoch == newest[segment_id]
            and state.other_terms.get(server, frozenset()) & state.other_terms.get(taken.server, frozenset())
        ]
        # Two copies of one epoch of one history both have all acknowledged changes: this one may be made anew.
        anew = {
            server: {
                each: replace(held[each], quarantined=False, nbytes=taking.where[each][1].file_bytes)
                for each in members
                if each in held
            }
            for server, held in taking.unexplained.items()
            if server in alike
        }
        taking.with_old_copies(segment, taken, members, bundle.held)
        for server, here in anew.items():
            taking.unexplained[server].update(here)
            effects.append(EndQuarantine(server, tuple(here)))
        where = f"{taken.server} and {taken.backup}" if taken.backup else taken.server
        text = f"{record.title}: the records were older than its memory; a segment of it is taken up on {where}"
        effects.append(Report(logging.WARNING, text))
    state = taking.state()
    return state.with_former_primaries(former) if former else state, tuple(effects)


class _TakingUp:
    """The parts of the state that change while segments are taken up, one after the other. They are copied once, since
    there may be as many segments as records. `where`: each segment with its record.
    """

    def __init__(self, state: State, now: Instant) -> None:
        self._before, self._now = state, now
        self._changed: dict[str, BufferRecord] = {}
        self.where = state.where()
        self.unexplained = {server: dict(held) for server, held in state.unexplained.items()}
        self.missing = {server: set(missing) for server, missing in state.missing.items()}
        self._together: dict[int, list[str]] = {}  # by bundle of several: the keys of its records
        for record in state.buffers.values():
            for bundle in {segment.group for segment in record.segments} - {0}:
                self._together.setdefault(bundle, []).append(record.key)

    def state(self) -> State:
        """Return the state with all changes."""
        if not self._changed:
            return self._before
        missing = {server: frozenset(missing) for server, missing in self.missing.items()}
        return replace(put(self._before, *self._changed.values()), unexplained=self.unexplained, missing=missing)

    def put(self, records: Iterable[BufferRecord]) -> None:
        for record in records:
            self._changed[record.key] = record
            self.where |= {segment.id: (record, segment) for segment in record.segments}

    def bundles_of(self, record: BufferRecord) -> Bundles:
        """Return the bundles of the record's segments."""
        keys = {record.key: None}
        for segment in record.segments:
            keys |= dict.fromkeys(self._together.get(segment.group, ()))
        return Bundles(self._changed.get(key, self._before.buffers[key]) for key in keys)

    def claims(self, record: BufferRecord, segment: SegmentRecord) -> dict[str, Held]:
        """Return the whole copies of a segment that are newer than its record, by server."""
        return {
            server: held[segment.id]
            for server, held in self.unexplained.items()
            if segment.id in held
            and held[segment.id].whole
            and is_newer(held[segment.id], record, segment)
            and self._before.heard(server, self._now)
        }

    def newest_claims(self, contested: Collection[int]) -> dict[int, int]:
        """Return the newest epoch in which a server that was heard of has each of these segments whole; at least 0."""
        newest = dict.fromkeys(contested, 0)
        for server, held in self.unexplained.items():
            for number in held.keys() & newest.keys() if self._before.heard(server, self._now) else ():
                if held[number].whole:
                    newest[number] = max(newest[number], held[number].epoch)
        return newest

    def with_old_copies(
        self,
        before: SegmentRecord,
        taken: SegmentRecord,
        members: Collection[int],
        members_held: Callable[[str], frozenset[int]],
    ) -> None:
        """Remove the segments that were taken up from `unexplained`. The copies that the record had elsewhere are now
        beside it, and quarantined, because clients may have changed them since the records were restored.
        """
        for server in (taken.server, taken.backup):
            if server:
                # The other members of the bundle share its roles. A server that does not hold such a member has lost
                # it.
                there, held = members_held(server), self.unexplained.setdefault(server, {})
                self.missing[server] = self.missing.get(server, set()).union(members) - there
                for each in members:
                    held.pop(each, None)
        for server in {before.server, before.backup, before.copying_to} - {taken.server, taken.backup, ""}:
            missing = self.missing.setdefault(server, set())
            if self._before.heard(server, self._now):
                here = self.unexplained.setdefault(server, {})
                for segment_id in (each for each in members if each not in missing):
                    _, segment = self.where[segment_id]
                    whole = server != before.copying_to
                    epoch = max(before.epoch, here[segment_id].epoch) if segment_id in here else before.epoch
                    here[segment_id] = Held(epoch, whole, not whole, quarantined=whole, nbytes=segment.file_bytes)
            missing.difference_update(members)


class _Members:
    """What servers hold of the segments that move together with one, which is to be taken up."""

    def __init__(self, taking: _TakingUp, bundles: Bundles, record: BufferRecord, segment: SegmentRecord) -> None:
        self._taking, self._segment = taking, segment
        self._epochs = {each.id: epoch_of(of, each) for of, each in bundles.members(record, segment)}

    def held(self, server: str, epoch: int | None = None) -> frozenset[int]:
        """Return those that a server has whole: as the records say, or in that epoch; None: in any but an earlier one
        than the records have.
        """
        beside = self._taking.unexplained.get(server, {})
        found = (
            each
            for each, least in self._epochs.items()
            if each in beside
            and beside[each].whole
            and (beside[each].epoch >= least if epoch is None else beside[each].epoch == epoch)
        )
        return self._as_recorded(server).union(found)

    def made(self, server: str) -> int:
        """Return the epoch since which a server has had all that it has of them."""
        beside, segment = self._taking.unexplained.get(server, {}), self._segment
        epochs = [beside[each].epoch for each in self.held(server) if each in beside]
        if self._as_recorded(server):
            epochs.append(segment.made if server == segment.server else segment.backup_made)
        return min(epochs)

    def half_made(self) -> frozenset[str]:
        """Return the servers that hold an incomplete copy of one."""
        begun = {
            server
            for server, held in self._taking.unexplained.items()
            if any(each in held and held[each].begun for each in self._epochs)
        }
        target = self._segment.copying_to
        held, missing = self._taking.unexplained.get(target, {}), self._taking.missing.get(target, ())
        if target and any(each not in held and each not in missing for each in self._epochs):
            begun.add(target)
        return frozenset(begun)

    def _as_recorded(self, server: str) -> frozenset[int]:
        if server not in (self._segment.server, self._segment.backup):
            return frozenset()
        beside, missing = self._taking.unexplained.get(server, {}), self._taking.missing.get(server, set())
        return frozenset(self._epochs.keys() - beside.keys() - missing)


def _as_claimed(segment: SegmentRecord, claims: Mapping[str, Held], bundle: _Members) -> SegmentRecord:
    """Return the segment with its newest whole copies. If there are two that both know their roles, in the same epoch,
    and hold the same members of the bundle, all in that epoch, both go on: a member may have been made since, or was
    deleted, and one of them has kept it. Otherwise one of them goes on alone, in the next epoch, because it is unknown
    which changes the other one has not forwarded. A server with an incomplete copy of a member is the last choice: it
    would answer reads from that.
    """
    newest = max(held.epoch for held in claims.values())
    at = {server: held for server, held in sorted(claims.items()) if held.epoch == newest}
    primary = next((server for server, held in at.items() if held.primary), "")
    backup = next((server for server, held in at.items() if held.backup), "")
    half_made = bundle.half_made()
    held_of_pair = {bundle.held(server, epoch) for server in (primary, backup) for epoch in (newest, None)}
    if primary and backup and len(held_of_pair) == 1 and not {primary, backup} & half_made:
        roles = replace(segment, server=primary, backup=backup, epoch=newest, backup_made=bundle.made(backup))
    else:
        usual = (segment.server, segment.backup)
        alone = max(
            sorted(at, key=lambda server: (server != primary, server not in usual)),
            key=lambda server: (
                server not in half_made,
                len(bundle.held(server, newest)),
                len(bundle.held(server)),
            ),
        )
        roles = replace(segment, server=alone, backup="", epoch=newest + 1, backup_made=0)
    return replace(roles, copying_to="", made=bundle.made(roles.server))


def segments_forgotten(state: State, event: SegmentsForgotten, now: Instant) -> Step:
    """Give up segments that a server holds beside the records. Raises NotFoundError if a named segment is not among
    these, and UnavailableError if they may still be taken up because some server was not heard of. Then nothing is
    given up.
    """
    if event.name not in state.servers:
        known = ", ".join(sorted(state.servers)) or "none"
        raise NotFoundError(f'forget on "{event.name}": no memory server has that name; there are: {known}')
    if not state.heard(event.name, now) or not state.every_server_was_heard(now):
        raise UnavailableError(
            f'forget on "{event.name}": this server or another one was not heard of yet, so quarantined memory may '
            f"still be taken up; nothing was freed. Try again once smb status shows each server as alive "
            f"or gone"
        )
    there = state.unexplained.get(event.name, {})
    where = state.where()
    # Segments in use there are not freed, even if their record is older than they are.
    free = {number: held for number, held in there.items() if not _in_use(event.name, number, where)}
    wanted = event.segment_ids or free.keys()
    for number in sorted(wanted):
        if number not in free:
            raise NotFoundError(
                f'forget on "{event.name}": segment {number:016x} is not quarantined there; nothing was freed. '
                f"`smb status` lists the quarantined segments"
            )
    segments = tuple(SegmentRecord(number, event.name, 0, free[number].nbytes) for number in sorted(wanted))
    if not segments:
        return state, ()
    # Only these copies: other copies of the same segments were not named.
    drop = DropSegments(segments, 0, Ground.FORGOTTEN)
    report = Report(
        logging.WARNING, f'memory server "{event.name}" is told to free {len(segments)} quarantined segments'
    )
    return _explained(state, event.name, wanted), (drop, report)


def _in_use(server: str, segment_id: int, where: Where) -> bool:
    return segment_id in where and any(copy.server == server for copy in _copies(*where[segment_id]))
