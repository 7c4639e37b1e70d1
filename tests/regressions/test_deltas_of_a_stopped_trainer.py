"""A trainer that was stopped for longer than its turn wrote its delta over its successor's, and readers had nothing to
read until the next whole state.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import smb
import smb.torch
from smb.call.dispatcher import Dispatcher
from smb.call.versions import Publication
from smb.engine import Opcode
from smb.torch.publishing import shard_writer
from tests.conftest import Connect

ELEMENTS = 100_000


def state(number: int) -> dict[str, torch.Tensor]:
    """A state that differs in a few elements from the one before."""
    bits = torch.zeros(ELEMENTS, dtype=torch.int32)
    bits[number * 100 : number * 100 + 100] = number
    return {"w": bits}


def test_its_delta_is_refused(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "_TURN_S", 0.5)
    monkeypatch.setattr(Publication, "kept", lambda *_: nullcontext())  # nobody renews it
    stopped = connect()
    first, second = (smb.torch.Publisher(each, "w", state(0), deltas=8) for each in (stopped, connect()))
    first.publish(state(1))
    follower = smb.torch.follow(connect(), "w")
    assert follower.state_dict()["w"].equal(state(1)["w"])
    call, published = Dispatcher.call, [2, 3]

    def late(dispatcher: Dispatcher, request: Any, *arguments: Any, **options: Any) -> Any:
        if request.opcode is Opcode.WRITE and dispatcher.info.name.startswith("w."):
            while published and dispatcher.session is stopped._session:
                number = published.pop(0)
                assert second.publish(state(number)) == number  # once the other one's turn has ended
        return call(dispatcher, request, *arguments, **options)

    monkeypatch.setattr(Dispatcher, "call", late)
    with pytest.raises(smb.LockLostError):
        first.publish(state(7))
    assert not published
    assert follower.state_dict()["w"].equal(state(3)["w"])
    assert follower.generation == 3
