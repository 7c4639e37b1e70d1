"""Asynchronous DiLoCo: DiLoCo's rounds, in which no worker waits for another.

Rule: after H = every steps a worker writes W_i - W_base into its inbox, reads the present weights, and goes on. A round
is closed when `grace` seconds have passed since the `quorum`-th contribution arrived, or when all members have
contributed. The close is DiLoCo's Nesterov step with

    w_i = tokens_i / sqrt(1 + s_i)

tokens_i = 1, or the samples with token_weights; s_i, the staleness, is the number of rounds that were closed since the
worker read the weights from which its delta starts. With quorum=1 every contribution is a step of the model, so
outer_lr must be small, about 0.07 (Liu et al., Asynchronous local-SGD training for language modeling, 2024); with
quorum=K, K deltas are gathered for one step, as in FedBuff (Nguyen et al. 2022), and DiLoCo's 0.7 works.

If a worker's last contribution still lies in its inbox when the next one is due, the worker trains on alone and later
sends both contributions as one.

Taxonomy: data parallel; central; asynchronous; one write and one read of the model per worker and H steps.

Staleness: the scheme sets no bound, since nobody waits for a slow worker, and weights by 1/sqrt(1 + s).
Guards(staleness_max=S) sets one: it refuses s > S. tests/train/test_rounds.py compares with a reference in numpy that
knows the staleness, and checks that contributions beyond the bound are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smb.train.diloco import NesterovRounds
from smb.train.traits import ROUNDS, Closing, Traits


@dataclass(frozen=True, kw_only=True)
class AsyncDiLoCo(NesterovRounds):
    """DiLoCo without waiting: each worker contributes after every `every` local steps and goes on. The settings are
    those of DiLoCo and BSP.
    """

    NAME: ClassVar[str] = "asyncdiloco"
    TRAITS: ClassVar[Traits] = Traits(
        way=ROUNDS,
        calls=22,
        closing=Closing(4, 2),
        outer=True,
        no_overlap="it exchanges seldom, and waits for nobody",
    )
    quorum: int | None = 1
    outer_lr: float = 0.07
    WAITS: ClassVar[bool] = False
