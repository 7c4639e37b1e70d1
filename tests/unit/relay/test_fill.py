"""A version on its way: each block comes once, from its parent, and from others where the parent is late with it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from smb.relay import fill as module
from smb.relay.arrived import Blocks
from smb.relay.fill import STALL_S, UNSURE_S, FeedRate, Fill
from smb.relay.filler import Filler
from smb.relay.plans import Plan, Plans

BLOCKS = Blocks(100 * 10 - 3, 10)
ALL = 2**100 - 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def filled(*parents: tuple[float, str]) -> Fill:
    return Fill(BLOCKS, 1, "source", Plan(1, 0, 9, parents or ((0.5, "peer"), (1.0, "source"))))


def take_all(fill: Fill, parent: str, bits: int = ALL, *, comes: bool = True) -> list[int]:
    found = []
    while blocks := fill.take(parent, bits, 3, comes=comes):
        found += blocks
    return found


def put(fill: Fill, blocks: list[int], parent: str) -> None:
    for block in blocks:
        assert fill.put(block, parent, lambda: None)


def test_each_block_is_taken_once_and_from_the_parent_of_the_plan() -> None:
    fill = filled()
    peers, sources = take_all(fill, "peer"), take_all(fill, "source")
    assert sorted(peers + sources) == list(range(100))
    assert 48 <= len(peers) <= 52
    put(fill, peers, "peer")
    assert not fill.done
    assert not fill.wants("peer")
    put(fill, sources, "source")
    assert fill.done
    assert not fill.active
    assert fill.bits == ALL


def test_a_block_that_a_parent_does_not_have_is_not_taken_from_it() -> None:
    fill = filled()
    assert take_all(fill, "peer", bits=0) == []
    some = take_all(fill, "peer", bits=2**50 - 1)
    assert some
    assert max(some) < 50
    fill.give_back(some[:1])
    assert take_all(fill, "peer", bits=2**50 - 1) == [some[0]]


def test_the_blocks_of_a_broken_parent_come_from_the_source() -> None:
    fill = filled()
    taken = take_all(fill, "peer", bits=2**20 - 1)
    fill.broke("peer")
    sources = take_all(fill, "source")
    assert sorted(sources) == list(range(100))
    put(fill, sources, "source")
    assert fill.done
    assert not fill.put(taken[0], "peer", lambda: pytest.fail("the block is there"))


def test_a_parent_that_answers_nothing_is_left_after_a_while(clock: Clock) -> None:
    fill = filled()
    put(fill, take_all(fill, "source"), "source")
    taken = take_all(fill, "peer", bits=2**10 - 1)
    clock.now += STALL_S / 2
    assert take_all(fill, "source") == []
    fill.moved("peer", taken)  # a part of the answer, and there it hangs
    clock.now += STALL_S * 0.75
    assert take_all(fill, "source") == []
    clock.now += STALL_S / 2
    put(fill, take_all(fill, "source"), "source")
    assert fill.done


def test_one_hanging_call_delays_its_own_blocks_only(clock: Clock) -> None:
    """The other thread of that parent goes on, and must not give the hanging call more time."""
    fill = filled()
    put(fill, take_all(fill, "source"), "source")
    hanging = fill.take("peer", ALL, 3)
    for _ in range(4):
        clock.now += STALL_S / 3
        put(fill, fill.take("peer", ALL, 2), "peer")
    assert fill.take("source", ALL, 3) == hanging[:1]
    assert fill.take("source", ALL, 3) == hanging[1:2]


def test_a_parent_with_nothing_new_is_left_for_what_it_lacks(clock: Clock) -> None:
    fill = filled()
    put(fill, take_all(fill, "source"), "source")
    for bits in (2**10 - 1, 2**20 - 1):
        clock.now += STALL_S * 0.75
        put(fill, take_all(fill, "peer", bits), "peer")
        assert take_all(fill, "source") == []
    clock.now += STALL_S * 1.25
    assert take_all(fill, "peer", 2**20 - 1) == []
    put(fill, take_all(fill, "source"), "source")
    assert fill.done


@pytest.mark.parametrize("begun", [0, 2**50 - 1])
def test_what_a_parent_of_another_plan_lacks_is_taken_from_the_source_soon(clock: Clock, begun: int) -> None:
    """It may wait for this relay. So may a parent that has not begun the version."""
    fill = filled()
    put(fill, take_all(fill, "source"), "source")
    put(fill, take_all(fill, "peer", begun, comes=False), "peer")
    clock.now += UNSURE_S * 0.75
    assert take_all(fill, "source") == []
    clock.now += UNSURE_S / 2
    assert take_all(fill, "peer", begun, comes=False) == []
    sources = take_all(fill, "source")
    assert sources
    assert all(begun >> block & 1 == 0 for block in sources)
    put(fill, sources, "source")
    assert fill.done


def test_a_parent_that_begins_late_gives_the_rest(clock: Clock) -> None:
    fill = filled()
    assert take_all(fill, "peer", 0, comes=False) == []
    put(fill, take_all(fill, "source"), "source")
    clock.now += UNSURE_S * 1.25
    (block,) = fill.take("source", ALL)
    assert fill.take("peer", 0) == []  # it has begun
    assert fill.take("source", ALL) == []
    rest = take_all(fill, "peer")
    assert block not in rest
    put(fill, [block], "source")
    put(fill, rest, "peer")
    assert fill.done


def test_late_blocks_come_from_any_parent_that_has_them(clock: Clock) -> None:
    fill = filled((0.5, "peer"), (1.0, "other"))
    others = take_all(fill, "other", bits=ALL)
    put(fill, others[1:], "other")
    fill.broke("peer")
    missing = ALL & ~fill.bits & ~(1 << others[0])
    some = missing & -missing
    assert take_all(fill, "other", some) == [some.bit_length() - 1]
    clock.now += STALL_S * 1.25
    assert others[0] in take_all(fill, "peer")  # the call at the other parent hangs


def test_nothing_is_written_after_the_end() -> None:
    fill = filled()
    (block,) = fill.take("source", ALL)
    fill.end()
    assert not fill.put(block, "source", lambda: pytest.fail("the fill has ended"))
    assert fill.take("source", ALL) == []


def read(fill: Fill, clock: Clock, parent: str, bits: int, seconds: float) -> int:
    """Read the next block from that parent; return how many bytes it has."""
    blocks = fill.take(parent, bits)
    with fill.reading(parent, blocks):
        clock.now += seconds
    put(fill, blocks, parent)
    return sum(BLOCKS.range(block)[1] for block in blocks)


def test_the_rate_of_a_link_is_measured_under_a_backlog(clock: Clock) -> None:
    """A block that a parent has just got comes fast, or late; neither says how fast its link is."""
    fill = filled()
    mine = [block for block in range(100) if BLOCKS.point(block) < 0.5]
    offered = 0
    for block in mine[:10]:
        offered |= 1 << block
        read(fill, clock, "peer", offered, 0.01)
    assert not fill.rates()["peer"].limited
    assert fill.rates()["peer"].bytes_per_s == pytest.approx(1000)
    nbytes = sum(read(fill, clock, "peer", ALL, 0.1) for _ in mine[10:-1])
    assert fill.rates()["peer"].limited
    assert fill.rates()["peer"].bytes_per_s == pytest.approx(nbytes / (0.1 * len(mine[10:-1])))
    read(fill, clock, "source", ALL, 1.0)
    assert fill.rates()["source"].limited


def test_relays_of_one_parent_begin_at_different_blocks() -> None:
    begun = {Fill(BLOCKS, 1, "source", Plan.direct("source"), first).take("source", ALL)[0] for first in range(300)}
    assert begun == set(range(100))


def test_a_mirror_without_work_takes_over_from_one_with_a_backlog() -> None:
    fill = filled((0.5, "slow"), (1.0, "fast"))
    assert fill.take("slow", 0) == []
    put(fill, take_all(fill, "fast"), "fast")
    assert not fill.wants("fast")
    (block,) = fill.take("slow", ALL)
    assert fill.wants("fast")
    assert fill.take("fast", 0) == []
    helped = take_all(fill, "fast")
    assert 40 <= len(helped) < 50
    assert block not in helped
    put(fill, helped, "fast")
    rest = [block, *take_all(fill, "slow")]
    assert 2 <= len(rest) <= 5
    put(fill, rest, "slow")
    assert fill.done


def test_the_source_helps_a_parent_with_a_backlog_a_little() -> None:
    fill = filled((0.5, "slow"), (1.0, "fast"))
    assert fill.take("slow", 0) == []
    assert take_all(fill, "source") == []
    assert fill.take("slow", ALL)
    assert len(take_all(fill, "source")) == 5  # of 100 blocks, with three relays


def test_rates_outlast_a_delta_without_changes() -> None:
    """Nothing came, so nothing is known anew; of a parent that gave nothing of what came nothing is known any more."""
    client: Any = None
    filler = Filler(client, "mirror", "source", Plans("source"))
    four, one = FeedRate(4.0, limited=True), FeedRate(1.0, limited=False)
    for measured, told in (
        ({"source": four, "b": one}, {"source": four, "b": one}),
        ({}, {"source": four, "b": one}),
        ({"source": FeedRate(2.0, limited=True)}, {"source": FeedRate(3.0, limited=True)}),
        ({"source": FeedRate(9.0, limited=False)}, {"source": FeedRate(9.0, limited=False)}),
    ):
        fill: Any = SimpleNamespace(rates=functools.partial(dict, measured))
        filler._measure(fill)
        assert filler.rates() == told
