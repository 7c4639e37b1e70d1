"""How the demo uses each scheme: settings with which its small network learns in less than a minute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smb.errors import InvalidArgumentError
from smb.train import SCHEMES

# The moving rate of elastic averaging is shared out among the workers; their sum stays below 1, or the shared model
# would overshoot.
MOVING_RATE_SUM = 0.8


@dataclass(frozen=True)
class Recipe:
    """A scheme's settings in the demo; what the workers' learning rate is multiplied by; whether their momentum is
    Nesterov's.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 1.0
    nesterov: bool = False


def recipe(scheme: str, workers: int) -> Recipe:
    """Return the recipe for so many workers. Raises InvalidArgumentError where there is no such scheme."""
    alpha = MOVING_RATE_SUM / workers
    recipes = {
        # The mean of all workers' steps is one step on as many times the samples.
        "bsp": Recipe(),
        # The sum of all workers' steps is taken: each takes its share of the learning rate.
        "asp": Recipe(learning_rate=1.0 / workers),
        "ssp": Recipe({"staleness": 3}, learning_rate=1.0 / workers),
        "r2sp": Recipe(learning_rate=1.0 / workers),
        "easgd": Recipe({"alpha": alpha, "every": 4}),
        "eamsgd": Recipe({"alpha": alpha, "every": 4}, nesterov=True),
        "seasgd": Recipe({"alpha": alpha, "every": 4}),
        "hsgd": Recipe(),
        "localsgd": Recipe({"every": 10}),
        "diloco": Recipe({"every": 20}),
        "asyncdiloco": Recipe({"every": 20}),
    }
    if scheme not in recipes or scheme not in SCHEMES:
        there = ", ".join(name for name in recipes if name in SCHEMES)
        raise InvalidArgumentError(f"there is no scheme {scheme!r}; there are: {there}")
    return recipes[scheme]
