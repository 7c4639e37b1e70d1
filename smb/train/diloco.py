"""DiLoCo: H local steps of any optimizer, then a Nesterov step on the servers with the mean of what they did.

Rule (Douillard et al., DiLoCo: Distributed low-communication training of language models, 2023), H = every:

    g = - sum_i w_i (W_i - W) / sum_i w_i
    v = mu v + g
    W -= lr (g + mu v)

with lr = outer_lr and mu = outer_momentum, w_i = 1, or the worker's samples with token_weights. The inner optimizer,
AdamW there, keeps its state and never sends it. v lives on the servers, in two slots that take turns, and the step is
made of sums: W += - lr mu^2 v_before - lr (1 + mu) g (rounds.py).

Taxonomy: data parallel; central; synchronous, H steps apart; one write and one read of the model per worker and round:
1/H of the bytes of BSP.

Staleness: as LocalSGD. tests/train/test_rounds.py: equal to a reference in numpy, to the bit, also when
members and closers are killed at each step of closing.

Streaming (Douillard et al., Streaming DiLoCo with overlapping communication, 2025): the model is cut into P = fragments
of whole tensors. Each is exchanged once in H steps, at its own time: one every H / P steps. A worker's change of it is
sent in the background, and `delay` steps later

    w <- mix w + (1 - mix) W

so that what the worker did meanwhile, and what others did not share, stays with the weight `mix`. The next
contribution is w - W. With fragments=1, delay=0, mix=0 it is the rule above. A contribution that comes after its round
was closed by a quorum is dropped: its worker takes the fragment over, and goes on. exchange/streaming.py;
tests/train/test_streaming.py: equal to a reference in numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from smb.buffer import Buffer
from smb.errors import InvalidArgumentError
from smb.tensors import TensorInfo
from smb.train.exchange.closing import Outer
from smb.train.exchange.rounds import RoundExchange, RoundScheme
from smb.train.exchange.streaming import FragmentExchange
from smb.train.fragments import FRAGMENTS_MAX, cut
from smb.train.group import WIRE_BYTES, Group
from smb.train.parameters import Parameters
from smb.train.scheme import Span, is_number, is_whole
from smb.train.traits import EXACT, ROUNDS, Closing, Traits


@dataclass(frozen=True, kw_only=True)
class NesterovRounds(RoundScheme):
    """Nesterov on the mean over all workers after every `every` local steps. The rest: see RoundScheme."""

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
        return Outer(self.outer_lr, self.outer_momentum)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(NesterovRounds):
    """After every `every` local steps, Nesterov's momentum on the mean over all workers.

    - `outer_lr`, `outer_momentum`: of the step on the servers.
    - `fragments`: the model is exchanged in this many parts, each once in `every` steps, in the background.
    - `delay`: a worker takes a part's outcome over this many local steps later, and waits for it if it is not there.
    - `mix`: the share of its own values that a worker keeps then.
    - `step_wire`: how the servers' step travels to the workers, as wire= of a buffer. "exact": they read the model.
    - `quorum`, `grace`, `token_weights`: as in BSP.
    """

    NAME: ClassVar[str] = "diloco"
    TRAITS: ClassVar[Traits] = Traits(
        way=ROUNDS,
        calls=20,
        closing=Closing(4, 2),
        outer=True,
        no_overlap="it exchanges seldom; in fragments (fragments=) it would hide behind whole steps",
    )
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    step_wire: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.fragments, 1, min(self.every, FRAGMENTS_MAX)):
            raise InvalidArgumentError(
                f"{self.NAME}: fragments={self.fragments!r} is no whole number in 1 to every={self.every}, or beyond "
                f"{FRAGMENTS_MAX}: each is exchanged once in so many steps, at a step of its own"
            )
        if not is_whole(self.delay, 0) or self.delay * self.fragments >= self.every:
            raise InvalidArgumentError(
                f"{self.NAME}: delay={self.delay!r} is no whole number of steps from 0 to below every/fragments="
                f"{self.every / self.fragments:g}: what one exchange gives is taken over before the next begins"
            )
        if not (is_number(self.mix) and 0 <= self.mix < 1):
            raise InvalidArgumentError(
                f"{self.NAME}: mix={self.mix!r} is not from 0 to below 1; with 1 a worker would take nothing over"
            )

        if not isinstance(self.step_wire, str) or self.step_wire not in WIRE_BYTES:
            raise InvalidArgumentError(f"{self.NAME}: step_wire={self.step_wire!r} is none of {', '.join(WIRE_BYTES)}")

    @property
    def traits(self) -> Traits:
        """Those of the class, for so many fragments; with a step_wire the servers keep the step, and its rest."""
        found = replace(self.TRAITS, fragments=self.fragments, delay=self.delay, step_wire=self.step_wire)
        if self.fragments > 1:
            found = replace(found, no_overlap="with fragments= it exchanges in the background already")
        return found if self.step_wire == EXACT else replace(found, calls=found.calls + 3, closing=Closing(7, 2, 3))

    def step_wires(self) -> str:
        """Return step_wire."""
        return self.step_wire

    @property
    def _streams(self) -> bool:
        return (self.fragments, self.delay, self.mix, self.step_wire) != (1, 0, 0, EXACT)

    def check(self, name: str, parameters: Parameters) -> None:
        """Refuse what can't be cut into the fragments."""
        if self._streams and parameters.in_ranks:
            raise InvalidArgumentError(
                f"join of training {name!r}: fragments, delay, mix and step_wire are not there for the ranks of a mesh "
                f"(mesh=) yet; leave them out, or join without a mesh"
            )
        self._cut(name, parameters.size, parameters.table)

    def spans(self, weights: Buffer) -> tuple[Span, ...]:
        """Return the fragments: of whole tensors, where the group knows of tensors."""
        return self._cut(weights.name, weights.size, weights.table)

    def _cut(self, name: str, size: int, table: Mapping[str, TensorInfo] | None) -> tuple[Span, ...]:
        starts = [info.offset // 4 for info in table.values()] if table else []
        return cut(size, starts, self.fragments, f"training {name!r}")

    def run(self, group: Group, parameters: Parameters) -> RoundExchange:
        """Return this worker's exchange."""
        if not self._streams:
            return super().run(group, parameters)
        return FragmentExchange(group, parameters, self, self.delay, self.mix)
