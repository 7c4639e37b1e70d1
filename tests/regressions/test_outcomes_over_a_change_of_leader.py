"""What a client tells of a call that met a change of leader: its outcome, and what the coordinators had said."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import grpc
import pytest

from smb import errors
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer
from smb.rpc.coordinator_client import Coordinator
from smb.rpc.trailers import ANSWERED, OUTCOME, STANDBY
from tests.support.control_plane import served

Answer: TypeAlias = Callable[[Any, grpc.ServicerContext], Any]

_TIMEOUT_S = 5.0  # a call that is tried until then is answered often, also on a loaded machine
STANDS_BY = "a:1 does not lead now"


def dies(_: object, context: grpc.ServicerContext) -> None:
    """As one that is lost before it has answered."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def stands_by(_: object, context: grpc.ServicerContext) -> None:
    context.set_trailing_metadata(((ANSWERED, "1"), (STANDBY, "1"), (OUTCOME, errors.NOT_APPLIED)))
    context.abort(grpc.StatusCode.UNAVAILABLE, STANDS_BY)


def exists(_: object, context: grpc.ServicerContext) -> None:
    context.set_trailing_metadata(((ANSWERED, "1"), (OUTCOME, errors.NOT_APPLIED)))
    context.abort(grpc.StatusCode.ALREADY_EXISTS, "another's")


class Scripted(CoordinatorServicer):
    """Answers its first call with the first answer, and so on; from the last one on with that."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = [*answers]
        self.leads: Callable[[], bool] = lambda: False
        self.requests: list[Any] = []

    def CreateBuffer(self, request: pb.CreateBufferRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._answer(request, context)

    def OpenBuffer(self, request: pb.OpenBufferRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._answer(request, context)

    def DeleteBuffer(self, request: pb.DeleteBufferRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return self._answer(request, context)

    def ListBuffers(self, request: pb.ListBuffersRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return pb.ListBuffersReply()

    def Leader(self, request: pb.LeaderRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return pb.LeaderReply(leads=self.leads())

    def _answer(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return answer(request, context)


@contextmanager
def client_of(*services: Scripted) -> Iterator[Coordinator]:
    """Return a client that has had an answer already."""
    with ExitStack() as stack:
        coordinator = Coordinator(",".join([stack.enter_context(served(service)) for service in services]))
        stack.callback(coordinator.close)
        coordinator.list_buffers(10.0)
        yield coordinator


def create(coordinator: Coordinator) -> None:
    coordinator.create_buffer(pb.CreateBufferRequest(name="w"), _TIMEOUT_S)


def test_a_create_that_may_have_been_made_is_in_doubt() -> None:
    """The leader died with it, and then there was none: the client said that nothing had been done."""
    with client_of(Scripted(dies, stands_by)) as coordinator:
        with pytest.raises(errors.UnavailableError, match=rf"{STANDS_BY}.*may have been carried out") as raised:
            create(coordinator)
        assert raised.value.outcome == errors.UNKNOWN


def test_the_leader_knows() -> None:
    """It remembers a create by its number: what it says of one that was made again is so."""
    with client_of(Scripted(dies, exists)) as coordinator:
        with pytest.raises(errors.AlreadyExistsError, match=r"another's$") as raised:
            create(coordinator)
        assert raised.value.outcome == errors.NOT_APPLIED


def test_a_create_that_no_leader_has_seen_is_not() -> None:
    with client_of(Scripted(stands_by)) as coordinator:
        with pytest.raises(errors.UnavailableError, match=rf"{STANDS_BY}$") as raised:
            create(coordinator)
        assert raised.value.outcome == errors.NOT_APPLIED


@pytest.mark.parametrize("dead_first", [False, True])
def test_one_that_stands_by_is_quoted(dead_first: bool) -> None:
    """It depended on whose turn it was at the timeout: the client said that nobody answered."""
    with socket.socket() as closed, served(Scripted(stands_by)) as address:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
        coordinator = Coordinator(f"{dead},{address}" if dead_first else f"{address},{dead}")
        try:
            with pytest.raises(errors.UnavailableError, match=STANDS_BY):
                create(coordinator)
        finally:
            coordinator.close()


def test_a_delete_that_was_kept_is_made_by_the_next_leader() -> None:
    """Who stands by hears of the next leader a little later than the client that looked: the delete was in doubt."""
    looked = threading.Event()
    term = (STANDBY, "7"), (ANSWERED, "1"), (OUTCOME, errors.NOT_APPLIED)

    def names(_: object, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(term)
        context.abort(grpc.StatusCode.UNAVAILABLE, STANDS_BY)

    def keeps(request: object, context: grpc.ServicerContext) -> None:
        assert looked.wait(30)
        stands_by(request, context)

    first = Scripted(names, keeps)
    second = Scripted(names, lambda *_: pb.DeleteBufferReply())

    def leads() -> bool:
        looked.set()
        return True

    second.leads = leads
    with client_of(first, second) as coordinator:
        coordinator.delete_buffer("w", missing_ok=False, timeout=8.0)
    assert looked.is_set()
    assert len(second.requests) == 2


def test_who_waits_for_a_name_waits_no_longer_for_a_change_of_leader() -> None:
    """The next leader was asked to wait as long again, and the client gave up before that."""
    wait_s, lost_after_s = 20.0, 0.5

    def dies_late(request: object, context: grpc.ServicerContext) -> None:
        threading.Event().wait(lost_after_s)  # of the wait
        dies(request, context)

    def missing(_: object, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(((ANSWERED, "1"), (OUTCOME, errors.NOT_APPLIED)))
        context.abort(grpc.StatusCode.NOT_FOUND, "no such name appeared")

    service = Scripted(dies_late, missing)
    with client_of(service) as coordinator, pytest.raises(errors.NotFoundError, match="appeared"):
        coordinator.open_buffer("w", wait_s, 10.0)
    first, second = (request.timeout_ms for request in service.requests)
    assert first > 1000 * (wait_s - lost_after_s)
    assert second <= first - 1000 * lost_after_s


def test_a_delete_of_one_buffer_is_made_again() -> None:
    """What has the name by then stays: so what has no other outcome than to be gone is asked for again. By a name, or
    where it matters whether it was there, it is in doubt.
    """
    service = Scripted(dies, lambda *_: pb.DeleteBufferReply())
    with client_of(service) as coordinator:
        coordinator.delete_buffer("w", missing_ok=True, timeout=_TIMEOUT_S, known_id=7)
    assert [(request.id, request.missing_ok) for request in service.requests] == [(7, True)] * 2
    for missing_ok, known_id in ((True, 0), (False, 7)):
        service = Scripted(dies, lambda *_: pb.DeleteBufferReply())
        with client_of(service) as coordinator, pytest.raises(errors.UnavailableError) as raised:
            coordinator.delete_buffer("w", missing_ok, _TIMEOUT_S, known_id)
        assert (raised.value.outcome, len(service.requests)) == (errors.UNKNOWN, 1)
