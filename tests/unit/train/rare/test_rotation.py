"""The arithmetic of round-robin synchronisation: turns, gaps, batch sizes, and what a worker measures."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import smb
from smb.train.rare.rotation import Candidate, Pace, Turn, batch_sizes, gap_s, may_skip, staleness_max


@given(st.integers(0, 2**40 - 1), st.integers(0, 127), st.integers(0, 2**15 - 1), st.booleans())
def test_a_turn_survives_its_word(updates: int, slot: int, incarnation: int, taken: bool) -> None:
    turn = Turn(updates, slot, incarnation, taken)
    assert Turn.of(turn.word()) == turn
    assert 0 <= turn.word() < 2**63


def test_zero_is_the_first_turn() -> None:
    assert Turn.of(0) == Turn()


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(0, 63))
def test_turns_go_round_all_who_live(slots: set[int], start: int) -> None:
    """From any slot on, also a dead one's, each live member has one turn in a round, and `away` tells when."""
    live = [Candidate(slot, slot + 100) for slot in slots]
    turn = Turn(slot=start)
    told = {member.slot: turn.away(member.slot, live) for member in live}
    seen: list[int] = []
    for _ in range(2 * len(live)):
        turn = turn.passed(live, updated=True)
        assert turn.is_of(Candidate(turn.slot, turn.slot + 100))
        seen.append(turn.slot)
    assert seen[: len(live)] == seen[len(live) :]
    assert set(seen) == slots
    for slot in slots - {start}:
        assert seen.index(slot) + 1 == told[slot]
    assert turn.updates == 2 * len(live)


def test_a_turn_is_its_owners_only() -> None:
    turn = Turn(slot=2, incarnation=7)
    assert turn.is_of(Candidate(2, 7))
    assert turn.is_of(Candidate(2, 7 + 2**15))  # beyond what is kept
    assert not turn.is_of(Candidate(2, 8))  # whoever has the slot now is another
    assert not turn.is_of(Candidate(3, 7))
    assert turn.take().taken
    assert turn.passed([Candidate(2, 8)], updated=False) == Turn(0, 2, 8)


def test_the_gaps_of_a_round_are_less_than_an_iteration() -> None:
    assert gap_s(1.2, 4) == pytest.approx(0.25)
    assert 4 * gap_s(1.0, 4) == pytest.approx(1 / 1.2)
    assert gap_s(0.0, 3) == 0  # nothing measured yet


def test_batches_follow_speed() -> None:
    assert batch_sizes([100, 100, 100, 100], 32) == [32, 32, 32, 32]
    assert batch_sizes([300, 100], 32) == [48, 16]
    assert batch_sizes([0, 0], 8) == [8, 8]  # nobody has measured yet
    assert batch_sizes([100, 0, 300], 20) == [10, 20, 30]  # a newcomer counts as the mean


def test_the_slowest_still_takes_part() -> None:
    assert batch_sizes([1e6, 1e-3], 32) == [63, 1]


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=64), st.integers(1, 4096))
def test_batches_add_up(speeds: list[float], batch_size: int) -> None:
    """As many samples as without: the learning rate's batch stays, and nobody has none."""
    sizes = batch_sizes(speeds, batch_size)
    assert sum(sizes) == batch_size * len(speeds)
    assert min(sizes) >= 1


@pytest.mark.parametrize(("speeds", "batch_size"), [([], 8), ([1.0], 0)])
def test_batches_of_nothing_are_refused(speeds: list[float], batch_size: int) -> None:
    with pytest.raises(smb.InvalidArgumentError, match="batch sizes"):
        batch_sizes(speeds, batch_size)


def test_a_window_of_iterations_gives_their_mean() -> None:
    pace = Pace(4)
    ended = [pace.count(10, seconds, 0.5) for seconds in (1.0, 2.0, 3.0, 2.0)]
    assert ended == [False, False, False, True]
    assert pace.iteration_s == pytest.approx(2.5)  # computing and exchanging; waiting is not told
    for _ in range(4):
        pace.count(10, 4.0, 0.0)
    assert pace.iteration_s == pytest.approx(4.0)  # of the last window alone


def test_speed_is_smoothed() -> None:
    pace = Pace(10)
    pace.count(100, 1.0, 9.0)
    assert pace.speed == pytest.approx(100)  # exchanging is not computing
    pace.count(100, 2.0, 0.0)
    assert 80 < pace.speed < 100
    pace.count(0, 1.0, 0.0)  # a step without a number of samples says nothing
    assert 80 < pace.speed < 100


def test_unequal_workers_come_to_equal_iterations() -> None:
    """Batches by measured speed: after some rounds all compute for as long, with a fixed cost in each, and noise."""
    seed = 5
    rng = random.Random(seed)
    per_sample, fixed = [0.001, 0.001, 0.002, 0.004], 0.002
    paces, sizes = [Pace(10) for _ in per_sample], [32] * 4

    def computing(i: int) -> float:
        return fixed + sizes[i] * per_sample[i]

    before = max(computing(i) for i in range(4))
    for _ in range(40):
        for i, pace in enumerate(paces):
            pace.count(sizes[i], computing(i) * rng.uniform(0.95, 1.05), 0.01)
        sizes = batch_sizes([pace.speed for pace in paces], 32)
    times = [computing(i) for i in range(4)]
    assert max(times) < 1.2 * min(times), f"seed {seed}: {sizes} take {times}"
    assert before > 1.5 * max(times)


def test_a_late_worker_is_skipped_within_bounds() -> None:
    assert may_skip(0.5, 0.5, skipped=0, skips=1)
    assert not may_skip(0.4, 0.5, skipped=0, skips=1)
    assert not may_skip(9.0, 0.5, skipped=1, skips=1)  # the others wait now
    assert not may_skip(9.0, None, skipped=0, skips=1)
    assert staleness_max(4, 0) == 3
    assert staleness_max(4, 1) == 6  # twice round, without itself
