"""BSP, bulk-synchronous parallel: every step is a round.

Rule: each worker does one local step from the same weights; then the weights move by the mean of the workers' changes,

    W += sum_i w_i (W_i - W) / sum_i w_i,      w_i = 1, or the worker's samples with token_weights

With SGD, also with momentum and with weight decay, a round equals one step on the samples of all workers together.
Sources: Valiant, A bridging model for parallel computation, 1990; Das et al. 2016, synchronous SGD without new
hyper-parameters. With quorum=K the scheme is SGD with backup workers (Chen et al. 2016): the first K contributions of a
round count, and later ones are dropped.

Taxonomy: data parallel; central (the servers' memory); synchronous; one write and one read of the model per worker and
step.

Staleness: 0. A worker goes on only from the weights of the closed round. A late contribution is dropped (`dropped` in
the status), never added to a later round. tests/train/test_rounds.py compares with one process that has the whole
batch, and checks that no part of a late contribution counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smb.train.exchange.rounds import RoundScheme
from smb.train.traits import ROUNDS, Closing, Traits


@dataclass(frozen=True, kw_only=True)
class BSP(RoundScheme):
    """After every local step the model moves by the mean over all workers.

    - `quorum`: this many contributions close a round, `grace` seconds after they arrived (None: the contributions of
      all live members). grace="auto" waits for a quantile of the delays of earlier contributions, within bounds.
    - `token_weights`: a contribution weighs as much as its number of samples. False: all contributions weigh the same.
    """

    NAME: ClassVar[str] = "bsp"
    TRAITS: ClassVar[Traits] = Traits(
        way=ROUNDS, calls=17, each_step=True, closing=Closing(2, 1), no_overlap="", plans_overlap=True
    )
    LATE: ClassVar[bool] = False
