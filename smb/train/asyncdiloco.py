"""Asynchronous DiLoCo: DiLoCo's rounds, and nobody waits for anybody.

Rule: after H = every steps a worker puts W_i - W_base into its inbox, takes over the weights as they are by then, and
goes on. A round is closed as soon as `quorum` contributions are there and `grace` seconds have passed, or all members
have contributed. The close is DiLoCo's Nesterov step with

    w_i = tokens_i / sqrt(1 + s_i)

tokens_i = 1, or the samples with token_weights; s_i, the staleness, is how many rounds were closed since the worker
took over the weights that its delta starts from. With quorum=1 every contribution is a step, which wants a small
outer_lr, about 0.07 (Liu et al., Asynchronous local-SGD training for language modeling, 2024); with quorum=K, K deltas
are gathered for one step, as in FedBuff (Nguyen et al. 2022), and DiLoCo's 0.7 works.

A worker whose last contribution still lies in its inbox when the next one is due goes on alone, and later sends both as
one.

Taxonomy: data parallel; central; asynchronous; one write and one read of the model per worker and H steps.

Staleness: unbounded by itself (a slow worker is not waited for), weighted by 1/sqrt(1 + s); bounded by
Guards(staleness_max=S), which refuses s > S. tests/train/test_rounds.py: equal to a reference in numpy that
knows the staleness; refused beyond the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smb.train.diloco import NesterovRounds
from smb.train.traits import ROUNDS, Closing, Traits


@dataclass(frozen=True, kw_only=True)
class AsyncDiLoCo(NesterovRounds):
    """DiLoCo without waiting: each worker contributes after every `every` local steps and goes on. Settings
    as in BSP.
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
