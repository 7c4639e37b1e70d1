"""DiLoCo: H local steps of any optimizer, then a Nesterov step on the servers with the mean of the workers' changes.

Rule (Douillard et al., DiLoCo: Distributed low-communication training of language models, 2023), H = every:

    g = - sum_i w_i (W_i - W) / sum_i w_i
    v = mu v + g
    W -= lr (g + mu v)

with lr = outer_lr and mu = outer_momentum, w_i = 1, or the worker's samples with token_weights. The inner optimizer
(AdamW in the paper) keeps its state and never sends it. v lies on the servers, in two slots that are used in turn, and
the step is computed by sums: W += - lr mu^2 v_before - lr (1 + mu) g (exchange/round_closing.py).

Taxonomy: data parallel; central; synchronous, H steps apart; one write and one read of the model per worker and round:
1/H of the bytes of BSP.

Staleness: as LocalSGD. tests/train/test_rounds.py: the model equals a reference in numpy bit for bit, also when
members, or the worker that closes the round, are killed at any step of closing.

Streaming (Douillard et al., Streaming DiLoCo with overlapping communication, 2025): the model is cut into P = fragments
of whole tensors. Each is exchanged once in H steps, at its own time: one every H / P steps. A worker sends its change
of the fragment in the background, and `delay` steps later it sets

    w <- mix w + (1 - mix) W

so the worker keeps its own values with the weight `mix`, with the steps that it did meanwhile. The next contribution is
w - W. With fragments=1, delay=0, mix=0 this is the rule above. A contribution that arrives after a quorum closed its
round is dropped; the worker then takes over the fragment and goes on. The code is in exchange/streaming.py;
tests/train/test_streaming.py compares with a reference in numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from smb.buffer import Buffer
from smb.errors import InvalidArgumentError
from smb.tensors import TensorInfo
from smb.train.exchange.round_closing import Outer
from smb.train.exchange.rounds import RoundExchange, RoundScheme
from smb.train.exchange.streaming import FragmentExchange
from smb.train.fragments import FRAGMENTS_MAX, cut
from smb.train.group import WIRE_BYTES, Group
from smb.train.parameters import Parameters
from smb.train.scheme import Span, is_number, is_whole
from smb.train.traits import EXACT, ROUNDS, Closing, Traits


@dataclass(frozen=True, kw_only=True)
class NesterovRounds(RoundScheme):
    """A Nesterov step with the mean over all workers after every `every` local steps. RoundScheme has the other
    settings.
    """

    every: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = is_number(self.outer_lr) and is_number(self.outer_momentum)
        if not (numbers and self.outer_lr > 0 and 0 <= self.outer_momentum < 1):
            raise InvalidArgumentError(
                f"scheme {self.NAME!r}: outer_lr must be a number above 0 (it is {self.outer_lr!r}), and "
                f"outer_momentum a number from 0 to below 1 (it is {self.outer_momentum!r})"
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

    - `outer_lr`, `outer_momentum`: the learning rate and the momentum of the step on the servers.
    - `fragments`: the model is exchanged in this many parts, each once in `every` steps, in the background.
    - `delay`: a worker takes over the result of a part's exchange this many local steps later, and waits for the result
      if the round is still open.
    - `mix`: the weight of its own values that a worker keeps when it takes over a part.
    - `step_wire`: how the servers' step travels to the workers, as wire= of a buffer. With "exact" the workers read the
      model instead.
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
                f"scheme {self.NAME!r}: fragments must be a whole number from 1 to every={self.every} and at most "
                f"{FRAGMENTS_MAX}, not {self.fragments!r}: each fragment is exchanged at a step of its own, once in "
                f"`every` steps"
            )
        if not is_whole(self.delay, 0) or self.delay * self.fragments >= self.every:
            raise InvalidArgumentError(
                f"scheme {self.NAME!r}: delay must be a whole number of steps from 0 to below every/fragments="
                f"{self.every / self.fragments:g}, not {self.delay!r}: a worker takes over the result of one exchange "
                f"before it begins the next"
            )
        if not (is_number(self.mix) and 0 <= self.mix < 1):
            raise InvalidArgumentError(
                f"scheme {self.NAME!r}: mix must be a number from 0 to below 1, not {self.mix!r}: with 1 a worker "
                f"would take over nothing"
            )

        if not isinstance(self.step_wire, str) or self.step_wire not in WIRE_BYTES:
            raise InvalidArgumentError(
                f"scheme {self.NAME!r}: step_wire must be one of {', '.join(WIRE_BYTES)}, not {self.step_wire!r}"
            )

    @property
    def traits(self) -> Traits:
        """The traits of the class with this number of fragments and this delay. With a step_wire the servers also keep
        the step, and the part of it that rounding left out.
        """
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
        """Raise InvalidArgumentError if the model can't be cut into the fragments, or a mesh has it."""
        if self._streams and parameters.in_ranks:
            raise InvalidArgumentError(
                f"join of training {name!r}: fragments, delay, mix and step_wire do not work with the ranks of a mesh "
                f"(mesh=) yet; leave these settings out, or join without a mesh"
            )
        self._cut(name, parameters.size, parameters.table)

    def spans(self, weights: Buffer) -> tuple[Span, ...]:
        """Return the fragments. If the group has a table of tensors, each fragment consists of whole tensors."""
        return self._cut(weights.name, weights.size, weights.table)

    def _cut(self, name: str, size: int, table: Mapping[str, TensorInfo] | None) -> tuple[Span, ...]:
        starts = [info.offset // 4 for info in table.values()] if table else []
        return cut(size, starts, self.fragments, f"training {name!r}")

    def run(self, group: Group, parameters: Parameters) -> RoundExchange:
        """Return this worker's exchange."""
        if not self._streams:
            return super().run(group, parameters)
        return FragmentExchange(group, parameters, self, self.delay, self.mix)
