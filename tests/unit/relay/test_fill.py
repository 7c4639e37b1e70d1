"""A version on its way: every block comes once, from its parent, and from the source where the parent gives nothing."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from smb.relay import fill as module
from smb.relay.arrived import Blocks
from smb.relay.fill import Fill
from smb.relay.filler import Filler

BLOCKS = Blocks(100 * 10 - 3, 10)
HALVES = ((0.5, "peer"), (1.0, "source"))


def take_all(fill: Fill, parent: str, bits: int = -1) -> list[int]:
    found = []
    while blocks := fill.take(parent, lambda each: bool(bits >> each & 1), 3):
        found += blocks
    return found


def put(fill: Fill, blocks: list[int], parent: str) -> None:
    for block in blocks:
        assert fill.put(block, parent, lambda: None)


def test_every_block_is_taken_once_by_whom_the_plan_says() -> None:
    fill = Fill(BLOCKS, 1, "source", HALVES)
    peers, sources = take_all(fill, "peer"), take_all(fill, "source")
    assert sorted(peers + sources) == list(range(100))
    assert 48 <= len(peers) <= 52
    put(fill, peers, "peer")
    assert not fill.done
    assert not fill.wants("peer")
    put(fill, sources, "source")
    assert fill.done
    assert not fill.active
    assert fill.bits == 2**100 - 1


def test_what_a_parent_does_not_have_is_not_taken_from_it() -> None:
    fill = Fill(BLOCKS, 1, "source", HALVES)
    assert take_all(fill, "peer", bits=0) == []
    some = take_all(fill, "peer", bits=2**50 - 1)
    assert some
    assert max(some) < 50
    fill.give_back(some[:1])
    assert take_all(fill, "peer", bits=2**50 - 1) == [some[0]]


def test_a_broken_parents_blocks_come_from_the_source() -> None:
    fill = Fill(BLOCKS, 1, "source", HALVES)
    taken = take_all(fill, "peer", bits=2**20 - 1)
    fill.broke("peer")
    sources = take_all(fill, "source")
    assert sorted(sources) == list(range(100))
    put(fill, sources, "source")
    assert fill.done
    assert not fill.put(taken[0], "peer", lambda: pytest.fail("it is there"))


def test_a_parent_that_gives_nothing_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    fill = Fill(BLOCKS, 1, "source", HALVES)
    sources = take_all(fill, "source")
    put(fill, sources, "source")
    taken = take_all(fill, "peer", bits=2**10 - 1)  # and there it hangs
    now += module.STALL_S / 2
    assert take_all(fill, "source") == []
    put(fill, taken[:1], "peer")
    now += module.STALL_S * 0.75
    assert take_all(fill, "source") == []
    now += module.STALL_S / 2
    put(fill, take_all(fill, "source"), "source")
    assert fill.done


def test_nothing_is_written_after_the_end() -> None:
    fill = Fill(BLOCKS, 1, "source", HALVES)
    (block,) = fill.take("source", lambda _: True)
    fill.end()
    assert not fill.put(block, "source", lambda: pytest.fail("it has ended"))
    assert fill.take("source", lambda _: True) == []


def test_rates_outlast_a_delta_without_changes() -> None:
    """Nothing came, so nothing is known anew; of a parent that gave nothing of what came nothing is known any more."""
    client: Any = None
    filler = Filler(client, "mirror", "source")
    for measured, told in (
        ({"source": 4.0, "b": 1.0}, {"source": 4.0, "b": 1.0}),
        ({}, {"source": 4.0, "b": 1.0}),
        ({"source": 2.0}, {"source": 3.0}),
    ):
        fill: Any = SimpleNamespace(rates=functools.partial(dict, measured))
        filler._measure(fill)
        assert filler.rates() == told
