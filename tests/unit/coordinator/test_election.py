"""smb.coordinator.etcd.election: what is changed, and by whom, where answers are lost, late, doubled or wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from smb.coordinator.etcd import etcd_pb2 as pb
from smb.coordinator.etcd.connection import Access, Etcd, Place, RefusedError, SilentError
from smb.coordinator.etcd.election import Lead, campaign, leader_of
from smb.coordinator.etcd.store import CHANGES_MAX, EtcdStore, read_records
from smb.coordinator.store import DeposedError, StoreError, StoreFullError
from smb.errors import InvalidArgumentError, OutOfMemoryError

PLACE = Place(("127.0.0.1:1",), "prefix")
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

    async def grant(self, lease_s: int, timeout_s: float) -> pb.LeaseGrantResponse:
        self.leases += 1
        return pb.LeaseGrantResponse(ID=self.leases, TTL=lease_s)

    async def revoke(self, lease_id: int, timeout_s: float) -> None:
        self.entries = {key: entry for key, entry in self.entries.items() if entry.lease != lease_id}

    async def keep_alive(self, lease_id: int, timeout_s: float) -> int:
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


def run(test: Callable[[FakeEtcd, Etcd], Coroutine[Any, Any, None]]) -> None:
    etcd = FakeEtcd()
    asyncio.run(test(etcd, cast(Etcd, etcd)))


async def elected(etcd: Etcd, name: str = "a:1") -> tuple[Lead, EtcdStore]:
    lead = await campaign(etcd, PLACE, name, LEASE_S)
    assert lead is not None
    return lead, EtcdStore(etcd, PLACE, lead)


def test_one_leads_until_it_lets_go() -> None:
    """A second candidate gets nothing while the first one leads, and leads under a later term once that has left."""

    async def test(_: FakeEtcd, etcd: Etcd) -> None:
        first, store = await elected(etcd)
        assert await campaign(etcd, PLACE, "b:1", LEASE_S) is None
        leader = await leader_of(etcd, PLACE)
        assert leader is not None
        assert leader.address == "a:1"
        await store.change({"x": "1"})
        await first.close()
        with pytest.raises(DeposedError):
            await store.change({"x": "2"})
        second, store = await elected(etcd, "b:1")
        assert second.term > first.term
        assert await store.load() == {"x": "1"}

    run(test)


def test_who_was_deposed_changes_nothing() -> None:
    """The key gone and another's there: the first one's change is refused whole, and it leads no more, also in its own
    eyes; likewise at its next look.
    """

    async def test(fake: FakeEtcd, etcd: Etcd) -> None:
        for change in (True, False):
            lead, store = await elected(etcd)
            await fake.revoke(fake.leases, 1)
            assert lead.holds
            _, later = await elected(etcd, "b:1")
            await later.change({"x": "b"})
            with pytest.raises(DeposedError) as caught:
                await (store.change({"x": "a"}) if change else store.load())
            assert caught.value.outcome == ("unknown" if change else "not applied")
            assert not lead.holds
            assert lead.lost.done()
            assert await later.load() == {"x": "b"}
            await fake.revoke(fake.leases, 1)

    run(test)


def test_a_late_attempt_changes_nothing() -> None:
    """A transaction whose answer is missing is sent again; when the first one arrives after all, even behind later
    changes and a deletion, nothing comes back. What was carried out twice counts once.
    """

    async def test(fake: FakeEtcd, etcd: Etcd) -> None:
        _, store = await elected(etcd)
        fake.faults = [LOST, TWICE, ""]
        await store.change({"x": "1"})
        await store.change({"x": None})
        for request in fake.late:
            assert not (await fake.carry_out(request)).succeeded
        assert await store.load() == {}
        fake.faults = [TWICE]
        await store.change({"x": "2", "y": "2"})
        assert await store.load() == {"x": "2", "y": "2"}

    run(test)


def test_a_refusal_for_space_is_looked_into() -> None:
    """etcd says that it has no room of what it did, and of what it did not: the first counts, the second changes
    nothing and leaves the lead; with an unanswered attempt before it, nobody knows, and the lead is given up.
    """

    async def test(fake: FakeEtcd, etcd: Etcd) -> None:
        lead, store = await elected(etcd)
        fake.faults = [DONE_BUT_FULL]
        await store.change({"x": "1"})
        fake.faults = [FULL]
        with pytest.raises(StoreFullError, match="nothing was changed"):
            await store.change({"x": "2"})
        assert lead.holds
        fake.faults = [DONE_BUT_FULL]
        await store.change({"x": None})
        await store.change({"y": "1"})
        fake.faults = [FULL]
        with pytest.raises(StoreFullError, match="nothing was changed"):
            await store.change({"y": None})
        assert await store.load() == {"y": "1"}
        fake.faults = [LOST, FULL]
        with pytest.raises(DeposedError, match="not known what became"):
            await store.change({"y": "2"})
        assert not lead.holds

    run(test)


def test_any_mix_of_faults_is_one_history() -> None:
    """Three that contend, whose answers are lost and whose attempts arrive late, by a seed: what the store says after
    each acknowledged change is what its leader has, and each key has what its last acknowledged change put there.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def test(fake: FakeEtcd, etcd: Etcd) -> None:
        truth: dict[str, str] = {}
        for turn in range(60):
            _, store = await elected(etcd, f"{turn}:1")
            assert await store.load() == truth
            for number in range(rng.randrange(8)):
                key, text = rng.choice("abc"), rng.choice((None, f"{turn}.{number}"))
                fake.faults = rng.choices([LOST, TWICE, DONE_BUT_FULL, FULL, ""], k=rng.randrange(3))
                while fake.late and rng.random() < 0.5:
                    await fake.carry_out(fake.late.pop(rng.randrange(len(fake.late))))
                    assert await store.load() == truth
                try:
                    await store.change({key: text})
                except StoreError:
                    continue
                except DeposedError:
                    break
                truth = {k: v for k, v in {**truth, key: text}.items() if v is not None}
                assert await store.load() == truth
            # The next one leads; what the last one sent arrives when it does.
            await fake.revoke(fake.leases, 1)
            fake.faults = []

    run(test)


def test_what_does_not_fit_is_refused_whole() -> None:
    """More records, or more bytes, than a transaction of etcd takes: nothing is sent; the most that fits is."""

    async def test(_: FakeEtcd, etcd: Etcd) -> None:
        _, store = await elected(etcd)
        with pytest.raises(OutOfMemoryError, match="128 records at once"):
            await store.change({str(number): "x" for number in range(CHANGES_MAX + 1)})
        with pytest.raises(OutOfMemoryError, match='record of "buffer/large"'):
            await store.change({"buffer/large": "x" * 1_500_001, "b": ""})
        assert await store.load() == {}
        await store.change({str(number): "x" for number in range(CHANGES_MAX)})
        assert len(await read_records(etcd, PLACE, page=10)) == CHANGES_MAX

    run(test)


def test_places_and_access_as_people_write_them(tmp_path: Any) -> None:
    """Addresses and a prefix, or an error that shows the form; a password file for our eyes alone."""
    assert Place.of("etcd://a:1,b:2,a:1/x/y/") == Place(("a:1", "b:2"), "x/y")
    for wrong in ("etcd://a:1", "etcd://a:1/", "etcd:///x", "etcd://a/x", "etcd://a:1,/x"):
        with pytest.raises(InvalidArgumentError, match="etcd://HOST:PORT"):
            Place.of(wrong)
    assert Access.of(None) == Access()
    (tmp_path / "user").write_text("smb:word")
    (tmp_path / "user").chmod(0o644)
    with pytest.raises(InvalidArgumentError, match="anybody may read"):
        Access.of(tmp_path)
    assert "word" not in repr(Access(None, "smb", "word"))
