"""Elastic averaging: EASGD, EAMSGD whose local steps have Nesterov's momentum, SEASGD whose sending hides.

They share the force (exchange/elastic_force.py) and differ in when a worker takes its half of a difference: EASGD and
EAMSGD after the next local step, SEASGD at once, with the shared model's half sent while the worker computes.
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
    """Every `every` (tau) local steps, with W the shared model and w the worker's values:

        d = alpha * (w - W);  W += d;  (next local step on w, not on w - d);  w -= d

    d is taken before a local step and applied after it. So does Algorithm 1 of Zhang, Choromanska, LeCun (Deep learning
    with elastic averaging SGD, 2015). The gradient is of w as it was when d was taken. With alpha = None it is 0.9 / p,
    where p is the number of workers at that exchange: the force adapts to joins and deaths. (The authors start with
    alpha = beta / p, beta = 0.9; in their terms alpha = eta * rho.) Any local optimizer.

    Taxonomy: data parallel; central (one shared model, on the memory servers); asynchronous; each worker with the
    centre, never with each other: one read and one accumulate of n floats every tau steps.

    Staleness: unbounded; nobody waits for anybody. A difference rests on a read made in the same call. Only additions
    made during one read and one accumulate can come in between. It is counted (`status`), and Guards(staleness_max=)
    refuses to send where it is more, as far as it can be known before sending. The centre moves by at most alpha of the
    way, whatever came in between. Tests: tests/train/test_elastic_schemes.py holds golden traces against numpy, and
    counts the staleness of interleavings made on purpose.

    A contribution of a step() that raised counts once: the next call finishes it (exchange/mover.py).
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
        return ElasticExchange(group, parameters, self.alpha, self.every, hidden=False)


@dataclass(frozen=True)
class SEASGD(Scheme):
    """Every `every` (tau) local steps, with W the shared model and w the worker's values:

        d = alpha * (w - W);  w -= d;  W += d

    (Ahn and others: ShmCaffe, 2018, and Soft Memory Box II, 2020; alpha = 0.2, tau = 1 there. alpha = None is 0.9 / p,
    as in EASGD.) The worker takes its half at once. The shared model's half is sent, and added where the memory is, by
    a background thread while the worker computes; the read of W is not hidden:

        iteration = max(T_compute, T_write + T_accumulate) + T_read + T_local      (T_local: d, and w -= d)

    The next exchange begins by waiting for the last one's addition, so a worker reads what it sent. An error of the
    background call surfaces there: what can be settled and sent again is; otherwise step() raises, has done nothing,
    and called again goes on from there, with each element counted once. Any local optimizer.

    Taxonomy: data parallel; central (one shared model, on the memory servers); asynchronous; each worker with the
    centre, never with each other: one read and one accumulate of n floats every tau steps.

    Staleness: unbounded; nobody waits for anybody. A difference rests on W as it was read one hidden addition before it
    arrives: what others added meanwhile is its staleness, about p - 1 for p workers of equal speed. It is counted
    (`status`); Guards(staleness_max=) as in EASGD. Tests: tests/train/test_elastic_schemes.py holds golden traces
    against numpy. By events it shows that computing goes on during the addition, and that the next read waits for it.
    It counts staleness in interleavings made on purpose. tests/fault/test_elastic_kills.py kills workers and servers.
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
    """One worker's side. Every so many steps it blocks for a read and, unless the addition is hidden, for that; where
    it is hidden, for the end of the last one.
    """

    def __init__(self, group: Group, parameters: Parameters, alpha: float | None, every: int, *, hidden: bool) -> None:
        parameters.keep_exact()  # what a worker gives is less than fewer bits can show
        self._elastic = Elastic(group, alpha, parameters)
        self._every = every
        self._hidden = hidden
        self._steps = 0
        self._samples = 0
        self._owed = False  # the worker's half of the last difference: after the local step under way

    def step(self, samples: int) -> None:
        """Every so many steps draw the values and the shared model to each other."""
        if not self._hidden:
            if self._elastic.under_way:  # the last call failed in the middle: this is its repetition
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
        """Take over the shared model, and begin to count anew: nothing is owed."""
        self._elastic.finish()
        self._elastic.restart()
        self._owed = False
        self._steps = self._samples = 0

    def flush(self) -> None:
        """Finish what is under way, and apply the worker's half."""
        self._elastic.finish()
        self._pay()

    def close(self) -> None:
        """Flush, and let go of the memory of the model's size."""
        self.flush()
        self._elastic.release()

    def abandon(self) -> None:
        """Wait until nothing is under way, and leave the values alone from then on."""
        self._owed = False
        self._elastic.abandon()

    def _done(self) -> None:
        self._steps += 1
        self._samples = 0

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
    """Take one local step of EAMSGD, in place: v = mu*v; w += v; g = gradient(w); w -= eta*g; v -= eta*g.

    `values` and `velocity` are float32 (n,); the velocity starts as zeros and is the worker's own. `gradient` is given
    the look-ahead point, in the memory of `values`, and returns the loss's gradient there, float32 (n,).
    """
    velocity *= np.float32(momentum)
    values += velocity
    change = np.float32(learning_rate) * gradient(values)
    values -= change
    velocity -= change
