"""What the exchanges of one worker cost, and what would make them cheaper: the result of Shared.explain().

Copies are counted where they are made (Parameters.copies), bytes and contributions are those of the training's table,
and times those of the worker (smb/train/time_spent.py). Nothing here is estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smb.config.parse import format_bytes
from smb.html_tables import described, listed
from smb.torch.training.model_parameters import TensorEntry, address_of
from smb.train import member_table as t
from smb.train.advice import Costs, advice

if TYPE_CHECKING:
    from smb.train import Worker

_LISTED = 20  # tensors that the text names at most, the largest ones


@dataclass(frozen=True, slots=True)
class TensorExplained:
    """A shared parameter: `bytes` in the group's buffer, float32, and `placed`: it is part of one array with all others
    (smb.torch.place).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    placed: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """The exchanges of one worker so far.

    - `transports`: those by which this process reaches the shared weights.
    - `contributions`, `bytes`: sent so far; bytes also of the models that were received.
    - `copied_bytes`: what exchanges have copied from one array of this process to another, outside of calls. None with
      overlap=, where copies are not counted.
    - `seconds`: since the worker joined. `blocked`, `waiting`: the shares of this time, 0 to 1, for which training
      stood still for exchanges, and for which exchanges waited for other workers.
    - `advice`: sentences; empty if nothing is known to help.
    """

    training: str
    scheme: str
    wire: str
    transports: tuple[str, ...]
    contributions: int
    bytes: int
    copied_bytes: int | None
    seconds: float
    blocked: float
    waiting: float
    tensors: tuple[TensorExplained, ...]
    advice: tuple[str, ...]

    def _facts(self) -> dict[str, object]:
        size, times = sum(tensor.bytes for tensor in self.tensors), max(1, self.contributions)
        placed = sum(tensor.bytes for tensor in self.tensors if tensor.placed)
        copied = "not counted" if self.copied_bytes is None else format_bytes(self.copied_bytes // times)
        return {
            "scheme": f"{self.scheme}, wire={self.wire}",
            "transport": ", ".join(self.transports),
            "parameters": f"{format_bytes(size)} in {len(self.tensors)} tensors, {format_bytes(placed)} placed",
            "contributions": self.contributions,
            "bytes of each": f"{format_bytes(self.bytes // times)} sent and received",
            "copies of each": f"{copied} in this process, outside of calls",
            "time": f"{self.blocked:.0%} of {self.seconds:.0f} s stood still, {self.waiting:.0%} waited for others",
        }

    def _rows(self) -> list[dict[str, object]]:
        largest = sorted(self.tensors, key=lambda tensor: -tensor.bytes)[:_LISTED]
        return [
            {
                "tensor": tensor.name,
                "shape": tensor.shape,
                "where": f"{tensor.dtype} on {tensor.device}",
                "bytes": format_bytes(tensor.bytes),
                "placed": "yes" if tensor.placed else "no",
            }
            for tensor in largest
        ]

    def __str__(self) -> str:
        lines = [f"training {self.training}", *(f"  {key}: {value}" for key, value in self._facts().items())]
        for row in self._rows():
            lines.append("  " + "  ".join(str(value) for value in row.values()))
        if (more := len(self.tensors) - _LISTED) > 0:
            lines.append(f"  and {more} smaller ones")
        return "\n".join([*lines, *(f"* {each}" for each in self.advice)])

    def _repr_html_(self) -> str:
        advice = "".join(listed([{"advice": each} for each in self.advice], ""))
        return described(f"training {self.training}", self._facts()) + listed(self._rows(), "") + advice


def explained(worker: Worker, entries: Sequence[TensorEntry], copied_bytes: int | None) -> Explanation:
    """Return what is known of a worker's exchanges. `copied_bytes` is None with overlap=. Blocks until each segment of
    the weights has a path.
    """
    placed, spent, member = address_of(entries) is not None, worker.group.time_spent, worker.group.member
    seconds = max(spent.seconds, 1e-9)
    found = Explanation(
        training=worker.name,
        scheme=worker.scheme.NAME,
        wire=worker.weights.wire,
        transports=worker.weights.transports,
        contributions=worker.contributions,
        bytes=member.get(t.BYTES),
        copied_bytes=copied_bytes,
        seconds=seconds,
        blocked=spent.blocked.seconds / seconds,
        waiting=spent.waiting.seconds / seconds,
        tensors=tuple(
            TensorExplained(
                entry.names[0],
                tuple(entry.tensor.shape),
                str(entry.tensor.dtype).removeprefix("torch."),
                str(entry.tensor.device),
                4 * entry.count,
                placed,
            )
            for entry in entries
        ),
        advice=(),
    )
    here = all(tensor.dtype == "float32" and tensor.device == "cpu" for tensor in found.tensors)
    costs = Costs(
        found.transports, found.wire, found.blocked, found.waiting, here and not placed, overlaps=copied_bytes is None
    )
    return replace(found, advice=tuple(advice(costs, worker.scheme.traits)))
