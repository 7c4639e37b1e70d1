"""States whose every element has one value, so that a mix of two is seen; and those who publish and follow them, in
processes of their own.
"""

from __future__ import annotations

from typing import Any

import torch

import smb
import smb.torch
from tests.support.transports import FAR


def filled(value: int) -> dict[str, torch.Tensor]:
    """A state whose every element is `value`, over many chunks."""
    return {
        "a": torch.full((300_000,), float(value)),
        "b": torch.full((7, 11), value, dtype=torch.int64),
        "c": torch.full((), value % 2, dtype=torch.bool),
        "d": torch.full((100_000,), float(value % 256), dtype=torch.bfloat16),
    }


def value_of(state: Any) -> int:
    """The one value of all of a filled state."""
    value = int(state["b"][0, 0])
    for name, wanted in filled(value).items():
        assert torch.equal(state[name], wanted), f"a mix: {name} beside b={value}"
    return value


def follow_until(barrier: Any, address: str, transport: str, last: int) -> list[int]:
    """Follow "w" until generation `last`; check each, by all three ways to read; return those that were seen."""
    with smb.connect(address, transport=transport) as client:
        barrier.wait()
        follower = smb.torch.follow(client, "w", timeout=60)  # before the trainer
        seen = [0]
        while seen[-1] < last:
            follower.wait(timeout=60)
            if len(seen) % 3 == 0:
                with follower.pin(ttl=10) as generation:
                    assert value_of(generation) == generation.number >= seen[-1]
            else:
                value = value_of(follower.state_dict())
                assert value == follower.generation > seen[-1]
            seen.append(follower.generation)
            if len(seen) == 2:
                barrier.wait()  # the trainer goes on, so that each sees its first generation and the last one at least
        return seen[1:]


def publish_up_to(barrier: Any, address: str, last: int) -> list[int]:
    """Publish generations 1 to `last` under "w", in which every value is the generation's number; every other one in
    the background, with the state overwritten at once. All after the first one come once each reader has seen that.
    """
    with smb.connect(address) as client:
        barrier.wait()
        publisher = smb.torch.Publisher(client, "w", filled(0), stripe="64KiB")
        for number in range(1, last + 1):
            if number % 2:
                assert publisher.publish(filled(number)) == number
            else:
                state = filled(number)
                publisher.publish_async(state)
                for tensor in state.values():
                    tensor.zero_()
            if number == 1:
                barrier.wait()
        assert publisher.publish(filled(last + 1)) == last + 1
        return [publisher.generation]


def pin_and_wait(messages: Any, address: str, ttl: float) -> None:
    """Pin the latest generation of "w", tell so, and read it whenever the process runs until it is lost; tell that."""
    with smb.connect(address, transport=FAR) as client:
        follower = smb.torch.follow(client, "w", timeout=60)
        with follower.pin(ttl=ttl) as generation:
            messages.put(generation.number)
            try:
                while True:
                    assert value_of(generation) == generation.number
            except smb.LockLostError as error:
                messages.put(str(error))


def publish_until_killed(messages: Any, address: str) -> None:
    """Publish filled states under "w", each value one more than the last published; tell each number."""
    with smb.connect(address) as client:
        publisher = smb.torch.Publisher(client, "w", filled(0))
        while True:
            messages.put(publisher.publish(filled(publisher.generation + 1)))
