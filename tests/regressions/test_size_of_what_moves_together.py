"""A live server that lacked one segment lost its role in what moves together with it: that memory counted no bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.dashboard.history import EventWatch
from smb.coordinator.events import BufferMade, BufferWanted
from smb.coordinator.memserver_client import Look, RunLiveness
from smb.coordinator.mirrors.filling import Mirrors
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.records import Held, ServerRecord
from smb.coordinator.replica_role_changes import RoleChanges
from smb.coordinator.segment_maker import SegmentMaker
from smb.coordinator.service import CoordinatorService
from smb.coordinator.session_end_notifier import SessionEndNotifier
from smb.coordinator.store import SqliteStore
from smb.coordinator.validate import Creation
from smb.rpc import control_pb2 as pb
from tests.support.decisions import registration, server

NBYTES = 4096


class Servers:
    """Memory servers that live, and hold weights alone."""

    def __init__(self) -> None:
        self.weights = 0

    async def look(self, at: ServerRecord, segment_ids: Collection[int] = ()) -> Look:
        return Look(RunLiveness.ALIVE, {each: Held(1, nbytes=NBYTES) for each in segment_ids if each == self.weights})


async def made(log: CommitLog, creation: Creation, first_id: int) -> int:
    ids = iter(range(first_id, first_id + 10))
    await log.commit(BufferWanted(creation, lambda: next(ids)))
    record = log.state.buffers[creation.name]
    await log.commit(BufferMade(creation.name, record.segments))
    return record.segments[0].id


def test_memory_that_leaves_the_records_by_a_registration_counts(tmp_path: Path) -> None:
    """The state of weights is gone at a server that has the weights still: both go on with the other server."""

    async def work() -> None:
        store, servers = SqliteStore(tmp_path), Servers()
        log, known = await CommitLog.open(store, 1), cast(Any, servers)
        for name in ("a", "b"):
            await log.commit(registration(log.state, server(name)))
        weights = await made(log, Creation("w", (1024,), "float32", replicas=2), 10)
        state = await made(log, Creation("s", (), "", like="w", joins=True, replicas=2), 20)
        ends, maker = SessionEndNotifier(log, known), SegmentMaker(log, known)
        roles = RoleChanges(log, known, ends)
        copies = CopyMaker(log, known, roles.tell_roles, maker.drop)
        service = CoordinatorService(
            log, known, maker, roles, copies, ends, EventWatch(log.now()), cast(Any, None), Mirrors()
        )
        (segment,) = log.state.buffers["w"].segments
        servers.weights, name = weights, segment.backup
        shown = log.state.servers[name]
        stamp = log.state.lineage.stamp
        request = pb.RegisterServerRequest(
            name=name, instance_id=shown.instance_id, data_address=shown.data_address,
            control_address=shown.control_address, capacity_bytes=shown.capacity_bytes, used_bytes=NBYTES,
            segment_ids=[weights], segment_epochs=[1], segment_flags=[1],
            stamps=[pb.StoreStamp(cluster=stamp.cluster, term=stamp.term + 1, sequence=1)],
        )  # fmt: skip
        await service.RegisterServer(request, cast(Any, None))
        assert [record.segments[0].backup for record in log.state.buffers.values()] == ["", ""]
        assert state not in log.state.unexplained[name]  # of a restored store: what it does not have is kept
        assert log.state.unexplained[name][weights].nbytes == NBYTES
        assert log.state.taken_bytes(name) == NBYTES
        await store.close()

    asyncio.run(work())
