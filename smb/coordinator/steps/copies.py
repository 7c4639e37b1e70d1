"""Servers' roles for segments with two copies: how a loss, a return and a new copy change them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from smb.coordinator.bundles import Bundles, Member
from smb.coordinator.drop_rules import dropped, is_newer, is_that_copy
from smb.coordinator.events import (
    BackupsLost,
    CopiesEnded,
    CopyBegun,
    CopyDropped,
    Effect,
    Instant,
    LeadsLater,
    MoveAllowed,
    Report,
    RolesSwitched,
    SaveBuffer,
    ServerReturned,
)
from smb.coordinator.records import BufferRecord, Held, SegmentRecord
from smb.coordinator.replicas import (
    begin_copy,
    come_back,
    copies_on,
    drop_copy,
    end_copies,
    lead_later,
    let_move,
    lose_backups,
    switch_roles,
)
from smb.coordinator.state import State, Step, put, without
from smb.drop_reasons import Ground
from smb.errors import NotFoundError, UnavailableError

EPOCH_BELIEVED_MAX = 1 << 31  # of a server's report: more role changes than there ever are, and a u32 has room for more
CHANGED_BYTES_MAX = 1 << 20  # total size of changed records if the store bounds a change: etcd takes 1.5 MB


def server_returned(state: State, event: ServerReturned, now: Instant) -> Step:
    """A server is back: its copies that missed changes are stale, unless no others exist. If it has backups of which
    the primaries have reported that they lack something, it takes over. Raises UnavailableError while that is unknown
    because the servers of the other copies have not been heard of or did not answer just now, and as `check_all_asked`
    does.
    """
    check_all_asked(state, event.name, event.held, event.missing)
    known = state.servers.get(event.name)
    restarted = known is None or known.instance_id != event.instance_id

    def heard(name: str) -> bool:
        return name != event.name and state.heard(name, now)

    behind = _behind(state, event.name, event.held)
    deciding = deciding_peers(state, event.name, event.held)
    # A server that is alive now may not have been when others were looked at: its lease ran out while the coordinator
    # was held up, and runs anew. So it was not looked at, and may be dead.
    seen = set(deciding) if event.seen is None else event.seen
    unheard = (name for name in deciding if state.alive(name, now) and not (state.heard(name, now) and name in seen))
    if restarted and (peers := list(unheard)):
        raise UnavailableError(
            f'memory server "{event.name}" was restarted, and {", ".join(peers)} with the other copies of its '
            f"segments was not heard of yet; it must register again"
        )
    missing = event.missing | not_those_copies(state, event.name, event.held)
    bundles = Bundles(state.buffers.values())
    missing = bundles.lacking(event.name, missing, heard)
    only_here = bundles.named_by(_lacked_by_primaries(state, event.name)) - missing
    if only_here:  # it is not known whether a buffer that is not ready was made: without it, it takes over with none
        unready = [record for record in state.buffers.at(event.name) if not record.ready]
        only_here -= bundles.named_by({each.id for of in unready for each in of.segments} - event.held.keys())

    def judge(record: BufferRecord) -> BufferRecord:
        return come_back(record, event.name, missing, heard, restarted=restarted, behind=behind, only_here=only_here)

    where = state.where()
    newer = (number for number, held in event.held.items() if number in where and _claims(held, *where[number]))
    here = list(state.buffers.at(event.name))
    judged, effects = judge_copies(state, judge, event.changes_max, contested=frozenset(newer), of=here)
    return with_former_primaries(state, judged, effects, {event.name} if restarted else ()), effects


def with_former_primaries(before: State, state: State, effects: Iterable[Effect], gone: Collection[str] = ()) -> State:
    """Return the state in which servers that were primaries before, of the buffers saved by these effects, must hear
    first that another one has taken over: they answer reads until then. Servers without a lease do not, nor do former
    runs, of servers that are `gone`.
    """
    leases = state.server_leases.ends
    former = {
        segment.id: (was.server,)
        for effect in effects
        if isinstance(effect, SaveBuffer)
        for segment, was in zip(effect.record.segments, before.buffers[effect.record.key].segments, strict=True)
        if was.server != segment.server and was.server not in gone and was.server in leases
    }
    return state.with_former_primaries(former) if former else state


def _lacked_by_primaries(state: State, server: str) -> frozenset[int]:
    """Return the segments with backups on this server whose primaries have reported that they do not have them. These
    primaries stayed, because no backup had been heard of.
    """
    return frozenset(
        segment.id
        for record in state.buffers.at(server)
        if record.ready
        for segment in record.segments
        if segment.backup == server and segment.id in state.missing.get(segment.server, ())
    )


class NotAskedError(UnavailableError):
    """A server was not asked for a segment that was made meanwhile, or dropped very many after it had been asked."""


def check_all_asked(state: State, server: str, held: Collection[int], missing: Collection[int]) -> None:
    """Raise NotAskedError if the records place a segment on a server that has not said whether it has it. That
    segment was made after the server was asked, perhaps by its former run.
    """
    for record in state.buffers.at(server):
        for copy in record.copies if record.ready else ():
            if copy.server == server and copy.id not in held and copy.id not in missing:
                raise NotAskedError(
                    f'memory server "{server}" was not asked for a segment of {record.title}, which was made '
                    f"meanwhile; it must register again"
                )


def _claims(held: Held, record: BufferRecord, segment: SegmentRecord) -> bool:
    return held.whole and is_newer(held, record, segment)


def not_those_copies(state: State, server: str, held: Mapping[int, Held]) -> frozenset[int]:
    """Return the segments that the records place on a server but of which it holds another copy."""
    return frozenset(
        segment.id
        for record in state.buffers.at(server)
        if record.ready
        for segment in record.segments
        if segment.id in held
        and server in (segment.server, segment.backup, segment.copying_to)
        and not is_that_copy(server, held[segment.id], segment)
    )


def may_be_dropped(state: State, server: str, held: Mapping[int, Held], *, restarted: bool) -> frozenset[int]:
    """Return the segments that a server holds and may be told to drop, once others have confirmed their copies: those
    beside the records, and all if it was restarted or lacks something, since others go on alone then.
    """
    here = {copy.id for record in state.buffers.at(server) for copy in record.copies if copy.server == server}
    stays = not restarted and here <= held.keys() - not_those_copies(state, server, held)
    return frozenset(held.keys() - here if stays else held)


def survivors(state: State, now: Instant) -> frozenset[str]:
    """Return the servers that are to go on alone with some segment, because the server of its other copy is gone."""
    found = set()
    for record in at_dead(state, now):
        for segment in record.segments if record.movable else ():
            if segment.backup:
                living = [name for name in (segment.server, segment.backup) if state.alive(name, now)]
                found |= set(living) if len(living) == 1 else set()
    return frozenset(name for name in found if state.heard(name, now))


def at_dead(state: State, now: Instant) -> list[BufferRecord]:
    """Return the records with a copy on a server without a lease: those that a loss may change."""
    dead = (name for name in state.buffers.servers() if not state.alive(name, now))
    found = {record.key: record for name in dead for record in state.buffers.at(name)}
    return list(found.values())


def deciding_peers(state: State, server: str, held: Mapping[int, Held]) -> list[str]:
    """Return the servers on whose lives it depends what becomes of this server's copies if it was restarted: those of
    the backups of its primaries, and those of the primaries of backups that are behind. `held`: what the server holds.
    """
    behind = _behind(state, server, held)
    peers = {
        segment.backup if segment.server == server else segment.server
        for record in state.buffers.at(server)
        if record.ready and record.movable
        for segment in record.segments
        if segment.backup and (segment.server == server or segment.id in behind)
    }
    return sorted(peers)


def _behind(state: State, server: str, held: Mapping[int, Held]) -> frozenset[int]:
    """Return the segments of which the server has the backup, and was the primary when it last heard of its role."""
    return frozenset(
        segment.id
        for record in state.buffers.at(server)
        if record.ready and record.movable
        for segment in record.segments
        if segment.backup == server and segment.id in held and held[segment.id].epoch < segment.switched
    )


def backups_lost(state: State, event: BackupsLost, _: Instant) -> Step:
    """A primary reports that these backups do not follow any more."""
    segment_ids = Bundles(state.buffers.values()).named_by(event.segment_ids)

    def judge(record: BufferRecord) -> BufferRecord:
        if not any(copy.segment_id in segment_ids for copy in copies_on(record, event.name)):
            return record
        ours = {segment.id for segment in record.segments if segment.server == event.name} & segment_ids
        return lose_backups(record, ours)

    return judge_copies(state, judge, event.changes_max, of=list(state.buffers.at(event.name)))


def leads_later(state: State, event: LeadsLater, now: Instant) -> Step:
    """A primary cannot take its role, because it has another one of the bundle, from records that were replaced since.
    The new epoch waits until every server was heard of: one may have a copy that is newer than these records, but not
    newer than that epoch.
    """
    if not state.knows_all_memory(now):
        return state, ()
    here = list(state.buffers.at(event.name))
    present = {each.id: each.epoch for record in here for each in record.segments if each.id in event.refused}
    meant = {
        number: last
        for number, last in event.epochs.items()
        if present.get(number) == event.refused[number] and last <= EPOCH_BELIEVED_MAX
    }
    if not meant:
        return state, ()
    bundles = Bundles(state.buffers.values())
    # It is judged first what becomes of a creation that was interrupted: the backup may have all of it.
    open_ = {each.id for record in here if record.id in state.interrupted for each in record.segments}
    epochs = without(bundles.with_epochs(meant), *bundles.named_by(open_))

    def judge(record: BufferRecord) -> BufferRecord:
        return lead_later(record, event.name, epochs)

    return judge_copies(state, judge, event.changes_max, "gets its roles in a later epoch", of=here)


def copy_begun(state: State, event: CopyBegun, now: Instant) -> Step:
    """A server begins to hold a new copy of a segment. Raises NotFoundError if the copy is not wanted any more."""
    record, target = state.buffers.get(event.key), state.servers.get(event.target)
    known = target is not None and target.instance_id == event.instance_id and state.alive(event.target, now)
    judged = record
    if record is not None and target is not None and known and not target.draining:
        judged = begin_copy(record, event.segment_id, event.target, event.epoch, event.leaving)
    if record is None or judged is None or judged is record:
        raise NotFoundError(f"segment {event.segment_id:016x} needs no copy on {event.target} any more")
    (segment,) = (each for each in judged.segments if each.id == event.segment_id)
    if not state.confirmed(segment.server, segment.id, now):
        raise NotFoundError(
            f'memory server "{segment.server}", which has the other copy, has not confirmed that it has it'
        )
    bundles = Bundles(state.buffers.values())
    members = bundles.members(record, segment)
    _check_members(event, members)
    if not all(state.confirmed(segment.server, member.id, now) for _, member in members):
        raise NotFoundError(f'memory server "{segment.server}" lacks one of the segments that move together')
    text = f"a segment of {record.title} is being copied to {event.target}"
    if len(members) > 1:
        text += f", with {len(members) - 1} that move together with it"
    changed = (judged, *bundles.followers(judged))
    effects: list[Effect] = [*map(SaveBuffer, changed)]
    if event.leaving:
        text += f", and leaves {event.leaving}"
        left = tuple(replace(member, server=event.leaving) for _, member in members)
        effects.append(dropped(left, Ground.SUPERSEDED, state.unexplained, event.epoch))
    state = put(state, *changed)
    ids = [member.id for _, member in members]
    beside = without(state.unexplained.get(event.target, {}), *ids)
    state = replace(
        state,
        unexplained={**state.unexplained, event.target: beside},
        missing={**state.missing, event.target: state.missing.get(event.target, frozenset()).difference(ids)},
    )
    return state, (*effects, Report(logging.INFO, text))


def _check_members(event: CopyBegun, members: Sequence[Member]) -> None:
    """Raise NotFoundError unless the target has room for each member of the bundle, and all members are ready."""
    missing = [record for record, member in members if member.id not in event.members | {event.segment_id}]
    if missing:
        raise NotFoundError(
            f"segment {event.segment_id:016x} moves together with one of {missing[0].title}, for which {event.target} "
            f"has not made room"
        )
    for record, _ in members:
        if not record.ready:
            raise NotFoundError(f"{record.title}, which moves together with it, is still being made")


def roles_switched(state: State, event: RolesSwitched, now: Instant) -> Step:
    """The two copies of a segment, and of the others in its bundle, switch their roles. Raises NotFoundError if that is
    not possible any more.
    """
    record = state.buffers.get(event.key)
    judged = record if record is None else switch_roles(record, event.segment_id, event.epoch)
    if record is None or judged is None or judged is record:
        raise NotFoundError(f"segment {event.segment_id:016x} does not have two copies in epoch {event.epoch - 1}")
    (segment,) = (each for each in judged.segments if each.id == event.segment_id)
    bundles = Bundles(state.buffers.values())
    contested = state.contested()
    for of, member in bundles.members(record, segment):
        if not of.ready or member.id in contested:
            raise NotFoundError(f"{of.title}, of which a segment moves together with it, may change now")
        for name in (segment.server, segment.backup):
            if not state.confirmed(name, member.id, now):
                raise NotFoundError(f'memory server "{name}" has not confirmed that it has a copy of {of.title}')
    changed = (judged, *bundles.followers(judged))
    state = put(state, *changed)
    text = f"a segment of {record.title} has its primary on {segment.server} now, and its backup on {segment.backup}"
    return state, (*map(SaveBuffer, changed), Report(logging.INFO, text))


def move_allowed(state: State, event: MoveAllowed, _: Instant) -> Step:
    """A segment with one copy gets roles, so that it may move or get another copy."""
    record = state.buffers.get(event.key)
    judged = record if record is None else let_move(record, event.segment_id)
    if record is None or judged is None or judged is record:
        raise NotFoundError(f"segment {event.segment_id:016x} already has roles, or was deleted")
    return put(state, judged), (SaveBuffer(judged),)


def copy_dropped(state: State, event: CopyDropped, now: Instant) -> Step:
    """A segment with one copy has moved."""
    record = state.buffers.get(event.key)
    judged = record if record is None else drop_copy(record, event.segment_id, event.leaving, event.epoch)
    if record is None or judged is None or judged is record:
        raise NotFoundError(f"segment {event.segment_id:016x} does not leave {event.leaving} any more")
    (segment,) = (each for each in judged.segments if each.id == event.segment_id)
    if not state.confirmed(segment.server, segment.id, now):
        raise NotFoundError(
            f'memory server "{segment.server}", which has the other copy, has not confirmed that it has it'
        )
    text = f"a segment of {record.title} is on {segment.server} now, and leaves {event.leaving}"
    drop = dropped((replace(segment, server=event.leaving),), Ground.SUPERSEDED, state.unexplained, event.epoch)
    return put(state, judged), (SaveBuffer(judged), drop, Report(logging.INFO, text))


def copies_ended(state: State, event: CopiesEnded, now: Instant) -> Step:
    """New copies are whole, or were given up. A copy counts as whole once its own server has said in this term that it
    is there: that server may have dropped it, by records that were restored meanwhile. The primary reports again.
    """
    epochs = Bundles(state.buffers.values()).with_epochs(event.epochs)

    def judge(record: BufferRecord) -> BufferRecord:
        return end_copies(record, event.name, epochs, whole=event.whole)

    text = "has a new copy" if event.whole else "could not be copied"
    level, here = logging.INFO if event.whole else logging.WARNING, list(state.buffers.at(event.name))
    unheard = frozenset(
        segment.id
        for record in here
        for segment in record.segments
        if event.whole and segment.copying_to and not state.confirmed(segment.copying_to, segment.id, now)
    )
    return judge_copies(state, judge, event.changes_max, text, level, unheard, here)


def _with_segments_of(judged: BufferRecord, present: BufferRecord, segment_ids: frozenset[int]) -> BufferRecord:
    """Return the judged record with these segments as they are at present."""
    if judged is present or segment_ids.isdisjoint(segment.id for segment in present.segments):
        return judged
    segments = tuple(
        was if was.id in segment_ids else now for was, now in zip(present.segments, judged.segments, strict=True)
    )
    return present if segments == present.segments else replace(judged, segments=segments)


def judge_copies(
    state: State,
    judge: Callable[[BufferRecord], BufferRecord],
    changes_max: int | None,
    what: str = "has lost a copy",
    level: int = logging.WARNING,
    contested: frozenset[int] = frozenset(),
    of: Iterable[BufferRecord] | None = None,
) -> Step:
    """Replace buffers' records by those that `judge` returns, at most `changes_max` of them. All segments of a bundle
    change at once, however many they are. Segments that are `contested`, or of which a server has a newer copy, stay,
    with their bundles; others of the same buffer change. `of`: the records to judge; None: all.
    """
    effects: list[Effect] = []
    changed: dict[str, BufferRecord] = {}
    left = CHANGED_BYTES_MAX
    bundles: Bundles | None = None
    contested |= state.contested()
    if contested:
        bundles = Bundles(state.buffers.values())
        contested = bundles.named_by(contested)
    for record in state.buffers.values() if of is None else of:
        if not record.movable:
            continue
        present = changed.get(record.key, record)
        judged = _with_segments_of(judge(present), present, contested)
        if judged is present:
            continue
        bundles = bundles or Bundles(state.buffers.values())
        together = [judged, *bundles.followers(judged, changed)]
        more = [each for each in together if each.key not in changed]
        size = sum(len(each.to_json()) for each in more) if changes_max is not None else 0
        if changes_max is not None and changed and (len(changed) + len(more) > changes_max or size > left):
            break
        left -= size
        changed |= {each.key: each for each in together}
    if changed:
        state = put(state, *changed.values())
    for judged in changed.values():
        servers = ", ".join(segment.server for segment in judged.segments)
        effects += [SaveBuffer(judged), Report(level, f"{judged.title} {what}: it goes on with those on {servers}")]
    return state, tuple(effects)
