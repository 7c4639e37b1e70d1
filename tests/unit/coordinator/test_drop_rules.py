"""smb.coordinator.drop_rules: what may be dropped, what is kept, and what is taken up again, by state.step alone."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest

from smb import errors
from smb.coordinator.drop_rules import check, why_kept
from smb.coordinator.events import (
    AnswerDrops,
    BufferDeleted,
    CopiesEnded,
    CopyBegun,
    DropSegments,
    Effect,
    EndQuarantine,
    Restarted,
    SaveBuffer,
    SegmentsForgotten,
    ServerDied,
    Ticked,
    UnexplainedJudged,
)
from smb.coordinator.lineage import TERMS_MAX, Lineage, Stamp
from smb.coordinator.moves.wanted_copies import wishes
from smb.coordinator.records import Held, SegmentRecord
from smb.coordinator.replicas import CopyRole
from smb.coordinator.state import SERVER_LEASE_S, State, load, put
from smb.coordinator.steps.copies import may_be_dropped
from smb.coordinator.steps.creation import NotNowError
from smb.drop_reasons import Ground
from tests.support.decisions import Cluster, registration, returned, server

FROM_BEFORE = Held(2, quarantined=True)


@pytest.fixture
def cluster() -> Cluster:
    """Three servers; "w" has its primary on a and its backup on b."""
    made = Cluster()
    made.register("a", "b", "c")
    made.create(replicas=2, server_names=("a",))
    return made


def segment(cluster: Cluster, name: str = "w") -> SegmentRecord:
    return cluster.state.buffers[name].segments[0]


def again(cluster: Cluster, older: State | None = None, term: int = 2) -> Cluster:
    """A coordinator that starts on the records of this one, or of an `older` one: a backup that was restored."""
    of = older or cluster.state
    state = load(of.buffers.values(), of.servers.values(), lineage=of.lineage)
    begun = Cluster(state, cluster.seconds, ids=cluster.ids)
    begun.do(Restarted(term))
    return begun


def back(cluster: Cluster, name: str, held: frozenset[int] = frozenset(), run: int = 1, **how: object) -> AnswerDrops:
    """A server registers."""
    cluster.do(returned(cluster.state, name, run, held, None, how.get("as_held")))  # type: ignore[arg-type]
    cluster.do(registration(cluster.state, server(name, run), held, **how))  # type: ignore[arg-type]
    return cluster.only(AnswerDrops)


def judge(cluster: Cluster) -> list[Effect]:
    """As it is after the first lease of a term."""
    cluster.state = replace(cluster.state, began=-math.inf)
    return [each for each in cluster.do(UnexplainedJudged()) if isinstance(each, DropSegments | SaveBuffer)]


def moved_to_c(cluster: Cluster) -> None:
    """The backup is lost, and made anew on c."""
    cluster.do(ServerDied("b", 1))
    cluster.do(Ticked())
    number = segment(cluster).id
    cluster.do(CopyBegun("w", number, "c", 1, 3))
    cluster.do(CopiesEnded("a", {number: 3}, True))
    assert (segment(cluster).server, segment(cluster).backup, segment(cluster).epoch) == ("a", "c", 4)


def test_a_copy_goes_once_another_server_has_confirmed_a_later_one(cluster: Cluster) -> None:
    """Not because the records name others: these may have lost theirs, and have not been heard of in this term."""
    number = segment(cluster).id
    moved_to_c(cluster)
    cluster = again(cluster)
    answer = back(cluster, "b", frozenset({number}), as_held=Held(1, nbytes=100))
    assert not answer.segment_ids
    assert not answer.quarantined  # a buffer has it
    assert "a or c has not confirmed" in why_kept(
        "b", number, cluster.state.unexplained["b"][number], cluster.state.where()
    )
    assert judge(cluster) == []
    back(cluster, "c", frozenset({number}))
    (drop,) = judge(cluster)
    assert isinstance(drop, DropSegments)
    assert (drop.ground, drop.epoch) == (Ground.SUPERSEDED, 4)
    assert [each.server for each in drop.segments] == ["b"]
    assert judge(cluster) == []


def test_a_copy_stays_if_the_others_were_lost(cluster: Cluster) -> None:
    """Both servers of the records are back empty: the old copy is the last one, and is listed."""
    number = segment(cluster).id
    moved_to_c(cluster)
    cluster = again(cluster)
    back(cluster, "b", frozenset({number}), as_held=Held(1, nbytes=100))
    cluster.do(ServerDied("c", 1))
    back(cluster, "a", run=2)
    back(cluster, "c", run=2)
    cluster.do(Ticked())
    assert judge(cluster) == []
    assert number in cluster.state.unexplained["b"]
    assert cluster.state.lost_segments(cluster.now) == {number}  # what was acknowledged since is gone


def test_an_empty_server_is_not_promoted(cluster: Cluster) -> None:
    """While no server was heard of nobody goes on alone; the survivor does once it has told what it has."""
    number = segment(cluster).id
    cluster = again(cluster)
    cluster.do(ServerDied("a", 1))
    cluster.do(Ticked())
    assert (segment(cluster).server, segment(cluster).backup) == ("a", "b")
    back(cluster, "b", frozenset({number}))
    cluster.do(Ticked())
    assert (segment(cluster).server, segment(cluster).backup, segment(cluster).epoch) == ("b", "", 2)


def test_a_primary_that_was_started_anew_waits_for_what_its_backup_tells(cluster: Cluster) -> None:
    """That may be empty by now. It waits for one lease at most, or for two, as most servers are late at once."""
    number = segment(cluster).id
    cluster = again(cluster)
    for _ in range(2):
        with pytest.raises(errors.UnavailableError, match='"a" was restarted, and b with the other copies'):
            back(cluster, "a", frozenset({number}), run=2)
        cluster.seconds += SERVER_LEASE_S
        cluster.do(Ticked())
    back(cluster, "a", frozenset({number}), run=2)
    assert (segment(cluster).server, segment(cluster).backup) == ("a", "")


@pytest.mark.parametrize("new", [True, False])
def test_what_no_record_has_is_dropped_by_a_store_that_is_new_enough(cluster: Cluster, *, new: bool) -> None:
    """Its deletion was acknowledged there. A store that was restored may just not know it, also after it has counted on
    past the server's number.
    """
    older = cluster.state
    cluster.create("later", server_names=("c",))
    number, told = segment(cluster, "later").id, cluster.state.lineage.stamp
    if new:
        cluster.do(BufferDeleted("later", False))
    cluster = again(cluster, None if new else older)
    for count in range(3):
        cluster.create(f"more{count}", server_names=("c",))
    assert cluster.state.lineage.sequence > told.sequence
    answer = back(cluster, "c", frozenset({number}), stamps=(told,))
    if new:
        assert (answer.segment_ids, answer.grounds) == ((number,), (Ground.DELETED,))
        return
    assert (answer.segment_ids, answer.quarantined) == ((), (number,))
    # From here on the server is told of this store alone, and keeps what it marked.
    marked = Held(1, quarantined=True, nbytes=100)
    answer = back(cluster, "c", frozenset({number}), as_held=marked)
    assert (answer.segment_ids, answer.quarantined) == ((), ())
    assert cluster.state.taken_bytes("c") == cluster.state.allocation("c").nbytes + 100
    cluster.renew("c", used_bytes=cluster.state.held_bytes_max("c"))
    with pytest.raises(errors.UnavailableError, match="was not heard of yet"):
        cluster.do(SegmentsForgotten("c", frozenset()))
    back(cluster, "a", frozenset({segment(cluster).id}))
    back(cluster, "b", frozenset({segment(cluster).id}))
    with pytest.raises(errors.NotFoundError, match="is not quarantined there; nothing was freed"):
        cluster.do(SegmentsForgotten("c", frozenset({number, 999})))
    cluster.do(SegmentsForgotten("c", frozenset()))
    (drop,) = [each for each in cluster.effects if isinstance(each, DropSegments)]
    assert drop == DropSegments((SegmentRecord(number, "c", 0, 100),), 0, Ground.FORGOTTEN)


def test_the_server_of_a_newer_store_is_taken_up(cluster: Cluster) -> None:
    """A store of before the move is restored: the segment is found where it went, with both copies as they are."""
    older, number = cluster.state, segment(cluster).id
    moved_to_c(cluster)
    told = cluster.state.lineage.stamp
    cluster = again(cluster, older)
    back(cluster, "c", frozenset({number}), as_held=Held(4, backup=True, nbytes=100), stamps=(told,))
    assert judge(cluster) == []  # not before all were heard of: another may have a later one
    assert not cluster.state.lost_segments(cluster.now)
    back(cluster, "b", stamps=(told,))
    back(cluster, "a", frozenset({number}), as_held=Held(4, primary=True), stamps=(told,))
    (saved,) = judge(cluster)
    assert isinstance(saved, SaveBuffer)
    assert (segment(cluster).server, segment(cluster).backup, segment(cluster).epoch) == ("a", "c", 4)
    assert cluster.state.taken_bytes("c") == cluster.state.allocation("c").nbytes
    assert judge(cluster) == []


def test_one_copy_that_moved_is_taken_up(cluster: Cluster) -> None:
    """Its former server has nothing any more; roles of what is contested do not change meanwhile."""
    cluster.create("one", server_names=("a",))
    older, number = cluster.state, segment(cluster, "one").id
    cluster = again(cluster, older)
    held = frozenset({segment(cluster).id})
    back(cluster, "a", held)
    back(cluster, "b", held)
    assert cluster.state.lost_segments(cluster.now) == frozenset()  # c was not heard of
    back(cluster, "c", frozenset({number}), run=2, as_held=Held(5))  # its daemon was started anew
    judge(cluster)
    one = segment(cluster, "one")
    assert (one.server, one.backup, one.epoch) == ("c", "", 6)
    assert not cluster.state.lost_segments(cluster.now)


def test_a_copy_that_was_not_whole_is_never_taken_up(cluster: Cluster) -> None:
    """It has zeros where the source had not come to."""
    number = segment(cluster).id
    cluster = again(cluster)
    back(cluster, "c", frozenset({number}), as_held=Held(9, begun=True, whole=False))
    back(cluster, "b", frozenset({number}))
    back(cluster, "a", frozenset({number}))
    (drop,) = judge(cluster)
    assert isinstance(drop, DropSegments)
    assert (drop.epoch, drop.room, drop.segments[0].server) == (9, True, "c")
    assert segment(cluster).server == "a"


def test_old_memory_is_not_the_copy_that_was_made_since(cluster: Cluster) -> None:
    """A server that had lost its memory got a copy anew, and came back with the memory of before: both copies differed.
    The other one goes on alone, and what is here is dropped for it.
    """
    number = segment(cluster).id
    cluster.do(ServerDied("b", 1))
    cluster.do(Ticked())
    back(cluster, "b", run=2)
    cluster.do(CopyBegun("w", number, "b", 2, 3))
    cluster.do(CopiesEnded("a", {number: 3}, True))
    assert segment(cluster).backup == "b"
    back(cluster, "b", frozenset({number}), run=3, as_held=Held(4))
    assert segment(cluster).backup == "b"
    answer = back(cluster, "b", frozenset({number}), run=4, as_held=Held(1))
    assert (segment(cluster).server, segment(cluster).backup) == ("a", "")
    assert (answer.segment_ids, answer.grounds) == ((number,), (Ground.SUPERSEDED,))


def test_numbers_of_another_history_are_not_compared(cluster: Cluster) -> None:
    """A restored store counts epochs on from old ones: a higher one need not have what a server changed."""
    older, number = cluster.state, segment(cluster).id
    moved_to_c(cluster)
    told = cluster.state.lineage.stamp
    cluster = again(cluster, older)
    back(cluster, "a", frozenset({number}))
    back(cluster, "b", frozenset({number}))
    for run in range(2, 7):  # the roles change again and again
        cluster.do(ServerDied("b", run - 1))
        cluster.do(Ticked())
        back(cluster, "b", run=run)
        cluster.do(CopyBegun("w", number, "b", run, segment(cluster).epoch + 1))
        cluster.do(CopiesEnded("a", {number: segment(cluster).epoch}, True))
    assert segment(cluster).epoch > 4
    answer = back(cluster, "c", frozenset({number}), as_held=Held(4, nbytes=100), stamps=(told,))
    assert (answer.segment_ids, answer.quarantined) == ((), (number,))
    assert judge(cluster) == []
    assert number in cluster.state.unexplained["c"]


def test_a_newer_copy_of_the_server_that_registers_counts_at_once(cluster: Cluster) -> None:
    """One fail-over since the backup, and the daemons were started anew: the old copy was promoted, the good one put
    aside for good.
    """
    older, number = cluster.state, segment(cluster).id
    cluster.do(ServerDied("b", 1))
    cluster.do(Ticked())
    told = cluster.state.lineage.stamp  # a alone, in epoch 2
    cluster = again(cluster, older)
    back(cluster, "c")
    back(cluster, "b", frozenset({number}), run=2, as_held=Held(1))
    answer = back(cluster, "a", frozenset({number}), run=2, as_held=Held(2), stamps=(told,))
    assert answer.quarantined == (number,)  # until the records have it, whatever dies before
    assert (segment(cluster).server, segment(cluster).backup, segment(cluster).epoch) == ("a", "b", 1)
    (saved,) = judge(cluster)
    assert isinstance(saved, SaveBuffer)
    assert (segment(cluster).server, segment(cluster).backup, segment(cluster).epoch) == ("a", "", 3)
    assert cluster.state.unexplained["b"][number].quarantined
    assert back(cluster, "a", frozenset({number}), run=2, as_held=Held(3, quarantined=True)).taken_up == (number,)


def test_of_two_claims_alike_one_wins(cluster: Cluster) -> None:
    """Both daemons were started anew, and know no roles: the server that the record has goes on."""
    older, number = cluster.state, segment(cluster).id
    moved_to_c(cluster)
    told = cluster.state.lineage.stamp
    cluster = again(cluster, older)
    back(cluster, "b")
    back(cluster, "a", frozenset({number}), run=2, as_held=Held(4), stamps=(told,))
    back(cluster, "c", frozenset({number}), run=2, as_held=Held(4, nbytes=100), stamps=(told,))
    saved, drop = judge(cluster)
    assert isinstance(saved, SaveBuffer)
    assert (segment(cluster).server, segment(cluster).epoch) == ("a", 5)  # of two alike the one that the record has
    # It was changed in the same term: a has all that it has.
    assert isinstance(drop, DropSegments)
    assert [each.server for each in cluster.effects if isinstance(each, EndQuarantine)] == ["c"]


def test_a_claim_of_another_history_is_kept(cluster: Cluster) -> None:
    """Its epoch has the same number by chance."""
    older, number = cluster.state, segment(cluster).id
    moved_to_c(cluster)
    told = cluster.state.lineage.stamp
    cluster = again(cluster, older)
    back(cluster, "b")
    back(cluster, "a", frozenset({number}), run=2, as_held=Held(4), stamps=(told,))
    back(cluster, "c", frozenset({number}), run=2, as_held=Held(4, nbytes=100), stamps=(told._replace(term=99),))
    (saved,) = judge(cluster)
    assert isinstance(saved, SaveBuffer)
    assert (segment(cluster).server, segment(cluster).epoch) == ("a", 5)
    assert cluster.state.unexplained["c"][number].quarantined
    assert judge(cluster) == []


def test_what_did_not_answer_just_now_confirms_nothing(cluster: Cluster) -> None:
    """Its lease runs, but its host may be gone."""
    number = segment(cluster).id
    moved_to_c(cluster)
    cluster = again(cluster)
    for name in ("a", "c"):
        back(cluster, name, frozenset({number}))
    event = registration(cluster.state, server("b"), frozenset({number}), as_held=Held(1))
    unproven = frozenset({("a", number), ("c", number)})
    cluster.do(replace(event, unproven=unproven))
    assert not cluster.only(AnswerDrops).segment_ids
    assert not [each for each in cluster.do(UnexplainedJudged(unproven=unproven)) if isinstance(each, DropSegments)]
    (drop,) = judge(cluster)
    assert isinstance(drop, DropSegments)


def test_what_was_deleted_meanwhile_is_dropped(cluster: Cluster) -> None:
    """It was kept beside the records; the coordinator ended at the next look."""
    number = segment(cluster).id
    moved_to_c(cluster)
    cluster = again(cluster)
    back(cluster, "b", frozenset({number}), as_held=Held(1))
    beside = cluster.state.unexplained
    cluster.do(BufferDeleted("w", False))
    assert number not in cluster.state.unexplained["b"]
    cluster.state = replace(cluster.state, unexplained=beside)  # of a lock, whose name was freed
    (drop,) = judge(cluster)
    assert isinstance(drop, DropSegments)
    assert (drop.ground, drop.segments[0].server) == (Ground.DELETED, "b")


def test_a_displaced_copy_is_kept(cluster: Cluster) -> None:
    """After a restore clients changed the copy that the records had; a newer one of before is taken up all the same."""
    older, number = cluster.state, segment(cluster).id
    cluster.do(ServerDied("a", 1))
    cluster.do(Ticked())
    told = cluster.state.lineage.stamp  # b alone, in epoch 2
    cluster = again(cluster, older)
    back(cluster, "a", frozenset({number}), run=1)
    cluster.seconds += SERVER_LEASE_S / 2
    cluster.renew("a")
    back(cluster, "c")
    back(cluster, "b", frozenset({number}), as_held=Held(2, primary=True), stamps=(told,))
    (saved,) = judge(cluster)
    assert isinstance(saved, SaveBuffer)
    assert (segment(cluster).server, segment(cluster).backup) == ("b", "")
    assert cluster.state.unexplained["a"][number].quarantined
    assert judge(cluster) == []
    kept = frozenset({("a", number)})
    (wish,) = wishes(list(cluster.state.buffers.values()), cluster.state.pool(cluster.now), kept=kept)
    assert wish.target == "c"  # a's would be overwritten


def test_a_pair_that_lacks_what_moves_with_it_does_not_go_on(cluster: Cluster) -> None:
    """After a restore, and before a newer pair was taken up, an older version made a buffer that moves together with
    it. The pair's backup has nothing of it, and was taken for a copy of it.
    """
    older, number = cluster.state, segment(cluster).id
    moved_to_c(cluster)  # on a and c, in epoch 4
    told = (cluster.state.lineage.stamp,)
    cluster = again(cluster, older)
    back(cluster, "a", frozenset({number}), as_held=Held(4, primary=True), stamps=told)
    back(cluster, "b", frozenset({number}), as_held=Held(1, backup=True))
    back(cluster, "c", frozenset({number}), as_held=Held(4, backup=True), stamps=told)
    beside, terms = cluster.state.unexplained, cluster.state.other_terms
    cluster.state = replace(cluster.state, unexplained={}, other_terms={})
    cluster.create("m", like="w", joins=True, replicas=0)
    cluster.state = replace(cluster.state, unexplained=beside, other_terms=terms)
    saved = judge(cluster)
    assert {each.record.name for each in saved if isinstance(each, SaveBuffer)} == {"w", "m"}
    for name in ("w", "m"):
        assert (segment(cluster, name).server, segment(cluster, name).backup, segment(cluster, name).epoch) == (
            "a",
            "",
            5,
        )


def test_nothing_joins_what_the_records_have_in_an_old_place(cluster: Cluster) -> None:
    """After a restore a buffer that moves together with another one is made where that one's memory is: not by the
    restored records, which place it elsewhere. Its acknowledged changes were hidden as the newer memory was taken up.
    """
    older, number = cluster.state, segment(cluster).id
    moved_to_c(cluster)  # on a and c, in epoch 4
    told = (cluster.state.lineage.stamp,)
    cluster = again(cluster, older)
    back(cluster, "b", frozenset({number}), as_held=Held(1, backup=True))

    def join() -> None:
        cluster.want("m", like="w", joins=True, replicas=0)

    with pytest.raises(NotNowError, match="waits for memory servers that were not heard of yet"):
        join()
    back(cluster, "a", run=2)  # its memory is lost
    back(cluster, "c", frozenset({number}), as_held=Held(4, backup=True), stamps=told)
    with pytest.raises(NotNowError, match="not heard of yet"):  # others, which the records do not know, may come
        join()
    cluster.state = replace(cluster.state, began=-math.inf)
    with pytest.raises(NotNowError, match='"w" it waits until the records, which are older than its memory, follow'):
        join()
    judge(cluster)
    assert segment(cluster).server == "c"
    back(cluster, "b", frozenset({number}), as_held=Held(2, primary=True))  # it led until now, by the records
    cluster.renew("b")
    join()
    assert segment(cluster, "m").server == "c"


@pytest.mark.parametrize("there", [True, False])
def test_a_copy_is_whole_once_its_server_has_said_that_it_is_there(cluster: Cluster, there: bool) -> None:
    """Its primary reports that in each term. But the server may have dropped it, by records that were restored in
    between and had no such copy.
    """
    cluster.do(ServerDied("b", 1))
    cluster.do(Ticked())
    number = segment(cluster).id
    cluster.do(CopyBegun("w", number, "c", 1, 3))
    cluster = again(cluster)
    back(cluster, "a", frozenset({number}), as_held=Held(3, primary=True))
    cluster.do(CopiesEnded("a", {number: 3}, True))
    assert (segment(cluster).backup, segment(cluster).copying_to) == ("", "c")
    back(cluster, "c", frozenset({number}) if there else frozenset(), as_held=Held(3, backup=True))
    cluster.do(CopiesEnded("a", {number: 3}, True))
    assert segment(cluster).backup == ("c" if there else "")


def test_segments_beside_a_contested_one_change_roles() -> None:
    """One segment of a buffer is newer than the restored records. Another one's primary comes back without its memory:
    its backup takes over at once, as nobody would judge it again once the newer one was taken up.
    """
    cluster = Cluster()
    cluster.register("a", "b", "c", "d")
    cluster.create(replicas=2, server_names=("a", "c"), stripe_bytes=2 << 20)
    first, second = cluster.state.buffers["w"].segments
    cluster = again(cluster)
    told = (Stamp(cluster.state.lineage.stamp.cluster, 7, 7),)
    for name, held in (
        (first.backup, {first.id: Held(1, backup=True)}),
        (second.server, {second.id: Held(4, primary=True)}),
        (second.backup, {second.id: Held(4, backup=True)}),
    ):
        (as_held,) = held.values()
        back(cluster, name, frozenset(held), as_held=as_held, stamps=told)
    assert cluster.state.contested() == {second.id}
    back(cluster, first.server, run=2)
    after, contested = cluster.state.buffers["w"].segments
    assert (after.server, after.backup, after.epoch) == (first.backup, "", 2)
    assert contested == second
    judge(cluster)
    after, taken_up = cluster.state.buffers["w"].segments
    assert after.server == first.backup
    assert taken_up.epoch == 4
    assert cluster.state.lost_segments(cluster.now) == frozenset()


def without_the_member(cluster: Cluster, *kept_by: str, kept: Held = FROM_BEFORE, copied_to: str = "") -> Cluster:
    """The records of "m", which moved with "w" and was deleted since, are back; a pair of servers has "w" alone. Some
    did not hear of the deletion. `copied_to`: by the records, a copy of both is being made there.
    """
    cluster.create("m", like="w", joins=True, replicas=0)
    older, number = cluster.state, segment(cluster).id
    cluster.do(BufferDeleted("m", False))
    moved_to_c(cluster)  # on a and c, in epoch 4
    told = (cluster.state.lineage.stamp,)
    cluster = again(cluster, older)
    back(cluster, "a", frozenset({number}), as_held=Held(4, primary=True), stamps=told)
    back(cluster, "b", run=2)
    back(cluster, "c", frozenset({number}), as_held=Held(4, backup=True), stamps=told)
    member, beside, missing = segment(cluster, "m").id, dict(cluster.state.unexplained), dict(cluster.state.missing)
    for name in kept_by:
        beside[name] = {**beside[name], member: kept}
        missing[name] -= {member}
    if copied_to:
        missing[copied_to] -= {member}
        records = [cluster.state.buffers[name] for name in ("w", "m")]
        parts = [replace(of.segments[0], backup="", copying_to=copied_to) for of in records]
        copied = [replace(of, segments=(part,)) for of, part in zip(records, parts, strict=True)]
        cluster.state = put(cluster.state, *copied)
    cluster.state = replace(cluster.state, unexplained=beside, missing=missing)
    judge(cluster)
    return cluster


def test_a_pair_goes_on_without_a_member_that_neither_holds(cluster: Cluster) -> None:
    """The restored records have a buffer that was deleted since. The pair of another buffer, with which it moved, is
    taken up as a pair all the same.
    """
    cluster = without_the_member(cluster)
    assert (segment(cluster).server, segment(cluster).backup, segment(cluster).epoch) == ("a", "c", 4)


@pytest.mark.parametrize("kept_by", ["a", "c", "ac"])
def test_a_pair_does_not_go_on_with_a_member_from_before(cluster: Cluster, kept_by: str) -> None:
    """Nor is it known that both have the same of it if both have kept it. One goes on alone, with it: it counted as
    whole on both servers.
    """
    cluster = without_the_member(cluster, *kept_by)
    for name in ("w", "m"):
        (at,) = cluster.state.buffers[name].segments
        assert (at.server, at.backup, at.epoch) == (kept_by[0], "", 5)
    assert cluster.state.confirmed(kept_by[0], segment(cluster, "m").id, cluster.now)


def test_members_of_a_bundle_follow_the_newest_one(cluster: Cluster) -> None:
    """Records without "w" were restored, and the roles of "m" were switched; then records with both. The servers had
    other roles of "m" in the epoch that was given for the sake of "w", and refused these.
    """
    cluster.create("m", like="w", joins=True, replicas=0)
    number, member = segment(cluster).id, segment(cluster, "m").id
    assert number < member
    told = (cluster.state.lineage.stamp,)
    cluster = again(cluster)
    roles = {"a": {"primary": True}, "b": {"backup": True}}, {"a": {"backup": True}, "b": {"primary": True}}
    for name in ("a", "b"):
        back(cluster, name, frozenset({number, member}), as_held=Held(1), stamps=told)
    back(cluster, "c")
    beside = {name: {number: Held(4, **roles[0][name]), member: Held(5, **roles[1][name])} for name in ("a", "b")}
    cluster.state = replace(cluster.state, unexplained=beside)
    judge(cluster)
    for name in ("w", "m"):
        (at,) = cluster.state.buffers[name].segments
        assert (at.server, at.backup, at.epoch) == ("b", "", 6)
    assert not cluster.state.contested()
    # It may register before it hears of this role: that copy of "w" is the one that was taken up.
    held = {number: Held(4, **roles[0]["b"]), member: Held(5, **roles[1]["b"])}
    cluster.do(replace(registration(cluster.state, server("b"), frozenset(held)), held=held))
    assert cluster.state.missing["b"] == frozenset()


def test_a_member_that_is_older_than_its_record_is_lost_with_its_bundle(cluster: Cluster) -> None:
    """Of two histories, one has the newer "m", and an old copy of "w" beside it. That was read as if it were "w"."""
    cluster.create("m", like="w", joins=True, replicas=0)
    number, member = segment(cluster).id, segment(cluster, "m").id
    cluster.do(ServerDied("b", 1))
    cluster.do(Ticked())
    cluster.do(CopyBegun("w", number, "c", 1, 3, members=frozenset({number, member})))
    cluster.do(CopiesEnded("a", {number: 3}, True))  # on a and c, in epoch 4
    other = (cluster.state.lineage.stamp._replace(term=77, sequence=99),)
    cluster = again(cluster)
    for name in ("a", "c"):
        back(cluster, name, frozenset({number, member}), as_held=Held(4), stamps=other)
    back(cluster, "b")
    held = {number: Held(1), member: Held(8, primary=True)}
    cluster.state = replace(cluster.state, unexplained={**cluster.state.unexplained, "b": held})
    judge(cluster)
    assert (segment(cluster).server, segment(cluster).backup, segment(cluster).epoch) == ("b", "", 9)
    assert cluster.state.missing["b"] == {number}
    assert all(cluster.state.unexplained[name][number].quarantined for name in ("a", "c"))


@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_others_are_asked_before_anything_may_go(cluster: Cluster, restarted: bool, lacks: bool) -> None:
    """A primary without a member loses the others to its backup, too. That may just have died."""
    cluster.create("m", like="w", joins=True, replicas=0)
    held = {segment(cluster, name).id: Held(1) for name in ("w" if lacks else "wm")}
    asked = may_be_dropped(cluster.state, "a", {**held, 99: Held(1)}, restarted=restarted)
    assert asked == ({*held, 99} if restarted or lacks else {99})


@pytest.mark.parametrize("half", ["a", "c", "ac", "copied to c"])
def test_a_server_with_half_a_member_is_the_last_choice(cluster: Cluster, half: str) -> None:
    """It would answer reads from half a copy. The other server has nothing of that member, which counts as lost."""
    if half == "copied to c":
        cluster = without_the_member(cluster, copied_to="c")
    else:
        cluster = without_the_member(cluster, *half, kept=Held(2, whole=False, begun=True))
    for name in ("w", "m"):
        (at,) = cluster.state.buffers[name].segments
        assert (at.server, at.backup, at.epoch) == ("c" if half == "a" else "a", "", 5)
    # With a role, half a copy would count as whole from then on.
    assert all(copy.segment_id == segment(cluster).id for name in "abc" for copy in cluster.state.copies(name))


def test_a_living_primary_hears_first_that_another_goes_on_alone(cluster: Cluster) -> None:
    """Only the backup has kept the member, so it goes on. The primary answers reads until it has registered."""
    number = segment(cluster).id
    cluster = without_the_member(cluster, "c")
    assert cluster.state.suspected >= {"a"}
    assert [(copy.id, copy.role) for copy in cluster.state.copies("c")] == []
    assert cluster.state.former_primaries[number] == {"a"}


def test_the_primary_of_the_records_hears_first_that_another_has_taken_over(cluster: Cluster) -> None:
    """It led by records that were older than the memory of its former backup, and answered reads as long as it renewed,
    beside the other one.
    """
    older, number = cluster.state, segment(cluster).id
    cluster.do(ServerDied("a", 1))
    cluster.do(Ticked())
    assert (segment(cluster).server, segment(cluster).epoch) == ("b", 2)
    told = cluster.state.lineage.stamp
    cluster = again(cluster, older)
    back(cluster, "a", frozenset({number}), as_held=Held(1, primary=True))
    back(cluster, "c")
    back(cluster, "b", frozenset({number}), as_held=Held(2, primary=True), stamps=(told,))
    judge(cluster)
    assert segment(cluster).server == "b"
    assert cluster.state.suspected == {"a"}
    assert cluster.state.not_led() == {number}
    assert [copy.role for copy in cluster.state.copies("b")] == []
    answer = back(cluster, "a", frozenset({number}), as_held=Held(1, primary=True))
    assert answer.segment_ids == (number,)
    cluster.renew("a")
    assert [copy.role for copy in cluster.state.copies("b")] == [CopyRole.PRIMARY]


def test_nothing_joins_while_a_former_primary_may_answer(cluster: Cluster) -> None:
    """It has registered, and its next renewal shows that the answer has come."""
    number = segment(cluster).id
    cluster = without_the_member(cluster, "c")
    back(cluster, "a", frozenset({number}), as_held=Held(4))
    assert cluster.state.not_led() >= {number}
    with pytest.raises(NotNowError, match='"w" it waits until its former primary has heard of the present one'):
        cluster.want("n", like="w", joins=True, replicas=0)
    cluster.renew("a")
    cluster.create("n", like="w", joins=True, replicas=0)
    assert segment(cluster, "n").server == "c"


def test_nothing_joins_a_pair_that_lacks_a_member(cluster: Cluster) -> None:
    """The restored records have a buffer that was deleted since, and a pair with which it moved goes on. A buffer that
    joined these would get no second copy after the next loss, as one of them is lost.
    """
    cluster = without_the_member(cluster)
    with pytest.raises(errors.NotFoundError, match=r'the memory of "m" \(on a\) was lost; delete that buffer'):
        cluster.create("n", like="w", joins=True, replicas=0)
    cluster.do(BufferDeleted("m", False))
    cluster.create("n", like="w", joins=True, replicas=0)
    assert segment(cluster, "n").backup == "c"


def test_a_deletion_takes_what_is_kept_beside_the_records_too(cluster: Cluster) -> None:
    """It is acknowledged, and no copy of it is wanted any more."""
    number = segment(cluster).id
    moved_to_c(cluster)
    cluster = again(cluster)
    back(cluster, "b", frozenset({number}), as_held=Held(1))
    cluster.do(BufferDeleted("w", False))
    (drop,) = [each for each in cluster.effects if isinstance(each, DropSegments)]
    assert {each.server for each in drop.segments} == {"a", "b", "c"}
    assert drop.ground is Ground.DELETED


def test_a_former_primary_is_told_that_it_is_none(cluster: Cluster) -> None:
    """It kept its memory while others took its role, and answered reads from it once its lease ran again, also while a
    copy was about to be made there. A server with a later epoch than the records have is not told: the records may be
    of before.
    """
    number = segment(cluster).id
    moved_to_c(cluster)  # the roles' epoch is 4
    cluster = again(cluster)
    for primary, epoch, told in ((True, 1, True), (False, 1, False), (True, 4, True), (True, 5, False)):
        held = Held(epoch, primary=primary, backup=not primary)
        for making in (frozenset[int](), frozenset({number})):
            answer = back(cluster, "b", frozenset({number}), as_held=held, making=making)
            assert answer.superseded == (((number, epoch),) if told else ())
    assert back(cluster, "a", frozenset({number}), as_held=Held(4, primary=True)).superseded == ()


def test_a_primary_of_another_copy_is_told_that_it_is_none(cluster: Cluster) -> None:
    """The records have a later copy there. As some server has a newer one, nothing is judged yet; the server went on as
    the primary beside the one that the records have.
    """
    number, record = segment(cluster).id, cluster.state.buffers["w"]
    later = replace(segment(cluster), server="b", backup="a", made=1, backup_made=5, epoch=6)
    cluster.state = put(cluster.state, replace(record, segments=(later,)))
    cluster = again(cluster)
    back(cluster, "c", frozenset({number}), as_held=Held(30))
    back(cluster, "b", frozenset({number}), as_held=Held(6, primary=True))
    answer = back(cluster, "a", frozenset({number}), as_held=Held(3, primary=True))
    assert cluster.state.copies("a") == []
    assert answer.superseded == ((number, 3),)


def test_memory_of_another_cluster_is_refused(cluster: Cluster) -> None:
    """A known name does not make it ours."""
    with pytest.raises(errors.InvalidArgumentError, match=r'"a" is not known here but holds 1 segments.*--state'):
        back(cluster, "a", frozenset({10**6}), run=2, stamps=(Stamp(77, 1, 1),))
    back(cluster, "a", frozenset({segment(cluster).id}), run=2, stamps=())  # of before there were stamps


@pytest.mark.parametrize("ground", Ground)
def test_the_rule_is_asserted(cluster: Cluster, ground: Ground) -> None:
    """Whatever a step would have dropped: of a segment that a buffer has on a and b, and c has too."""
    state, now = cluster.state, cluster.now
    for server_name, may_go in (("c", {Ground.SUPERSEDED, Ground.FORGOTTEN}), ("a", {Ground.SUPERSEDED})):
        effect = DropSegments((replace(segment(cluster), server=server_name),), 0, ground)
        answer = AnswerDrops((segment(cluster).id,), (0,), (), (ground,))
        for each in (effect, answer):
            with nullcontext() if ground in may_go else pytest.raises(AssertionError, match="must not go from"):
                check([each], state.where, lambda name, number: state.confirmed(name, number, now), server_name)
    unheard = replace(state, suspected=frozenset({"a", "b"}))
    effect = DropSegments((replace(segment(cluster), server="c"),), 0, ground)
    with nullcontext() if ground is Ground.FORGOTTEN else pytest.raises(AssertionError, match="must not go from c"):
        check([effect], unheard.where, lambda name, number: unheard.confirmed(name, number, now), "")


def test_a_history_covers_what_it_has() -> None:
    """Terms in their order, each up to its end; of the oldest too many nothing is known."""
    store = Lineage().begun(7).changed().changed().begun(8).changed()
    assert store.stamp == Stamp(7, 8, 3)
    for stamp, covered in (
        (Stamp(7, 7, 2), True),
        (Stamp(7, 7, 3), False),
        (Stamp(7, 8, 3), True),
        (Stamp(7, 8, 4), False),
        (Stamp(7, 9, 1), False),
        (Stamp(6, 7, 1), False),
        (Stamp(0, 0, 0), False),
    ):
        assert store.covers(stamp) == covered, stamp
    assert Lineage.of(store.terms_json(), str(store.sequence)) == store
    assert Lineage.of("", "") == Lineage()
    for term in range(100, 100 + TERMS_MAX):
        store = store.begun(term)
    assert not store.covers(Stamp(7, 8, 3))
    assert replace(store, sequence=9).covers(Stamp(7, 100 + TERMS_MAX - 1, 9))
