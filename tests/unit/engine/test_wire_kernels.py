"""What travels in fewer bits is what numpy and ml_dtypes make of it, on every instruction set; as near as promised."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smb._engine import lib
from tests.support.kernels import OPS, Array, deterministic, every_isa, pointer, reference
from tests.support.kernels import best_isa_afterwards as best_isa_afterwards

BLOCK: int = lib.SMB_WIRE_BLOCK
HALVES: dict[int, Any] = {lib.SMB_WIRE_BFLOAT16: ml_dtypes.bfloat16, lib.SMB_WIRE_FLOAT16: np.float16}
WIRES = {
    lib.SMB_WIRE_BFLOAT16: "bfloat16",
    lib.SMB_WIRE_FLOAT16: "float16",
    lib.SMB_WIRE_INT8: "int8",
    lib.SMB_WIRE_INT4: "int4",
}
# Of each with blocks: elements of a block, the largest integer.
BLOCKS: dict[int, tuple[int, int]] = {lib.SMB_WIRE_INT8: (BLOCK, 127), lib.SMB_WIRE_INT4: (lib.SMB_WIRE_INT4_BLOCK, 7)}
COUNT_MAX = 2500
SCALE_MAX = {  # so many times it is finite
    127: np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0)),
    7: np.finfo(np.float32).max / np.float32(7),
}
TINY = 2.0**-141  # a block's error where its scale is subnormal

every_wire = pytest.mark.parametrize("wire", WIRES, ids=list(WIRES.values()))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow and NaN are what is tested here


def encode(wire: int, values: Array) -> Array:
    encoded = np.zeros(lib.smb_wire_bytes(wire, values.size) + 2, np.uint8)
    encoded[-2:] = 0xA5  # beside it nothing changes
    assert lib.smb_kernel_encode(wire, pointer(values), values.size, pointer(encoded)) == lib.SMB_OK
    assert (encoded[-2:] == 0xA5).all()
    return encoded[:-2]


def decode(wire: int, encoded: Array, count: int, first: int = 0) -> Array:
    values = np.empty(count, np.float32)
    status = lib.smb_kernel_apply_encoded(wire, lib.SMB_REPLACE, pointer(values), pointer(encoded), first, count, 1.0)
    assert status == lib.SMB_OK
    return values


def reference_encode(wire: int, values: Array) -> Array:
    if wire in HALVES:
        return values.astype(HALVES[wire]).view(np.uint8)
    parts: list[Array] = []
    elements, limit = BLOCKS[wire]
    for start in range(0, values.size, elements):
        block = values[start : start + elements]
        largest = np.abs(block).max()
        finite = np.isfinite(largest)
        scale = min(np.float32(largest / np.float32(limit)), SCALE_MAX[limit]) if finite else np.float32(np.nan)
        numbers = np.zeros(block.size, np.int8)
        if np.isfinite(scale) and scale > 0:
            numbers = np.clip(np.rint(block / scale), -limit, limit).astype(np.int8)
        parts += [np.array([scale], np.float32).view(np.uint8), packed(wire, numbers)]
    return np.concatenate([*parts, np.empty(0, np.uint8)])


def packed(wire: int, numbers: Array) -> Array:
    """The integers of a block as they travel."""
    if wire == lib.SMB_WIRE_INT8:
        return numbers.view(np.uint8)
    halves = np.append(numbers, np.zeros(numbers.size % 2, np.int8)).view(np.uint8) & 15
    return halves[::2] | halves[1::2] << 4


def unpacked(wire: int, sent: Array) -> Array:
    """And back; one more of an odd number."""
    if wire == lib.SMB_WIRE_INT8:
        return sent.view(np.int8)
    halves = np.stack([sent & 15, sent >> 4], axis=1).ravel().astype(np.int8)
    return np.where(halves > 7, halves - 16, halves)


def reference_decode(wire: int, encoded: Array, count: int) -> Array:
    if wire in HALVES:
        return encoded.view(HALVES[wire]).astype(np.float32)
    parts = [np.empty(0, np.float32)]
    elements, limit = BLOCKS[wire]
    nbytes = elements if limit == 127 else elements // 2
    for at in range(0, encoded.size, nbytes + 4):
        scale = encoded[at : at + 4].copy().view(np.float32)
        parts.append(unpacked(wire, encoded[at + 4 : at + 4 + nbytes]).astype(np.float32) * scale)
    return np.concatenate(parts)[:count]


def random_values(count: int, seed: int) -> Array:
    """Return blocks of random bits, of numbers near each other, of special ones, and of subnormal ones."""
    random = np.random.default_rng(seed)
    special = np.array(
        [0, -0.0, 1e-45, -1e-40, 1.17549435e-38, 1, -1.5, 65519, 65520, 3.4e38, np.inf, np.nan], np.float32
    )
    kinds = [
        np.frombuffer(random.bytes(4 * count), np.float32),
        random.standard_normal(count).astype(np.float32),
        random.choice(special, count),
        np.frombuffer(random.bytes(4 * count), np.uint32).__and__(0x807FFFFF).astype(np.uint32).view(np.float32),
        random.choice(special[:10], count),
    ]
    which = np.repeat(random.integers(0, len(kinds), count // 97 + 1), 97)[:count]
    return np.choose(which, [kind.view(np.uint32) for kind in kinds]).astype(np.uint32).view(np.float32)


def assert_same(found: Array, expected: Array) -> None:
    """Bit-equal; where both are NaN its sign and payload may differ."""
    different = (found.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(found) & np.isnan(expected))
    where = np.flatnonzero(different)
    assert where.size == 0, f"{where.size} differ, first {where[0]}: {found[where[0]]!r} for {expected[where[0]]!r}"


@every_isa
@every_wire
def test_encoded_and_combined_as_numpy_does(isa: int, wire: int) -> None:
    """Any bits, any length, any part of what was encoded, each operation: the bits of the same in numpy."""
    assert lib.smb_isa_select(isa) == lib.SMB_OK

    @deterministic
    @given(
        count=st.one_of(st.integers(1, 70), st.integers(1, COUNT_MAX)),
        part=st.tuples(st.floats(0, 1), st.floats(0, 1)),
        op=st.sampled_from(sorted(OPS)),
        seed=st.integers(0, 2**32 - 1),
        scale=st.one_of(st.just(1.0), st.sampled_from([0.0, -1.0, 0.1, 1e30, np.inf, np.nan])),
    )
    @example(count=COUNT_MAX, part=(0.0, 1.0), op=lib.SMB_SUM, seed=1, scale=1.0)
    @example(count=2 * BLOCK, part=(0.4, 0.6), op=lib.SMB_SUM, seed=1, scale=0.5)
    def check(count: int, part: tuple[float, float], op: int, seed: int, scale: float) -> None:
        values = random_values(count, seed)
        encoded = encode(wire, values)
        expected = reference_encode(wire, values)
        assert encoded.size == expected.size
        assert_same(decode(wire, encoded, count), reference_decode(wire, expected, count))
        if wire in BLOCKS:  # scales may be NaN of any kind; the numbers are as they are
            assert encoded.tobytes() == expected.tobytes()
        first, end = sorted(round(count * x) for x in part)
        target = random_values(end - first, seed + 1)
        wanted = reference(op, target, reference_decode(wire, expected, count)[first:end], scale)
        status = lib.smb_kernel_apply_encoded(wire, op, pointer(target), pointer(encoded), first, end - first, scale)
        assert status == lib.SMB_OK
        assert_same(target, wanted)

    check()


@every_isa
@pytest.mark.parametrize(("wire", "relative", "least"), [
    (lib.SMB_WIRE_BFLOAT16, 2.0**-8, 2.0**-134),
    (lib.SMB_WIRE_FLOAT16, 2.0**-11, 2.0**-25),
])  # fmt: skip
def test_halves_are_as_near_as_promised(isa: int, wire: int, relative: float, least: float) -> None:
    """|error| <= relative * |x| for what is normal in the smaller format, at most `least` below; and no error is much
    smaller for all, or the bound would say nothing."""
    assert lib.smb_isa_select(isa) == lib.SMB_OK
    random = np.random.default_rng(11)
    exponents = random.uniform(-126, 15.9, 200_000)
    values = (random.choice([-1.0, 1.0], exponents.size) * 2.0**exponents).astype(np.float32)
    error = np.abs(decode(wire, encode(wire, values), values.size).astype(np.float64) - values)
    assert (error <= np.maximum(relative * np.abs(values.astype(np.float64)), least)).all()
    assert (error > 0.9 * relative * np.abs(values)).any()


every_blocked = pytest.mark.parametrize("wire", BLOCKS, ids=[WIRES[wire] for wire in BLOCKS])


@every_isa
@every_blocked
def test_blocks_are_as_near_as_promised(isa: int, wire: int) -> None:
    """|error| <= half a step of its block, largest/254 of int8 and largest/14 of int4 (and 2^-22 of it for the
    roundings of scale and product)."""
    elements, limit = BLOCKS[wire]
    assert lib.smb_isa_select(isa) == lib.SMB_OK
    random = np.random.default_rng(12)
    blocks = 400
    sizes = 2.0 ** random.uniform(-149, 127.9, (blocks, 1))
    values = (random.uniform(-1, 1, (blocks, elements)) * sizes).astype(np.float32)
    values[0], values[1] = np.finfo(np.float32).max, 0.0
    found = decode(wire, encode(wire, values.ravel()), values.size).reshape(values.shape)
    largest = np.abs(values).max(axis=1, keepdims=True).astype(np.float64)
    error = np.abs(found.astype(np.float64) - values)
    assert np.isfinite(found).all()
    assert (error <= largest * (1 / (2 * limit) + 2.0**-22) + TINY).all()
    assert (error[largest.ravel() > 1e-30] > 0.9 / (2 * limit) * largest[largest > 1e-30][:, None]).any()


@every_isa
@every_blocked
def test_blocks_with_infinity_or_nan_arrive_as_nan(isa: int, wire: int) -> None:
    """It is seen at the other end, and only there: the next block is as it was."""
    elements, _ = BLOCKS[wire]
    assert lib.smb_isa_select(isa) == lib.SMB_OK
    for bad in (np.inf, -np.inf, np.nan):
        values = np.ones(3 * elements, np.float32)
        values[elements + 7] = bad
        found = decode(wire, encode(wire, values), values.size)
        assert np.isnan(found[elements : 2 * elements]).all()
        assert_same(found[:elements], values[:elements])
        assert_same(found[2 * elements :], values[2 * elements :])


def test_only_the_defined_numbers_are_known() -> None:
    """Other numbers have no size and are refused; nothing is touched."""
    values, encoded = np.ones(4, np.float32), np.full(64, 7, np.uint8)
    for wire in range(-1, 9):
        known = wire in WIRES
        assert lib.smb_wire_is_dense(wire) == known
        assert (lib.smb_wire_bytes(wire, 4) > 0) == (known or wire == lib.SMB_WIRE_EXACT)
        if not known:
            assert lib.smb_kernel_encode(wire, pointer(values), 4, pointer(encoded)) == lib.SMB_INVALID
            status = lib.smb_kernel_apply_encoded(wire, lib.SMB_SUM, pointer(values), pointer(encoded), 0, 4, 1.0)
            assert status == lib.SMB_INVALID
    assert (encoded == 7).all()
    assert (values == 1).all()


@every_isa
def test_crc32c(isa: int) -> None:
    """The published check value, the table of a definition bit by bit, any length, and parts one after the other."""
    assert lib.smb_isa_select(isa) == lib.SMB_OK
    assert lib.smb_crc32c(0, b"123456789", 9) == 0xE3069283
    table = []
    for value in range(256):
        entry = value
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)
        table.append(entry)
    data = np.random.default_rng(3).bytes(20_000)
    register, crcs = 0xFFFFFFFF, [0]
    for byte in data:
        register = register >> 8 ^ table[(register ^ byte) & 255]
        crcs.append(register ^ 0xFFFFFFFF)
    for count in (*range(40), 3071, 3072, 3073, 3080, 6144, 9999, 20_000):
        assert lib.smb_crc32c(0, data, count) == crcs[count]
        assert lib.smb_crc32c(crcs[count // 3], data[count // 3 : count], count - count // 3) == crcs[count]
