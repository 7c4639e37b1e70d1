"""An etcd for tests of what the coordinator does where answers are lost, late, doubled or wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from smb.coordinator.etcd import etcd_pb2 as pb
from smb.coordinator.etcd.connection import EtcdLocation, RefusedError, SilentError

PLACE = EtcdLocation(("127.0.0.1:1",), "prefix")
LEASE_S = 8
LOST, DONE_BUT_FULL, FULL, TWICE = "lost", "done but full", "full", "twice"


@dataclass
class Entry:
    value: bytes
    create_revision: int
    lease: int


@dataclass
class FakeEtcd:
    """One etcd, as far as it is used. `faults`: what befalls the next transactions; late ones are kept in `late`."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    revision: int = 1
    leases: int = 0
    faults: list[str] = field(default_factory=list)
    late: list[pb.TxnRequest] = field(default_factory=list)
    refusals: int = 0  # how many of the next renewals are refused
    renewals: int = 0

    async def grant(self, lease_s: int, timeout_s: float) -> pb.LeaseGrantResponse:
        self.leases += 1
        return pb.LeaseGrantResponse(ID=self.leases, TTL=lease_s)

    async def revoke(self, lease_id: int, timeout_s: float) -> None:
        self.entries = {key: entry for key, entry in self.entries.items() if entry.lease != lease_id}

    async def keep_alive(self, lease_id: int, timeout_s: float) -> int:
        self.renewals += 1
        if self.refusals:
            self.refusals -= 1
            raise RefusedError("permission denied", full=False, repeated=False)
        return LEASE_S if any(entry.lease == lease_id for entry in self.entries.values()) else 0

    async def range(self, request: pb.RangeRequest, timeout_s: float) -> pb.RangeResponse:
        keys = sorted(
            key
            for key in self.entries
            if (request.key <= key < request.range_end if request.range_end else key == request.key)
        )
        found = keys[: request.limit or None]
        kvs = [
            pb.KeyValue(key=key, value=self.entries[key].value, create_revision=self.entries[key].create_revision)
            for key in found
        ]
        return pb.RangeResponse(kvs=kvs, more=len(found) < len(keys))

    async def transact(self, request: pb.TxnRequest, timeout_s: float) -> tuple[pb.TxnResponse, bool]:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == FULL:
            raise RefusedError("no space", full=True, repeated=False)
        if fault == LOST:  # not carried out yet, and its answer never comes
            self.late.append(request)
            raise SilentError("nobody answers")
        reply = await self.carry_out(request)
        if fault == DONE_BUT_FULL:
            raise RefusedError("no space", full=True, repeated=False)
        if fault == TWICE:  # its answer was lost, and it was sent again
            return await self.carry_out(request), True
        return reply, False

    async def carry_out(self, request: pb.TxnRequest) -> pb.TxnResponse:
        good = all(self._holds(compare) for compare in request.compare)
        replies = []
        puts = any(each.HasField("request_put") for each in request.success) if good else False
        self.revision += puts
        for each in request.success if good else request.failure:
            reply = pb.ResponseOp()
            if each.HasField("request_put"):
                put, there = each.request_put, self.entries.get(each.request_put.key)
                created = there.create_revision if there else self.revision
                self.entries[put.key] = Entry(put.value, created, put.lease)
                reply.response_put.SetInParent()
            elif each.HasField("request_delete_range"):
                self.entries.pop(each.request_delete_range.key, None)
                reply.response_delete_range.SetInParent()
            else:
                reply.response_range.CopyFrom(await self.range(each.request_range, 1))
            replies.append(reply)
        return pb.TxnResponse(succeeded=good, responses=replies)

    def _holds(self, compare: pb.Compare) -> bool:
        there = self.entries.get(compare.key)
        if compare.target == pb.Compare.CREATE:
            return (there.create_revision if there else 0) == compare.create_revision
        return there is not None and there.value == compare.value
