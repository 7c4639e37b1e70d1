"""What must hold: after each event of the kind that an invariant names, and once all rests.

An invariant is a function with @after("kind") or @at_rest. It gets the world, and what happened, and returns what is
wrong; empty if it holds. The first finding ends the run.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smb.coordinator.bundles import Bundles, bundle_of
from smb.coordinator.events import CopyBegun, CopyDropped, RolesSwitched
from smb.coordinator.records import SegmentRecord
from smb.coordinator.state import Allocation, State
from tests.simulator.engine import Host
from tests.simulator.truth import Part

if TYPE_CHECKING:
    from tests.simulator.world import World

_AFTER: dict[str, list[Callable[..., str]]] = defaultdict(list)
AT_REST: list[Callable[[World], str]] = []
ALONE_S_MAX = 18.0
LISTED_S_MAX = 3.0
UNLISTED_S_MAX = 8.0  # until a server has renewed, and registered again
UNLISTED_TURNS = 4
UNLISTED_ASKS_S = 6.0  # the coordinator's last questions before a copy begins, and before it gives up
DROP_S_MAX = 3.0  # a server has dropped what it was told to, and the coordinator has its answer
COPYING_S_MAX = 8.0  # until a copy's next chunk; all copies of a server share its rate
ABOUT_TO_BEGIN_S = 12.0  # in which a copy that was decided begins, or its server does not answer in time
ASKED_S = 1.0  # between a server's answer and what rests on it, if nothing befalls anybody else
WAITS_S_MAX = 20.0  # three leases, and a little
COPIES_FACTOR, COPIES_BESIDE = 3, 8  # copies begun may be so many times what was lost, and so many more


def after(kind: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Check it after each event of that kind."""

    def take(check: Callable[..., str]) -> Callable[..., str]:
        _AFTER[kind].append(check)
        return check

    return take


def at_rest(check: Callable[[World], str]) -> Callable[[World], str]:
    """Check it once faults have ended and all is whole again, as the product says."""
    AT_REST.append(check)
    return check


def check(world: World, kind: str, *what: Any) -> None:
    """Check all that is to hold after such an event. An invariant that raises is a finding, too: in a memory server's
    task nobody else would see it.
    """
    for each in _AFTER[kind]:
        try:
            text = each(world, *what)
        except Exception:  # noqa: BLE001
            text = traceback.format_exc()
        if text:
            world.finds(each.__name__, text)


# ---- leases


@after("gone")
def who_lives_is_not_taken_for_dead(world: World, name: str, before: State) -> str:
    """The coordinator believes that a server is gone, because it did not renew. Not if that is the coordinator's fault:
    it stood still, or all servers were cut off together for less than two leases.
    """
    if name in before.suspected or before.servers[name].instance_id != world.servers[name].instance_id:
        return ""  # it has to register first, which others may hold up; or the process that did is gone
    if world.is_reached(name):
        return f"{name} counts as gone, though nothing befell it, or the network"
    return f"{name} counts as gone, though all were late at once" if world.is_late_only(name) else ""


# ---- memory


@after("destroy")
def nothing_is_destroyed_but_by_the_gate(world: World, host: Host, number: int) -> str:
    """Memory goes if somebody asked for it, or another host has all that was acknowledged."""
    part = world.truth.parts.get(number)
    if part is None or part.may_go or part.lost or not part.is_in(host.segments.get(number)):
        return ""
    if part.loose and not part.acknowledged and not host.segments[number].cells:
        return ""  # a creation that the store may have lost, and nobody has written to the buffer
    if any(world.truth.holders(part, without=host.name)):
        return ""
    return f"{host.name} destroys the last memory of segment {number:016x} of {part.title}"


@after("lose")
def one_host_may_be_lost(world: World, host: Host) -> str:
    """The product has said that all is whole: each segment of two copies is on another host, too."""
    for number in host.segments:
        part = world.truth.parts.get(number)
        if part is None or part.may_go or part.replicas < 2 or part.loose:
            continue
        if not world.survives(part, host.name):
            return f"all was said to be whole, and {host.name} had the only copy of {number:016x} of {part.title}"
    return ""


@after("made")
def what_is_made_is_there(world: World, state: State, key: str) -> str:
    """A buffer counts as made if each server of it, in the run that is registered, has its part, and the primaries have
    what moves together with it.
    """
    made = state.buffers[key]
    copies = [(copy.server, copy.id) for copy in made.copies]
    if made.movable:
        bundles = Bundles(state.buffers.values())
        copies += [(each.server, each.id) for part in made.segments for _, each in bundles.members(made, part)]
    for name, number in copies:
        if world.has_registered(state, name) and number not in world.hosts[name].segments:
            return f"{made.title} is made, and {name} has not {number:016x}"
    return ""


@after("moved")
def what_moves_is_there(world: World, state: State, event: CopyBegun | CopyDropped | RolesSwitched) -> str:
    """A copy is made from a server, or another one goes, only if that server has the memory: it was just asked."""
    record, now = state.buffers[event.key], world.loop.time()
    (segment,) = (each for each in record.segments if each.id == event.segment_id)
    gone_s = now - world.lost_at.get(segment.server, now)
    if gone_s < ASKED_S or not world.answers_at_once(without=segment.server):
        return ""
    held = world.hosts[segment.server].segments
    for _, member in Bundles(state.buffers.values()).members(record, segment):
        if member.id not in held:
            return f"{event} rests on {member.id:016x}, which {segment.server} lost {gone_s:.1f} s ago"
    return ""


@after("paired")
def what_is_paired_is_there(world: World, before: State, state: State) -> str:
    """Two servers count as those of a segment's two copies if both have it, in their runs that are registered. Neither
    has it, or one has the beginning of a copy, if it was deleted since the store's backup was made.
    """
    for key, record in state.buffers.items():
        if not record.ready or before.buffers.get(key) is record:
            continue
        known = before.buffers.get(key) or before.buffers.with_id(record.id)  # it was renamed
        pairs = {(each.id, each.server, each.backup) for each in known.segments} if known is not None else set()
        for segment in record.segments if record.movable else ():
            if not segment.backup or (segment.id, segment.server, segment.backup) in pairs:
                continue
            pair = [name for name in (segment.server, segment.backup) if world.has_registered(state, name)]
            held = {name: world.hosts[name].segments.get(segment.id) for name in pair}
            lacking = [name for name, memory in held.items() if memory is None]
            if len(pair) == 2 and len(lacking) == 1 and any(memory and memory.whole for memory in held.values()):
                return f"{record.title} counts as whole, and {lacking[0]} has not {segment.id:016x}"
    return ""


@after("answers")
def one_server_answers_reads(world: World, number: int, name: str, present: SegmentRecord) -> str:
    """A server whose segment has another primary answers no reads of it by itself."""
    part, other = world.truth.parts.get(number), world.servers[present.server]
    state = world.leading_state()
    if part is None or part.loose or state is None:
        return ""
    if not other.process.alive or not other.engine.leads(number, present.epoch):
        return ""
    return f"{name} answers reads of {number:016x}, of which {present.server} is the primary in epoch {present.epoch}"


# ---- data


@after("write")
def one_server_takes_changes_in_an_epoch(world: World, part: Part, epoch: int, server: str) -> str:
    """The servers that acknowledge changes of a segment in one epoch are one."""
    if part.loose or epoch == 0:
        return ""
    known = world.truth.primaries.setdefault((part.id, epoch), server)
    return "" if known == server else f"{known} and {server} took changes of {part.id:016x} in epoch {epoch}"


@after("wait")
def a_call_on_what_is_there_comes_to_its_end(world: World, part: Part, client: str, waited_s: float) -> str:
    """A call on a segment of two copies ends while some server that has all of it is well, and a coordinator."""
    if part.loose or part.may_go or part.replicas < 2 or waited_s < WAITS_S_MAX:
        return ""
    if not world.is_calm(world.leader_name(), client, "etcd"):
        return ""
    well = [name for name in world.truth.holders(part) if world.is_calm(name)]
    return (
        f"{client} waits since {waited_s:.1f} s for {part.id:016x} of {part.title}, and {well} have it" if well else ""
    )


@after("alone")
def a_copy_is_made_while_servers_are_well(world: World, number: int, title: str, alone_s: float) -> str:
    """A segment with one copy gets a second one within a bound, while nothing befalls anybody."""
    well = alone_s > ALONE_S_MAX and world.is_calm(world.leader_name(), *world.hosts, "etcd")
    return f"{title}: {number:016x} has had one copy for {alone_s:.1f} s" if well else ""


@after("copying")
def a_copy_goes_on(world: World, name: str, number: int, epoch: int, chunks: int, stands_s: float) -> str:
    """A server sends the next chunk within a bound to a backup that has confirmed all others."""
    if stands_s <= COPYING_S_MAX:
        return ""
    return f"{name} copies bundle {number:016x} in epoch {epoch}, and sent chunk {chunks} {stands_s:.1f} s ago"


@after("begun")
def no_copy_is_made_anew_during_maintenance(world: World, before: State, event: CopyBegun) -> str:
    """While lost copies are held, none begins, but for those that were about to."""
    record, since = before.buffers.get(event.key), world.held_since
    held = since is not None and world.loop.time() - since > ABOUT_TO_BEGIN_S and before.copies_held(world.now())
    if not held or event.leaving or record is None or record.replicas < 2:
        return ""
    return f"a copy of {record.title} begins on {event.target}, though maintenance holds copies"


@after("listed")
def what_is_listed_is_there(world: World, server: str, number: int, gone_s: float) -> str:
    """Memory that a server has dropped is not listed there for long, while nothing befalls it."""
    well = gone_s > LISTED_S_MAX and world.is_calm(world.leader_name(), server, "etcd", for_s=gone_s + DROP_S_MAX)
    return f"{number:016x} is listed at {server}, where it has not been for {gone_s:.1f} s" if well else ""


@after("unlisted")
def what_is_there_is_listed(world: World, server: str, number: int, there_s: float, turns: int) -> str:
    """Memory that the records do not have at a server is listed there, or goes, once its server has renewed, and
    registered again: a few times, as messages to it may be under way, or lost. While a copy is about to begin, its room
    is in no record: for as long as the coordinator asks servers.
    """
    if there_s <= UNLISTED_S_MAX or turns < UNLISTED_TURNS:
        return ""
    if not world.is_calm(*world.hosts, *world.coordinator_names, "etcd", for_s=UNLISTED_ASKS_S):
        return ""
    return f"{server} holds {number:016x} since {there_s:.1f} s, which no record has there and no list shows"


@after("read")
def no_acknowledged_change_is_missing(
    world: World, part: Part, least: dict[int, int], found: dict[int, int], server: str
) -> str:
    """A read shows all that was acknowledged before it began, and nothing that nobody wrote."""
    if part.loose:
        return ""
    for client, number in least.items():
        if found.get(client, 0) < number:
            return (
                f"{server} shows write {found.get(client, 0)} of client {client} to {part.id:016x} of {part.title}: "
                f"{number} was acknowledged"
            )
    for client, number in found.items():
        if number > part.attempted.get(client, 0):
            return f"{server} shows write {number} of client {client} to {part.id:016x}, which nobody made"
    return ""


# ---- locks


@after("lock")
def tokens_rise(world: World, name: str, token: int, highest: int) -> str:
    """A lock's token is higher than every one that was given before it was asked for."""
    return "" if token > highest else f'lock "{name}": token {token} after {highest}'


@after("lock held")
def a_lock_has_one_holder(world: World, name: str, holder: str, other: str) -> str:
    """Nobody gets a lock that somebody holds."""
    return f'lock "{name}" was given to {other} while {holder} held it'


# ---- what the coordinator says


@after("copy")
def copies_lie_in_two_zones(world: World, before: State, state: State, event: CopyBegun) -> str:
    """A new copy is made in another zone than the other one's, if a server there is well and has room."""
    record, now = state.buffers[event.key], world.now()
    if record.replicas < 2:
        return ""  # it moves, and has two copies only while it does
    (segment,) = (each for each in record.segments if each.id == event.segment_id)
    zone = world.plan.zone_of(segment.server)
    if not zone or zone != world.plan.zone_of(event.target) or now is None:
        return ""
    nbytes = Bundles(state.buffers.values()).file_bytes(record, segment)
    free = before.pool(now).free_bytes
    elsewhere = [name for name in world.hosts if world.plan.zone_of(name) != zone and world.is_calm(name)]
    elsewhere = [name for name in elsewhere if before.heard(name, now) and free.get(name, 0) >= nbytes]
    beside = {name for name, held in before.unexplained.items() if held}
    found = [name for name in elsewhere if name not in beside | {event.leaving}]
    well = world.is_calm(world.leader_name(), "etcd", segment.server)
    return f"{record.title} is copied within zone {zone}, and {found} had room" if found and well else ""


@after("commit")
def allocation_is_the_sum_of_the_records(world: World, state: State) -> str:
    """What counts as taken of each server is what the records have there."""
    sums: dict[str, Allocation] = {}
    for record in state.buffers.values():
        for copy in record.copies:
            before = sums.get(copy.server, Allocation())
            sums[copy.server] = Allocation(before.nbytes + copy.file_bytes, before.segments + 1)
    counted = {name: each for name, each in state.allocated.items() if each.segments or each.nbytes}
    return "" if counted == sums else f"allocated {counted}, records have {sums}"


@after("commit")
def groups_move_together(world: World, state: State) -> str:
    """All members of a group have the same servers and epoch."""
    bundles = Bundles(state.buffers.values())
    for record in state.buffers.values():
        for segment in record.segments if record.movable else ():
            for _, other in bundles.members(record, segment):
                if (other.server, other.backup, other.epoch, other.copying_to) != (
                    segment.server, segment.backup, segment.epoch, segment.copying_to,
                ):  # fmt: skip
                    return f"bundle {bundle_of(segment):016x}: {segment} and {other}"
    return ""


@after("stored")
def what_is_shown_is_stored(world: World, state: State, owes: bool) -> str:
    """The buffers that a coordinator knows after it has stored an event are those in the store."""
    stored = {key.removeprefix("buffer/") for key in world.store.record_keys() if key.startswith("buffer/")}
    differs = stored ^ state.buffers.keys()
    return f"stored or shown, not both: {sorted(differs)}" if differs and not owes else ""


@after("list")
def nothing_is_called_lost_that_is_there(world: World, buffers: Any) -> str:
    """What is listed as lost is not where the records have it."""
    for buffer in buffers:
        for segment in buffer.layout.segments:
            part = world.truth.parts.get(segment.id)
            if not segment.lost or part is None or part.loose:
                continue
            for name in {segment.server, segment.backup} - {""}:
                memory = world.hosts[name].segments.get(segment.id)
                if part.is_in(memory) and memory is not None and memory.epoch == (segment.epoch or memory.epoch):
                    return f"{buffer.name} is listed as lost, and {name} has {segment.id:016x}"
    return ""


# ---- at rest


@at_rest
def all_is_whole_again(world: World) -> str:
    """Each segment of two copies has both, on different hosts, and each has all that was acknowledged."""
    state = world.leading_state()
    for record in state.buffers.values() if state is not None else ():
        for segment in record.segments if record.replicas == 2 else ():
            part = world.truth.parts.get(segment.id)
            if part is None or part.may_go or part.loose or part.lost:
                continue
            for name in (segment.server, segment.backup):
                if name and not part.is_in(world.hosts[name].segments.get(segment.id)):
                    return f"{record.title}: {name} has not all of {segment.id:016x} that was acknowledged"
    return ""


@at_rest
def no_acknowledged_change_is_lost(world: World) -> str:
    """Some host has each segment that nobody deleted, but for single copies on a host whose memory was lost."""
    for part in world.truth.parts.values():
        if part.loose and not part.acknowledged:
            continue  # as above
        if not part.may_go and not part.lost and not any(world.truth.holders(part)):
            return f"segment {part.id:016x} of {part.title} is nowhere as it was acknowledged: {part.acknowledged}"
    return ""


@at_rest
def names_are_as_they_were_told(world: World) -> str:
    """Creations, renames, deletions and attributes of files that were acknowledged hold."""
    state = world.leading_state()
    assert state is not None
    for client in world.clients:
        for name, known in client.names.items():
            record = state.buffers.get(name)
            if (known.id if known is not None else None) != (record.id if record is not None else None):
                there, told = [each.id if each is not None else 0 for each in (record, known)]
                return f"{name}: {told:016x} was acknowledged, the records have {there:016x}"
            if record is not None and known is not None and known.attributes not in (None, record.file_attributes):
                return f"{name}: its file's attributes are not the acknowledged {known.attributes!r}"
    return ""


@at_rest
def all_memory_is_accounted_for(world: World) -> str:
    """What a server holds is in the records there, or is listed with its reason."""
    state = world.leading_state()
    assert state is not None
    there = {(copy.server, copy.id) for record in state.buffers.values() for copy in record.copies}
    for name, host in world.hosts.items():
        listed = state.unexplained.get(name, {})
        for number in host.segments:
            if (name, number) not in there and number not in listed:
                return f"{name} holds {number:016x}, which no record has there and no list shows"
        for number in host.quarantined:
            if number not in listed:
                return f"{number:016x} is in quarantine at {name}, and not listed"
    return ""


@at_rest
def allocation_is_what_is_there(world: World) -> str:
    """The bytes that count as taken of a server are those that it has taken, but for memory that was lost."""
    state = world.leading_state()
    assert state is not None
    for name, server in world.servers.items():
        gone = sum(  # of what is lost, or goes as soon as another server has a copy
            copy.file_bytes
            for record in state.buffers.values()
            for copy in record.copies
            if copy.server == name and copy.id not in world.hosts[name].segments
        )
        used = server.engine.figures.counters().segment_bytes
        if used + gone != state.taken_bytes(name):
            return f"{name} has taken {used} bytes, {gone} are lost, and {state.taken_bytes(name)} count as taken"
    return ""


@at_rest
def copies_were_made_for_what_was_lost(world: World) -> str:
    """No storm: once faults have ended, not many more copies begin than were missing."""
    most = COPIES_FACTOR * world.copies_missing + COPIES_BESIDE
    begun = world.copies_begun
    return "" if begun <= most else f"{begun} copies were begun for {world.copies_missing} that were missing"


@at_rest
def nothing_waits_for_ever(world: World) -> str:
    """Each client's last call has come to its end."""
    for client in world.clients:
        if client.doing:
            return f"{client.name} has been at {client.doing} since {client.since:.1f}"
    return ""
