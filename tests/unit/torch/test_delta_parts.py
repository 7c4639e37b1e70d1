"""The delta of one generation: a reader of parts takes what concerns it, and refuses bytes that were not published."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smb.engine import SUM_PRIME, delta_apply, state_sum
from smb.torch.publishing import delta_parts
from smb.torch.publishing.delta_parts import Choice, DeltaParts, compare, cut, pieces_of, rows_of, table_of
from tests.support.kernels import deterministic


class Memory:
    """Memory that has some elements of a state with elements of two bytes, as one tensor."""

    width = 2

    def __init__(self, indices: np.ndarray[Any, Any], state: np.ndarray[Any, Any]) -> None:
        self.indices, self.values = indices, state[indices].copy()
        self.tensors = {"w": torch.from_numpy(self.values)}
        self.runs = np.stack([indices, np.arange(len(indices)), np.ones(len(indices), np.int64)], axis=1)

    def runs_of(self, _: str) -> Any:
        return self.runs

    def host(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def delta_of(parts: list[DeltaParts]) -> np.ndarray[Any, Any]:
    """As the ranks write it."""
    rows = rows_of(b"".join(each.rows.tobytes() for each in parts))
    return np.frombuffer(table_of(rows) + b"".join(each.data for each in parts) if len(rows) else b"", np.uint8)


@deterministic
@given(seed=st.integers(0, 2**32), owners=st.integers(1, 4), percent=st.sampled_from([0, 1, 20]))
def test_readers_of_any_elements_have_what_any_owners_changed(seed: int, owners: int, percent: int) -> None:
    """Parts of all sizes; a reader that reads some of them has its elements, and the sums are those of its elements."""
    random = np.random.default_rng(seed)
    count = 5000
    state = random.integers(-9999, 9999, count).astype(np.int16)
    fresh = state.copy()
    fresh[random.random(count) < percent / 100] += 1
    owner = np.sort(random.integers(0, owners, count)) if seed % 2 else random.integers(0, owners, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_parts, "_PART_ELEMENTS", 100)
        patch.setattr(delta_parts, "_GAP_MAX", 40)
        patch.setattr(delta_parts, "_FIRST_LOOK", int(random.integers(8, 200)))
        made = []
        for each in range(owners):
            (mine,) = np.nonzero(owner == each)
            memory: Any = Memory(mine, state)
            found = compare(
                memory, pieces_of(memory), [("w", torch.from_numpy(fresh[mine])), ("v", torch.empty(1))], 10**6
            )
            assert found is not None
            assert (memory.values == fresh[mine]).all()
            made.append(found)
        delta = delta_of(made)
        whole = np.array([[0, 0, count]])
        added = sum(each.added for each in made)
        assert (state_sum(2, state, whole) + added) % SUM_PRIME == state_sum(2, fresh, whole)
        first = int(random.integers(0, count))
        wanted = np.arange(first, min(count, first + int(random.integers(1, 900))))
        for indices in (wanted, wanted[random.random(len(wanted)) < 0.5], wanted[:0]):
            memory = Memory(indices, state)
            read: list[int] = []

            def fetch(start: int, nbytes: int, read: list[int] = read) -> Any:
                assert start >= 0
                assert nbytes > 0
                assert start + nbytes <= len(delta)
                read.append(nbytes)
                return delta[start : start + nbytes]

            choice = Choice(fetch, len(delta), memory.runs)
            parts = choice.parts()
            assert choice.is_valid
            assert parts is not None
            before = state_sum(2, memory.values, memory.runs)
            total = delta_apply(2, memory.values, memory.runs, count, parts, before) if len(parts) else before
            assert (memory.values == fresh[indices]).all()
            assert total == state_sum(2, memory.values, memory.runs)
            if seed % 2 and percent == 20:  # owners of neighbours: parts are narrow
                assert sum(read) < len(delta) * 0.8
        values = state.copy()
        parts = Choice(lambda start, nbytes: delta[start : start + nbytes], len(delta), None).parts()
        assert parts is not None
        if len(parts):
            delta_apply(2, values, whole, count, parts, 0)
        assert (values == fresh).all()


def test_other_bytes_are_refused() -> None:
    """Any changed byte of table and parts, bytes that end early, and random bytes; never a read outside the delta."""
    random = np.random.default_rng(3)
    state = np.zeros(3000, np.int16)
    memory: Any = Memory(np.arange(3000), state)
    fresh = np.where(random.random(3000) < 0.1, 5, 0).astype(np.int16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_parts, "_PART_ELEMENTS", 1000)
        found = compare(memory, pieces_of(memory), [("w", torch.from_numpy(fresh))], 10**6)
    assert found is not None
    delta = delta_of([found])
    start = len(table_of(found.rows))

    def accepted(damaged: np.ndarray[Any, Any]) -> bool:
        def fetch(at: int, nbytes: int) -> Any:
            assert 0 <= at <= at + nbytes <= len(damaged)
            return damaged[at : at + nbytes]

        choice = Choice(fetch, len(damaged), memory.runs)
        return choice.is_valid and choice.parts() is not None

    assert accepted(delta)
    for at in range(len(delta)):
        damaged = delta.copy()
        damaged[at] ^= 4
        assert not accepted(damaged)
    for size in (1, 7, 8, start - 1, start, len(delta) - 1):
        assert not accepted(delta[:size])
    for _ in range(2000):
        accepted(random.integers(0, 256 if _ % 2 else 2, int(random.integers(1, 300))).astype(np.uint8))


def test_a_change_of_too_much_is_told() -> None:
    """More bytes than are allowed, in one part or in all: there is no delta, and the memory has the new state."""
    state, fresh = np.zeros(4000, np.int16), np.ones(4000, np.int16)
    sparse = np.where(np.arange(4000) % 50 == 0, 1, 0).astype(np.int16)
    for new, most, fits in ((fresh, 10**6, False), (sparse, 10**6, True), (sparse, 100, False)):
        memory: Any = Memory(np.arange(4000), state)
        memory.runs = np.array([[0, 0, 4000]])
        found = compare(memory, pieces_of(memory), [("w", torch.from_numpy(new))], most)
        assert (found is not None) == fits
        assert (memory.values == new).all()


@deterministic
@given(seed=st.integers(0, 2**32), most=st.integers(1, 50))
def test_runs_are_cut_into_parts_of_the_same_elements(seed: int, most: int) -> None:
    """Each part has at most so many elements, and gaps of at most four bytes; together they are the runs."""
    random = np.random.default_rng(seed)
    runs, there, here = [], 0, 0
    for count in random.integers(1, 120, random.integers(1, 20)).tolist():
        there += int(random.choice([0, 1, 1000, 2**31, 2**33]))
        runs.append((there, here, count))
        there, here = there + count, here + count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_parts, "_PART_ELEMENTS", most)
        parts = [part.tolist() for part in cut(np.array(runs))]

    def elements(of: Any) -> list[tuple[int, int]]:
        return [(there + each, here + each) for there, here, count in of for each in range(count)]

    assert elements([run for part in parts for run in part]) == elements(runs)
    for part in parts:
        assert sum(count for _, _, count in part) <= most
        assert part[-1][0] + part[-1][2] - part[0][0] <= 2**32 - 1
