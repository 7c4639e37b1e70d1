"""ASP, totally asynchronous: every worker adds what it did when it has done it, and waits for nobody.

    W_global += W_local - base;  W_local = base = W_global        after every local step

In one call: the servers add, and the sums come back in the same round trip. Source: Dean et al. 2012, "Large scale
distributed deep networks" (Downpour SGD); it is SSP without a bound (Ho et al. 2013).

Taxonomy: data parallel; central (a parameter server); asynchronous; each worker with the servers alone.

Staleness: how many contributions of others were acknowledged between a worker's read and its next contribution. No
bound is promised, but the group's guards may set one (staleness_max): a contribution beyond it is refused. Nobody's
contribution is lost, and each counts once: the workers' own records of what they saw show it
(tests/train/test_asp_and_ssp.py, judged by tests/support/training_judges.py). A worker that is killed while it sends
may leave a part of its last contribution, whole chunks of it, in the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from smb.train import member_table as t
from smb.train.exchange.background_send import deltas_of
from smb.train.parameters import Parameters
from smb.train.scheme import Exchange, Scheme
from smb.train.traits import FUSED, Traits

if TYPE_CHECKING:
    from smb.train.group import Group

_SENT = t.GROUP_EXTRA  # contributions acknowledged so far


@dataclass(frozen=True)
class ASP(Scheme):
    """Totally asynchronous updates. It has no settings."""

    NAME: ClassVar[str] = "asp"
    TRAITS: ClassVar[Traits] = Traits(way=FUSED, calls=4, each_step=True, no_overlap="", plans_overlap=True)

    def run(self, group: Group, parameters: Parameters) -> Exchange:
        """Return this worker's exchange."""
        return Asynchronous(group, parameters)


class Asynchronous(Exchange):
    """One worker's side. A step blocks for one accumulate, and two small calls."""

    EACH_STEP = True

    def __init__(self, group: Group, parameters: Parameters) -> None:
        self._group = group
        self._deltas = deltas_of(group.weights, parameters, group.sent_bytes)
        self._sent = 0  # contributions, ours among them, when the read began that the next contribution builds on
        self._unsent_samples = 0

    def step(self, samples: int) -> None:
        """Add the delta and take over the sum."""
        group, deltas = self._group, self._deltas
        self.flush()
        before = group.table.get(0, _SENT)
        self._unsent_samples = samples
        deltas.exchange(partial(group.check, staleness=max(0, before - self._sent)), fetch=True)
        self._count()
        self._sent = before + 1

    def restart(self) -> None:
        """Take over the shared model."""
        self._deltas.restart()
        self._sent = self._group.table.get(0, _SENT)

    def flush(self) -> None:
        """Send what a failed call left unsent."""
        if self._deltas.finish():
            self._count()
            self._sent += 1

    def _count(self) -> None:
        self._group.table.add(0, _SENT, 1)
        self._group.count(self._unsent_samples, self._deltas.moved_bytes())
