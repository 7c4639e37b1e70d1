"""EASGD: asynchronous elastic averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from smb.train.exchange.elastic_force import Elastic, check_settings
from smb.train.parameters import Parameters
from smb.train.scheme import Exchange, Scheme
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

    A contribution of a step() that raised counts once: the next call finishes it (smb/train/exchange/contribution.py).
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
        return DelayedExchange(group, parameters, self.alpha, self.every)


class DelayedExchange(Exchange):
    """One worker's side of EASGD and EAMSGD. Blocks for a read and an accumulate every so many steps."""

    def __init__(self, group: Group, parameters: Parameters, alpha: float | None, every: int) -> None:
        parameters.keep_exact()  # what a worker gives is less than fewer bits can show
        self._elastic = Elastic(group, alpha, parameters)
        self._every = every
        self._steps = 0
        self._samples = 0
        self._owed = False  # the worker's half of the last difference: after the local step under way

    def step(self, samples: int) -> None:
        """Apply what was taken before this local step; every so many steps take and send the next difference."""
        if self._elastic.under_way:  # the last call failed in the middle: this is its repetition
            self._finish()
            return
        self._pay()
        if (self._steps + 1) % self._every:
            self._steps += 1
            self._samples += samples
            return
        self._elastic.take()
        self._elastic.send(self._samples + samples)
        self._owed = True
        self._finish()

    def restart(self) -> None:
        """Take over the shared model: nothing is owed."""
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
        """Leave the values alone from now on."""
        self._owed = False
        self._elastic.abandon()

    def _finish(self) -> None:
        self._elastic.finish()
        self._steps += 1
        self._samples = 0

    def _pay(self) -> None:
        if self._owed:
            self._elastic.pay()
            self._owed = False
