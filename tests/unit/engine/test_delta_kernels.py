"""Deltas of states: bit for bit what changed, by every instruction set; nothing outside of a state is touched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smb._engine import lib
from smb.engine import SUM_PRIME, Runs, delta_apply, delta_encode, state_sum
from tests.support.kernels import deterministic, every_isa

WIDTHS = [1, 2, 4, 8]
MASK = 2**64 - 1


def one(first: int, count: int) -> Runs:
    """The runs of memory that has these elements."""
    return np.array([[first, 0, count]])


def encode(width: int, old: np.ndarray, fresh: np.ndarray, first: int = 0, room: int | None = None) -> bytes | None:
    """Make `fresh` of `old`; return the part."""
    count = fresh.nbytes // width
    out = np.empty(1024 + 16 * fresh.nbytes if room is None else room, np.uint8)
    found = delta_encode(width, old.ctypes.data + first * width, fresh.ctypes.data, one(first, count), out)
    return None if found is None else out[: found[0]].tobytes()


def apply(width: int, state: np.ndarray, delta: bytes, total: int) -> int | None:
    """Apply a delta to a whole state."""
    count = state.nbytes // width
    return delta_apply(width, state, one(0, count), count, delta, total)


def sum_of(state: np.ndarray) -> int:
    """The sum of a state, by its definition."""
    total = 0
    for word, value in enumerate(state.view("<u8").tolist()):
        mixed = (word + 1) * 0x9E3779B97F4A7C15 & MASK
        total += value * (((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & MASK) >> 8 | 1)
    return total % (2**64 - 59)


@every_isa
@deterministic
@given(seed=st.integers(0, 2**32), words=st.integers(1, 400), percent=st.sampled_from([0, 1, 5, 100]), data=st.data())
def test_a_delta_makes_the_new_state_of_the_old(
    isa: int, seed: int, words: int, percent: int, data: st.DataObject
) -> None:
    """Any bits, any range of elements, any density: old becomes new, by the delta alone, too; the sums agree."""
    lib.smb_isa_select(isa)
    width = data.draw(st.sampled_from(WIDTHS))
    random = np.random.default_rng(seed)
    start = random.integers(0, 256, 8 * words, np.uint8)
    count = 8 * words // width
    first = data.draw(st.integers(0, count))
    length = data.draw(st.integers(0, count - first))
    fresh = start[first * width : (first + length) * width].copy()
    hit = random.random(len(fresh)) < percent / 100
    fresh[hit] = random.integers(0, 256, int(hit.sum()), np.uint8)
    wanted = start.copy()
    wanted[first * width : (first + length) * width] = fresh
    published, read = start.copy(), start.copy()
    delta = encode(width, published, fresh, first)
    assert delta is not None
    assert (published == wanted).all()
    total = apply(width, read, delta, state_sum(width, start, one(0, count)))
    assert (read == wanted).all()
    assert total == state_sum(width, wanted, one(0, count)) == sum_of(wanted)
    elements = np.ascontiguousarray(wanted).reshape(count, width) != start.reshape(count, width)
    assert bool(delta) == bool(elements.any())


@every_isa
@pytest.mark.parametrize("width", WIDTHS)
def test_gaps_of_every_length(isa: int, width: int) -> None:
    """A gap takes one byte up to 254 elements and five from there on."""
    lib.smb_isa_select(isa)
    for gap in (0, 1, 63, 64, 253, 254, 255, 256, 5000, 70_000):
        old = np.zeros(8 * (gap + 8), np.uint8)
        fresh = old.copy()
        fresh[gap * width] = 7
        read = old.copy()
        delta = encode(width, old, fresh)
        assert delta is not None
        assert len(delta) == 16 + (1 if gap < 255 else 5) + width
        assert apply(width, read, delta, 0) == sum_of(fresh)
        assert (read == fresh).all()


@every_isa
def test_too_dense_is_told(isa: int) -> None:
    """Where there is no room, the state is the new one all the same."""
    lib.smb_isa_select(isa)
    for size in (8, 64, 4096, 100_000):
        for room in (0, 16, 400, 4000):
            old, fresh = np.zeros(size, np.uint8), np.full(size, 1, np.uint8)
            delta = encode(2, old, fresh, room=room)
            assert (delta is not None) == (room >= 16 + 384 and size <= 64)
            assert (old == fresh).all()


@deterministic
@given(seed=st.integers(0, 2**32), width=st.sampled_from(WIDTHS), data=st.binary(max_size=200))
def test_what_is_no_delta_touches_nothing_else(seed: int, width: int, data: bytes) -> None:
    """Damaged and foreign bytes are refused or change the state's own elements; what is behind it stays."""
    random = np.random.default_rng(seed)
    memory = np.zeros(256, np.uint8)
    state = memory[64:128]
    assert apply(width, state, data, 0) is None or len(data) == 0 or len(data) >= 16
    old = np.zeros(64, np.uint8)
    delta = bytearray(encode(width, old, random.integers(0, 256, 64, np.uint8)) or b"")
    for at in random.integers(0, max(len(delta), 1), 3):
        delta[at : at + 1] = bytes([int(random.integers(0, 256))])
    apply(width, state, bytes(delta), 0)
    apply(width, state, bytes(delta[: random.integers(0, len(delta) + 1)]), 0)
    assert not memory[:64].any()
    assert not memory[128:].any()


@pytest.mark.parametrize("width", WIDTHS)
def test_one_wrong_element_changes_the_sum(width: int) -> None:
    """Any single element, of any width, by any bit; and two that change places."""
    random = np.random.default_rng(1)
    state = random.integers(0, 256, 4096, np.uint8)
    runs = one(0, 4096 // width)
    right = state_sum(width, state, runs)
    for bit in range(8 * len(state)):
        state[bit // 8] ^= 1 << bit % 8
        assert state_sum(width, state, runs) != right
        state[bit // 8] ^= 1 << bit % 8
    for at in range(0, 4096, 8):  # all signs
        state[at + 7] ^= 128
    assert state_sum(width, state, runs) != right
    for at in range(0, 4096, 8):
        state[at + 7] ^= 128
    state[:8], state[8:16] = state[8:16].copy(), state[:8].copy()
    assert state_sum(width, state, runs) != right


@deterministic
@given(seed=st.integers(0, 2**32), width=st.sampled_from(WIDTHS), owners=st.integers(1, 5))
def test_the_sum_of_a_state_is_that_of_its_parts(seed: int, width: int, owners: int) -> None:
    """However its elements are shared among owners, also within one word, and whatever they change."""
    random = np.random.default_rng(seed)
    count = 8 * 40 // width
    state = random.integers(0, 256, (count, width), np.uint8)
    fresh = state.copy()
    fresh[random.random(count) < 0.1] ^= 129
    owner = random.integers(0, owners, count)
    total = after = 0
    for each in range(owners):
        (mine,) = np.nonzero(owner == each)
        if not len(mine):
            continue
        runs = np.stack([mine, np.arange(len(mine)), np.ones(len(mine), np.int64)], axis=1)
        part, out = state[mine].copy(), np.empty(8192, np.uint8)
        total += state_sum(width, part, runs)
        found = delta_encode(width, part.ctypes.data, (new := fresh[mine].copy()).ctypes.data, runs, out)
        assert found is not None
        after += found[2]
        assert (part == new).all()
    assert total % SUM_PRIME == state_sum(width, state, one(0, count))
    assert (total + after) % SUM_PRIME == state_sum(width, fresh, one(0, count))
