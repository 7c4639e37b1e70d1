"""A create whose answer was lost is asked for again. If somebody had renamed or deleted the buffer meanwhile, another
one was made: one create counted twice.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

import smb
from smb.coordinator import limits
from smb.coordinator.events import BufferDeleted, BufferFailed, MakeSegments, Restarted, UnexplainedJudged
from smb.errors import NotFoundError, OutOfMemoryError
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer, CoordinatorStub
from smb.rpc.coordinator_client import Coordinator
from tests.support.control_plane import served
from tests.support.decisions import Cluster

ATTEMPT = 7


@pytest.fixture
def client(connect: Callable[..., smb.Client]) -> smb.Client:
    return connect()


class LosesAnAnswer(CoordinatorServicer):
    """Before a real coordinator: of the first create the answer is lost, after `meanwhile`."""

    def __init__(self, channel: grpc.Channel, meanwhile: Callable[[], object]) -> None:
        self._behind = CoordinatorStub(channel)
        self._meanwhile: Callable[[], object] | None = meanwhile

    def ListBuffers(self, request: pb.ListBuffersRequest, context: grpc.ServicerContext) -> pb.ListBuffersReply:  # noqa: N802
        reply: pb.ListBuffersReply = self._behind.ListBuffers(request)
        return reply

    def CreateBuffer(self, request: pb.CreateBufferRequest, context: grpc.ServicerContext) -> pb.Buffer | None:  # noqa: N802
        try:
            made: pb.Buffer = self._behind.CreateBuffer(request)
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            context.abort(error.code(), error.details())
        if self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return made


def create(address: str, meanwhile: Callable[[], object]) -> pb.Buffer:
    """One create, of which the first answer is lost."""
    with grpc.insecure_channel(address) as channel, served(LosesAnAnswer(channel, meanwhile)) as between:
        coordinator = Coordinator(between)
        try:
            coordinator.list_buffers(10.0)  # it has had an answer, so it asks again
            return coordinator.create_buffer(pb.CreateBufferRequest(name="b", shape=[10], dtype="float32"), 10.0)
        finally:
            coordinator.close()


@pytest.mark.parametrize("taken", [False, True])
def test_what_was_renamed_is_the_answer(cluster: smb.LocalCluster, client: smb.Client, taken: bool) -> None:
    """By its new name, also where another buffer has the old one by then."""

    def meanwhile() -> None:
        client.rename("b", "c")
        if taken:
            client.create("b", 3)

    made = create(cluster.address, meanwhile)
    assert made.name == "c"
    assert made.id == client.open("c").info.id
    assert [info.name for info in client.list()] == (["b", "c"] if taken else ["c"])


@pytest.mark.parametrize("replaced", [False, True])
def test_what_was_deleted_stays_so(cluster: smb.LocalCluster, client: smb.Client, replaced: bool) -> None:
    """The caller hears what became of it. A create of its own makes another one."""

    def meanwhile() -> None:
        if replaced:
            client.create("other", 3)
            client.rename("other", "b", replace=True)
        else:
            client.delete("b")

    with pytest.raises(
        smb.NotFoundError, match='create of "b": the buffer was created, but another client deleted it'
    ) as raised:
        create(cluster.address, meanwhile)
    assert raised.value.outcome == "applied"
    assert [info.shape for info in client.list()] == ([(3,)] if replaced else [])
    client.delete("b", missing_ok=True)
    assert client.create("b", 10).size == 10


@pytest.fixture
def decisions() -> Cluster:
    cluster = Cluster()
    cluster.register("a")
    return cluster


def test_what_was_not_made_is_made(decisions: Cluster) -> None:
    """Of a creation that failed, or that a stop of the coordinator cut off, nothing is left: it begins anew."""
    for stopped in (False, True):
        decisions.want(attempt_id=ATTEMPT)
        assert decisions.want(attempt_id=ATTEMPT) == ()  # it is under way
        decisions.do(Restarted(1) if stopped else BufferFailed("w"))
        decisions.register("a")
        decisions.do(UnexplainedJudged())
        assert decisions.state.buffers == {}
    decisions.want(attempt_id=ATTEMPT)
    assert decisions.only(MakeSegments).record.name == "w"
    with pytest.raises(OutOfMemoryError):
        decisions.want("large", 1 << 40, attempt_id=8)
    assert decisions.state.deleted_attempts == ()


def test_the_latest_deletions_are_known(decisions: Cluster) -> None:
    """As many as are kept; the first one is forgotten then."""
    for attempt in range(1, limits.DELETED_ATTEMPTS_MAX + 2):
        decisions.create(elements=1, attempt_id=attempt)
        decisions.do(BufferDeleted("w", missing_ok=False))
    assert len(decisions.state.deleted_attempts) == limits.DELETED_ATTEMPTS_MAX
    for attempt in (2, limits.DELETED_ATTEMPTS_MAX + 1):
        with pytest.raises(NotFoundError):
            decisions.want(attempt_id=attempt)
    assert decisions.want(attempt_id=1)
