"""Elastic averaging: EASGD; EAMSGD, with Nesterov's momentum in the local steps; SEASGD, which sends in the background.

All three share exchange/elastic_force.py and differ in when a worker applies its half of a difference. EASGD and EAMSGD
apply the half after the next local step. SEASGD applies it at once, and sends the shared model's half while the worker
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from smb.errors import InvalidArgumentError
from smb.train.exchange.elastic_force import Elastic, check_settings
from smb.train.parameters import Parameters, Values
from smb.train.scheme import Exchange, Scheme, is_number
from smb.train.traits import ELASTIC, Traits

if TYPE_CHECKING:
    from smb.train.group import Group


@dataclass(frozen=True)
class EASGD(Scheme):
    """Elastic averaging: every `every` (tau) local steps the worker and the shared model move towards each other.

    With W the shared model and w the worker's values:

        d = alpha * (w - W);  W += d;  (next local step on w, not on w - d);  w -= d

    d is taken before a local step and applied after it, as in Algorithm 1 of Zhang, Choromanska, LeCun (Deep learning
    with elastic averaging SGD, 2015). The gradient is that of w when d was taken. alpha=None means 0.9 / p, where p is
    the number of workers at that exchange, so the force adapts to joins and deaths. (The authors start with alpha =
    beta / p, beta = 0.9; in their terms alpha = eta * rho.) Any local optimizer works.

    Taxonomy: data parallel; central (one shared model, on the memory servers); asynchronous; each worker with the
    centre, never with each other: one read and one accumulate of n floats every tau steps.

    Staleness: unbounded; nobody waits for anybody. d rests on a read made in the same call, so only additions made
    during one read and one accumulate can come in between. These additions are counted (`staleness` in the status).
    Guards(staleness_max=) refuses a contribution if there are more of them, as far as this is known before sending. The
    centre moves by at most alpha of the way in any case.

    Blocks for one read and one accumulate. A contribution whose step() raised counts once: the next call of step()
    finishes it.
    """

    NAME: ClassVar[str] = "easgd"
    TRAITS: ClassVar[Traits] = Traits(
        way=ELASTIC, calls=6, no_overlap="scheme='seasgd' is EASGD that sends in the background"
    )
    alpha: float | None = None
    every: int = 10

    def __post_init__(self) -> None:
        check_settings(self.NAME, self.alpha, self.every)

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange."""
        return ElasticExchange(group, parameters, self.alpha, self.every, hidden=False)


@dataclass(frozen=True)
class EAMSGD(Scheme):
    """EASGD whose workers step with Nesterov's momentum, every `every` (tau) local steps.

    With W the shared model, w and v the worker's values and velocity:

        d = alpha * (w - W);  W += d;  v = mu*v;  w += v;  g = grad(w);  w -= eta*g;  v -= eta*g;  w -= d

    (Zhang, Choromanska, LeCun 2015, Algorithm 2.) d is computed from w before the look-ahead `w += v`, and never enters
    v. Everything from `v = mu*v` to `v -= eta*g` is the local step, which the user's program takes: nesterov_step()
    takes it on numpy arrays, with momentum= of the group's scheme. alpha is as in EASGD.

    It also works with another optimizer with Nesterov momentum (torch.optim.SGD(nesterov=True), and most that fold the
    look-ahead into the parameters), with one difference. Their parameters are the look-ahead point theta = w + `mu*v`;
    their buffer is -v/eta. Both forms take the same steps on theta as long as eta is constant. The elastic difference
    is then `alpha * (theta - W)`: it pulls the look-ahead point to the shared model, by `alpha*mu*v` more than the rule
    above, and the shared model is an average of look-ahead points. Use nesterov_step if that matters. With an optimizer
    that has no momentum this scheme is EASGD.

    Taxonomy, staleness and blocking: as EASGD.
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
                f"scheme {self.NAME!r}: momentum must be a number from 0 to below 1, not {self.momentum!r}"
            )

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange."""
        return ElasticExchange(group, parameters, self.alpha, self.every, hidden=False)


@dataclass(frozen=True)
class SEASGD(Scheme):
    """EASGD that adds to the shared model in the background, while the next local steps run, every `every` (tau) steps.

    With W the shared model and w the worker's values:

        d = alpha * (w - W);  w -= d;  W += d

    (Ahn and others: ShmCaffe, 2018, and Soft Memory Box II, 2020; alpha = 0.2, tau = 1 there. alpha=None means 0.9 / p,
    as in EASGD.) The worker takes its half at once. A background thread sends the shared model's half, which is added
    where the memory is, while the worker computes. The read of W is not hidden:

        iteration = max(T_compute, T_write + T_accumulate) + T_read + T_local      (T_local: d, and w -= d)

    The next exchange first waits for the last one's addition, so a worker reads a model that contains its own addition.
    That exchange also handles an error of the background call: it settles the call and sends again if it can; otherwise
    step() raises without having done anything. The next call of step() goes on, and each element counts once. Any local
    optimizer works.

    Taxonomy: data parallel; central (one shared model, on the memory servers); asynchronous; each worker with the
    centre, never with each other: one read and one accumulate of n floats every tau steps.

    Staleness: unbounded; nobody waits for anybody. d rests on W as it was read one hidden addition before d arrives.
    The number of additions of others in that time is its staleness, about p - 1 for p workers of equal speed. The
    status has it; Guards(staleness_max=) works as in EASGD.
    """

    NAME: ClassVar[str] = "seasgd"
    TRAITS: ClassVar[Traits] = Traits(way=ELASTIC, calls=5, hides=True, no_overlap="it sends in the background already")
    alpha: float | None = 0.2
    every: int = 1

    def __post_init__(self) -> None:
        check_settings(self.NAME, self.alpha, self.every)

    def interval(self) -> int:
        """Return `every`."""
        return self.every

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange."""
        return ElasticExchange(group, parameters, self.alpha, self.every, hidden=True)


class ElasticExchange(Exchange):
    """One worker's side. Every `every` steps it blocks for a read. Then it blocks for its addition to the shared model,
    or, if additions are hidden, for the end of the last one.
    """

    def __init__(self, group: Group, parameters: Parameters, alpha: float | None, every: int, *, hidden: bool) -> None:
        parameters.keep_exact()  # a contribution is smaller than values of fewer bits can show
        self._elastic = Elastic(group, alpha, parameters)
        self._every = every
        self._hidden = hidden
        self._steps = 0
        self._samples = 0
        self._unsent = 0  # steps since the last exchange
        # The worker has not applied its half of the last difference, which is due after this local step.
        self._owed = False

    def step(self, samples: int) -> None:
        """Every `every` steps move the values and the shared model towards each other."""
        self._unsent = self._steps % self._every + 1
        if not self._hidden:
            if self._elastic.under_way:  # the last call failed half-way, and this call repeats it
                self._elastic.finish()
                self._done()
                return
            self._pay()
        if (self._steps + 1) % self._every:
            self._steps += 1
            self._samples += samples
            return
        if self._hidden:
            self._elastic.finish()
            self._elastic.take()
            self._elastic.pay()
            self._elastic.send(self._samples + samples)
        else:
            self._elastic.take()
            self._elastic.send(self._samples + samples)
            self._owed = True
            self._elastic.finish()
        self._done()

    def restart(self) -> None:
        """Set the values to the shared model, drop a half that is due, and count steps from 0 again."""
        self._elastic.finish()
        self._elastic.restart()
        self._owed = False
        self._steps = self._samples = self._unsent = 0

    def flush(self) -> None:
        """Finish an exchange in progress, and apply the worker's half."""
        self._elastic.finish()
        self._pay()

    def close(self) -> None:
        """Flush, and release the arrays of the model's size."""
        self.flush()
        self._elastic.release()

    def abandon(self) -> int:
        """Wait until no exchange is in progress; from then on the values are not changed."""
        self._owed = False
        self._elastic.abandon()
        lost, self._unsent = self._unsent, 0
        return lost

    def _done(self) -> None:
        self._steps += 1
        self._samples = self._unsent = 0

    def _pay(self) -> None:
        if self._owed:
            self._elastic.pay()
            self._owed = False


def nesterov_step(
    values: Values,
    velocity: Values,
    gradient: Callable[[Values], Values],
    learning_rate: float,
    momentum: float,
) -> None:
    """Take one local step of EAMSGD, in place: `v = mu*v; w += v; g = gradient(w); w -= eta*g; v -= eta*g`.

    `values` and `velocity` are float32 (n,). The velocity starts as zeros and belongs to the worker. `gradient` gets
    the look-ahead point, in the memory of `values`, and returns the loss's gradient there, float32 (n,). Calls no
    server.

    ```python
    velocity = np.zeros_like(values)
    smb.train.nesterov_step(values, velocity, gradient, learning_rate=0.1, momentum=0.9)
    ```
    """
    velocity *= np.float32(momentum)
    values += velocity
    change = np.float32(learning_rate) * gradient(values)
    values -= change
    velocity -= change
