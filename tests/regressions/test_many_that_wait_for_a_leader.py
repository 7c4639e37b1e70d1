"""Clients and servers asked a coordinator that stood by some twenty times a second until it led: with 1 000 servers and
10 000 clients it had no time to lead, and the first create took 24 s in place of 8.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import grpc.aio
import pytest

import smb
from smb.coordinator.front import KEPT_MAX, Front
from smb.coordinator.rpc_answers import Answers
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer
from smb.rpc.coordinator_client import Coordinator
from tests.support.daemons import keep_port
from tests.support.transports import SLOWNESS


class Service(CoordinatorServicer):
    async def DeleteBuffer(self, request: pb.DeleteBufferRequest, context: Any) -> pb.DeleteBufferReply:  # noqa: N802
        return pb.DeleteBufferReply()


class Standby:
    """A coordinator that stands by, in a thread of its own; counts the calls that it refused."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Event
        started: Future[str] = Future()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(started),))
        self._thread.start()
        self.address = started.result(10)

    async def _run(self, started: Future[str]) -> None:
        self._ended, self.front = asyncio.Event(), Front()
        server = grpc.aio.server(interceptors=[Answers(self._answered, self.front)])
        server.add_generic_rpc_handlers((self.front,))
        port = server.add_insecure_port("127.0.0.1:0")
        self.front.address = f"127.0.0.1:{port}"
        self.front.stand_by("127.0.0.1:9", 1)
        await server.start()
        started.set_result(self.front.address)
        await self._ended.wait()
        await server.stop(None)

    def _answered(self, method: str, code: grpc.StatusCode, _: float) -> None:
        if code is not grpc.StatusCode.OK and method != "Leader":
            self.refused.append(method)

    def stand_by(self, leader: str, term: int) -> None:
        self._loop.call_soon_threadsafe(self.front.stand_by, leader, term)

    def lead(self) -> None:
        self._loop.call_soon_threadsafe(self.front.lead, Service(), lambda: True, 4)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()


def test_who_waits_for_a_leader_asks_rarely_and_is_answered_at_once() -> None:
    dead = keep_port()
    standby = Standby()
    coordinator = Coordinator(f"127.0.0.1:{dead.getsockname()[1]},{standby.address}")
    ended: list[float] = []

    def delete() -> None:
        coordinator.delete_buffer("w", False, 30.0)
        ended.append(time.monotonic())

    waits = threading.Thread(target=delete)
    try:
        waits.start()
        with pytest.raises(smb.UnavailableError, match="does not lead now"):  # the other one asks meanwhile
            Coordinator(standby.address).delete_buffer("w", False, 1.0)
        led = time.monotonic()
        standby.lead()
        waits.join(20)
        assert ended
        assert ended[0] - led < 2 * SLOWNESS, "it is kept for 5 s"
        assert standby.refused.count("DeleteBuffer") <= 9, "20 a second; the one here asks for half of what is left"
    finally:
        coordinator.close()
        standby.close()
        dead.close()


def test_a_leader_that_others_know_is_found_at_once() -> None:
    """The last one leads no more, and another one does: nobody waits at the one in between."""
    standbys = [Standby() for _ in range(3)]
    first, second, third = standbys
    coordinator = Coordinator(",".join(each.address for each in standbys))
    try:
        third.lead()
        coordinator.delete_buffer("w", False, 10.0)
        third.close()
        for each in (first, second):
            each.stand_by(second.address, 3)
        second.lead()
        began = time.monotonic()
        coordinator.delete_buffer("w", False, 30.0)
        assert time.monotonic() - began < 2 * SLOWNESS, "a call is kept for 5 s"
    finally:
        coordinator.close()
        first.close()
        second.close()


def test_what_a_standby_keeps_has_bounds() -> None:
    """Each for its time, and until another leader is known; not more than so many, and small ones. Nothing for what is
    no number, for who does not know the leader that this one knows, by one that knows of none, and by one that stops.
    """

    async def run() -> None:
        front, small = Front(), pb.RenewSessionRequest(session_id=1)

        async def refuses(patience: str, request: Any = small) -> None:
            await asyncio.wait_for(front.wait_to_lead(request, patience), 1)

        await refuses("900000 0")
        front.stand_by("a:1", 1)
        await refuses("900000 1", pb.RenewSessionRequest(client_name="x" * 5000))
        for bad in ("", "-1 1", "x", "900000", "900000 2", "9" * 5000 + " 1", "1e9 1", "900000 " + "9" * 5000):
            await refuses(bad)
        began = time.monotonic()
        await front.wait_to_lead(small, "50 1")
        assert time.monotonic() - began >= 0.05
        kept = [asyncio.create_task(front.wait_to_lead(small, "900000 1")) for _ in range(KEPT_MAX)]
        await asyncio.sleep(0)
        await refuses("900000 1")
        front.stand_by("a:1", 1)  # as it looks again
        assert not any(each.done() for each in kept)
        front.stand_by("b:1", 2)
        await asyncio.wait_for(asyncio.gather(*kept), 30)
        await refuses("900000 1")  # who has not heard of the new one
        last = asyncio.create_task(front.wait_to_lead(small, "900000 2"))
        await asyncio.sleep(0)
        front.stop_keeping()
        await asyncio.wait_for(last, 1)
        await refuses("900000 2")

    asyncio.run(run())
