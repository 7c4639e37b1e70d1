"""Requests to the coordinator and its answers are lost at random. What clients were answered about names is a history
that one coordinator can have. A change of leader (test_leader_changes.py) loses a few; here they are hundreds a minute.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

import smb
from tests.fault.long import LIMIT_S, seed, times
from tests.support.daemons import wait_for
from tests.support.name_callers import NameCallers
from tests.support.name_history import UNKNOWN, find_order

pytestmark = pytest.mark.timeout(LIMIT_S)

ROUNDS, CALLS = times(8, 400), 40
LOST = 0.1  # of requests as of answers
AWAY_S = 0.1  # at most, from an answer that is lost to its client's next attempt: others' calls come in between


class Loses(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Passes calls on, as bytes, and loses some of those about names."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self._channel = grpc.insecure_channel(address)
        self._rng = rng
        self._gone = threading.Event()  # never set
        self.lost = 0

    def service(self, details: Any) -> Any:
        """See gRPC."""

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            return self._pass(details.method, request, context)

        return grpc.unary_unary_rpc_method_handler(answer)

    def close(self) -> None:
        self._channel.close()

    def _pass(self, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        fate, away_s = self._rng.random(), self._rng.uniform(0, AWAY_S)
        named = method.endswith("Buffer")
        if named and fate < LOST:
            self._lose(context, away_s)
        try:
            answer: bytes = self._channel.unary_unary(method)(request, timeout=context.time_remaining())
        except grpc.RpcError as error:
            if not named or fate > 2 * LOST:
                context.set_trailing_metadata(error.trailing_metadata())
                context.abort(error.code(), error.details())
        if named and fate < 2 * LOST:
            self._lose(context, away_s)
        return answer

    def _lose(self, context: grpc.ServicerContext, away_s: float) -> None:
        self.lost += 1
        self._gone.wait(away_s)
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@contextmanager
def between(address: str, rng: random.Random) -> Iterator[tuple[str, Loses]]:
    server = grpc.server(ThreadPoolExecutor(8))
    loses = Loses(address, rng)
    server.add_generic_rpc_handlers((loses,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", loses
    finally:
        server.stop(None).wait()
        loses.close()


def test_names() -> None:
    rng = random.Random(seed())
    with smb.LocalCluster(servers=2, capacity="16MiB") as cluster, smb.connect(cluster.address) as client:
        total = client.create("sum", 1000, "int64")
        with between(cluster.address, random.Random(rng.random())) as (address, loses):
            callers = NameCallers(address, pause_s=0.001)
            callers.start(rng)
            try:
                names: dict[str, Any] = {}
                done = unknown = 0
                for number in range(ROUNDS):
                    wait_for(lambda: callers.count() >= CALLS or callers.errors, "calls", 60)
                    assert not callers.errors, f"round {number}: {callers.errors}"
                    with callers.held() as calls:
                        found = {info.name: client.open(info.name).metadata["mark"] for info in client.list()[:-1]}
                    assert find_order(calls, names, found), f"round {number}: no coordinator answers so: {calls}"
                    names = found
                    done += len(calls)
                    unknown += sum(call.answer == UNKNOWN for call in calls)
            finally:
                callers.end()
        assert not callers.errors, callers.errors
        assert total.read().tolist() == [callers.additions] * 1000
        assert loses.lost > ROUNDS
        print(f"{done} calls about names, {loses.lost} lost, {unknown} of unknown outcome")
