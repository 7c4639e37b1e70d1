"""DiLoCo: H local steps of any optimizer, then a Nesterov step on the servers with the mean of what they did.

Rule (Douillard et al., DiLoCo: Distributed low-communication training of language models, 2023), H = every:

    g = - sum_i w_i (W_i - W) / sum_i w_i
    v = mu v + g
    W -= lr (g + mu v)

with lr = outer_lr and mu = outer_momentum, w_i = 1, or the worker's samples with token_weights. The inner optimizer,
AdamW there, keeps its state and never sends it. v lives on the servers, in two copies that take turns (rounds.py).

Taxonomy: data parallel; central; synchronous, H steps apart; one write and one read of the model per worker and round:
1/H of the bytes of BSP.

Staleness: as LocalSGD. tests/train/test_rounds.py: equal to a reference in numpy, to the bit, also when
members and closers are killed at each step of closing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smb.errors import InvalidArgumentError
from smb.train.exchange.rounds import Outer, RoundScheme
from smb.train.scheme import is_number


@dataclass(frozen=True, kw_only=True)
class DiLoCo(RoundScheme):
    """Nesterov on the mean over all workers after every `every` local steps. The rest: see RoundScheme."""

    NAME: ClassVar[str] = "diloco"
    every: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = is_number(self.outer_lr) and is_number(self.outer_momentum)
        if not (numbers and self.outer_lr > 0 and 0 <= self.outer_momentum < 1):
            raise InvalidArgumentError(
                f"{self.NAME}: outer_lr={self.outer_lr!r} must be more than 0, and "
                f"outer_momentum={self.outer_momentum!r} from 0 to below 1"
            )

    def interval(self) -> int:
        """Return `every`."""
        return self.every

    def outer(self) -> Outer:
        """Return Nesterov's rule."""
        return Outer("nesterov", 1, (("lr", self.outer_lr), ("mu", self.outer_momentum)))
