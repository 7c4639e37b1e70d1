"""A call whose method was looked up while a coordinator stood by, and which is answered once the coordinator leads; or
the other way round, because it waited for its turn.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, cast

import grpc
import pytest

from smb.coordinator.front import Front
from smb.coordinator.store import DeposedError
from smb.errors import NOT_APPLIED
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer


class Details(NamedTuple):
    """What gRPC says of a call before its request has come."""

    method: str
    invocation_metadata: tuple[()] = ()


class Service(CoordinatorServicer):
    async def DeleteBuffer(self, request: pb.DeleteBufferRequest, context: Any) -> pb.DeleteBufferReply:  # noqa: N802
        return pb.DeleteBufferReply()


def _call(front: Front) -> Any:
    handler = front.service(cast(grpc.HandlerCallDetails, Details("/smb.v1.Coordinator/DeleteBuffer")))
    assert handler is not None
    assert handler.unary_unary is not None
    return handler.unary_unary


def test_the_leaders_service_answers() -> None:
    """It was the one that stands by, which knows no such method: the client was told of a fault inside."""
    front = Front()
    call = _call(front)
    front.lead(Service(), lambda: True, 1)
    front.check("DeleteBuffer")
    assert asyncio.run(call(pb.DeleteBufferRequest(name="w"), None)) == pb.DeleteBufferReply()


def test_who_waited_for_its_turn_hears_that_another_one_leads() -> None:
    """The same fault, for a call that came while this coordinator led."""
    front = Front()
    front.lead(Service(), lambda: True, 1)
    call = _call(front)
    front.check("DeleteBuffer")
    front.stand_by("h:1", 2)
    with pytest.raises(DeposedError, match="h:1 does") as refused:
        asyncio.run(call(pb.DeleteBufferRequest(name="w"), None))
    assert refused.value.outcome == NOT_APPLIED
