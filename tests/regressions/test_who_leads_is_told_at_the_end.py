"""A coordinator that stands by says who leads. Asked again, it has no time left to answer, or leads by then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import grpc
import pytest

from smb import errors
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer
from smb.rpc.coordinator_client import Coordinator
from smb.rpc.trailers import ANSWERED, STANDBY
from tests.support.control_plane import served

_LONG_S = 3.0  # for the first attempt, and for what comes of the second
SAID = "a:1 does not lead now, b:2 does"
LEADS = "answered as the leader"


class StandsBy(CoordinatorServicer):
    """The first call is answered, no later one is. With a code it leads by then: that is the answer to later ones."""

    def __init__(self, later: grpc.StatusCode | None = None) -> None:
        self.over = threading.Event()
        self.asked = False
        self._later = later

    def ListBuffers(self, request: pb.ListBuffersRequest, context: grpc.ServicerContext) -> pb.ListBuffersReply:  # noqa: N802
        return self._answer(context)

    def CreateBuffer(self, request: pb.CreateBufferRequest, context: grpc.ServicerContext) -> pb.Buffer:  # noqa: N802
        return self._answer(context)

    def OpenBuffer(self, request: pb.OpenBufferRequest, context: grpc.ServicerContext) -> pb.Buffer:  # noqa: N802
        return self._answer(context)

    def _answer(self, context: grpc.ServicerContext) -> object:
        if not self.asked:
            self.asked = True
            context.set_trailing_metadata(((ANSWERED, "1"), (STANDBY, "1"), ("smb-outcome", errors.NOT_APPLIED)))
            context.abort(grpc.StatusCode.UNAVAILABLE, SAID)
        if self._later:
            context.set_trailing_metadata(((ANSWERED, "1"),))
            context.abort(self._later, LEADS)
        self.over.wait(10.0)
        return pb.ListBuffersReply()


@contextmanager
def _client_of(service: StandsBy) -> Iterator[Coordinator]:
    with served(service) as address, closing(Coordinator(address)) as coordinator:
        try:
            yield coordinator
            assert service.asked
        finally:
            service.over.set()


@pytest.mark.parametrize("changes", [False, True])
def test_the_last_attempt_hides_nothing(changes: bool) -> None:
    """On a busy machine the client was told that nobody had answered. A change may have been made: that stays said."""
    with _client_of(StandsBy()) as coordinator:
        if changes:
            with pytest.raises(errors.TimeoutError) as unknown:
                coordinator.create_buffer(pb.CreateBufferRequest(name="w"), _LONG_S)
            assert unknown.value.outcome == errors.UNKNOWN
        else:
            with pytest.raises(errors.UnavailableError, match=SAID):
                coordinator.list_buffers(_LONG_S)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.NOT_FOUND, errors.NotFoundError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.TimeoutError),  # the name did not appear
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDeniedError),
    ],
)
def test_one_that_leads_by_then_is_heard(code: grpc.StatusCode, expected: type[errors.Error]) -> None:
    """An open of a name that nobody has was told, after a change of leader, that the coordinator does not lead."""
    with _client_of(StandsBy(later=code)) as coordinator, pytest.raises(expected, match=LEADS):
        coordinator.open_buffer("w", 0.0, 20.0)


def test_a_create_is_told_that_the_name_is_taken() -> None:
    """It was told that the coordinator does not lead, and that nothing had been done."""
    service = StandsBy(later=grpc.StatusCode.ALREADY_EXISTS)
    with _client_of(service) as coordinator, pytest.raises(errors.AlreadyExistsError, match=LEADS):
        coordinator.create_buffer(pb.CreateBufferRequest(name="w"), 20.0)
