"""A coordinator that stands by says who leads; asked again as the timeout ends, it has no time left to answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from smb import errors
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server
from smb.rpc.coordinator_client import ANSWERED, STANDBY, Coordinator

_LONG_S = 3.0  # for the first attempt, and for what comes of the second
SAID = "a:1 does not lead now, b:2 does"


class StandsBy(CoordinatorServicer):
    """The first call is answered, no later one is."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.asked = False

    def ListBuffers(self, request: pb.ListBuffersRequest, context: grpc.ServicerContext) -> pb.ListBuffersReply:  # noqa: N802
        return self._answer(context)

    def CreateBuffer(self, request: pb.CreateBufferRequest, context: grpc.ServicerContext) -> pb.Buffer:  # noqa: N802
        return self._answer(context)

    def _answer(self, context: grpc.ServicerContext) -> object:
        if not self.asked:
            self.asked = True
            context.set_trailing_metadata(((ANSWERED, "1"), (STANDBY, "1"), ("smb-outcome", errors.NOT_APPLIED)))
            context.abort(grpc.StatusCode.UNAVAILABLE, SAID)
        self.over.wait(10.0)
        return pb.ListBuffersReply()


@pytest.mark.parametrize("changes", [False, True])
def test_the_last_attempt_hides_nothing(changes: bool) -> None:
    """On a busy machine the client was told that nobody had answered. A change may have been made: that stays said."""
    service = StandsBy()
    server = grpc.server(ThreadPoolExecutor(2))
    add_CoordinatorServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    coordinator = Coordinator(f"127.0.0.1:{port}")
    try:
        if changes:
            with pytest.raises(errors.TimeoutError) as unknown:
                coordinator.create_buffer(pb.CreateBufferRequest(name="w"), _LONG_S)
            assert unknown.value.outcome == errors.UNKNOWN
        else:
            with pytest.raises(errors.UnavailableError, match=SAID):
                coordinator.list_buffers(_LONG_S)
        assert service.asked
    finally:
        service.over.set()
        coordinator.close()
        server.stop(None)
