"""Optimizers' steps: numpy's bits on every instruction set, the rules as they are stated, and what they refuse."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import smb
from smb._engine import ffi, lib
from smb.call.optimizer_rules import RULES, hyper_of, rule_of
from tests.support import kernels
from tests.support.kernels import best_isa_afterwards as best_isa_afterwards
from tests.support.kernels import every_isa
from tests.support.optimizers import step

COUNT_MAX = 4097
GUARD = 3  # elements on each side that must stay as they are
HYPER = [
    {"lr": 0.1},
    {"lr": -0.7, "scale": 1.0, "weight_decay": 0.25, "beta1": 0.0, "beta2": 0.5, "eps": 0.0, "step": 3},
    {"lr": 1e-3, "scale": -0.3, "weight_decay": 1e-2, "mu": 0.95, "step": 1000, "alpha": 1.0},
    {"lr": 1e30, "scale": 3e38, "weight_decay": -1e20, "mu": -2.0, "beta1": 0.99999999, "eps": 1e30, "alpha": -3e38},
    {"lr": 1e-40, "scale": 0.0, "weight_decay": 1e-45, "mu": 1e-42, "eps": 1e-45, "step": 2**53, "alpha": 1e-41},
]
every_rule = pytest.mark.parametrize("rule", RULES)
deterministic = settings(kernels.deterministic, max_examples=150 if os.environ.get("SMB_LONG") else 30)


def numbers_of(rule: str, given_hyper: dict[str, float]) -> dict[str, float]:
    """Return those that the rule has, what must be given and is not being 0.3, or of a step 7."""
    needed = {name: 7 if name == "step" else 0.3 for name, value in RULES[rule].hyper.items() if value is None}
    return hyper_of(RULES[rule], {**needed, **{n: v for n, v in given_hyper.items() if n in RULES[rule].hyper}}, "test")


def run(rule: int, arrays: list[np.ndarray[Any, Any] | None], count: int, numbers: dict[str, float]) -> int:
    """Weights, gradient and two states, as the engine does it."""
    hyper = ffi.new("struct smb_hyper *", numbers)
    places = [ffi.NULL if a is None else ffi.cast("float *", a.ctypes.data) for a in arrays]
    return int(lib.smb_kernel_step(rule, *places, count, hyper))


def values(random: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a third random bits, a third numbers near each other, a third special ones."""
    info = np.finfo(np.float32)
    positive = [0.0, info.smallest_subnormal, info.smallest_normal, 1.0, 1.5, float(info.max), np.inf, np.nan]
    special = np.float32([*positive, *(-value for value in positive)])
    raw = np.frombuffer(random.bytes(4 * count), np.float32)
    near = random.standard_normal(count, np.float32)
    return np.choose(random.integers(0, 3, count), [raw, near, random.choice(special, count)])


def assert_same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], what: str) -> None:
    """Bit-equal; where both are NaN its sign and payload may differ."""
    different = (found.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(found) & np.isnan(expected))
    where = np.flatnonzero(different)
    assert where.size == 0, (
        f"{what}: {where.size} differ, first {where[0]}: {found[where[0]]!r}, {expected[where[0]]!r}"
    )


@every_isa
@every_rule
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow and NaN are what is tested here
def test_a_step_gives_numpys_bits(isa: int, rule: str) -> None:
    """Any length up to 4097, any alignment, any bits, all numbers; nothing beside the range changes, and the gradient
    does not.
    """
    assert lib.smb_isa_select(isa) == lib.SMB_OK
    states = len(RULES[rule].states)
    longest = [example(number=number, count=COUNT_MAX, shifts=(0, 1, 2, 3), seed=1) for number in range(len(HYPER))]

    @deterministic
    @given(
        number=st.integers(0, len(HYPER) - 1),
        count=st.integers(0, COUNT_MAX),
        shifts=st.tuples(*[st.integers(0, 16)] * 4),
        seed=st.integers(0, 2**32 - 1),
    )
    @example(number=0, count=0, shifts=(0, 0, 0, 0), seed=1)
    def check(number: int, count: int, shifts: tuple[int, ...], seed: int) -> None:
        random, numbers = np.random.default_rng(seed), numbers_of(rule, HYPER[number])
        memory = [values(random, count + shift + 2 * GUARD) for shift in shifts[: 2 + states]]
        expected = [array.copy() for array in memory]
        ranges = [slice(shift + GUARD, shift + GUARD + count) for shift in shifts]
        step(rule, *(array[r] for array, r in zip(expected, ranges, strict=False)), **numbers)
        parts = [array[r] for array, r in zip(memory, ranges, strict=False)]
        assert run(RULES[rule].number, [*parts, *[None] * (2 - states)], count, numbers) == lib.SMB_OK
        for name, found, wanted in zip(("weights", "gradient", "m", "v"), memory, expected, strict=False):
            assert_same(found, wanted, name)

    for each in longest:
        check = each(check)
    check()


@every_rule
def test_rules_have_the_engines_numbers(rule: str) -> None:
    """The Python table says of states what the engine does; other numbers are no rules."""
    assert lib.smb_rule_states(RULES[rule].number) == len(RULES[rule].states)
    numbers = {known.number for known in RULES.values()}
    for number in set(range(-2, 300)) - numbers:
        assert lib.smb_rule_states(number) == -1
        assert lib.smb_rule_accepts(number, ffi.new("struct smb_hyper *", {"lr": 0.1, "step": 1})) == 0


REFUSED = [
    ("sgd", {}, "rule 'sgd' takes lr, scale, weight_decay: lr must be given"),
    ("momentum", {"weight_decay": 0.1}, "lr and mu must be given"),
    ("adam", {"lr": 0.1}, "step must be given"),
    ("elastic", {"lr": 0.1, "alpha": 0.5}, "rule 'elastic' takes alpha: lr is unknown"),
    ("sgd", {"lr": 0.1, "momentum": 0.9}, "momentum is unknown"),
    ("sgd", {"lr": "high"}, "lr must be a number, not 'high'"),
    ("sgd", {"lr": None}, "lr must be a number, not None"),
    ("sgd", {"lr": float("nan")}, "lr must be a finite float32, not nan"),
    ("sgd", {"lr": float("inf")}, "finite"),
    ("sgd", {"lr": 1e39}, "a finite float32"),
    ("sgd", {"lr": 10**400}, "must be a number"),
    ("adam", {"lr": 0.1, "step": 0}, "step must be an integer from 1 to .*, not 0"),
    ("adam", {"lr": 0.1, "step": 1.5}, "step must be an integer"),
    ("adam", {"lr": 0.1, "step": 2.0**54}, "step must be an integer"),
    ("adam", {"lr": 0.1, "step": float("inf")}, "step must be an integer"),
    ("adamw", {"lr": 0.1, "step": 1, "beta1": 1.0}, "beta1 must be at least 0 and less than 1"),
    ("adamw", {"lr": 0.1, "step": 1, "beta2": -0.1}, "beta2 must be at least 0 and less than 1"),
    ("adamw", {"lr": 0.1, "step": 1, "beta2": float("nan")}, "beta2 must be at least 0 and less than 1"),
    ("adamw", {"lr": 0.1, "step": 1, "eps": -1e-8}, "0 or more"),
]


@pytest.mark.parametrize(("rule", "numbers", "told"), REFUSED)
def test_numbers_that_cannot_be(rule: str, numbers: dict[str, float], told: str) -> None:
    """A number that is missing, unknown or out of its range is refused by name."""
    with pytest.raises(smb.InvalidArgumentError, match=f"^apply of w: .*{told}"):
        hyper_of(rule_of(rule, "apply of w"), numbers, "apply of w")


@every_rule
def test_the_engine_refuses_them_too(rule: str) -> None:
    """What another client sends is judged as well: each number out of its range by itself. Nothing is done."""
    good = numbers_of(rule, {})
    bad: dict[str, list[float]] = {name: [np.nan, np.inf, -np.inf, 1e39] for name in good}
    bad |= {"beta1": [1.0, -1e-9, np.nan], "beta2": [1.0, -1e-9, np.nan], "step": [0, -1, 1.5, 2.0**54, np.nan, np.inf]}
    bad["eps"] = [-1e-8, np.nan, np.inf]
    arrays = [np.ones(5, np.float32) for _ in range(4)]
    number = RULES[rule].number
    assert lib.smb_rule_accepts(number, ffi.new("struct smb_hyper *", good)) == 1
    for name in good:
        for value in bad[name]:
            assert lib.smb_rule_accepts(number, ffi.new("struct smb_hyper *", {**good, name: value})) == 0, (
                name,
                value,
            )
            assert run(number, arrays, 5, {**good, name: value}) == lib.SMB_INVALID
    assert all((array == 1).all() for array in arrays)


def test_there_is_no_such_rule() -> None:
    """A name that is none is refused with those that are."""
    for name in ("", "SGD", "lamb", None):
        with pytest.raises(smb.InvalidArgumentError, match=r"unknown rule .*; known are sgd, momentum, nesterov, adam"):
            rule_of(name, "apply of w")  # type: ignore[arg-type]
