"""smb.coordinator.memserver_client: how long the coordinator waits for a memory server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import grpc
import pytest

from smb.coordinator.lineage import Stamp
from smb.coordinator.memserver_client import MemoryServers, NotYetError
from smb.coordinator.records import BufferRecord, SegmentRecord, ServerRecord
from smb.drop_reasons import Ground
from smb.errors import UnavailableError
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import MemoryServerServicer, add_MemoryServerServicer_to_server
from tests.support.decisions import Cluster, server


class Slow(MemoryServerServicer):
    """Makes a segment once it is told to."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def CreateSegment(self, request: pb.CreateSegmentRequest, _: object) -> pb.CreateSegmentReply:  # noqa: N802
        await self.may.wait()
        return pb.CreateSegmentReply(used_bytes=7, group_id=request.group_id)


@pytest.mark.parametrize("stays", [True, False])
def test_a_live_server_is_waited_for(stays: bool) -> None:
    """A large segment takes minutes on a busy host. The server is asked as long as its lease runs, and no longer."""

    async def work() -> None:
        slow, asked = Slow(), 0
        far = grpc.aio.server()
        add_MemoryServerServicer_to_server(slow, far)
        port = far.add_insecure_port("127.0.0.1:0")
        await far.start()

        def alive() -> bool:
            nonlocal asked
            asked += 1
            if asked == 2:
                slow.may.set()
            return stays

        record, segment = segment_of_12_gib()
        servers = MemoryServers()
        at = replace(server("a"), control_address=f"127.0.0.1:{port}")
        try:
            if stays:
                assert await servers.create(at, record, segment, alive=alive) == 7
            else:
                with pytest.raises(
                    UnavailableError, match=r'"a" at 127\.0\.0\.1:\d+ made no segment before its lease ended'
                ):
                    await servers.create(at, record, segment, alive=alive)
        finally:
            await servers.close()
            await far.stop(None)

    asyncio.run(asyncio.wait_for(work(), 30))


class Registering(MemoryServerServicer):
    """A memory server whose registration is under way at first."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.terms: list[int] = []

    async def DeleteSegment(self, request: pb.DeleteSegmentRequest, context: Any) -> pb.DeleteSegmentReply:  # noqa: N802
        self.terms.append(request.term)
        if len(self.terms) <= self.refusals:
            await context.abort(grpc.StatusCode.ABORTED, "this server is not registered with that coordinator")
        return pb.DeleteSegmentReply(used_bytes=7)

    async def TakeRoles(self, request: pb.TakeRolesRequest, context: Any) -> pb.TakeRolesReply:  # noqa: N802
        await self.DeleteSegment(pb.DeleteSegmentRequest(term=request.term), context)
        await context.abort(grpc.StatusCode.NOT_FOUND, "segment 7 has no role 1 here in epoch 2")

    async def CreateSegment(self, request: pb.CreateSegmentRequest, context: Any) -> pb.CreateSegmentReply:  # noqa: N802
        await self.DeleteSegment(pb.DeleteSegmentRequest(term=request.stamp.term), context)
        return pb.CreateSegmentReply(used_bytes=7)


@contextlib.asynccontextmanager
async def registering(refusals: int) -> AsyncIterator[tuple[Registering, MemoryServers, ServerRecord]]:
    there, far = Registering(refusals), grpc.aio.server()
    add_MemoryServerServicer_to_server(there, far)
    port = far.add_insecure_port("127.0.0.1:0")
    await far.start()
    servers = MemoryServers(term=5)
    try:
        yield there, servers, replace(server("a"), control_address=f"127.0.0.1:{port}")
    finally:
        await servers.close()
        await far.stop(None)


@pytest.mark.parametrize("registers", [True, False])
def test_a_drop_is_repeated_until_the_server_has_registered(registers: bool) -> None:
    """It drops nothing for a coordinator with which it has not registered, and that takes a moment after a restart."""

    async def work() -> None:
        async with registering(2 if registers else 99) as (there, servers, at):
            now = asyncio.get_running_loop().time
            begun = now()
            with nullcontext() if registers else pytest.raises(UnavailableError, match="not registered"):
                assert await servers.drop(at, 1, 1, Ground.DELETED) == 7
            assert set(there.terms) == {5}
            if registers:
                assert len(there.terms) == 3
            else:
                assert len(there.terms) > 3
                assert now() - begun >= 2.5  # so long may a registration take

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_copy_is_not_asked_for_again_by_itself() -> None:
    """It takes the place of an earlier one, because its source has just confirmed its own: that may be dead by then."""

    async def work() -> None:
        async with registering(99) as (there, servers, at):
            with pytest.raises(NotYetError, match="is registering: this server is not registered"):
                await servers.create(at, *segment_of_12_gib(), stamp=Stamp(5, 5, 1))
            assert there.terms == [5]

    asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.parametrize(("refusals", "why"), [(0, "has no role 1"), (99, "is not registered")])
def test_a_role_that_was_not_heard_of_yet_is_told_from_a_failure(refusals: int, why: str) -> None:
    """A server that failed is avoided for a while, also for other copies."""

    async def work() -> None:
        async with registering(refusals) as (_, servers, at):
            with pytest.raises(NotYetError, match=f'"a" at .* takes no roles yet: .*{why}'):
                await servers.take_roles(at, [pb.Replica(segment_id=7, epoch=2, confirm=True)])
        gone = MemoryServers()
        with pytest.raises(UnavailableError) as failed:
            await gone.take_roles(at, [])
        assert not isinstance(failed.value, NotYetError)
        await gone.close()

    asyncio.run(asyncio.wait_for(work(), 30))


def segment_of_12_gib() -> tuple[BufferRecord, SegmentRecord]:
    cluster = Cluster()
    cluster.register("a")
    record = cluster.create()
    return record, replace(record.segments[0], file_bytes=12 << 30)
