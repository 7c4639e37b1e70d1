"""What may make a worker's exchanges cheaper, from its counters. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smb.train.traits import EXACT, FUSED, Traits

_MUCH = 0.2  # share of its time for which a worker stands still before more is said than where its parameters are


@dataclass(frozen=True, slots=True)
class Costs:
    """A worker's costs. `blocked` and `waiting` are shares of its time, 0 to 1: training stood still for exchanges, and
    exchanges waited for other workers. `overlaps`: it has overlap=. `scattered`: its parameters could be placed and are
    not; None: unknown. `wire` is None if it is not known.
    """

    transports: tuple[str, ...]
    wire: str | None
    blocked: float
    waiting: float
    scattered: bool | None
    overlaps: bool = False


def advice(costs: Costs, traits: Traits) -> Iterator[str]:
    """Yield sentences; none if nothing is known to help."""
    if costs.scattered and traits.way == FUSED and not costs.overlaps:
        yield (
            "parameters lie in arrays of their own, or were moved since smb.torch.place: call "
            "smb.torch.place(model, optimizer, client) before smb.torch.join"
        )
    if costs.blocked < _MUCH:
        return
    if costs.waiting > costs.blocked / 2:
        yield (
            "most of the time that training stands still is waiting for other workers: look for the slow one with "
            "smb top, or take a scheme that does not wait (asp, easgd)"
        )
        return
    if traits.no_overlap == "" and not costs.overlaps:
        yield 'exchanges can run behind the passes: smb.torch.join(overlap="forward")'
    if traits.each_step:
        yield "every step is an exchange: localsgd, diloco or easgd exchange every so many steps"
    if costs.wire == EXACT and costs.transports not in {("shm",), ()}:
        yield 'contributions travel exact: wire="bfloat16" or "int8" sends a half or a quarter of the bytes'
