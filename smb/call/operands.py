"""Checks the other buffers of a call that combines several on the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from smb.buffer_info import BufferInfo
from smb.call.optimizer_rules import OptimizerRule
from smb.errors import InvalidArgumentError
from smb.layout import Layout


class Operand(Protocol):
    """A buffer that takes part in the call. Messages show its repr."""

    @property
    def info(self) -> BufferInfo:
        """The coordinator's last known description."""


def each_of(value: Any, count: int) -> tuple[Any, ...]:
    """Return one value for each of `count` buffers: `value` itself, if it is a sequence, or `count` times `value`."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * count


def check_beside(asked: str, target: Operand, other: Operand) -> None:
    """Raise InvalidArgumentError unless servers can combine `other` with `target`: same dtype, same placement."""
    ours, theirs = target.info, other.info
    if ours.dtype != theirs.dtype:
        raise InvalidArgumentError(
            f"{asked}: {other!r} must have the dtype {ours.dtype.name}; create it with like={ours.name!r}"
        )
    moves = ours.movable or theirs.movable
    if _placement(ours.layout, moves) != _placement(theirs.layout, moves):
        raise InvalidArgumentError(
            f"{asked}: {other!r} is not striped over the same servers in the same way; create it with "
            f"like={ours.name!r}"
        )


def check_step(asked: str, rule: OptimizerRule, weights: Operand, gradient: Operand, state: Sequence[Operand]) -> None:
    """Raise InvalidArgumentError unless a step of the rule can change weights and state as one."""
    for other in (gradient, *state):
        check_beside(asked, weights, other)
        if other.info.versions > 1:
            raise InvalidArgumentError(f"{asked}: {other!r} keeps several versions; gradient and state need versions=1")
    if len({each.info.id for each in (weights, gradient, *state)}) != 2 + len(state):
        raise InvalidArgumentError(f"{asked}: weights, gradient and state must be different buffers")
    for each in (weights, *state) if state else ():
        if each.info.movable and each.info.replicas == 1:
            raise InvalidArgumentError(
                f"{asked}: {each!r} has one copy and has moved to another server; rule {rule.name!r} cannot "
                f"change it together with others as one; use 'sgd' or 'elastic', or create the "
                f"buffers anew"
            )
    for each in state:
        if each.info.replicas != weights.info.replicas:
            raise InvalidArgumentError(
                f"{asked}: {each!r} has replicas={each.info.replicas} but the weights have "
                f"replicas={weights.info.replicas}; a step changes both as one; create it with "
                f"state_of={weights.info.name!r}"
            )
        if weights.info.replicas > 1 and not each.info.moves_with(weights.info):
            raise InvalidArgumentError(
                f"{asked}: {each!r} and the weights can move to different servers, so a failure could leave "
                f"a step in one of them alone; create it with state_of={weights.info.name!r}"
            )
    if gradient.info.replicas > weights.info.replicas:
        raise InvalidArgumentError(
            f"{asked}: {gradient!r} has two copies but the weights have one; create the weights with "
            f"replicas=2, or the gradient with replicas=1"
        )


def check_warden(asked: str, target: BufferInfo, warden: BufferInfo) -> None:
    """Raise InvalidArgumentError unless each server of `target` can check the lock of `warden` for it, and always will.

    Each segment of `target` needs the segment of the same index of `warden` on its server, and the two must stay
    together: in one bundle if there are two copies, or where they are if there is one.
    """
    here, there = ([segment.server for segment in each.layout.segments] for each in (target, warden))
    together = len(here) <= len(there) and here == there[: len(here)]
    if target.replicas > 1 or warden.replicas > 1:
        if not target.moves_with(warden):
            raise InvalidArgumentError(
                f"{asked}: the lock passed as fence= is of buffer {warden.name!r}, which can be on another server "
                f"after a failure; create one of the two with state_of= the other, or pass this buffer's own lock"
            )
    elif target.movable or warden.movable or not together:
        raise InvalidArgumentError(
            f"{asked}: the lock passed as fence= is of buffer {warden.name!r}, which "
            + (
                "has one copy, and one of the two has moved to another server"
                if target.movable or warden.movable
                else "lies on other servers"
            )
            + f", so that no server of {target.name!r} can check it; create one of the two with like= the other, or "
            "pass this buffer's own lock"
        )


def _placement(layout: Layout, moves: bool) -> tuple[object, ...]:
    """Return what must be equal in two buffers that servers combine.

    If one of the buffers can move, they need not lie on the same servers: the client reads the parts that lie elsewhere
    and sends them along.
    """
    servers = len(layout.segments) if moves else [segment.server for segment in layout.segments]
    return (layout.nbytes, layout.stripe_bytes, layout.chunk_bytes, servers)
