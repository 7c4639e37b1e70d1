"""The kernels give numpy's bits (ml_dtypes' for bfloat16) on every instruction set that this machine has."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from smb._engine import ffi, lib
from smb.engine import EngineClient
from smb.errors import InvalidArgumentError
from tests.support.kernels import ISAS, OPS, Array, pointer, reference
from tests.support.kernels import best_isa_afterwards as best_isa_afterwards

DTYPES: dict[int, np.dtype[Any]] = {
    lib.SMB_FLOAT16: np.dtype(np.float16),
    lib.SMB_FLOAT32: np.dtype(np.float32),
    lib.SMB_FLOAT64: np.dtype(np.float64),
    lib.SMB_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    lib.SMB_INT32: np.dtype(np.int32),
    lib.SMB_INT64: np.dtype(np.int64),
    lib.SMB_UINT8: np.dtype(np.uint8),
}
FLOATS = (lib.SMB_FLOAT16, lib.SMB_FLOAT32, lib.SMB_FLOAT64, lib.SMB_BFLOAT16)
HALVES = (lib.SMB_FLOAT16, lib.SMB_BFLOAT16)
INTEGERS = (lib.SMB_INT32, lib.SMB_INT64, lib.SMB_UINT8)
STORAGE = {  # dtypes without arithmetic: bytes
    lib.SMB_INT8: 1, lib.SMB_INT16: 2, lib.SMB_UINT16: 2, lib.SMB_UINT32: 4, lib.SMB_UINT64: 8, lib.SMB_COMPLEX64: 8,
    lib.SMB_BOOL: 1, lib.SMB_FLOAT8_E4M3FN: 1, lib.SMB_FLOAT8_E5M2: 1,
}  # fmt: skip
WITH_BITS = {
    getattr(lib, f"SMB_{name.upper()}"): np.dtype(name)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")
}
BITS: dict[int, np.ufunc] = {
    lib.SMB_BAND: np.bitwise_and, lib.SMB_BOR: np.bitwise_or, lib.SMB_BXOR: np.bitwise_xor,
}  # fmt: skip
FLOAT_SCALES = [1.0, 0.0, -0.0, -1.0, 0.5, 0.1, 1e-3, -3.0, 1e5, 1e-40, 1e300, np.inf, -np.inf, np.nan, 1.00048828125]
INTEGER_SCALES = [0.0, 1.0, 2.0, 3.0, 255.0]
COUNT_MAX = 4097
GUARD = 3  # elements on each side that must stay as they are

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=[str(dtype) for dtype in DTYPES.values()])
every_op = pytest.mark.parametrize("op", OPS, ids=list(OPS.values()))


def apply(dtype: int, op: int, target: Array, source: Array, scale: float) -> int:
    return int(lib.smb_kernel_apply(dtype, op, pointer(target), pointer(source), target.size, scale))


def bits(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")


def assert_same(dtype: int, found: Array, expected: Array, told: str = "") -> None:
    """Bit-equal; where both are NaN its sign and payload may differ."""
    assert found.dtype == expected.dtype
    different = bits(found) != bits(expected)
    if dtype in FLOATS:
        different &= ~(np.isnan(found) & np.isnan(expected))
    where = np.flatnonzero(different)
    assert where.size == 0, (
        f"{told} {where.size} differ, first {where[0]}: {found[where[0]]!r} for {expected[where[0]]!r}"
    )


def special_values(dtype: int) -> Array:
    if dtype in INTEGERS:
        info = np.iinfo(DTYPES[dtype])
        return np.array([0, 1, 2, info.max, info.max - 1, info.min, info.min + 1], DTYPES[dtype])
    info = ml_dtypes.finfo(DTYPES[dtype])
    positive = [0.0, info.smallest_subnormal, info.smallest_normal, info.eps, 1.0, 1.5, info.max, np.inf, np.nan]
    values = np.array(positive).astype(DTYPES[dtype])
    return np.concatenate([values, -values])


def random_values(dtype: int, count: int, seed: int) -> Array:
    """Return a third random bits, a third numbers near each other, a third special ones."""
    random = np.random.default_rng(seed)
    form = DTYPES[dtype]
    raw = np.frombuffer(random.bytes(count * form.itemsize), form)
    near = random.integers(0, 7, count).astype(form)
    special = random.choice(special_values(dtype), count)
    return np.choose(random.integers(0, 3, count), [bits(raw), bits(near), bits(special)]).view(form)


def draw_scale(dtype: int, random: np.random.Generator) -> float:
    """Return one, a special one, or any that the dtype takes."""
    match random.integers(3):
        case 0:
            return 1.0
        case 1:
            return float(random.choice(FLOAT_SCALES if dtype in FLOATS else INTEGER_SCALES))
    if dtype in FLOATS:
        return float(np.frombuffer(random.bytes(8), np.float64)[0])
    info = np.iinfo(DTYPES[dtype])
    # Above 2^53 only some integers are floats; those near the ends of int64 are among them.
    drawn = float(random.integers(info.min, info.max, dtype=info.dtype, endpoint=True))
    return drawn if drawn < float(int(info.max) + 1) else float(info.min)


def examples(dtype: int, op: int) -> Iterator[tuple[int, int, int, int, float]]:
    """Yield lengths, places of target and source, seeds and scales: the same in every run, others for each operation.
    Half of the lengths are short, and all of these come.
    """
    yield 0, 0, 0, 1, 1.0
    yield COUNT_MAX, 1, 0, 1, 1.0
    yield COUNT_MAX, 0, 3, 2, 2.0
    for number in range(150 if os.environ.get("SMB_LONG") else 60):
        seed = 1000 * (1 + op) + number
        random = np.random.default_rng(seed)
        short = (30 * op + number // 2) % 71
        count = short if number % 2 else random.integers(0, COUNT_MAX, endpoint=True)
        yield int(count), int(random.integers(17)), int(random.integers(17)), seed, draw_scale(dtype, random)


@every_dtype
@every_op
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow and NaN are what is tested here
def test_kernel_gives_numpys_bits(dtype: int, op: int) -> None:
    """Any length up to 4097, any alignment, any bits, any accepted scale; and nothing beside the range changes."""
    for count, target_shift, source_shift, seed, scale in examples(dtype, op):
        before = random_values(dtype, count + target_shift + 2 * GUARD, seed)
        at = slice(target_shift + GUARD, target_shift + GUARD + count)
        source = random_values(dtype, count + source_shift, seed + 1)[source_shift:]
        expected, untouched = before.copy(), source.copy()
        expected[at] = reference(op, before[at], source, scale)
        for isa, name in enumerate(ISAS):
            told = f"{name} count={count} shifts={target_shift},{source_shift} seed={seed} scale={scale!r}"
            memory = before.copy()
            assert lib.smb_isa_select(isa) == lib.SMB_OK
            assert apply(dtype, op, memory[at], source, scale) == lib.SMB_OK, told
            assert_same(dtype, memory, expected, told)
            assert bits(source).tobytes() == bits(untouched).tobytes(), told


@pytest.mark.parametrize("dtype", HALVES, ids=[str(DTYPES[dtype]) for dtype in HALVES])
@every_op
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_value_of_16_bits(dtype: int, op: int) -> None:
    """All 65536 values of a 16-bit float, against each special one and scaled: no rounding is left to chance."""
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    for special in special_values(dtype):
        for scale in (1.0, 0.3):
            expected = reference(op, np.full(every.size, special, DTYPES[dtype]), every, scale)
            for isa, name in enumerate(ISAS):
                assert lib.smb_isa_select(isa) == lib.SMB_OK
                target = np.full(every.size, special, DTYPES[dtype])
                assert apply(dtype, op, target, every, scale) == lib.SMB_OK
                assert_same(dtype, target, expected, f"{name} {special!r} scale={scale}")


@every_dtype
@every_op
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_target_may_be_source(dtype: int, op: int) -> None:
    """A buffer combined with itself: the old value is read everywhere before the new one is stored."""
    for isa, name in enumerate(ISAS):
        print(name)
        assert lib.smb_isa_select(isa) == lib.SMB_OK
        for scale in (1.0, 3.0):
            target = random_values(dtype, COUNT_MAX, 7)
            expected = reference(op, target, target, scale)
            assert apply(dtype, op, target, target, scale) == lib.SMB_OK
            assert_same(dtype, target, expected)


@every_op
@pytest.mark.parametrize("dtype", INTEGERS, ids=[str(DTYPES[dtype]) for dtype in INTEGERS])
def test_scale_of_integers_is_an_integer_of_the_dtype(op: int, dtype: int) -> None:
    """A fraction, NaN, infinity or a number out of range is refused and changes nothing; the last inside is taken."""
    info = np.iinfo(DTYPES[dtype])
    past = float(int(info.max) + 1)
    target, source = np.full(9, 5, DTYPES[dtype]), np.full(9, 3, DTYPES[dtype])
    before = float(np.nextafter(float(info.min), -np.inf))
    for scale in (0.5, -1.5, np.nan, np.inf, -np.inf, past, before):
        assert lib.smb_op_accepts(dtype, op, scale) == 0
        assert apply(dtype, op, target, source, scale) == lib.SMB_INVALID
    assert (target == 5).all()
    for scale in (0.0, -0.0, 1.0, float(info.min), float(np.nextafter(past, 0)) // 1):
        assert lib.smb_op_accepts(dtype, op, scale) == 1
        assert apply(dtype, op, target, source, scale) == lib.SMB_OK


@pytest.mark.parametrize("op", BITS, ids=[function.__name__ for function in BITS.values()])
@pytest.mark.parametrize("dtype", WITH_BITS, ids=[str(dtype) for dtype in WITH_BITS.values()])
def test_operations_on_bits_are_numpys(dtype: int, op: int) -> None:
    """Any bits at any alignment, of each width; another scale than 1 is refused and changes nothing."""
    for isa, name in enumerate(ISAS):
        print(name)
        assert lib.smb_isa_select(isa) == lib.SMB_OK
        form, random = WITH_BITS[dtype], np.random.default_rng(5)
        for count, shift in ((0, 0), (1, 1), (70, 3), (COUNT_MAX, 0), (COUNT_MAX, 1)):
            memory, source = (
                random.integers(0, 2, size, np.uint8).view(bool) if form.kind == "b" else
                np.frombuffer(random.bytes(size * form.itemsize), form).copy()
                for size in (count + 2 * GUARD + shift, count)
            )  # fmt: skip
            expected, target = memory.copy(), memory[GUARD + shift : GUARD + shift + count]
            expected[GUARD + shift : GUARD + shift + count] = BITS[op](target, source)
            assert apply(dtype, op, target, source, 2.0) == lib.SMB_INVALID
            assert apply(dtype, op, target, source, 1.0) == lib.SMB_OK
            assert memory.tobytes() == expected.tobytes()


def test_only_numbers_of_dtypes_and_ops_are_known() -> None:
    """Every number beside the defined ones is refused, and so is arithmetic on dtypes for storage."""
    value = np.zeros(1, np.float64)
    for dtype in range(-1, 20):
        size = DTYPES[dtype].itemsize if dtype in DTYPES else STORAGE.get(dtype, 0)
        assert lib.smb_dtype_bytes(dtype) == size
        for op in range(-1, 12):
            known = (
                dtype in WITH_BITS if op in BITS else
                op in OPS and (dtype in DTYPES or (dtype in STORAGE and op == lib.SMB_REPLACE))
            )  # fmt: skip
            assert lib.smb_op_accepts(dtype, op, 1.0) == known
            assert (apply(dtype, op, value, value.copy(), 1.0) == lib.SMB_OK) == known
        assert lib.smb_op_accepts(dtype, lib.SMB_REPLACE, 3.0) == (dtype in DTYPES)


def expected_isas() -> tuple[list[str], str]:
    """What the processor has by the kernel's own account, and which of them is the fastest where that was measured."""
    names, best = ["generic"], "generic"
    if platform.machine() != "x86_64":
        return names, best
    described = dict(re.findall(r"^(.+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text().split("\n\n")[0], re.M))
    flags = set(described["flags"].split())
    if {"avx2", "f16c"} <= flags:
        names, best = [*names, "avx2"], "avx2"
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
            zen5 = described["vendor_id"] == "AuthenticAMD" and int(described["cpu family"]) >= 26
            names, best = [*names, "avx512", "avx512-wide"], "avx512-wide" if zen5 else "avx512"
    return names, best


def run_with_isa(isa: str | None) -> subprocess.CompletedProcess[str]:
    """Load the engine in a process of its own and print the instruction set that it uses."""
    script = "from smb._engine import ffi, lib; from smb.engine import check_isa; check_isa(); "
    script += "print(ffi.string(lib.smb_isa_name(lib.smb_isa_current())).decode())"
    variables = {key: value for key, value in os.environ.items() if key != "SMB_ISA"}
    if isa is not None:
        variables["SMB_ISA"] = isa
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60, check=False)


def test_the_processor_decides_which_instruction_sets_there_are() -> None:
    """The engine's list is what /proc/cpuinfo says; without SMB_ISA the one that was measured as fastest is in use."""
    names, best = expected_isas()
    assert names == ISAS
    assert run_with_isa(None).stdout.strip() == best


def test_smb_isa_chooses_the_instruction_set() -> None:
    """Each one that is here by its name; a name that is not here is refused with those that are."""
    for name in ISAS:
        assert run_with_isa(name).stdout.strip() == name
    assert run_with_isa("").stdout == run_with_isa(None).stdout
    for name in ("avx9", "AVX2", "generic "):
        refused = run_with_isa(name)
        assert refused.returncode != 0
        assert f"SMB_ISA must be one of {', '.join(ISAS)} on this processor, not {name};" in refused.stderr


def test_a_daemon_with_an_unknown_smb_isa_ends_with_one_line(tmp_path: Path) -> None:
    """No traceback; its last line names the variable, its value and what there is instead."""
    command = [sys.executable, "-m", "memserver", "--coordinator", "127.0.0.1:1", "--memory-dir", str(tmp_path)]
    refused = subprocess.run(
        [*command, "--metrics", "127.0.0.1:0", "--listen", "127.0.0.1:0"],
        capture_output=True, text=True, env=os.environ | {"SMB_ISA": "avx9"}, timeout=60, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert "ERROR memserver: SMB_ISA must be one of generic" in refused.stderr.splitlines()[-1]


def test_a_client_with_an_unknown_smb_isa_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error of ours, which commands print as one line, not by the import."""
    monkeypatch.setenv("SMB_ISA", "avx9")
    with pytest.raises(InvalidArgumentError, match=r"SMB_ISA must be one of .*, not avx9"):
        EngineClient(1)


def test_isa_selection_is_checked() -> None:
    """An instruction set that is not here is refused, and the one in use stays."""
    used = lib.smb_isa_current()
    for isa in (-1, len(ISAS), 100):
        assert lib.smb_isa_select(isa) == lib.SMB_INVALID
        assert lib.smb_isa_name(isa) == ffi.NULL
    assert lib.smb_isa_current() == used
