"""smb.coordinator.placement: which servers, and which cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smb import errors
from smb.coordinator.placement import (
    BufferPlacement,
    Pool,
    chunk_bytes,
    place,
    place_backups,
    place_copy,
    place_like,
    weighted_round,
)
from smb.coordinator.records import BufferRecord, SegmentRecord
from tests.support.decisions import Cluster, registration, server

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def servers_of(placement: BufferPlacement) -> list[str]:
    return [share.server for share in placement.shares]


def test_a_buffer_is_spread_over_all_servers_with_room_most_free_first() -> None:
    """Without a wish a large buffer takes every server, those with the most free bytes first."""
    placement = place(Pool({"a": 1 * GIB, "b": 3 * GIB, "c": 2 * GIB}), 64 * MIB)
    assert servers_of(placement) == ["b", "c", "a"]
    assert placement.stripe_bytes == 256 * KIB
    assert placement.chunk_bytes == 256 * KIB
    assert sum(share.nbytes for share in placement.shares) == 64 * MIB


def test_a_buffer_smaller_than_a_stripe_lies_on_one_server() -> None:
    """Nothing is spread thinner than one stripe for each server; 1.5 stripes take two."""
    pool = Pool({"a": GIB, "b": GIB, "c": GIB})
    assert servers_of(place(pool, 100)) == ["a"]
    assert servers_of(place(pool, 256 * KIB)) == ["a"]
    assert [share.nbytes for share in place(pool, 384 * KIB).shares] == [256 * KIB, 128 * KIB]


def test_a_view_of_the_largest_buffer_with_small_stripes_fits_into_the_mappings_of_a_process() -> None:
    """Beyond half of Linux's 65 530 the stripes are larger."""
    pool = Pool({"a": 1 << 50, "b": 1 << 50})
    assert place(pool, 8 * GIB).stripe_bytes == 256 * KIB
    assert place(pool, 8 * GIB + 1).stripe_bytes == MIB
    assert place(pool, 4 * GIB + 1, versions=2).stripe_bytes == MIB
    assert place(pool, 8 * GIB + 1, count=2).stripe_bytes == MIB


def test_small_buffers_go_round() -> None:
    """One after the other lands where most is free, so equal servers fill evenly; ties go by name."""
    free = {"b": GIB, "a": GIB, "c": GIB}
    landed = []
    for _ in range(6):
        (share,) = place(Pool(free), 64 * KIB).shares
        landed.append(share.server)
        free[share.server] -= share.file_bytes
    assert landed == ["a", "b", "c"] * 2


def test_servers_without_room_are_left_out() -> None:
    """Where a full server would have to take part, the others take its share."""
    pool = Pool({"a": GIB, "b": GIB, "full": 4 * KIB})
    assert servers_of(place(pool, 64 * MIB)) == ["a", "b"]


def test_the_header_of_a_segment_counts() -> None:
    """A server with exactly the data's bytes free has no room: the segment's header and chunk table need some too."""
    with pytest.raises(errors.OutOfMemoryError, match="no room for 1 MiB"):
        place(Pool({"a": MIB}), MIB)
    assert place(Pool({"a": MIB + 64 * KIB}), MIB).shares[0].file_bytes > MIB


def test_a_count_is_kept_and_refused_where_it_cannot_be() -> None:
    """servers=n gives n, refuses more than there are, and n that do not all have room."""
    pool = Pool({"a": GIB, "b": GIB, "c": 8 * MIB})
    assert len(place(pool, 64 * MIB, count=2).shares) == 2
    with pytest.raises(errors.OutOfMemoryError, match="64 MiB over 3 servers; free: a 1 GiB, b 1 GiB, c 8 MiB"):
        place(pool, 64 * MIB, count=3)
    with pytest.raises(errors.UnavailableError, match=r"4 servers were asked for, 3 are alive \(a, b, c\)"):
        place(pool, 64 * MIB, count=4)
    with pytest.raises(errors.InvalidArgumentError, match="at most 1024"):
        place(pool, 64 * MIB, count=1025)


def test_a_count_shrinks_the_default_stripe_so_that_every_server_takes_part() -> None:
    """100 KiB over three servers is cut into pages, not put onto one; a single page stays whole."""
    pool = Pool({"a": GIB, "b": GIB, "c": GIB})
    placement = place(pool, 100 * KIB, count=3)
    assert [share.nbytes for share in placement.shares] == [36 * KIB, 36 * KIB, 28 * KIB]
    assert placement.chunk_bytes == 36 * KIB
    assert len(place(pool, 4000, count=3).shares) == 1


def test_named_servers_keep_their_order_and_must_live() -> None:
    """Names are taken as they come; an unknown one and a dead one are told apart."""
    pool = Pool({"a": GIB, "b": GIB}, dead=frozenset({"gone"}))
    assert servers_of(place(pool, 8 * MIB, names=["b", "a"])) == ["b", "a"]
    with pytest.raises(errors.UnavailableError, match='"gone" is not alive; alive: a, b'):
        place(pool, 8 * MIB, names=["a", "gone"])
    with pytest.raises(errors.InvalidArgumentError, match='no memory server is named "x"'):
        place(pool, 8 * MIB, names=["a", "x"])


def test_without_a_server_the_error_says_how_to_start_one() -> None:
    """An empty cluster, and one of dead servers only, answer Unavailable with the command."""
    for pool in (Pool({}), Pool({}, dead=frozenset({"a"}))):
        with pytest.raises(errors.UnavailableError, match="start one with: smb-memserver"):
            place(pool, 4 * KIB)


def test_like_repeats_cut_and_servers_or_fails() -> None:
    """A placement like another has its servers in its order, also where others have more room."""
    segments = (SegmentRecord(1, "b", 64 * KIB, 72 * KIB), SegmentRecord(2, "a", 32 * KIB, 40 * KIB))
    like = BufferRecord("w", 7, (24576,), "float32", 96 * KIB, 1, 64 * KIB, 64 * KIB, segments, 0.0, True)
    placement = place_like(Pool({"a": MIB, "b": MIB, "c": GIB}), like)
    assert servers_of(placement) == ["b", "a"]
    assert (placement.stripe_bytes, placement.chunk_bytes) == (64 * KIB, 64 * KIB)
    assert [share.nbytes for share in placement.shares] == [64 * KIB, 32 * KIB]
    twice = place_like(Pool({"a": MIB, "b": MIB}), like, versions=2)
    assert [share.nbytes for share in twice.shares] == [128 * KIB, 128 * KIB]
    with pytest.raises(errors.OutOfMemoryError, match='on the servers of "w"'):
        place_like(Pool({"a": MIB, "b": 64 * KIB, "c": GIB}), like)
    with pytest.raises(errors.UnavailableError, match='"b" is not alive'):
        place_like(Pool({"a": MIB, "c": GIB}, dead=frozenset({"b"})), like)


@pytest.mark.parametrize(
    ("stripe", "chunk"),
    [
        (4 * KIB, 4 * KIB),
        (12 * KIB, 12 * KIB),
        (96 * KIB, 96 * KIB),
        (300 * KIB, 100 * KIB),
        (268 * KIB, 4 * KIB),
        (320 * KIB, 160 * KIB),
        (GIB, 256 * KIB),
    ],
)
def test_a_chunk_is_the_largest_number_of_pages_that_divides_the_stripe(stripe: int, chunk: int) -> None:
    """Between a page and 256 KiB; a stripe of a prime number of pages beyond that has chunks of one page."""
    assert chunk_bytes(stripe) == chunk


def test_two_versions_are_two_copies_of_whole_stripes_cut_alike() -> None:
    """Every segment holds as much of one copy as of the other; small buffers get stripes no larger than they need."""
    pool = Pool({"a": GIB, "b": GIB, "c": GIB})
    small = place(pool, 100, versions=2)
    assert (small.stripe_bytes, [share.nbytes for share in small.shares]) == (4 * KIB, [8 * KIB])
    middling = place(pool, 200 * KIB + 1, versions=2)
    assert (middling.stripe_bytes, middling.chunk_bytes) == (204 * KIB, 204 * KIB)
    large = place(pool, MIB + 1, versions=2)
    assert [share.nbytes for share in large.shares] == [MIB] * 3
    assert large.stripe_bytes == 256 * KIB
    with pytest.raises(errors.OutOfMemoryError, match="no room for 4 GiB"):
        place(pool, 2 * GIB, versions=2)


def test_an_absurd_stripe_of_two_versions_finds_no_room() -> None:
    """The padding counts: it is refused before it can overflow anything."""
    with pytest.raises(errors.OutOfMemoryError, match="no room for"):
        place(Pool({"a": GIB, "b": GIB}), 8 * KIB, stripe_bytes=(1 << 64) - 4096, versions=2)


@given(
    free=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(-MIB, 64 * MIB), min_size=1),
    nbytes=st.integers(1, 128 * MIB),
    pages=st.integers(0, 600),
    weights=st.lists(st.sampled_from([1.0, 3.0]), min_size=8, max_size=8),
)
def test_a_placement_always_fits_and_holds_every_byte(
    free: dict[str, int], nbytes: int, pages: int, weights: list[float]
) -> None:
    """Whatever the cluster: all bytes are placed, no server beyond what it has free, none twice where all weigh the
    same; or it is refused.
    """
    try:
        pool = Pool(free, weights=dict(zip("abcdefgh", weights, strict=True)))
        placement = place(pool, nbytes, stripe_bytes=pages * 4 * KIB)
    except errors.OutOfMemoryError:
        return
    assert sum(share.nbytes for share in placement.shares) == nbytes
    assert all(0 < share.nbytes < share.file_bytes for share in placement.shares)
    taken = Counter[str]()
    for share in placement.shares:
        taken[share.server] += share.file_bytes
    assert all(nbytes <= free[server] for server, nbytes in taken.items())
    if len(set(weights)) == 1:
        assert len(taken) == len(placement.shares)


def test_equal_weights_change_nothing() -> None:
    """Whatever they are called, weights of one size give the placement that there is without any."""
    free = {"a": GIB, "b": 2 * GIB, "c": 3 * GIB}
    for weight in (0.1, 1.0, 2.5e8):
        weights = dict.fromkeys(free, weight)
        for wish in ({}, {"count": 2}, {"names": ["a", "c", "b"]}, {"versions": 2}):
            assert place(Pool(free, weights=weights), 5 * MIB + 4, **wish) == place(Pool(free), 5 * MIB + 4, **wish)


def test_a_heavier_server_gets_more_segments_spread_evenly() -> None:
    """1, 2 and 4 times the bandwidth: as many segments, and data, interleaved."""
    pool = Pool(dict.fromkeys("abc", GIB), weights={"a": 100.0, "b": 200.0, "c": 400.0})
    placement = place(pool, 7 * 8 * MIB)
    assert servers_of(placement) == list("cbcacbc")
    assert [share.nbytes for share in placement.shares] == [8 * MIB] * 7
    small = place(pool, 3 * 256 * KIB)  # three stripes: one each is the best there is
    assert sorted(servers_of(small)) == list("abc")
    assert sorted(servers_of(place(pool, MIB))) == list("abcc")


def test_a_wish_for_servers_cuts_stripes_so_small_that_weights_are_kept() -> None:
    """Over named servers a buffer of few stripes is cut finer, as it is for equal ones."""
    placement = place(Pool({"a": GIB, "b": GIB}, weights={"b": 3.0}), 64 * KIB, names=["a", "b"])
    assert Counter(servers_of(placement)) == {"a": 1, "b": 3}
    assert [share.nbytes for share in placement.shares] == [16 * KIB] * 4


def test_room_goes_before_weights() -> None:
    """A heavy server without room for its part gets an even one; one without room for that takes no part."""
    pool = Pool({"a": 64 * MIB, "b": 40 * MIB}, weights={"b": 4.0})
    assert servers_of(place(pool, 30 * MIB)) == ["b", "b", "a", "b", "b"]
    assert servers_of(place(pool, 60 * MIB)) == ["a", "b"]
    assert servers_of(place(Pool({"a": 64 * MIB, "b": MIB}, weights={"b": 4.0}), 60 * MIB)) == ["a"]


def test_like_repeats_a_weighted_round_and_counts_room_by_server() -> None:
    """Two segments on one server need room for both."""
    segments = tuple(SegmentRecord(i, name, 64 * KIB, 72 * KIB) for i, name in enumerate("bab"))
    like = BufferRecord("w", 7, (49152,), "float32", 192 * KIB, 1, 64 * KIB, 64 * KIB, segments, 0.0, True)
    assert servers_of(place_like(Pool({"a": MIB, "b": MIB}), like)) == ["b", "a", "b"]
    with pytest.raises(errors.OutOfMemoryError, match='on the servers of "w"'):
        place_like(Pool({"a": MIB, "b": 100 * KIB}), like)


@given(
    weights=st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0, 10.0, 0.01]), min_size=1, max_size=40),
    most=st.integers(1, 64),
)
def test_a_round_gives_everybody_a_turn_and_no_more_than_there_are(weights: list[float], most: int) -> None:
    """All servers take part, in few turns, the heavier ones as often as the lighter ones or more."""
    order = weighted_round(weights, most)
    turns = Counter(order)
    assert turns.keys() == set(range(len(weights)))
    assert len(order) <= max(len(weights), min(most, max(16, 2 * len(weights))))
    for i, weight in enumerate(weights):
        assert all(turns[i] >= turns[j] for j, other in enumerate(weights) if weight > other)


@given(weights=st.lists(st.floats(1.0, 8.0), min_size=2, max_size=5))
def test_no_other_round_of_that_length_loads_the_busiest_server_less(weights: list[float]) -> None:
    """Taking one turn from the server with the highest load and giving it to any other makes that one's as high."""
    turns = Counter(weighted_round(weights, 1024))
    highest, busiest = max((turns[i] / weight, i) for i, weight in enumerate(weights))
    if turns[busiest] > 1 and len(set(weights)) > 1:  # the one turn that everybody has stays
        assert all((turns[i] + 1) / weight >= highest * (1 - 1e-9) for i, weight in enumerate(weights) if i != busiest)


def test_second_copies_lie_like_those_of_the_other() -> None:
    """Beside the copies of the buffer that it is like, though others have more room; without room there, elsewhere."""
    segments = (
        SegmentRecord(1, "a", 64 * KIB, 72 * KIB, "c", 1),
        SegmentRecord(2, "b", 64 * KIB, 72 * KIB, "d", 1),
        SegmentRecord(3, "a", 64 * KIB, 72 * KIB, "", 2),  # one copy for now
    )
    like = BufferRecord("w", 7, (49152,), "float32", 192 * KIB, 1, 64 * KIB, 64 * KIB, segments, 0.0, True, replicas=2)
    for room, expected in ((MIB, ("c", "d", "e")), (64 * KIB, ("c", "e", "b"))):
        pool = Pool({"a": MIB, "b": MIB, "c": MIB, "d": room, "e": GIB})
        assert place_backups(pool, place_like(pool, like), like) == expected
    one_host = {"a": "h", "b": "i", "c": "h", "d": "h", "e": "j"}  # a's copy lay on its own host: now there is another
    pool = Pool(dict.fromkeys("abcde", MIB), hosts=one_host)
    assert place_backups(pool, place_like(pool, like), like) == ("e", "d", "b")
    pool = Pool(dict.fromkeys("abcde", MIB), hosts=dict.fromkeys("abcde", "h"))
    assert place_backups(pool, place_like(pool, like), like)[:2] == ("c", "d")


def test_both_servers_of_a_pair_take_data_alike() -> None:
    """A copy goes to no server that takes data without TLS, where the other one takes it inside; and the other way
    round. Where there is no such server there is no place.
    """
    free = {"a": GIB, "b": 8 * GIB, "c": GIB, "d": GIB}
    pool = Pool(free, plain=frozenset({"b", "d"}))
    assert [place_copy(pool, name, MIB) for name in free] == ["c", "d", "a", "b"]
    assert place_copy(Pool(free, plain=frozenset({"b", "c", "d"})), "a", MIB) == ""
    placement = place(pool, MIB, names=["a", "b"])
    assert place_backups(pool, placement) == ("c", "d")
    with pytest.raises(errors.OutOfMemoryError, match="in two copies"):
        place_backups(Pool({"a": GIB, "b": GIB}, plain=frozenset({"b"})), place(pool, MIB, names=["a"]))


def test_two_copies_lie_in_two_zones_where_there_are_two() -> None:
    """At creation and at a new copy; a host counts more than a zone, and a full zone not at all."""
    free, zones = dict.fromkeys("abcd", GIB) | {"d": 2 * GIB}, {"a": "x", "b": "y", "d": "x"}
    pool = Pool(free, hosts={name: name for name in free}, zones=zones)
    assert place_backups(pool, place(pool, MIB, names=["a", "d"])) == ("b", "c")
    assert [place_copy(pool, name, MIB) for name in "abd"] == ["b", "d", "b"]
    assert place_copy(replace(pool, free_bytes={"a": GIB, "d": GIB}), "a", MIB) == "d"
    one_machine = replace(pool, hosts=dict.fromkeys("abcd", "h"))
    assert place_copy(replace(one_machine, free_bytes={"b": GIB, "d": 2 * GIB}), "a", MIB) == "b"
    pods = replace(pool, hosts={"a": "n1", "b": "n1", "c": "n2", "d": "n2"}, zones={})  # two of each node
    assert place_copy(pods, "a", MIB) == "d"


def test_a_rolling_upgrade_keeps_two_copies_on_two_machines() -> None:
    """A server of before does not name its machine, and is known to share that of others by its address. Two that name
    theirs are told apart by that alone.
    """
    cluster = Cluster()
    machines = {"a1": ("1", ""), "a2": ("1", "m1"), "b1": ("2", ""), "b2": ("2", "m2"), "c": ("1", "m3")}
    for name, (host, machine) in machines.items():
        here = replace(server(name), data_address=f"10.0.0.{host}:7000", host_name=machine)
        cluster.do(registration(cluster.state, here))
    pool = cluster.state.pool(cluster.now)
    near = {(one, other) for one in machines for other in machines if one < other and pool.nearness(one, other)}
    assert near == {("a1", "a2"), ("a1", "c"), ("b1", "b2")}
    assert place_copy(replace(pool, free_bytes={"a2": 2 * GIB, "b1": GIB}), "a1", MIB) == "b1"
