"""smb.coordinator.etcd.election: what is changed, and by whom, where answers are lost, late, doubled or wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from smb.coordinator.etcd.connection import Access, Etcd, EtcdLocation
from smb.coordinator.etcd.election import Lead, campaign, leader_of
from smb.coordinator.etcd.store import CHANGES_MAX, EtcdStore, read_records
from smb.coordinator.store import DeposedError, StoreError, StoreFullError
from smb.errors import InvalidArgumentError, OutOfMemoryError
from tests.support.fake_etcd import DONE_BUT_FULL, FULL, LEASE_S, LOST, PLACE, TWICE, FakeEtcd


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


def test_a_refused_renewal_is_tried_again_with_pauses() -> None:
    """A refusal comes at once, and a leader that asked again at once kept a processor and its log busy up to the end of
    its lease. It leads on if etcd accepts it meanwhile, and lets go at that end if not.
    """

    async def test(fake: FakeEtcd, etcd: Etcd) -> None:
        for lease_s, refusals, tries in ((3, 2, 5), (1, 100_000, 12)):
            lead = await campaign(etcd, PLACE, "a:1", lease_s)
            assert lead is not None
            fake.refusals, fake.renewals = refusals, 0
            keeping = asyncio.create_task(lead.keep())
            done, _ = await asyncio.wait([lead.lost, keeping], timeout=2, return_when=asyncio.FIRST_COMPLETED)
            assert fake.renewals <= tries
            assert bool(done) == (refusals > tries)
            assert lead.holds == (refusals < tries)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
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
        with pytest.raises(DeposedError, match="the outcome of a change is unknown"):
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
        with pytest.raises(OutOfMemoryError, match="the change has 128 records"):
            await store.change({str(number): "x" for number in range(CHANGES_MAX + 1)})
        with pytest.raises(OutOfMemoryError, match='record of "buffer/large"'):
            await store.change({"buffer/large": "x" * 1_500_001, "b": ""})
        assert await store.load() == {}
        await store.change({str(number): "x" for number in range(CHANGES_MAX)})
        assert len(await read_records(etcd, PLACE, page=10)) == CHANGES_MAX

    run(test)


def test_places_and_access_as_people_write_them(tmp_path: Any) -> None:
    """Addresses and a prefix, or an error that shows the form; a password file for our eyes alone."""
    assert EtcdLocation.of("etcd://a:1,b:2,a:1/x/y/") == EtcdLocation(("a:1", "b:2"), "x/y")
    for wrong in ("etcd://a:1", "etcd://a:1/", "etcd:///x", "etcd://a/x", "etcd://a:1,/x"):
        with pytest.raises(InvalidArgumentError, match="etcd://HOST:PORT"):
            EtcdLocation.of(wrong)
    assert Access.of(None) == Access()
    (tmp_path / "user").write_text("smb:word")
    (tmp_path / "user").chmod(0o644)
    with pytest.raises(InvalidArgumentError, match="anybody may read"):
        Access.of(tmp_path)
    assert "word" not in repr(Access(None, "smb", "word"))
