"""Faults that the product once had, or was near to, put back one by one: `--plant NAME`. Each has to be found.

A plant is a generator of (object, attribute, what to put there); README.md says how to add one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from memserver.registrant import Registrant
from memserver.replication import Replication, Taken
from memserver.terms import CoordinatorTerms
from smb.coordinator import commit_log, steps
from smb.coordinator.drop_rules import ground_to_drop
from smb.coordinator.events import (
    BufferMade,
    EraseBuffer,
    HeldUp,
    Instant,
    MoveAllowed,
    Restarted,
    ServerCounted,
    ServerRegistered,
)
from smb.coordinator.memserver_client import RunLiveness
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.registrations import Registrations
from smb.coordinator.replica_role_changes import RoleChanges
from smb.coordinator.segment_maker import SegmentMaker
from smb.coordinator.state import State, Step, delete
from smb.coordinator.steps import copies, creation, names, servers, unexplained
from smb.errors import NotFoundError
from tests.simulator.engine import Engine

Replaced = Iterator[tuple[Any, str, Any]]
PLANTS: dict[str, Callable[[], Replaced]] = {}


def plant(make: Callable[[], Replaced]) -> Callable[[], Replaced]:
    """Offer it under the function's name."""
    PLANTS[make.__name__.replace("_", "-")] = make
    return make


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Have the product this fault inside the block; None: it stays as it is."""
    replaced = [patch.object(*each) for each in PLANTS[name]()] if name is not None else []
    for each in replaced:
        each.start()
    try:
        yield
    finally:
        for each in replaced:
            each.stop()


@plant
def dead_by_port() -> Replaced:
    """A server is alive if somebody listens at its port: an empty run that took its place goes on alone."""

    async def look(self: RoleChanges, server: Any) -> RunLiveness:
        connections: Any = self._servers._connections
        try:
            await asyncio.wait_for(connections.knock(server.control_address), 0.5)
        except ConnectionRefusedError:
            await self._commit_log.commit(steps.ServerDied(server.name, server.instance_id))
            return RunLiveness.DEAD
        except (OSError, asyncio.TimeoutError):
            return RunLiveness.MUTE
        return RunLiveness.ALIVE

    async def confirmed(self: RoleChanges, server: str, segment_ids: frozenset[int]) -> frozenset[int]:
        return segment_ids

    yield RoleChanges, "look", look
    yield RoleChanges, "_confirmed", confirmed


@plant
def unknown_dropped() -> Replaced:
    """What no record has goes, however old the records are."""

    def ground(server: str, number: int, held: Any, where: Any, confirmed: Any, *, covered: bool) -> Any:
        return ground_to_drop(server, number, replace(held, quarantined=False), where, confirmed, covered=True)

    yield servers, "ground_to_drop", ground
    yield unexplained, "ground_to_drop", ground


@plant
def list_before_copies() -> Replaced:
    """What a server's list lacks is lost, though copies were made since the list."""

    async def asked_back(self: Registrations, event: ServerRegistered) -> ServerRegistered:
        records = self._commit_log.state.buffers.values()
        here = {copy.id for record in records for copy in record.copies if copy.server == event.server.name}
        return replace(event, missing=frozenset(here - event.held.keys()))

    yield Registrations, "_asked_back", asked_back


@plant
def save_without_reserve() -> Replaced:
    """On a full disk no change of roles can be stored."""
    yield commit_log, "_CREATIONS", (object,)


@plant
def old_memory_believed() -> Replaced:
    """Memory from before a loss is taken for the copy that was made since."""
    yield copies, "is_that_copy", lambda *_: True
    yield copies, "not_those_copies", lambda *_: frozenset()
    yield servers, "not_those_copies", lambda *_: frozenset()


@plant
def room_stays() -> Replaced:
    """Nobody drops the room for a copy that never began."""

    async def give_back(*_: object) -> None:
        pass

    drop = Registrant._drop

    def drop_all(self: Registrant, reply: Any, held: Any) -> None:
        reply.ClearField("room_segment_ids")
        drop(self, reply, held)

    yield CopyMaker, "_give_room_back", give_back
    yield Registrant, "_drop", drop_all


@plant
def made_by_another_run() -> Replaced:
    """A buffer counts as made though a server was started anew meanwhile."""
    made = steps._STEPS[BufferMade]

    def step(state: State, event: BufferMade, now: Instant) -> Step:
        return made(state, replace(event, instances={}), now)

    yield steps, "_STEPS", {**steps._STEPS, BufferMade: step}


@plant
def attempts_forgotten() -> Replaced:
    """A creation that is asked for again, as its answer was lost, is another one."""
    yield creation, "made_before", lambda *_: None


@plant
def tokens_begin_again() -> Replaced:
    """A lock that was freed as nobody used it counts its tokens from the beginning."""
    make = SegmentMaker._make_segment

    async def from_zero(self: SegmentMaker, state: State, *rest: Any) -> int:
        return await make(self, replace(state, token_floor=0), *rest)

    yield SegmentMaker, "_make_segment", from_zero


@plant
def moved_without_a_question() -> Replaced:
    """A lease that runs is taken for a copy that is there: servers are not asked before copies move."""

    async def confirm(*_: object, **__: object) -> None:
        pass

    yield CopyMaker, "_confirm", confirm


@plant
def lock_with_one_copy() -> Replaced:
    """A lock that was made beside one server never gets its second copy."""
    allowed = steps._STEPS[MoveAllowed]

    def step(state: State, event: MoveAllowed, now: Instant) -> Step:
        record = state.buffers.get(event.key)
        if record is not None and record.replicas > 1:
            raise NotFoundError("it has two copies")
        return allowed(state, event, now)

    yield steps, "_STEPS", {**steps._STEPS, MoveAllowed: step}


@plant
def quarantine_of_what_is_gone() -> Replaced:
    """A lock that is freed stays listed in quarantine at a server that held a copy beside the records, or registered
    while it was told to drop it. Both mends have to go: each hides the other one's fault.
    """
    counted = steps._STEPS[ServerCounted]

    def step(state: State, event: ServerCounted, now: Instant) -> Step:
        return counted(state, replace(event, dropped=0), now)

    yield names, "end_copies_beside", lambda state, *_: state
    yield steps, "_STEPS", {**steps._STEPS, ServerCounted: step}


@plant
def room_beside_lost_memory() -> Replaced:
    """Memory that a server has lost counts as held: what it holds too much goes unseen. Both mends have to go: nothing
    is made for a coordinator that its server has left, either.
    """
    yield State, "held_bytes_max", State.taken_bytes
    yield CoordinatorTerms, "check_not_left", lambda *_: None


@plant
def late_calls_are_obeyed() -> Replaced:
    """A server drops memory, and takes roles, for a coordinator that led before the records were restored."""
    yield CoordinatorTerms, "check_not_left", lambda *_: None
    yield CoordinatorTerms, "check", lambda *_, **_words: None


@plant
def former_primary_serves() -> Replaced:
    """A server that is back with memory that has another primary by now is not told to stop serving it, and has a lease
    for it. Both mends have to go.
    """
    take = Replication.take

    def take_some(self: Replication, parts: Any, *arguments: Any, **words: Any) -> Taken:
        return take(self, [part for part in parts if part.role or part.let_move or part.confirm], *arguments, **words)

    yield Replication, "take", take_some
    yield Replication, "note_records", lambda *_: None


@plant
def pair_without_a_member() -> Replaced:
    """A pair that is taken up goes on as one, though its backup lacks what moves together with it: a buffer that joined
    the bundle where the records had it. Both mends have to go: nothing joins before the records are right, either.
    """
    yield State, "was_restored", False
    yield creation, "_check_records_are_right", lambda *_: None
    yield unexplained._Members, "held", lambda *_: frozenset()
    yield unexplained._Members, "made", lambda *_: 0


@plant
def member_of_no_record() -> Replaced:
    """A member of a bundle that no record has stands for the bundle: nobody asks for its copy."""

    def all_members(self: Engine, bundle: Any, _: int) -> list[int]:
        return list(bundle.members)

    yield Engine, "_with_role", all_members


@plant
def half_made_by_the_records() -> Replaced:
    """A buffer is taken back if the records show it as half made, though they may be older than its servers."""

    restarted = steps._STEPS[Restarted]

    def step(state: State, event: Restarted, now: Instant) -> Step:
        state, effects = restarted(state, event, now)
        for record in [each for each in state.buffers.values() if each.id in state.interrupted]:
            state = delete(state, record)
            effects = (*effects, EraseBuffer(record.key))
        return state, effects

    yield steps, "_STEPS", {**steps._STEPS, Restarted: step}


@plant
def joined_to_what_is_lost() -> Replaced:
    """A buffer may be made to move together with one whose memory is lost."""
    placed = creation._placed_together

    def place(state: State, *rest: Any, **how: Any) -> Any:
        return placed(replace(state, missing={}), *rest, **how)

    yield creation, "_placed_together", place


@plant
def held_up_unnoticed() -> Replaced:
    """Leases that ran out while the coordinator stood still are believed to be over. Both mends have to go: most
    servers are late at once, too.
    """

    def step(state: State, _: HeldUp, __: Instant) -> Step:
        return state, ()

    yield steps, "_STEPS", {**steps._STEPS, HeldUp: step}
    yield State, "late", lambda *_: []


@plant
def most_are_believed_gone() -> Replaced:
    """If most servers are late at once, all of them count as gone."""
    yield State, "late", lambda *_: []
