"""EAMSGD: elastic averaging with Nesterov's momentum at the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from smb.errors import InvalidArgumentError
from smb.train.easgd import DelayedExchange
from smb.train.exchange.elastic_force import check_settings
from smb.train.parameters import Parameters, Values
from smb.train.scheme import Exchange, Scheme, is_number
from smb.train.traits import ELASTIC, Traits

if TYPE_CHECKING:
    from smb.train.group import Group


@dataclass(frozen=True)
class EAMSGD(Scheme):
    """EASGD whose workers step with Nesterov's momentum. With W the shared model, w and v the worker's values and
    velocity, every `every` (tau) local steps:

        d = alpha * (w - W);  W += d;  v = mu*v;  w += v;  g = grad(w);  w -= eta*g;  v -= eta*g;  w -= d

    (Zhang, Choromanska, LeCun 2015, Algorithm 2.) d is of w before the look-ahead `w += v`, and never enters v.
    Everything from `v = mu*v` to `v -= eta*g` is the local step, and is the user's: nesterov_step() does it on numpy
    arrays, with momentum= of the group's scheme. alpha as in EASGD.

    With another optimizer that has Nesterov momentum (torch.optim.SGD(nesterov=True), and most that fold the look-ahead
    into the parameters) it composes, with one difference. Their parameters are the look-ahead point theta = w + mu*v;
    their buffer is -v/eta. Both forms take the same steps on theta, as long as eta is constant. The elastic difference
    is then alpha * (theta - W): it draws the look-ahead point to the shared model. That is alpha*mu*v more than the
    rule above takes, and the shared model is an average of look-ahead points. If that matters, use nesterov_step. With
    an optimizer without momentum this scheme is EASGD.

    Taxonomy, staleness and what is tested: as EASGD. tests/train/test_elastic_schemes.py holds the golden trace of
    nesterov_step with this exchange; tests/unit/train/test_elastic_force.py holds theta beside torch's parameters,
    without a force.
    """

    NAME: ClassVar[str] = "eamsgd"
    TRAITS: ClassVar[Traits] = Traits(way=ELASTIC, no_overlap="scheme='seasgd' is EASGD that sends in the background")
    alpha: float | None = None
    every: int = 10
    momentum: float = 0.99

    def __post_init__(self) -> None:
        check_settings(self.NAME, self.alpha, self.every)
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise InvalidArgumentError(
                f"scheme {self.NAME!r}: momentum={self.momentum!r} is no momentum; it is at least 0 and less than 1"
            )

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange."""
        return DelayedExchange(group, parameters, self.alpha, self.every)


def nesterov_step(
    values: Values,
    velocity: Values,
    gradient: Callable[[Values], Values],
    learning_rate: float,
    momentum: float,
) -> None:
    """Take one local step of EAMSGD, in place: v = mu*v; w += v; g = gradient(w); w -= eta*g; v -= eta*g.

    `values` and `velocity` are float32 (n,); the velocity starts as zeros and is the worker's own. `gradient` is given
    the look-ahead point, in the memory of `values`, and returns the loss's gradient there, float32 (n,).
    """
    velocity *= np.float32(momentum)
    values += velocity
    change = np.float32(learning_rate) * gradient(values)
    values -= change
    velocity -= change
