"""Locks: one holder at a time, in order, for as long as its lease; what a former holder still does is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import smb
from tests.conftest import Connect
from tests.support.clients import hold_lock, in_process
from tests.support.daemons import stop, wait_for, waiting
from tests.support.transports import EACH_WAY, FAR, SLOWNESS


def test_a_lock_has_one_holder(client: smb.Client, connect: Connect) -> None:
    """Increments of a counter under the lock, read and written apart, are not lost; tokens grow."""
    others = [connect(transport) for transport in (FAR, "shm", FAR)]
    buffer = client.create("w", 1, "int64")
    tokens: list[int] = []

    def work(own: smb.Client) -> None:
        mine = own.open("w")
        for _ in range(25):
            with own.lock("one") as lock:
                tokens.append(lock.token)
                mine.write(mine.read() + 1)

    threads = [threading.Thread(target=work, args=(own,)) for own in (client, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert buffer.read()[0] == 100
    assert tokens == sorted(set(tokens))


def test_who_waits_longest_is_next(cluster: smb.LocalCluster, client: smb.Client, connect: Connect) -> None:
    """Five clients that ask one after the other get it in that order."""
    order: list[int] = []
    with client.lock("line"):
        threads = []
        for number in range(5):
            own = connect(FAR)
            threads.append(threading.Thread(target=_take, args=(own, order, number)))
            threads[-1].start()
            wait_for(lambda number=number: waiting(cluster) == number + 1, "it to wait")
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def _take(own: smb.Client, order: list[int], number: int) -> None:
    with own.lock("line"):
        order.append(number)


def test_timeouts_and_misuse(client: smb.Client, connect: Connect) -> None:
    """A lock that is taken is not given within the time; what makes no sense is refused with its reason."""
    other = connect(FAR)
    lock = client.lock("busy")
    with lock:
        assert lock.held
        start = time.monotonic()
        with pytest.raises(smb.TimeoutError, match=r"'busy'.*0\.2 s"), other.lock("busy", timeout=0.2):
            pass
        assert 0.2 <= time.monotonic() - start < 5
        with pytest.raises(smb.TimeoutError), other.lock("busy", timeout=0):
            pass
        with pytest.raises(smb.InvalidArgumentError, match="already holds the lock"):
            lock.acquire()
        lock.check()
    assert not lock.held
    assert repr(lock) == "<smb.Lock 'busy', not held>"
    with pytest.raises(smb.InvalidArgumentError, match="was released"):
        lock.release()
    with pytest.raises(smb.InvalidArgumentError, match="was released"):
        _ = lock.token
    for ttl in (0, -1, 10**9):
        with pytest.raises(smb.InvalidArgumentError, match="ttl"):
            client.lock("busy", ttl=ttl)
    with pytest.raises(smb.InvalidArgumentError, match="name"):
        client.lock("no\nname")
    with lock:  # it may be taken again
        assert lock.held


def test_a_lock_lives_longer_than_its_ttl_while_it_is_held(client: smb.Client, connect: Connect) -> None:
    """It is renewed in the background: three times its ttl later it is still ours."""
    with client.lock("long", ttl=0.3) as lock:
        end = time.monotonic() + 0.9
        with pytest.raises(smb.TimeoutError), connect(FAR).lock("long", timeout=0.9):
            pass
        assert time.monotonic() >= end
        lock.check()
        assert lock.held


@pytest.mark.parametrize("ttl", [0.5, 1.0])
def test_a_dead_holders_lock_is_free_within_its_ttl(cluster: smb.LocalCluster, connect: Connect, ttl: float) -> None:
    """The holder is killed: the next one has the lock at most ttl + 0.5 s later."""
    client = connect(FAR)
    with in_process(hold_lock, cluster.address, "dead", ttl) as (process, messages):
        token = messages.get(timeout=30 * SLOWNESS)
        os.kill(process.pid, signal.SIGKILL)
        start = time.monotonic()
        with client.lock("dead", timeout=20 * SLOWNESS) as lock:
            assert time.monotonic() - start <= ttl + 0.5
            assert lock.token > token


def test_a_stopped_holder_that_wakes_is_refused(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Stopped past its lease, another takes the lock and writes; woken, its fenced write is refused and it is told."""
    client = connect(FAR)
    buffer = client.create("w", 300_000, "int64", stripe="64KiB")
    with in_process(hold_lock, cluster.address, "w", 0.3, fenced=True) as (process, messages):
        assert messages.get(timeout=30 * SLOWNESS) > 0
        stop(process.pid)
        with buffer.lock(timeout=20 * SLOWNESS) as lock:
            buffer.write(np.full(300_000, 7), fence=lock)
            os.kill(process.pid, signal.SIGCONT)
            assert messages.get(timeout=30 * SLOWNESS) == "LockLostError"  # its write
            assert messages.get(timeout=30 * SLOWNESS) == "LockLostError"  # leaving
        assert (buffer.read() == 7).all()


def test_a_lock_that_was_lost_is_told_on_leaving(client: smb.Client, connect: Connect) -> None:
    """Without renewal it runs out: check and release say so, and the lock is another's."""
    lock = client.lock("short", ttl=0.2).acquire()
    client._session.renewals.remove(lock)
    with connect(FAR).lock("short", timeout=20 * SLOWNESS):
        with pytest.raises(smb.LockLostError, match="short"):
            lock.check()
        assert not lock.held
        with pytest.raises(smb.LockLostError, match="short"):
            lock.release()


def test_fences_are_of_the_buffers_own_lock(client: smb.Client, connect: Connect) -> None:
    """A named lock, that of a buffer on another server, or one that is not taken is no fence."""
    w, v = (client.create(name, 10, "int64", servers=[f"server-{at}"]) for at, name in enumerate("wv"))
    with client.lock("w") as named, v.lock() as others:
        for lock, said in (
            (named, r"a buffer's lock\(\)"),
            (others, "is of buffer 'v', which lies on other servers.*pass this buffer's own lock"),
        ):
            with pytest.raises(smb.InvalidArgumentError, match=f"fence.*{said}"):
                w.write(np.ones(10, np.int64), fence=lock)
        with pytest.raises(smb.InvalidArgumentError, match="not held"):
            w.fill(1, fence=w.lock())
    with w.lock() as own:
        w.write(np.ones(10, np.int64), fence=own)
        w.accumulate(np.ones(10, np.int64), fence=own)
        w.accumulate_from(client.create("u", like=w), fence=own)
        w.fill(5, fence=own)
        client.open("w").accumulate(np.ones(10, np.int64), fence=own)  # the same buffer, opened once more
        with pytest.raises(smb.InvalidArgumentError, match="another client"):
            connect(FAR).open("w").fill(7, fence=own)
    with pytest.raises(smb.InvalidArgumentError, match="released"):
        client.open("w").fill(7, fence=own)
    assert (w.read() == 6).all()


@pytest.fixture(scope="module")
def fragile() -> Iterator[smb.LocalCluster]:
    """One server, to be restarted."""
    with smb.LocalCluster(servers=1, capacity="16MiB") as running:
        yield running


@pytest.mark.parametrize("transport", EACH_WAY)
def test_a_lock_survives_its_server(fragile: smb.LocalCluster, transport: str) -> None:
    """kill -9 and restart of the home: the holder holds on, those who wait are still in line, tokens go on growing."""
    order: list[str] = []
    with (
        smb.connect(fragile.address, transport=transport, timeout=10 * SLOWNESS) as holder,
        smb.connect(fragile.address, transport=transport, timeout=10 * SLOWNESS) as waiter,
    ):
        with holder.lock("home", ttl=20 * SLOWNESS) as lock:
            first = lock.token

            def wait() -> None:
                with waiter.lock("home", timeout=20 * SLOWNESS) as next_lock:
                    order.append("waiter")
                    assert next_lock.token > first

            thread = threading.Thread(target=wait)
            thread.start()
            wait_for(lambda: waiting(fragile) == 1, "it to wait")
            fragile.servers[0].kill()
            fragile.servers[0].start()
            lock.check()
            wait_for(lambda: waiting(fragile) == 1, "it to wait again")
            order.append("holder")
        thread.join()
    assert order == ["holder", "waiter"]


def test_a_closed_clients_locks_are_free_at_once(client: smb.Client, connect: Connect) -> None:
    """Closing ends the session, and with it what it held, long before the ttl."""
    other = connect(FAR)
    other.lock("closing", ttl=60).acquire()
    other.close()
    start = time.monotonic()
    with client.lock("closing", timeout=20 * SLOWNESS):
        assert time.monotonic() - start < 10


def test_errors_of_a_lock_name_it() -> None:
    """Bad arguments, a holder, a server and a coordinator that do not answer: each error says which lock was asked."""
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, timeout=0.5) as client,
        smb.connect(cluster.address) as other,
    ):
        for arguments in ({"ttl": 0}, {"ttl": "a"}, {"timeout": -1}, {"timeout": "a"}, {"replicas": 3}):
            with pytest.raises(smb.InvalidArgumentError, match=r"^lock 'run/x': (ttl|timeout|replicas) must be"):
                client.lock("run/x", **arguments)
        for name in ("", 3, "a b", "a" * 300):
            with pytest.raises(smb.InvalidArgumentError, match="lock"):
                client.lock(name)  # type: ignore[arg-type]
        known, of_buffer = client.lock("run/x", timeout=0.1), client.create("w", 10).lock(timeout=0)
        with other.lock("run/x"), other.open("w").lock():
            for lock, name in ((known, "lock 'run/x'"), (of_buffer, "lock of buffer 'w'")):
                with pytest.raises(smb.TimeoutError, match=f"^{name}: not acquired .*{other.name} holds it; "):
                    lock.acquire()
        for pid, stopped in (
            (cluster.servers[0].pid, lambda: client.lock("run/x", timeout=0).acquire()),
            (cluster.coordinator.pid, lambda: client.lock("run/y")),
        ):
            stop(pid)
            try:
                with pytest.raises(smb.TimeoutError, match=r"^lock 'run/[xy]': .*answer"):
                    stopped()
            finally:
                os.kill(pid, signal.SIGCONT)
        assert client.lock("run/y").acquire().held
