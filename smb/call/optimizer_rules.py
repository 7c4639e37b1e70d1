"""The optimizers that servers run (Buffer.apply): names, state and parameters. csrc/smb/types.h has the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from smb.errors import InvalidArgumentError

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_STEP_MAX = 2**53  # a float64 cannot represent every integer beyond this one


@dataclass(frozen=True, slots=True)
class OptimizerRule:
    """One optimizer. `number` travels in frames, `states` names its state, and `hyper` has the default of each
    parameter, None if the caller must pass it.
    """

    name: str
    number: int
    states: tuple[str, ...]
    hyper: Mapping[str, float | None]


_GRADIENT: dict[str, float | None] = {"lr": None, "scale": 1.0, "weight_decay": 0.0}
_ADAM: dict[str, float | None] = {**_GRADIENT, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "step": None}

RULES: dict[str, OptimizerRule] = {
    rule.name: rule
    for rule in (
        OptimizerRule("sgd", 1, (), _GRADIENT),
        OptimizerRule("momentum", 2, ("m",), {**_GRADIENT, "mu": None}),
        OptimizerRule("nesterov", 3, ("m",), {**_GRADIENT, "mu": None}),
        OptimizerRule("adam", 4, ("m", "v"), _ADAM),
        OptimizerRule("adamw", 5, ("m", "v"), {**_ADAM, "weight_decay": 0.01}),
        OptimizerRule("elastic", 6, (), {"alpha": None}),
    )
}


def rule_of(name: str, asked: str) -> OptimizerRule:
    """Return the rule of that name. Raises InvalidArgumentError for an unknown name; `asked` names the call."""
    if not isinstance(name, str) or name not in RULES:
        raise InvalidArgumentError(f"{asked}: unknown rule {name!r}; known are {', '.join(RULES)}")
    return RULES[name]


def hyper_of(rule: OptimizerRule, given: Mapping[str, float], asked: str) -> dict[str, float]:
    """Return all parameters of a rule by name. Raises InvalidArgumentError if one is missing, unknown or invalid."""
    strange = [name for name in given if name not in rule.hyper]
    missing = [name for name, default in rule.hyper.items() if default is None and name not in given]
    if strange or missing:
        problem = f"{strange[0]} is unknown" if strange else f"{' and '.join(missing)} must be given"
        raise InvalidArgumentError(f"{asked}: rule {rule.name!r} takes {', '.join(rule.hyper)}: {problem}")
    numbers: dict[str, float] = {}
    for name, default in rule.hyper.items():
        value = given.get(name, default)
        try:
            number = float(value)  # type: ignore[arg-type]  # None is refused like any value that is not a number
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(f"{asked}: {name} must be a number, not {value!r}") from error
        if not _is_in_range(name, number):
            raise InvalidArgumentError(
                f"{asked}: {name} must be {_RANGES.get(name, 'a finite float32')}, not {value!r}"
            )
        numbers[name] = number
    return numbers


_RANGES = {
    "beta1": "at least 0 and less than 1",
    "beta2": "at least 0 and less than 1",
    "eps": "a finite float32 of 0 or more",
    "step": "an integer from 1 to 2**53",
}


def _is_in_range(name: str, number: float) -> bool:
    if name in ("beta1", "beta2"):
        return 0 <= number < 1
    if name == "step":
        return 1 <= number <= _STEP_MAX and number == int(number)
    return abs(number) <= _FLOAT32_MAX and (name != "eps" or number >= 0)
