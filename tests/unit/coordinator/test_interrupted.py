"""smb.coordinator.steps.interrupted: creations whose end the records do not show, by state.step alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from smb import errors
from smb.coordinator.events import (
    BufferDeleted,
    BufferRenamed,
    DropSegments,
    EraseBuffer,
    Event,
    Restarted,
    SaveBuffer,
    ServerDied,
    Ticked,
    UnexplainedJudged,
    WakeOpeners,
)
from smb.coordinator.lineage import Stamp
from smb.coordinator.records import UNKNOWN_EPOCH, Held, Kind
from smb.coordinator.replicas import CopyRole
from smb.coordinator.state import load
from smb.coordinator.steps.creation import NotNowError
from smb.drop_reasons import Ground
from tests.support.decisions import Cluster, registration, returned, server

NEW, USED = Held(0, untouched=True), Held(0)


@pytest.fixture
def cluster() -> Cluster:
    """Three servers; "half" is being made on a and b when the coordinator stops."""
    made = Cluster()
    made.register("a", "b", "c")
    made.want("half", server_names=("a", "b"), attempt_id=7)
    return again(made)


def again(cluster: Cluster, term: int = 2) -> Cluster:
    """A coordinator that starts on these records."""
    state = load(cluster.state.buffers.values(), cluster.state.servers.values(), lineage=cluster.state.lineage)
    begun = Cluster(state, cluster.seconds, ids=cluster.ids)
    begun.do(Restarted(term))
    return begun


def back(cluster: Cluster, name: str, held: Held | None, run: int = 1) -> None:
    """A server registers, with all that the records place on it, or without."""
    there = {copy.id for record in cluster.state.buffers.values() for copy in record.copies if copy.server == name}
    with_it = there if held is not None else set()
    cluster.do(returned(cluster.state, name, run, with_it, as_held=held))
    cluster.do(registration(cluster.state, server(name, run), with_it, as_held=held))


def judged(cluster: Cluster) -> list[str]:
    """Return the names that clients see then."""
    cluster.do(UnexplainedJudged(changes_max=1))
    return [record.name for record in cluster.state.listed()]


@pytest.mark.parametrize("held", [NEW, USED])
def test_it_is_made_if_each_segment_is_there(cluster: Cluster, held: Held) -> None:
    """Once every server was heard of. Until then nobody sees it, takes its name, or renames it."""
    back(cluster, "a", held)
    back(cluster, "c", None)
    assert judged(cluster) == []
    events: tuple[Event, ...] = (
        BufferRenamed("half", "other", replace=True),
        BufferRenamed("w", "half", replace=True),
    )
    cluster.create("w", server_names=("c",))
    with pytest.raises(errors.UnavailableError, match="waits until b has said what it holds"):
        cluster.do(events[0])
    with pytest.raises(errors.AlreadyExistsError):
        cluster.do(events[1])
    for attempt_id, outcome in ((0, "not applied"), (6, "not applied"), (7, "unknown")):
        with pytest.raises(errors.UnavailableError, match="waits until b has said what it holds") as told:
            cluster.state.check_known(Kind.BUFFER, "half", attempt_id=attempt_id)
        assert told.value.outcome == outcome
    with pytest.raises(errors.UnavailableError, match="waits until b has said what it holds"):
        cluster.want("half")
    with pytest.raises(errors.UnavailableError, match="or delete the buffer"):
        cluster.state.check_known(Kind.BUFFER, "half")
    assert cluster.want("half", attempt_id=7) == ()
    back(cluster, "b", held)
    assert judged(cluster) == ["half", "w"]
    assert cluster.only(SaveBuffer).record.ready
    assert cluster.only(WakeOpeners).key == "half"
    cluster.state.check_known(Kind.BUFFER, "half")
    for name in ("a", "b"):  # what they hold is judged by the record now
        with pytest.raises(errors.NotFoundError, match="must register again"):
            cluster.renew(name)
        back(cluster, name, held)
    assert cluster.state.lost_segments(cluster.now) == set()


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("run", [1, 2])
def test_it_is_taken_back_if_a_part_is_nowhere(cluster: Cluster, first: str, run: int) -> None:
    """Nobody has written to the other one. That is dropped, and the name is free."""
    for name in dict.fromkeys((first, "a", "b", "c")):
        assert judged(cluster) == []
        assert cluster.effects == ()
        back(cluster, name, NEW if name == "a" else None, run if name == "b" else 1)
    assert judged(cluster) == []
    assert cluster.only(EraseBuffer).key == "half"
    assert cluster.only(DropSegments).ground is Ground.NEVER_MADE
    assert cluster.only(WakeOpeners).key == "half"
    assert cluster.state.buffers == {}
    assert cluster.state.interrupted == {}
    assert cluster.state.allocation("a").nbytes == cluster.state.allocation("b").nbytes == 0
    cluster.want("half", attempt_id=7)
    assert cluster.only(SaveBuffer).record.name == "half"


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_copy_elsewhere_counts_if_it_is_newer(epoch: int) -> None:
    """Otherwise it is one that the records gave up: nobody would take it up."""
    cluster = Cluster()
    cluster.register("a", "b", "c")
    cluster.want("half", replicas=2, server_names=("a",))
    (segment,) = cluster.state.buffers["half"].segments
    (other,) = {"a", "b", "c"} - {segment.server, segment.backup}
    cluster = again(cluster)
    for name in (segment.server, segment.backup):
        back(cluster, name, None)
    there, found = {segment.id}, replace(NEW, epoch=epoch)
    cluster.do(returned(cluster.state, other, 1, there, as_held=found))
    cluster.do(registration(cluster.state, server(other), there, as_held=found))
    assert judged(cluster) == (["half"] if epoch > 1 else [])
    assert ("half" in cluster.state.buffers) == (epoch > 1)


def test_several_are_decided_at_once() -> None:
    """That one counts as made does not hold up the next."""
    cluster = Cluster()
    cluster.register("a", "b")
    for name in ("u", "v", "w"):
        cluster.want(name, elements=1000, server_names=("a",))
    cluster = again(cluster)
    for name in ("a", "b"):
        back(cluster, name, NEW)
    cluster.do(UnexplainedJudged())
    assert [record.name for record in cluster.state.listed()] == ["u", "v", "w"]
    assert cluster.state.suspected == {"a"}


def test_what_is_being_made_was_not_used(cluster: Cluster) -> None:
    """a was still making its part when it was heard, and b was never asked."""
    back(cluster, "a", Held(0, whole=False, begun=True))
    back(cluster, "b", None)
    back(cluster, "c", None)
    assert judged(cluster) == []
    assert cluster.state.buffers == {}


def test_what_was_written_to_stays(cluster: Cluster) -> None:
    """The records are older than the buffer, and b has lost its part since: that part alone is lost."""
    back(cluster, "a", USED)
    back(cluster, "b", None, 2)
    back(cluster, "c", None)
    assert judged(cluster) == ["half"]
    back(cluster, "a", USED)
    back(cluster, "b", None, 2)
    assert cluster.state.lost_segments(cluster.now) == {cluster.state.buffers["half"].segments[1].id}


def test_a_server_that_is_away_is_waited_for(cluster: Cluster) -> None:
    """It may have a part that was written to. A deletion does not wait, and wakes who asks for the name again."""
    back(cluster, "a", NEW)
    back(cluster, "c", None)
    cluster.do(ServerDied("b", 1))
    assert judged(cluster) == []
    assert cluster.effects == ()
    with pytest.raises(errors.NotFoundError):
        cluster.do(BufferDeleted("half", missing_ok=False, id=12345))
    cluster.do(BufferDeleted("half", missing_ok=False))
    assert cluster.only(DropSegments).ground is Ground.DELETED
    assert cluster.only(WakeOpeners).key == "half"
    assert cluster.state.buffers == {}
    assert cluster.state.interrupted == {}


def test_one_copy_of_two_is_enough() -> None:
    """b was lost with its memory while the records were away: a goes on alone, and c gets a copy later."""
    cluster = Cluster()
    cluster.register("a", "b", "c")
    cluster.want("half", replicas=2, server_names=("a",))
    (segment,) = cluster.state.buffers["half"].segments
    cluster = again(cluster)
    for name in ("a", "b", "c"):
        back(cluster, name, replace(USED, epoch=1) if name == segment.server else None, 2 if name == "b" else 1)
    assert judged(cluster) == ["half"]
    (segment,) = cluster.state.buffers["half"].segments
    for name in ("a", "b", "c"):
        back(cluster, name, replace(USED, epoch=1) if name == segment.server else None, 2 if name == "b" else 1)
    (after,) = cluster.state.buffers["half"].segments
    assert (after.server, after.backup, after.epoch) == (segment.server, "", 2)


def test_a_report_counts_while_its_server_lives() -> None:
    """a has its copy, b never made one. Then a is gone: b does not take over, and a is waited for."""
    cluster = Cluster()
    cluster.register("a", "b", "c")
    cluster.want("half", replicas=2, server_names=("a",))
    before = cluster.state.buffers["half"]
    (segment,) = before.segments
    cluster = again(cluster)
    back(cluster, segment.server, replace(NEW, epoch=1))
    cluster.do(ServerDied(segment.server, 1))
    for name in {"a", "b", "c"} - {segment.server}:
        back(cluster, name, None)
    cluster.do(Ticked())
    assert judged(cluster) == []
    assert cluster.state.buffers["half"] == before
    back(cluster, segment.server, None, 2)
    assert judged(cluster) == []
    assert cluster.state.buffers == {}


def test_a_primary_that_was_restarted_does_not_go_on_with_its_backup() -> None:
    """It may have forgotten changes that it had not forwarded: one copy goes on."""
    cluster = Cluster()
    cluster.register("a", "b")
    cluster.want("half", replicas=2, server_names=("a",))
    cluster = again(cluster)
    back(cluster, "b", replace(USED, epoch=1))
    back(cluster, "a", replace(USED, epoch=1), 2)
    assert judged(cluster) == ["half"]
    (segment,) = cluster.state.buffers["half"].segments
    assert (segment.server, segment.backup, segment.epoch) == ("b", "", 2)


LEADS, FOLLOWS = replace(USED, epoch=1, primary=True), replace(USED, epoch=1, backup=True)


def pair_in_question() -> Cluster:
    """A buffer that is being made on "a" and "b", its backup, when the coordinator stops. "b" is heard of."""
    cluster = Cluster()
    cluster.register("a", "b")
    cluster.want("half", replicas=2, server_names=("a",))
    cluster = again(cluster)
    back(cluster, "b", FOLLOWS)
    return cluster


def roles(cluster: Cluster, name: str) -> list[CopyRole]:
    return [copy.role for copy in cluster.state.copies(name)]


def test_a_primary_that_was_restarted_answers_nobody_until_it_is_decided() -> None:
    """Its backup takes over then, and may hear of that seconds before it does: two servers would answer reads."""
    cluster = pair_in_question()
    back(cluster, "a", replace(USED, epoch=1), 2)
    assert roles(cluster, "a") == []
    assert roles(cluster, "b") == [CopyRole.BACKUP]
    assert judged(cluster) == ["half"]
    assert roles(cluster, "a") == []
    (segment,) = cluster.state.buffers["half"].segments
    assert (segment.server, segment.backup, segment.epoch) == ("b", "", 2)


@pytest.mark.parametrize("dies", [False, True])
def test_nobody_takes_over_from_a_server_that_has_not_heard_of_it(dies: bool) -> None:
    """ "a" never made its part of "state", and leads "w", which moves together with that. "b" goes on alone with both,
    since nobody knows what "c" had: it is told so when "a" has registered and renewed, or its lease has ended.
    """
    cluster = Cluster()
    cluster.register("a", "b", "c", "d")
    cluster.create("w", replicas=2, server_names=("a", "c"), elements=1 << 20, stripe_bytes=2 << 20)
    cluster.want("state", like="w", joins=True, replicas=2)
    pairs = [(each.server, each.backup) for each in cluster.state.buffers["state"].segments]
    (first, backup), (second, its_backup) = pairs
    assert len({first, backup, second, its_backup}) == 4
    cluster = again(cluster)
    w, state = (cluster.state.buffers[name].segments for name in ("w", "state"))
    for name, numbers in (
        (first, [w[0].id]),
        (backup, [w[0].id, state[0].id]),
        (second, [w[1].id, state[1].id]),
        (its_backup, [w[1].id, state[1].id]),
    ):
        held = Held(1, untouched=True, primary=name in (first, second), backup=name in (backup, its_backup))
        cluster.do(returned(cluster.state, name, 1, numbers, as_held=held))
        cluster.do(registration(cluster.state, server(name), numbers, as_held=held))
    cluster.do(ServerDied(second, 1))
    assert judged(cluster) == ["state", "w"]
    assert cluster.state.buffers["w"].segments[0].server == backup
    assert roles(cluster, first) == roles(cluster, backup) == []
    if dies:
        cluster.do(ServerDied(first, 1))
    else:
        numbers = [w[0].id]
        cluster.do(returned(cluster.state, first, 1, numbers))
        cluster.do(registration(cluster.state, server(first), numbers))
        assert roles(cluster, backup) == []  # the answer may be under way
        cluster.renew(first)
    assert roles(cluster, backup) == [CopyRole.PRIMARY] * 2


@pytest.mark.parametrize("run", [1, 2])
def test_a_primary_that_leads_goes_on_with_its_backup(run: int) -> None:
    """Also one that the records, which are older, have as another process: it was their primary from the beginning."""
    cluster = pair_in_question()
    back(cluster, "a", LEADS, run)
    assert roles(cluster, "a") == [CopyRole.PRIMARY]
    assert judged(cluster) == ["half"]
    (segment,) = cluster.state.buffers["half"].segments
    assert (segment.server, segment.backup, segment.epoch) == ("a", "b", 1)
    assert roles(cluster, "a") == [CopyRole.PRIMARY]


def test_a_restart_counts_for_the_leader_after_the_next() -> None:
    """The one to which "a" registered first stops before it decides. Its records have the new process of "a"."""
    cluster = pair_in_question()
    back(cluster, "a", replace(USED, epoch=1), 2)
    cluster = again(cluster, term=3)
    back(cluster, "a", replace(USED, epoch=1), 2)
    back(cluster, "b", FOLLOWS)
    assert roles(cluster, "a") == []
    assert judged(cluster) == ["half"]
    (segment,) = cluster.state.buffers["half"].segments
    assert (segment.server, segment.backup, segment.epoch) == ("b", "", 2)


@pytest.mark.parametrize("run", [1, 2])
def test_a_server_of_an_older_version_is_known_by_its_process(run: int) -> None:
    """It does not say which roles it has."""
    cluster = pair_in_question()
    back(cluster, "a", replace(USED, epoch=UNKNOWN_EPOCH), run)
    assert roles(cluster, "a") == ([CopyRole.PRIMARY] if run == 1 else [])
    assert judged(cluster) == ["half"]
    (segment,) = cluster.state.buffers["half"].segments
    assert (segment.server, segment.backup) == (("a", "b") if run == 1 else ("b", ""))


def test_a_backup_that_was_never_made_does_not_take_over() -> None:
    """Even from a primary that was restarted: that one has all there is."""
    cluster = half_made(USED)
    assert judged(cluster) == ["half"]
    (segment,) = cluster.state.buffers["half"].segments
    assert (segment.server, segment.backup, segment.epoch) == ("a", "", 2)


def half_made(held: Held) -> Cluster:
    """On "a", which was restarted since, and not on "b", which was not."""
    cluster = Cluster()
    cluster.register("a", "b")
    cluster.want("half", replicas=2, server_names=("a",))
    cluster = again(cluster)
    back(cluster, "b", None)
    back(cluster, "a", replace(held, epoch=1), 2)
    return cluster


def test_it_is_taken_back_if_one_server_never_made_its_copy() -> None:
    """And nobody has used the other: the creation had not ended. Going on with one copy would part its bundle."""
    cluster = half_made(NEW)
    assert judged(cluster) == []
    assert cluster.state.buffers == {}
    (drop,) = (each for each in cluster.effects if isinstance(each, DropSegments))
    assert {each.server for each in drop.segments} == {"a", "b"}


def test_what_it_was_to_move_with_keeps_its_copies() -> None:
    """The servers lack a member that was never made: the rest of the bundle has lost nothing."""
    cluster = Cluster()
    cluster.register("a", "b")
    cluster.create("w", replicas=2, server_names=("a",))
    cluster.want("state", like="w", joins=True, replicas=2)
    cluster = again(cluster)
    made = frozenset(segment.id for segment in cluster.state.buffers["w"].segments)
    for name in ("a", "b"):
        cluster.do(returned(cluster.state, name, 1, made, as_held=Held(1)))
        cluster.do(registration(cluster.state, server(name), made, as_held=Held(1)))
    # A third one, which would move with it, too, waits for that. It was placed where that one was not.
    with pytest.raises(NotNowError, match='until it is known whether "state", which an earlier run'):
        cluster.want("moment", like="w", joins=True, replicas=2)
    assert judged(cluster) == ["w"]
    assert set(cluster.state.buffers) == {"w"}
    (segment,) = cluster.state.buffers["w"].segments
    assert {segment.server, segment.backup} == {"a", "b"}
    cluster.create("moment", like="w", joins=True, replicas=2)


def test_a_mirror_is_taken_back_at_once() -> None:
    """It has nothing that its source does not have, which may be gone."""
    cluster = Cluster()
    cluster.register("a", "b")
    cluster.create("w", versions=2, server_names=("a",))
    cluster.want("m", mirror_of="w", server_names=("b",))
    cluster = again(cluster)
    assert cluster.only(EraseBuffer).key == "m"
    assert list(cluster.state.buffers) == ["w"]


def test_a_lock_is_no_buffer() -> None:
    """A deletion of a buffer does not find a lock whose creation was interrupted, whatever name it gives."""
    made = Cluster()
    made.register("a")
    made.want("v", kind=Kind.LOCK)
    cluster = again(made)
    assert cluster.state.in_question(Kind.LOCK, "v") is not None
    assert cluster.state.in_question(Kind.BUFFER, "lock:v") is None
    with pytest.raises(errors.NotFoundError):
        cluster.do(BufferDeleted("lock:v", missing_ok=False))
    with pytest.raises(errors.UnavailableError, match=r"try again$"):
        cluster.state.check_known(Kind.LOCK, "v")


def test_a_pair_whose_roles_were_switched_since_goes_on(cluster: Cluster) -> None:
    """The records are from within the creation; the buffer was made, and its roles were switched since. Whoever says
    that it is a backup then was not restarted.
    """
    made = Cluster()
    made.register("a", "b")
    made.want("half", server_names=("a",), replicas=2)
    (before,) = made.state.buffers["half"].segments
    made = again(made)
    told = (Stamp(made.state.lineage.stamp.cluster, 7, 7),)
    for _ in range(2):
        for name, held in ((before.server, Held(2, backup=True)), (before.backup, Held(2, primary=True))):
            made.do(returned(made.state, name, 1, {before.id}, as_held=held))
            made.do(registration(made.state, server(name, 1), {before.id}, stamps=told, as_held=held))
        made.state = replace(made.state, began=-math.inf)
        made.do(UnexplainedJudged())
    (now,) = made.state.buffers["half"].segments
    assert (now.server, now.backup, now.epoch) == (before.backup, before.server, 2)
    assert made.state.buffers["half"].ready
    assert not any(made.state.unexplained.values())
