"""How the demo uses each scheme: settings with which its small network learns in less than a minute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smb.errors import InvalidArgumentError
from smb.train import SCHEMES


@dataclass(frozen=True)
class Recipe:
    """A scheme in the demo.

    alpha_sum: the sum of all workers' moving rates, if the scheme has one; it must be below 1, or the shared model
    would overshoot. shares_rate: the steps of all workers are added, so each takes its share of the learning rate; with
    a mean, or a moving rate, each takes all of it. nesterov: the workers use Nesterov's momentum. hosts: the number of
    hosts that the workers pretend to be on.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    alpha_sum: float | None = None
    shares_rate: bool = False
    nesterov: bool = False
    hosts: int = 1

    def settings_for(self, workers: int) -> dict[str, Any]:
        """Return the scheme's settings."""
        return self.settings if self.alpha_sum is None else {"alpha": self.alpha_sum / workers, **self.settings}

    def rate_for(self, workers: int) -> float:
        """Return the factor of the workers' learning rate."""
        return 1.0 / workers if self.shares_rate else 1.0


RECIPES = {
    "bsp": Recipe(),
    "asp": Recipe(shares_rate=True),
    "ssp": Recipe({"staleness": 3}, shares_rate=True),
    "r2sp": Recipe(shares_rate=True),
    "easgd": Recipe({"every": 4}, alpha_sum=0.8),
    "eamsgd": Recipe({"every": 4}, alpha_sum=0.8, nesterov=True),
    "seasgd": Recipe({"every": 4}, alpha_sum=0.8),
    "hsgd": Recipe({"alpha": 0.4, "every": 2}, hosts=2),
    "localsgd": Recipe({"every": 10}),
    "diloco": Recipe({"every": 20}),
    # Its default momentum of 0.9 passes by the optimum in so short a run: docs/schemes.md.
    "asyncdiloco": Recipe({"every": 20, "outer_lr": 0.2, "outer_momentum": 0.5}),
}


def recipe(scheme: str) -> Recipe:
    """Return the recipe of a scheme, or default settings if it has none. Raises InvalidArgumentError."""
    if scheme not in SCHEMES:
        raise InvalidArgumentError(f"unknown scheme {scheme!r}; known are {', '.join(RECIPES)}")
    return RECIPES.get(scheme, Recipe())
