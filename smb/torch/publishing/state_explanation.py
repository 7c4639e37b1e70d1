"""What publishing or reading a state has cost this process: the result of explain() of a Publisher or Follower."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smb.call.published_states import PUBLISHER, READER
from smb.config.parse import format_bytes
from smb.html_tables import described, listed
from smb.published import has_deltas
from smb.state_costs import StateCosts, StateUse, advice

if TYPE_CHECKING:
    from smb.buffer import Buffer

_LISTED = 20  # tensors that the text names at most, the largest ones


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """A tensor of a published state. `bytes` is its size there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class StateExplanation:
    """What one Publisher or Follower has done so far, by its own counters.

    - `generation`: published or read last. `times`: how many it has published, or read.
    - `transports`: those by which this process reaches the servers, or the mirror `source` ("" for the state itself).
    - `bytes`: sent, or received, by all of them. `copied_bytes`: copied between arrays of this process, outside of
      calls. None if the Publisher was given pairs, of which copies are not counted.
    - `seconds`: for which their callers stood still; for publish_async() until it returned, for pairs with what the
      iterable took. `age`: seconds since the Publisher or Follower was made.
    - `tensors`: of a Follower with placements= the parts that it reads.
    - `advice`: sentences; empty if nothing is known to help.
    """

    state: str
    role: str
    generation: int
    times: int
    transports: tuple[str, ...]
    source: str
    bytes: int
    copied_bytes: int | None
    seconds: float
    age: float
    tensors: tuple[PublishedTensor, ...]
    advice: tuple[str, ...]

    def _facts(self) -> dict[str, object]:
        times = max(1, self.times)
        copied = "not counted" if self.copied_bytes is None else format_bytes(self.copied_bytes // times)
        each, share = self.seconds / times, self.seconds / self.age
        facts: dict[str, object] = {
            "generation": f"{self.generation or 'none yet'}; {self.times} by this {self.role}",
            "transport": ", ".join(self.transports) or "none yet",
        }
        if self.role == READER:
            facts["read from"] = self.source or "the state's own servers"
        return facts | {
            "tensors": f"{format_bytes(sum(each.bytes for each in self.tensors))} in {len(self.tensors)}",
            "bytes per generation": format_bytes(self.bytes // times),
            "copies per generation": f"{copied} in this process, outside of calls",
            "stood still": f"{each:.3g} s per generation, {share:.0%} of {self.age:.1f} s",
        }

    def _rows(self) -> list[dict[str, object]]:
        largest = sorted(self.tensors, key=lambda tensor: -tensor.bytes)[:_LISTED]
        return [
            {"tensor": each.name, "shape": each.shape, "dtype": each.dtype, "bytes": format_bytes(each.bytes)}
            for each in largest
        ]

    def __str__(self) -> str:
        lines = [f"{self.role} of {self.state}", *(f"  {key}: {value}" for key, value in self._facts().items())]
        lines += ["  " + "  ".join(str(value) for value in row.values()) for row in self._rows()]
        if (more := len(self.tensors) - _LISTED) > 0:
            lines.append(f"  and {more} smaller ones")
        return "\n".join([*lines, *(f"* {each}" for each in self.advice)])

    def _repr_html_(self) -> str:
        said = "".join(listed([{"advice": each} for each in self.advice], "")) if self.advice else ""
        return described(f"{self.role} of {self.state}", self._facts()) + listed(self._rows(), "no tensors") + said


def state_explained(
    buffer: Buffer, role: str, generation: int, costs: StateCosts, source: str, tensors: Iterable[PublishedTensor]
) -> StateExplanation:
    """Return what is known of a Publisher or Follower. Makes no call."""
    use = StateUse(
        buffer.name, role == PUBLISHER, costs.transports, costs.times, costs.seconds, costs.age, has_deltas(buffer)
    )
    return StateExplanation(
        state=buffer.name,
        role=role,
        generation=generation,
        times=costs.times,
        transports=costs.transports,
        source=source,
        bytes=costs.bytes,
        copied_bytes=costs.copied_bytes,
        seconds=costs.seconds,
        age=costs.age,
        tensors=tuple(tensors),
        advice=tuple(advice(use)),
    )
