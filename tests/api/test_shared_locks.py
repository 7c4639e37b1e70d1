"""Locks that several clients share: many together or one alone, in the order in which they asked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
import urllib.request

import numpy as np
import pytest

import smb
from tests.conftest import Connect
from tests.support.clients import hold_lock, in_process
from tests.support.daemons import cluster_metric, stop, wait_for, waiting
from tests.support.transports import EACH_WAY, FAR, SLOWNESS

WAIT_S = 20 * SLOWNESS


def test_many_share_it_or_one_has_it_alone(client: smb.Client, connect: Connect) -> None:
    """Adders share it and a reader takes it alone: each read finds whole rounds of additions, none under way."""
    buffer = client.create("w", 1000, "int64", stripe="4KiB")
    torn: list[int] = []
    ends = threading.Event()

    def add(own: smb.Client) -> None:
        mine = own.open("w")
        for _ in range(20):
            with mine.lock(shared=True, timeout=WAIT_S) as lock:
                for _ in range(2):  # a reader between the two would see an odd number
                    mine.accumulate(np.ones(1000, np.int64), fence=lock)

    def look() -> None:
        mine = connect(FAR).open("w")
        while not ends.is_set():
            with mine.lock(timeout=WAIT_S):
                torn.extend(int(value) for value in np.unique(mine.read() % 2))

    shared = [connect(transport).open("w").lock(shared=True) for transport in (FAR, "shm")]
    for lock in shared:
        lock.acquire()
    assert shared[0].token == shared[1].token
    assert all(lock.held for lock in shared)
    for lock in shared:
        lock.release()
    adders = [threading.Thread(target=add, args=(connect(transport),)) for transport in (FAR, "shm", FAR)]
    reader = threading.Thread(target=look)
    for thread in (*adders, reader):
        thread.start()
    for thread in adders:
        thread.join()
    ends.set()
    reader.join()
    assert set(torn) == {0}
    assert (buffer.read() == 3 * 20 * 2).all()


def test_who_waits_to_have_it_alone_is_not_passed(
    cluster: smb.LocalCluster, client: smb.Client, connect: Connect
) -> None:
    """Two hold it, one asks to have it alone, two more ask to share it: those two get it after that one, together."""
    order: list[str] = []
    first, second = client.lock("line", shared=True).acquire(), connect(FAR).lock("line", shared=True).acquire()
    together = threading.Barrier(2)

    def alone(own: smb.Client) -> None:
        with own.lock("line", timeout=WAIT_S):
            order.append("alone")

    def share(own: smb.Client) -> None:
        with own.lock("line", shared=True, timeout=WAIT_S):
            together.wait(WAIT_S)
            order.append("shared")

    threads = [threading.Thread(target=call, args=(connect(FAR),)) for call in (alone, share, share)]
    for number, thread in enumerate(threads):
        thread.start()
        wait_for(lambda number=number: waiting(cluster) == number + 1, "it to wait")
    with pytest.raises(smb.TimeoutError, match=r"not acquired within 0 s"):
        connect(FAR).lock("line", shared=True, timeout=0).acquire()
    first.release()
    assert order == []
    second.release()
    for thread in threads:
        thread.join()
    assert order == ["alone", "shared", "shared"]


def test_who_shares_it_does_not_wait_for_itself(
    cluster: smb.LocalCluster, client: smb.Client, connect: Connect
) -> None:
    """A nested call shares it again while another client waits to have it alone, who gets it after both."""
    other = connect(FAR)
    with client.lock("nested", shared=True) as outer:
        found = other.submit(lambda: other.lock("nested", timeout=WAIT_S).acquire())
        wait_for(lambda: waiting(cluster) == 1, "it to wait")
        with client.lock("nested", shared=True, timeout=0) as inner:
            assert inner.token == outer.token
        outer.check()
        assert not found.done()
    found.result(WAIT_S).release()


def test_what_makes_no_sense_with_shared_locks_is_refused(client: smb.Client, connect: Connect) -> None:
    """Who shares it cannot have it alone as well; another client waits; shared must be True or False."""
    buffer = client.create("w", 10)
    for lock, alone in (
        (client.lock("one", shared=True), client.lock("one")),
        (buffer.lock(shared=True), client.open("w").lock()),
    ):
        with lock:
            with pytest.raises(smb.InvalidArgumentError, match="holds the lock shared and would wait for itself"):
                alone.acquire()
            assert not alone.held
            assert repr(lock).endswith(f", shared, token {lock.token}>")
        with alone:
            assert alone.token > 0
    with client.lock("one"), pytest.raises(smb.TimeoutError, match=f"{client.name} holds it"):
        connect(FAR).lock("one", shared=True, timeout=0).acquire()
    with client.lock("one", shared=True), pytest.raises(smb.TimeoutError, match=f"{client.name} holds it"):
        connect(FAR).lock("one", timeout=0.1).acquire()
    with pytest.raises(smb.InvalidArgumentError, match="lock 'one': shared must be True or False, not 1"):
        client.lock("one", shared=1)  # type: ignore[arg-type]
    one, two = buffer.lock(shared=True), client.open("w").lock(shared=True)
    with one, two:  # two holdings of one client
        one.check()
    assert not two.held


def test_a_shared_holding_is_renewed_and_refused_once_it_is_lost(client: smb.Client, connect: Connect) -> None:
    """It lives on past its ttl. Not renewed, it ends; its fenced changes and its release are refused after another."""
    other = connect(FAR)
    buffer = client.create("w", 100_000, "int64", stripe="64KiB")
    held, lost = buffer.lock(shared=True, ttl=0.3).acquire(), other.open("w").lock(shared=True, ttl=0.3).acquire()
    token = held.token
    end = time.monotonic() + 0.9
    with pytest.raises(smb.TimeoutError):
        connect(FAR).open("w").lock(timeout=0.9).acquire()
    assert time.monotonic() >= end
    held.check()
    buffer.fill(1, fence=held)
    for one in (client, other):
        for lock in (held, lost):
            one._session.renewals.remove(lock)
    with connect(FAR).open("w").lock(timeout=WAIT_S) as alone:
        assert alone.token > token
        with pytest.raises(smb.LockLostError):
            buffer.fill(2, fence=held)
        with pytest.raises(smb.LockLostError):
            lost.check()
        for lock in (held, lost):
            with pytest.raises(smb.LockLostError):
                lock.release()
    assert (buffer.read() == 1).all()


def test_a_shared_holding_is_lost_with_its_lease(client: smb.Client, connect: Connect) -> None:
    """Whoever else shares the lock, and although nobody has had it alone."""
    with connect(FAR).lock("ended", shared=True):
        lost = client.lock("ended", ttl=0.5 * SLOWNESS, shared=True).acquire()
        client._session.renewals.remove(lost)
        wait_for(lambda: not lost.held, "the end of its lease")
        with pytest.raises(smb.LockLostError):
            lost.check()
        with pytest.raises(smb.LockLostError):
            lost.release()


def test_a_late_refusal_is_about_the_former_holding(client: smb.Client, connect: Connect) -> None:
    """The same object shares it again, under the same token, while a renewal of its released holding is under way."""
    other, lock = connect(FAR).lock("again", shared=True), client.lock("again", shared=True)
    with other:
        with lock:
            former = lock.holding
        pending = lock.start_renewal(former)
        with lock:
            assert (lock.token, lock.holding != former) == (former[0], True)
            try:
                with pytest.raises(smb.LockLostError):
                    lock.finish_renewal(former, pending, time.monotonic())
            finally:
                pending.end()
            assert lock.held
            lock.check()


def test_a_refused_renewal_is_logged_unless_the_lock_was_released(
    client: smb.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of a release without shared locks, to which a failover may lead, calls their renewals invalid."""
    renewals = client._session.renewals
    with client.lock("old", ttl=60, shared=True) as lock:
        known = lock._which
        lock._which = known | 2 << 8  # no server knows such a lock
        renewals._renew(0, lock)
        lock._which = known
    assert "refused the request as invalid: it is of a release without shared locks; update it" in caplog.text

    def released_meanwhile(*_renewal: object) -> None:
        released.release()
        raise smb.LockLostError("too late")

    released = client.lock("old", ttl=60, shared=True).acquire()
    monkeypatch.setattr(released, "finish_renewal", released_meanwhile)
    renewals._renew(0, released)
    assert not released.held
    assert "too late" not in caplog.text


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_holder_that_dies_or_leaves_frees_its_share(cluster: smb.LocalCluster, connect: Connect, how: str) -> None:
    """Killed, within its ttl; closed, at once. The other holders go on."""
    client = connect(FAR)
    if how == "closed":
        other = connect(FAR)
        other.lock("left", ttl=60, shared=True).acquire()
        with client.lock("left", ttl=60, shared=True):
            other.close()
        began = time.monotonic()
        with client.lock("left", timeout=WAIT_S):
            assert time.monotonic() - began < 10
        return
    with in_process(hold_lock, cluster.address, "left", 1.0, shared=True) as (process, messages):
        token = messages.get(timeout=30 * SLOWNESS)
        with client.lock("left", shared=True) as lock:
            assert lock.token == token
            os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        with client.lock("left", timeout=WAIT_S) as alone:
            assert time.monotonic() - began <= 1.5
            assert alone.token > token


def test_a_stopped_holder_that_shared_it_is_refused(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Stopped past its lease, another takes the lock and writes; woken, its fenced write is refused and it is told."""
    client = connect(FAR)
    buffer = client.create("w", 300_000, "int64", stripe="64KiB")
    with in_process(hold_lock, cluster.address, "w", 0.3, fenced=True, shared=True) as (process, messages):
        assert messages.get(timeout=30 * SLOWNESS) > 0
        stop(process.pid)
        with buffer.lock(timeout=WAIT_S) as lock:
            buffer.write(np.full(300_000, 7), fence=lock)
            os.kill(process.pid, signal.SIGCONT)
            assert messages.get(timeout=30 * SLOWNESS) == "LockLostError"  # its write
            assert messages.get(timeout=30 * SLOWNESS) == "LockLostError"  # leaving
        assert (buffer.read() == 7).all()


@pytest.mark.parametrize("transport", EACH_WAY)
def test_shared_holdings_survive_their_server(transport: str) -> None:
    """kill -9 and restart of the home: two hold it on, who waits is still in line, and gets it after both."""
    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, transport=transport, timeout=10 * SLOWNESS) as one,
        smb.connect(cluster.address, transport=transport, timeout=10 * SLOWNESS) as two,
        smb.connect(cluster.address, transport=transport, timeout=10 * SLOWNESS) as waiter,
    ):
        ttl_s = 2.0 * SLOWNESS
        first, second = one.lock("home", ttl=ttl_s, shared=True), two.lock("home", ttl=ttl_s, shared=True)
        with first, second:
            token = first.token
            found = waiter.submit(lambda: waiter.lock("home", timeout=60 * SLOWNESS).acquire())
            wait_for(lambda: waiting(cluster) == 1, "it to wait")
            cluster.servers[0].kill()
            cluster.servers[0].start()
            first.check()
            second.check()
            wait_for(lambda: waiting(cluster) == 1, "it to wait again")
            assert not found.done()
        alone = found.result(60 * SLOWNESS)
        assert alone.token > token
        alone.release()


def test_holders_of_a_shared_lock_are_shown(cluster: smb.LocalCluster, client: smb.Client, connect: Connect) -> None:
    """In metrics, among the clients, and in what the coordinator's page lists: one row a holder."""
    other = connect(FAR, name="other")
    url = f"http://{cluster.coordinator.metrics}/api/state"

    def rows() -> dict[str, str]:
        with urllib.request.urlopen(url, timeout=5) as page:
            waits = json.load(page)["waits"]
        return {wait["holder"]: wait["title"] for wait in waits if wait["name"] == "shown" and wait["holder"]}

    with client.lock("shown", shared=True), other.lock("shown", shared=True):
        assert cluster_metric(cluster, "smb_server_held_locks") == 2
        wait_for(lambda: rows() == dict.fromkeys((client.name, other.name), "lock shown (shared)"), "two holders")
    assert cluster_metric(cluster, "smb_server_held_locks") == 0


def test_shared_locks_in_coroutines(client: smb.Client, connect: Connect) -> None:
    """Two tasks share it in one event loop; a third that was cancelled while it waited does not get it."""
    other = connect(FAR)

    async def all_of_it() -> list[int]:
        async with client.lock("tasks", shared=True) as one, other.lock("tasks", shared=True) as two:
            waiter = asyncio.create_task(connect(FAR).lock("tasks").__aenter__())
            await asyncio.sleep(0)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            return [one.token, two.token]

    first, second = asyncio.run(all_of_it())
    assert first == second
    with client.lock("tasks", timeout=WAIT_S) as lock:
        assert lock.token > first
