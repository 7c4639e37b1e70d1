"""smb.coordinator.bundles: segments that move together, by state.step alone."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from smb import errors
from smb.coordinator import limits
from smb.coordinator.events import (
    BackupsLost,
    BufferDeleted,
    BufferFailed,
    BufferMade,
    BufferRenamed,
    BufferWanted,
    CopiesEnded,
    CopyBegun,
    DropSegments,
    LeadsLater,
    MakeSegments,
    MoveAllowed,
    Restarted,
    SaveBuffer,
    ServerDied,
    ServerDrained,
    Ticked,
)
from smb.coordinator.memserver_client import NotYetError
from smb.coordinator.messages import buffer_message, creation_of
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.moves.rebalance import plan
from smb.coordinator.moves.wanted_copies import wishes
from smb.coordinator.records import BufferRecord, Held, SegmentRecord
from smb.coordinator.room_to_drain import check_room
from smb.coordinator.state import put
from smb.coordinator.steps.creation import NotNowError
from smb.coordinator.validate import Creation
from smb.rpc import control_pb2 as pb
from tests.support.decisions import MIB, Cluster, registration, returned, server

NAMES = ("w", "m", "v")
Do = Callable[[Cluster], object]


@pytest.fixture
def cluster() -> Cluster:
    """Four servers; "w" has its primary on a and its backup on b, with the states "m", and "v", which is being made."""
    made = Cluster()
    made.register("a", "b")
    made.create("w", replicas=2, server_names=("a",))
    made.register("c", "d")
    join(made, "m")
    made.want("v", like="m", joins=True, replicas=0)
    return made


def join(cluster: Cluster, name: str, **wishes: object) -> BufferRecord:
    return cluster.create(name, **{"like": "w", "joins": True, "replicas": 0, **wishes})  # type: ignore[arg-type]


def segment(cluster: Cluster, name: str = "w") -> SegmentRecord:
    return cluster.state.buffers[name].segments[0]


def ids(cluster: Cluster) -> frozenset[int]:
    return frozenset(segment(cluster, name).id for name in NAMES if name in cluster.state.buffers)


def place(cluster: Cluster) -> tuple[str, str, int, str]:
    """Return where all of them are, with their epoch."""
    of = [record.segments[0] for record in cluster.state.buffers.values() if record.name in NAMES]
    (found,) = {(each.server, each.backup, each.epoch, each.copying_to) for each in of}
    return found


def made(cluster: Cluster) -> None:
    cluster.do(BufferMade("v", cluster.state.buffers["v"].segments))


def begin(cluster: Cluster, target: str = "c", leaving: str = "", **changes: Any) -> None:
    event = CopyBegun("w", segment(cluster).id, target, 1, segment(cluster).epoch + 1, leaving, ids(cluster))
    cluster.do(replace(event, **changes))


def saved(cluster: Cluster) -> set[str]:
    return {effect.record.name for effect in cluster.effects if isinstance(effect, SaveBuffer)}


def test_a_state_lies_where_its_weights_do(cluster: Cluster) -> None:
    """Copy by copy, in their epoch; the weights' record says from then on that it is the first of a bundle."""
    assert place(cluster) == ("a", "b", 1, "")
    assert {segment(cluster, name).group for name in NAMES} == {segment(cluster).id}
    assert cluster.state.buffers["m"].replicas == 2
    assert cluster.state.buffers["m"].shape == cluster.state.buffers["w"].shape
    join(cluster, "other", like=cluster.create("x", 1000, replicas=2).name, shape=(), dtype="")
    assert saved(cluster) == {"other"}
    x, other = (cluster.state.buffers[name] for name in ("x", "other"))
    assert [each.group for each in other.segments] == [each.group for each in x.segments] == [x.segments[0].id]
    cluster.want("y", 1000, like="x", joins=True, replicas=2)
    assert saved(cluster) == {"x", "y"}
    assert cluster.only(MakeSegments).record.segments[0].group == x.segments[0].id


def test_of_one_copy_it_is_like(cluster: Cluster) -> None:
    """Nothing is written down: such segments move by themselves."""
    cluster.create("one", 1000, server_names=("c",))
    record = join(cluster, "its", elements=1000, like="one")
    assert (record.replicas, record.segments[0].server, record.segments[0].group) == (1, "c", 0)
    assert cluster.state.buffers["one"].segments[0].group == 0
    assert not record.movable


def test_records_and_messages(cluster: Cluster) -> None:
    """Records of before are read, those without a bundle are written as they were, and clients are told."""
    for name in NAMES:
        record = cluster.state.buffers[name]
        assert BufferRecord.from_json(record.to_json()) == record
        (shown,) = buffer_message(cluster.state, record).layout.segments
        assert shown.group_id == segment(cluster).id
    alone = cluster.create("alone", 1000, replicas=2)
    assert "group" not in json.loads(alone.to_json())["segments"][0]


@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ({"replicas": 1}, 'replicas must be 2, as for "w", not 1; leave replicas= out'),
        ({"like": "none"}, 'no buffer "none"'),
        ({"like": "news"}, 'with state_of="news": that buffer keeps 2 versions'),
        ({"shape": (5,)}, 'like "w": shape and dtype must be'),
    ],
)
def test_what_can_not_join(cluster: Cluster, wishes: dict[str, object], told: str) -> None:
    """And why."""
    cluster.create("news", 1000, replicas=2, versions=2)
    with pytest.raises(errors.Error, match=told) as error:
        join(cluster, "n", **wishes)
    assert "n" not in cluster.state.buffers
    assert str(error.value).count('create of "n"') <= 1


def test_a_request_that_makes_no_sense() -> None:
    """What contradicts it is refused before anything is looked at."""
    for more, told in (
        ({"like": ""}, "it must name that buffer in like"),
        ({"versions": 2}, "a state has one version, not 2; leave versions= out"),
        ({"server_count": 1}, "leave both out"),
        ({"replicas": 3}, "replicas must be 1 or 2, not 3"),
    ):
        request = pb.CreateBufferRequest(**{"name": "m", "dtype": "float32", "like": "w", "joins": True, **more})
        with pytest.raises(errors.InvalidArgumentError, match=told):
            creation_of(request)
    assert creation_of(pb.CreateBufferRequest(name="m", like="w", joins=True)).replicas == 0


def test_an_existing_buffer_has_to_be_of_the_bundle(cluster: Cluster) -> None:
    """With exist_ok, as it has to be of the same shape."""
    made(cluster)
    assert join(cluster, "m", exist_ok=True) is cluster.state.buffers["m"]
    cluster.create("beside", like="w", replicas=2)
    with pytest.raises(errors.AlreadyExistsError, match='exists, but it does not move together with "w"'):
        join(cluster, "beside", exist_ok=True)


def test_without_room_nothing_is_made(cluster: Cluster) -> None:
    """On either of the two servers."""
    for name in "ab":
        full = Cluster()
        full.register("a", "b")
        full.create("w", replicas=2, server_names=("a",))
        full.do(registration(full.state, server(name, capacity_bytes=6 * MIB), frozenset()))
        with pytest.raises(errors.OutOfMemoryError, match=r'create of "m": no room for .* on the servers of "w"'):
            join(full, "m")
        assert list(full.state.buffers) == ["w"]


def test_so_many_move_together(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their records have to change in one transaction."""
    monkeypatch.setattr(limits, "BUNDLE_BUFFERS_MAX", 3)
    with pytest.raises(errors.OutOfMemoryError, match="at most 3 buffers can move together"):
        join(cluster, "n")


def both_die(cluster: Cluster) -> None:
    for name in ("a", "b"):
        cluster.do(ServerDied(name, 1))


ROLES: dict[str, tuple[Do, tuple[str, str, int, str]]] = {
    "primary dies": (lambda c: (c.do(ServerDied("a", 1)), c.do(Ticked(1))), ("b", "", 2, "")),
    "backup dies": (lambda c: (c.do(ServerDied("b", 1)), c.do(Ticked(1))), ("a", "", 2, "")),
    "primary returns without a part": (
        lambda c: c.do(returned(c.state, "a", 1, ids(c) - {segment(c, "m").id}, 1)),
        ("b", "", 2, ""),
    ),
    "backup returns without a part": (
        lambda c: c.do(returned(c.state, "b", 1, ids(c) - {segment(c).id}, 1)),
        ("a", "", 2, ""),
    ),
    "all return": (lambda c: c.do(returned(c.state, "b", 1, ids(c), 1)), ("a", "b", 1, "")),
    "primary restarts": (lambda c: c.do(returned(c.state, "a", 2, ids(c), 1)), ("b", "", 2, "")),
    # The other one is dead: what is here is not to be lost with what is lacking.
    "primary restarts alone without a part": (
        lambda c: (c.do(ServerDied("b", 1)), c.do(returned(c.state, "a", 2, ids(c) - {segment(c, "m").id}, 1))),
        ("a", "", 2, ""),
    ),
    "backup returns alone without a part": (
        lambda c: (c.do(ServerDied("a", 1)), c.do(returned(c.state, "b", 1, ids(c) - {segment(c, "m").id}, 1))),
        ("a", "", 2, ""),
    ),
    # Both are away, and the first to come back has lost its memory: the other one may have all.
    "primary returns empty, alone": (
        lambda c: (both_die(c), c.do(returned(c.state, "a", 2, frozenset(), 1)), c.do(Ticked(1))),
        ("b", "", 2, ""),
    ),
    "backup returns empty, alone": (
        lambda c: (both_die(c), c.do(returned(c.state, "b", 2, frozenset(), 1)), c.do(Ticked(1))),
        ("a", "", 2, ""),
    ),
    "backup is lost": (lambda c: c.do(BackupsLost("a", frozenset({segment(c, "m").id}), 1)), ("a", "", 2, "")),
    "backup of another is lost": (lambda c: c.do(BackupsLost("a", frozenset({99}), 1)), ("a", "b", 1, "")),
}


@pytest.mark.parametrize("what", ROLES)
def test_roles_change_together(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Of one that is being made, too, and though the store takes one record at a time."""

    change, expected = ROLES[what]
    change(cluster)
    assert place(cluster) == expected
    assert saved(cluster) in (set(), set(NAMES))


def register(cluster: Cluster, name: str, held: frozenset[int], run: int = 1) -> None:
    cluster.do(returned(cluster.state, name, run, held, 1))
    cluster.do(registration(cluster.state, server(name, run), held))


@pytest.mark.parametrize("both", [False, True])
def test_a_backup_takes_over_from_a_primary_that_lacks_a_member(cluster: Cluster, both: bool) -> None:
    """In a new term the primary was heard of first, and was not to lose the rest. If the backup lacks something, too,
    the primary goes on alone.
    """
    made(cluster)
    cluster.do(Restarted(2))
    all_of_them = ids(cluster)
    register(cluster, "a", all_of_them - {segment(cluster, "m").id})
    assert place(cluster) == ("a", "b", 1, "")
    register(cluster, "b", all_of_them - {segment(cluster, "v").id} if both else all_of_them)
    assert place(cluster) == (("a", "", 2, "") if both else ("b", "", 2, ""))
    assert cluster.state.not_led() == (frozenset() if both else all_of_them)
    assert ("a" in cluster.state.suspected) is not both


@pytest.mark.parametrize("dies_first", [False, True])
def test_nobody_waits_for_a_former_primary_without_a_lease(cluster: Cluster, dies_first: bool) -> None:
    """It answers no reads then. The backup waited for its next renewal, which may never come."""
    made(cluster)
    cluster.do(Restarted(2))
    all_of_them = ids(cluster)
    register(cluster, "a", all_of_them - {segment(cluster, "m").id})
    if dies_first:
        cluster.do(ServerDied("a", 1))
    register(cluster, "b", all_of_them)
    if not dies_first:
        assert cluster.state.not_led() == all_of_them
        cluster.do(ServerDied("a", 1))
    assert place(cluster) == ("b", "", 2, "")
    assert cluster.state.former_primaries == {}
    assert {copy.segment_id for copy in cluster.state.copies("b")} == all_of_them


def test_a_backup_does_not_take_over_what_it_may_never_have_made(cluster: Cluster) -> None:
    """Its primary lacks a member, and the coordinator was stopped while another was made: that is judged first."""
    cluster.do(Restarted(2))
    all_of_them = ids(cluster)
    register(cluster, "a", all_of_them - {segment(cluster, "m").id})
    register(cluster, "b", all_of_them - {segment(cluster, "v").id})
    assert place(cluster) == ("a", "b", 1, "")


def test_a_contested_bundle_stays_with_a_primary_that_lacks_a_member(cluster: Cluster) -> None:
    """And nobody has to register again, as often as either of them does."""
    made(cluster)
    cluster.do(Restarted(2))
    lost, newer = segment(cluster, "m").id, {"c": {segment(cluster).id: Held(7)}}
    cluster.state = replace(cluster.state, unexplained=newer)
    for _ in range(2):
        register(cluster, "a", ids(cluster) - {lost})
        register(cluster, "b", ids(cluster))
        assert place(cluster) == ("a", "b", 1, "")
        assert cluster.state.suspected == {"c", "d"}


def test_a_primary_that_can_lead_later_does(cluster: Cluster) -> None:
    """It has another role of the bundle, of an epoch that the records do not know. It leads alone in the next one, once
    every server was heard of, and unless one has newer memory.
    """
    made(cluster)
    cluster.do(Restarted(2))
    member = segment(cluster, "m").id
    event = LeadsLater("a", {member: 1}, {member: 6}, 1)
    for name in "abcd":
        register(cluster, name, ids(cluster) if name in "ab" else frozenset())
    contested = {"c": {segment(cluster).id: Held(7)}}
    for begun, unexplained, asked in (
        (cluster.state.began, {}, event),
        (-math.inf, contested, event),
        (-math.inf, {}, replace(event, name="b")),
        (-math.inf, {}, replace(event, epochs={member: 0})),
        (-math.inf, {}, replace(event, refused={member: 0})),  # it has got another role since it was told that one
        (-math.inf, {}, replace(event, epochs={member: 2**32 - 1})),  # after which there is none
    ):
        cluster.state = replace(cluster.state, began=begun, unexplained=unexplained)
        cluster.do(asked)
        assert place(cluster) == ("a", "b", 1, "")
    cluster.do(event)
    assert place(cluster) == ("a", "", 7, "")
    assert saved(cluster) == set(NAMES)
    cluster.do(event)
    assert saved(cluster) == set()


def test_what_a_primary_cannot_lead_changes_nothing_else(cluster: Cluster) -> None:
    """Not a buffer that has no roles on that server, nor what moves with a creation that was interrupted."""
    cluster.create("one", replicas=1, server_names=("a",))
    number, member = segment(cluster, "one").id, segment(cluster, "m").id
    cluster.do(MoveAllowed("one", number))
    plain = replace(segment(cluster, "one"), id=999, epoch=0)
    striped = replace(cluster.state.buffers["one"], segments=(segment(cluster, "one"), plain))
    cluster.state = put(cluster.state, striped)
    cluster.do(Restarted(2))  # "v" was being made
    for name in "abcd":
        held = ids(cluster) | {number, 999} if name == "a" else ids(cluster) if name == "b" else frozenset[int]()
        register(cluster, name, held)
    cluster.state = replace(cluster.state, began=-math.inf)
    cluster.do(LeadsLater("a", {member: 1}, {member: 6}, 1))
    assert place(cluster) == ("a", "b", 1, "")
    cluster.do(LeadsLater("a", {number: 2}, {number: 6}, 1))
    assert [each.epoch for each in cluster.state.buffers["one"].segments] == [7, 0]


@pytest.mark.parametrize("run", [1, 2])
def test_a_primary_that_lacks_a_member_hears_first_that_its_backup_took_over(cluster: Cluster, run: int) -> None:
    """It answers reads of the others until it has the answer to its registration. A run that has ended does not."""
    made(cluster)
    register(cluster, "a", ids(cluster) - {segment(cluster, "m").id}, run)
    assert place(cluster) == ("b", "", 2, "")
    assert cluster.state.not_led() == (ids(cluster) if run == 1 else frozenset())
    assert len(cluster.state.copies("b")) == (0 if run == 1 else 3)
    cluster.renew("a", run)
    assert len(cluster.state.copies("b")) == 3


def test_changes_are_bounded_by_whole_bundles(cluster: Cluster) -> None:
    """What moves together changes at once; what does not fit any more comes with the next event."""
    cluster.create("w2", 1000, replicas=2, server_names=("a",))
    join(cluster, "m2", elements=1000, like="w2")
    cluster.create("w3", 1000, replicas=2, server_names=("a",))
    cluster.do(ServerDied("a", 1))
    changed = []
    while any(isinstance(effect, SaveBuffer) for effect in cluster.do(Ticked(3))):
        changed.append(saved(cluster))
    assert [len(names) for names in changed] == [3, 3]
    assert set(NAMES) in changed


def degraded(cluster: Cluster) -> None:
    made(cluster)
    cluster.do(ServerDied("b", 1))
    cluster.do(Ticked())


def test_a_copy_is_of_all(cluster: Cluster) -> None:
    """It is begun, made and given up for all; any of them stands for all."""
    degraded(cluster)
    (wish,) = wishes(list(cluster.state.buffers.values()), cluster.state.pool(cluster.now))
    assert {member.id for _, member in wish.members} == ids(cluster)
    begin(cluster)
    assert place(cluster) == ("a", "", 3, "c")
    assert saved(cluster) == set(NAMES)
    assert not wishes(list(cluster.state.buffers.values()), cluster.state.pool(cluster.now))
    cluster.do(CopiesEnded("a", {segment(cluster, "v").id: 2}, whole=True, changes_max=1))
    assert place(cluster) == ("a", "", 3, "c")  # an old word
    cluster.do(CopiesEnded("a", {segment(cluster, "v").id: 3}, whole=False, changes_max=1))
    assert place(cluster) == ("a", "", 4, "")
    begin(cluster)
    cluster.do(BufferDeleted("w", missing_ok=False))
    cluster.do(CopiesEnded("a", {segment(cluster, "m").id: 5}, whole=True, changes_max=1))
    assert place(cluster) == ("a", "c", 6, "")
    cluster.do(BufferRenamed("m", "w"))  # the name says nothing
    join(cluster, "x", like="v")
    assert segment(cluster, "x").group == segment(cluster).group != segment(cluster).id


def test_a_copy_without_one_of_them_is_not_begun(cluster: Cluster) -> None:
    """Its target was not given all, or one of them is not there yet."""
    cluster.do(ServerDied("b", 1))
    cluster.do(Ticked())
    assert not wishes(list(cluster.state.buffers.values()), cluster.state.pool(cluster.now))
    with pytest.raises(errors.NotFoundError, match='buffer "v", which moves together with it, is still being made'):
        begin(cluster)
    made(cluster)
    with pytest.raises(
        errors.NotFoundError, match='moves together with one of buffer "v", for which c has not made room'
    ):
        begin(cluster, members=ids(cluster) - {segment(cluster, "v").id})
    begin(cluster, members=ids(cluster) | {99})  # one that was deleted meanwhile
    assert place(cluster) == ("a", "", 3, "c")


@pytest.mark.parametrize(("leaving", "stays"), [("a", "b"), ("b", "a")])
def test_a_drain_takes_all_of_them_along(cluster: Cluster, leaving: str, stays: str) -> None:
    """In one copy, with room for all; the server that they leave is told to drop each."""
    made(cluster)
    cluster.do(ServerDrained(leaving))
    (wish,) = wishes(list(cluster.state.buffers.values()), cluster.state.pool(cluster.now))
    begin(cluster, wish.target, leaving)
    assert place(cluster) == (stays, "", 2, wish.target)
    drop = cluster.only(DropSegments)
    assert {(each.id, each.server) for each in drop.segments} == {(number, leaving) for number in ids(cluster)}
    assert drop.epoch == 2
    cluster.do(CopiesEnded(stays, {segment(cluster).id: 2}, whole=True))
    assert place(cluster) == (stays, wish.target, 3, "")


def test_there_has_to_be_room_for_all(cluster: Cluster) -> None:
    """On one server: one with room for some of them takes none."""
    degraded(cluster)
    records, pool = list(cluster.state.buffers.values()), cluster.state.pool(cluster.now)
    most = sum(segment(cluster, name).file_bytes for name in NAMES)
    some = replace(pool, free_bytes={"a": most, "c": most - 1, "d": most - 1})
    assert wishes(records, some) == []
    with pytest.raises(errors.OutOfMemoryError, match="no room for copies of"):
        check_room(records, some, "a")
    enough = replace(some, free_bytes={**some.free_bytes, "d": most})
    assert [wish.target for wish in wishes(records, enough)] == ["d"]


def test_a_rebalance_moves_them_as_one(cluster: Cluster) -> None:
    """Their bytes count together, and there is one move for all, or none where it would only change places."""
    made(cluster)
    records, pool = list(cluster.state.buffers.values()), cluster.state.pool(cluster.now)
    assert plan(records, pool, dict.fromkeys("abcd", 64 * MIB)) == []
    cluster.create("alone", server_names=("a",))
    records, pool = list(cluster.state.buffers.values()), cluster.state.pool(cluster.now)
    moves = plan(records, pool, dict.fromkeys("abcd", 64 * MIB))
    assert len(moves) == 1
    assert moves[0].nbytes == sum(segment(cluster, name).file_bytes for name in NAMES)
    wanted = {move.segment_id: move for move in moves}
    (wish,) = wishes(records, pool, moves=wanted)
    assert {member.id for _, member in wish.members} == ids(cluster)


def test_nothing_joins_what_is_moving(cluster: Cluster) -> None:
    """It would be in one copy alone; a server that is being drained is waited for, too."""
    degraded(cluster)
    one = join(cluster, "n")
    assert [(each.server, each.backup, each.epoch) for each in one.segments] == [("a", "", 2)]
    begin(cluster, members=ids(cluster) | {one.segments[0].id})
    with pytest.raises(NotNowError, match='create of "x": to move together with "w" it waits for the copy'):
        join(cluster, "x")
    cluster.do(CopiesEnded("a", {segment(cluster).id: 3}, whole=True))
    cluster.do(ServerDrained("a"))
    with pytest.raises(NotNowError, match="has left a, which is being drained"):
        join(cluster, "x")


def test_nothing_joins_what_is_lost(cluster: Cluster) -> None:
    """It would have one copy until somebody deletes the other buffer, and nothing but a line of the log said so."""
    degraded(cluster)
    before = cluster.state
    gone = segment(cluster)
    cluster.state = replace(before, missing={gone.server: frozenset({gone.id})})
    with pytest.raises(errors.NotFoundError, match=r'memory of "w" \(on a\) was lost; delete that buffer'):
        join(cluster, "x")
    assert "x" not in cluster.state.buffers
    cluster.state = before
    join(cluster, "x")


def test_a_state_waits_for_a_lost_copy_that_can_be_made(cluster: Cluster) -> None:
    """It is put off as long as another server has room for that. Not for ever: who has waited asks without."""

    def ask(*, waits: bool) -> None:
        creation = Creation("n", (), "", like="w", joins=True, replicas=0)
        cluster.do(BufferWanted(creation, lambda: next(cluster.ids), waits=waits))

    before = cluster.state
    ask(waits=True)
    cluster.state = before
    degraded(cluster)
    with pytest.raises(NotNowError, match="it waits for the lost copy"):
        ask(waits=True)
    before = cluster.state
    ask(waits=False)
    cluster.state = before
    for name in "cd":
        cluster.do(ServerDied(name, 1))
    ask(waits=True)
    assert "n" in cluster.state.buffers


def test_what_was_made_for_other_roles_is_taken_back(cluster: Cluster) -> None:
    """Its weights moved while it was made: all copies that may be there are dropped, and it is tried again."""
    (before,) = cluster.state.buffers["v"].segments
    copies = cluster.state.buffers["v"].copies
    cluster.do(ServerDied("b", 1))
    cluster.do(Ticked())
    with pytest.raises(NotNowError, match='buffer "v" moves together has moved meanwhile'):
        cluster.do(BufferMade("v", (before,)))
    cluster.do(BufferFailed("v", copies))
    assert {(each.id, each.server) for each in cluster.only(DropSegments).segments} == {
        (before.id, "a"),
        (before.id, "b"),
    }
    assert "v" not in cluster.state.buffers
    join(cluster, "v")
    assert place(cluster) == ("a", "", 2, "")


@pytest.mark.parametrize("away", [True, False])
def test_a_buffer_is_not_made_for_roles_that_it_no_longer_has(cluster: Cluster, away: bool) -> None:
    """Its primary was taken for dead before it answered that it has its part. It would lead in the epoch before."""
    cluster.want("n", replicas=2, server_names=("a",))
    before = cluster.state.buffers["n"]
    (part,) = before.segments
    if away:
        cluster.do(ServerDied(part.server, 1))
        cluster.do(Ticked())
        assert cluster.state.buffers["n"].segments[0].server == part.backup
    with pytest.raises(NotNowError, match="a server of it was away") if away else nullcontext():
        cluster.do(BufferMade("n", before.segments))
    assert cluster.state.buffers["n"].ready is not away


def test_a_buffer_is_made_though_its_second_copy_took_too_long(cluster: Cluster) -> None:
    """Its primary has gone on alone meanwhile, in the next epoch. To make it again might take as long again."""
    cluster.want("n", replicas=2, server_names=("a",))
    before = cluster.state.buffers["n"]
    (part,) = before.segments
    cluster.do(BackupsLost("a", frozenset({part.id})))
    assert cluster.state.buffers["n"].degraded
    cluster.do(BufferMade("n", before.segments))
    assert cluster.state.buffers["n"].ready
    assert cluster.state.buffers["n"].degraded


@pytest.mark.parametrize("registers", [False, True])
def test_a_server_that_registers_is_not_avoided(cluster: Cluster, registers: bool) -> None:
    """It can take a copy in a moment. That went to another server, perhaps in the zone of the other one."""
    made(cluster)
    cluster.do(ServerDied("b", 1))
    cluster.do(Ticked())
    targets: list[str] = []

    async def create(at: Any, *_: object) -> int:
        targets.append(at.name)
        raise NotYetError("wait") if registers else errors.UnavailableError("no")

    async def drop(*_: object, **_how: object) -> int:
        raise errors.UnavailableError("no")

    async def take_roles(*_: object) -> frozenset[int]:
        return frozenset()

    async def commit(event: Any) -> Any:
        cluster.do(event)
        return SimpleNamespace(effects=cluster.effects, state=cluster.state)

    async def nothing(*_: Any) -> None:
        pass

    async def twice() -> None:
        commit_log: Any = SimpleNamespace(state=cluster.state, now=lambda: cluster.now, commit=commit)
        servers: Any = SimpleNamespace(create=create, take_roles=take_roles, drop=drop)
        maker = CopyMaker(commit_log, servers, nothing, nothing)
        for _ in range(2):
            await maker.begin()
            cluster.seconds += 1.0

    asyncio.run(twice())
    assert len(targets) >= 2
    assert len(set(targets)) == (1 if registers else 2)


@pytest.mark.parametrize("lost", [False, True])
def test_a_target_is_given_all_and_the_copy_that_stays_is_asked_for_all(cluster: Cluster, lost: bool) -> None:
    """In this order: confirmed, and then as for one: made, yielded, confirmed, stored, confirmed in its new role. If
    the copy that stays was lost while the change was stored, the other one is not dropped.
    """
    made(cluster)
    cluster.do(ServerDrained("a"))
    asked: list[tuple[str, str, int, int]] = []
    dropped: list[object] = []

    async def create(at: Any, record: Any, one: SegmentRecord, floor: int, replica: pb.Replica, _: object) -> int:
        asked.append(("make", at.name, one.id, one.group))
        assert (one.epoch, replica.epoch, replica.segment_id, replica.copying) == (2, 2, one.id, True)
        return 0

    async def take_roles(at: Any, replicas: Any) -> frozenset[int]:
        kinds = ["yield" if each.yields else "ask" if each.confirm else "tell" for each in replicas]
        asked.extend((kind, at.name, each.segment_id, 0) for kind, each in zip(kinds, replicas, strict=True))
        if lost and replicas[0].epoch == 2:
            raise errors.UnavailableError("b has no such role")
        return frozenset()

    async def commit(event: Any) -> Any:
        cluster.do(event)
        return SimpleNamespace(effects=cluster.effects, state=cluster.state)

    async def tell(*_: Any) -> None:
        raise AssertionError("told without being asked")

    async def drop(committed: Any) -> None:
        dropped.extend(each for each in committed.effects if isinstance(each, DropSegments))

    commit_log: Any = SimpleNamespace(state=cluster.state, now=lambda: cluster.now, commit=commit)
    servers: Any = SimpleNamespace(create=create, take_roles=take_roles)
    asyncio.run(CopyMaker(commit_log, servers, tell, drop).begin())
    assert [what for what, *_ in asked[::3]] == ["ask", "make", "yield", "ask", "tell", "ask"]
    assert {number for _, _, number, _ in asked} == ids(cluster)
    assert {group for what, _, _, group in asked if what == "make"} == {segment(cluster).group}
    assert place(cluster)[:3] == ("b", "", 2)
    assert len(dropped) == (not lost)
    assert cluster.state.suspected == ({"a"} if lost else set())
