"""A call whose method was looked up while a coordinator stood by, and which is answered once the coordinator leads."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, cast

import grpc

from smb.coordinator.front import Front
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer


class Details(NamedTuple):
    """What gRPC says of a call before its request has come."""

    method: str
    invocation_metadata: tuple[()] = ()


class Service(CoordinatorServicer):
    async def DeleteBuffer(self, request: pb.DeleteBufferRequest, context: Any) -> pb.DeleteBufferReply:  # noqa: N802
        return pb.DeleteBufferReply()


def test_the_leaders_service_answers() -> None:
    """It was the one that stands by, which knows no such method: the client was told of a fault inside."""
    front = Front()
    handler = front.service(cast(grpc.HandlerCallDetails, Details("/smb.v1.Coordinator/DeleteBuffer")))
    assert handler is not None
    assert handler.unary_unary is not None
    front.lead(Service(), lambda: True, 1)
    front.check("DeleteBuffer")
    call = cast(Any, handler.unary_unary)
    assert asyncio.run(call(pb.DeleteBufferRequest(name="w"), None)) == pb.DeleteBufferReply()
