"""Local SGD: every worker takes H steps alone, then the models are averaged.

Rule: with H = every,

    W += sum_i w_i (W_i - W) / sum_i w_i,      w_i = 1, or the worker's samples with token_weights

which for equal weights is the mean of the models (Stich, Local SGD converges fast and communicates little, 2019;
McMahan et al., federated averaging, 2017, weights by samples). The local optimizer's state is not exchanged.

Taxonomy: data parallel; central; synchronous, H steps apart; one write and one read of the model per worker and round.

Staleness: 0 in rounds without quorum, and H - 1 local steps inside a round. With quorum=K a contribution that arrives s
rounds late counts in the next round with the weight 1/sqrt(1 + s); Guards(staleness_max=) bounds s.
tests/train/test_rounds.py compares with a reference in numpy, also for a quorum and late contributions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smb.train.exchange.rounds import RoundScheme
from smb.train.traits import ROUNDS, Closing, Traits


@dataclass(frozen=True, kw_only=True)
class LocalSGD(RoundScheme):
    """After every `every` local steps the model moves by the mean over all workers. The other settings are those of
    BSP.
    """

    NAME: ClassVar[str] = "localsgd"
    TRAITS: ClassVar[Traits] = Traits(
        way=ROUNDS,
        calls=17,
        closing=Closing(2, 1),
        no_overlap="it exchanges seldom; scheme='diloco' in fragments (fragments=) would hide behind whole steps",
    )
    every: int

    def interval(self) -> int:
        """Return `every`."""
        return self.every
