"""SEASGD: elastic averaging whose sending hides behind computing."""

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
        return HiddenExchange(group, parameters, self.alpha, self.every)


class HiddenExchange(Exchange):
    """One worker's side of SEASGD. Every so many steps blocks for the last addition's end and for a read."""

    def __init__(self, group: Group, parameters: Parameters, alpha: float | None, every: int) -> None:
        parameters.keep_exact()  # what a worker gives is less than fewer bits can show
        self._elastic = Elastic(group, alpha, parameters)
        self._every = every
        self._steps = 0
        self._samples = 0

    def step(self, samples: int) -> None:
        """Every so many steps: wait for what is under way, draw the values to the shared model, begin to send."""
        if (self._steps + 1) % self._every:
            self._steps += 1
            self._samples += samples
            return
        self._elastic.finish()
        self._elastic.take()
        self._elastic.pay()
        self._elastic.send(self._samples + samples)
        self._steps += 1
        self._samples = 0

    def restart(self) -> None:
        """Take over the shared model, and begin to count anew."""
        self._elastic.finish()
        self._elastic.restart()
        self._steps = self._samples = 0

    def flush(self) -> None:
        """Wait for what is under way."""
        self._elastic.finish()

    def close(self) -> None:
        """Flush, and let go of the memory of the model's size."""
        self.flush()
        self._elastic.release()

    def abandon(self) -> None:
        """Wait until nothing is under way."""
        self._elastic.abandon()
