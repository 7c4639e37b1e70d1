"""Where coordinators keep their records: a directory with SQLite's promises, and an etcd.

Both can be full, and an older backup can be put in their place. SQLite writes to the kernel's cache: a power failure
takes the last changes away, in their order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import grpc

from smb.coordinator.etcd import etcd_pb2 as pb
from smb.coordinator.store import StoreFullError
from tests.simulator.loop import WIRE, Loop
from tests.simulator.network import RefusedError
from tests.support.fake_etcd import Entry, FakeEtcd

RESERVED_CHANGES = 1000  # that the reserve has room for
SYNCED_EVERY = 24  # changes between two of SQLite's own flushes, at most


class Directory:
    """A coordinator's --state directory: as SqliteStore, and what befalls its disk."""

    changes_max = None

    def __init__(self, rng: Random, now: Callable[[], float]) -> None:
        self._rng, self._now = rng, now
        self.texts: dict[str, str] = {}
        self._synced: dict[str, str] = {}
        self._since: list[tuple[float, dict[str, str | None]]] = []  # changes that a power failure may take away
        self.full = False
        self._reserve = RESERVED_CHANGES
        self.count = 0  # of changes

    async def load(self) -> dict[str, str]:
        """As Store."""
        return dict(self.texts)

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:
        """As Store."""
        if not self.full:
            self._reserve = RESERVED_CHANGES
        elif not urgent or self._reserve == 0:
            raise StoreFullError("cannot write: the disk is full; nothing was changed")
        else:
            self._reserve -= 1
        self.count += 1
        _apply(self.texts, changes)
        self._since.append((self._now(), dict(changes)))
        if len(self._since) >= SYNCED_EVERY:
            self.flush()

    @property
    def takes_nothing(self) -> bool:
        """Whether it has no room for anything any more."""
        return self.full and self._reserve == 0

    def free_bytes(self) -> int | None:
        """As Store."""
        return None

    async def close(self) -> None:
        """As Store."""

    def record_keys(self) -> set[str]:
        """Return the keys of all records."""
        return set(self.texts)

    def backup(self) -> Any:
        """Return a copy of all of it."""
        return dict(self.texts)

    def restore(self, backup: Any) -> None:
        """Put a backup in its place."""
        self.texts = dict(backup)
        self.flush()

    def flush(self) -> None:
        """What there is survives a power failure."""
        self._synced, self._since = dict(self.texts), []

    def lose_power(self) -> float:
        """Return since when changes are gone."""
        kept = self._rng.randrange(len(self._since) + 1)
        since = self._since[kept][0] if kept < len(self._since) else self._now()
        texts = dict(self._synced)
        for _, changes in self._since[:kept]:
            _apply(texts, changes)
        self.restore(texts)
        return since


def _apply(texts: dict[str, str], changes: Mapping[str, str | None]) -> None:
    for key, text in changes.items():
        if text is None:
            texts.pop(key, None)
        else:
            texts[key] = text


class EtcdServer:
    """An etcd: one that answers, and never loses what it has stored."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.full = False
        self.count = 0
        self._etcd = FakeEtcd()
        self._until: dict[int, float] = {}
        self._seconds: dict[int, int] = {}

    async def serve(
        self, method: str, request: bytes, metadata: Sequence[tuple[str, str]], left_s: float | None
    ) -> bytes:
        """Answer a call."""
        self._end_leases()
        name = method.rpartition("/")[2]
        reply = await getattr(self, name)(request)
        return bytes(reply.SerializeToString(deterministic=True))

    @property
    def takes_nothing(self) -> bool:
        """Whether it has no room: it keeps none for what is urgent."""
        return self.full

    async def Range(self, request: bytes) -> pb.RangeResponse:  # noqa: N802
        """Read."""
        return await self._etcd.range(pb.RangeRequest.FromString(request), 1.0)

    async def Txn(self, request: bytes) -> pb.TxnResponse:  # noqa: N802
        """Compare, and change."""
        asked = pb.TxnRequest.FromString(request)
        puts = any(each.HasField("request_put") for each in asked.success)
        if self.full and puts and b"/leader" not in request:
            raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")
        # A lease from before a backup was put back: the message was on its way.
        if any(each.request_put.lease and each.request_put.lease not in self._until for each in asked.success):
            raise RefusedError(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        self.count += 1
        return await self._etcd.carry_out(asked)

    async def LeaseGrant(self, request: bytes) -> pb.LeaseGrantResponse:  # noqa: N802
        """Make a lease."""
        asked = pb.LeaseGrantRequest.FromString(request)
        granted = await self._etcd.grant(asked.TTL, 1.0)
        self._until[granted.ID], self._seconds[granted.ID] = self._loop.time() + asked.TTL, asked.TTL
        self._loop.call_later(asked.TTL, self._end_leases, context=WIRE)
        return granted

    async def LeaseKeepAlive(self, request: bytes) -> pb.LeaseKeepAliveResponse:  # noqa: N802
        """Renew a lease."""
        number = pb.LeaseKeepAliveRequest.FromString(request).ID
        if number not in self._until:
            return pb.LeaseKeepAliveResponse(ID=number, TTL=0)
        self._until[number] = self._loop.time() + self._seconds[number]
        return pb.LeaseKeepAliveResponse(ID=number, TTL=self._seconds[number])

    async def LeaseRevoke(self, request: bytes) -> pb.LeaseRevokeResponse:  # noqa: N802
        """End a lease."""
        number = pb.LeaseRevokeRequest.FromString(request).ID
        self._until.pop(number, None)
        await self._etcd.revoke(number, 1.0)
        return pb.LeaseRevokeResponse()

    def _end_leases(self) -> None:
        for number in [each for each, until in self._until.items() if until <= self._loop.time()]:
            del self._until[number]
            entries = self._etcd.entries
            self._etcd.entries = {key: entry for key, entry in entries.items() if entry.lease != number}

    def record_keys(self) -> set[str]:
        """Return the keys of all records."""
        return {key.partition(b"/r/")[2].decode() for key in self._etcd.entries}

    def backup(self) -> Any:
        """Return a copy of all of it."""
        return copy.deepcopy(self._etcd.entries), self._etcd.revision

    def restore(self, backup: Any) -> None:
        """Put a backup in its place: its revisions come again, and no lease."""
        entries: dict[bytes, Entry] = copy.deepcopy(backup[0])
        self._etcd.entries = {key: entry for key, entry in entries.items() if not entry.lease}
        self._etcd.revision = backup[1]
        self._until = {}
