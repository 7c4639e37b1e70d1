"""fence= of another buffer's lock: each server checks it if the two buffers are on it together and stay together there;
everything else is refused, and never made without a fence.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import smb
from tests.conftest import Connect
from tests.fault.long import seed, times
from tests.support import second_copy
from tests.support.daemons import tidy, wait_for
from tests.support.transports import EACH_WAY, FAR, SLOWNESS

SIZE = 40_000
ONES = np.ones(SIZE, np.float32)
Call = Callable[[smb.Lock], object]


def stale_lock(buffer: smb.Buffer) -> smb.Lock:
    """Return the lock as a client has it that was stopped past its lease."""
    with buffer.lock() as held:
        token = held.token
    stale = buffer.lock()
    stale._holding = (token, 0)
    return stale


def calls_on(target: smb.Buffer, gradient: smb.Buffer, state: smb.Buffer) -> list[tuple[Call, float, float]]:
    """Return every call that changes `target`, what it makes of the ones there, and of the ones in `state`."""
    return [
        (lambda lock: target.write(3 * ONES, fence=lock), 3, 1),
        (lambda lock: target.write(3 * ONES, fence=lock, wire="int8"), 3, 1),
        (lambda lock: target.fill(4, fence=lock), 4, 1),
        (lambda lock: target.accumulate(ONES, fetch=True, fence=lock), 2, 1),
        (lambda lock: target.accumulate_sparse(np.arange(SIZE), ONES, fence=lock), 2, 1),
        (lambda lock: target.accumulate_from(gradient, fence=lock), 2, 1),
        (lambda lock: target.accumulate_from([target, gradient] * 2, op="replace", fence=lock), 4, 1),
        (lambda lock: target.apply("sgd", gradient, lr=-1, fence=lock), 2, 1),
        (lambda lock: target.apply("momentum", gradient, state, lr=-1, mu=1, fence=lock), 3, 2),
        (lambda lock: target.write_async(3 * ONES, fence=lock).result(60), 3, 1),
        (lambda lock: target.accumulate_async(ONES, fence=lock).result(60), 2, 1),
    ]


def check_each(target: smb.Buffer, gradient: smb.Buffer, state: smb.Buffer, warden: smb.Buffer) -> None:
    """Every call is made under the warden's lock, and refused, with nothing changed, once that is another client's."""
    gradient.fill(1)
    for call, new, state_new in calls_on(target, gradient, state):
        target.fill(1)
        state.fill(1)
        with warden.lock() as lock:
            call(lock)
        assert (target.read() == new).all(), new
        assert (state.read() == state_new).all()
        stale = stale_lock(warden)
        with warden.lock(), pytest.raises(smb.LockLostError, match="nothing was applied"):
            call(stale)
        assert (target.read() == new).all()
        assert (state.read() == state_new).all()


@pytest.mark.parametrize("way", EACH_WAY)
def test_each_call_under_the_lock_of_another(client: smb.Client, connect: Connect, way: str) -> None:
    """One copy, on the same servers; the warden may have another dtype, size and number of versions."""
    warden = client.create("warden", 100_000, "int64", stripe="64KiB", versions=2, servers=["server-0", "server-1"])
    assert len(warden.layout.segments) == 2
    ours = connect(way)
    target = ours.create("w", SIZE, stripe="64KiB", servers=["server-0", "server-1"])
    gradient, state = ours.create("g", like=target), ours.create("m", like=target)
    check_each(target, gradient, state, ours.open("warden"))
    check_each(target, gradient, state, gradient)


def test_a_lock_of_one_element_on_the_same_server(client: smb.Client) -> None:
    """Shared, too, and for a part of the buffer; the turn that follows it is refused to who shared it."""
    warden = client.create("turns", 1, "int64", servers=["server-1"])
    target = client.create("w", SIZE, servers=["server-1"])
    with warden.lock(shared=True) as lock:
        target.accumulate(ONES[:10], 7, fence=lock)
    with pytest.raises(smb.InvalidArgumentError, match="released"):
        target.fill(1, fence=lock)
    assert target.read().sum() == 10


def test_a_stopped_holder_changes_no_other_buffer_either(client: smb.Client, connect: Connect) -> None:
    """Its lease is over and another client has the lock: on no server does its change of either buffer come through."""
    warden = client.create("warden", SIZE, stripe="64KiB")
    target = client.create("w", like=warden)
    theirs = connect(FAR)
    former = theirs.open("warden").lock(ttl=0.05).acquire()
    theirs._session.renewals.remove(former)
    with warden.lock(timeout=20 * SLOWNESS) as lock:
        target.write(2 * ONES, fence=lock)
        for name in ("w", "warden"):
            for part in (slice(0, 10), slice(SIZE - 10, SIZE)):
                former._lost = False
                with pytest.raises(smb.LockLostError):
                    theirs.open(name).write(ONES[part], part.start, fence=former)
    assert (target.read() == 2).all()
    assert not warden.read().any()


@pytest.mark.parametrize("way", EACH_WAY)
def test_changes_count_once_over_kills(way: str) -> None:
    """Servers are killed during additions and steps that another buffer's lock fences, and come back with their memory:
    each counts once, in weights and state, and the lock is still held.
    """
    with (
        smb.LocalCluster(servers=2, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport=way, timeout=60) as client,
    ):
        warden = client.create("warden", 2, "int64", stripe="4KiB", servers=["server-0"])
        weights = client.create("w", SIZE, servers=["server-0"])
        gradient, state = client.create("g", like=weights), client.create("m", like=weights)
        gradient.fill(1)
        done, ends = [0], threading.Event()

        def work() -> None:
            with warden.lock(ttl=60) as lock:
                while not ends.is_set():
                    weights.accumulate(ONES, fence=lock)
                    weights.apply("momentum", gradient, state, lr=-1, mu=1, fence=lock)
                    done[0] += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(times(3, 30)):
                before = done[0]
                wait_for(lambda before=before: done[0] > before + 3 or not thread.is_alive(), "steps", 60.0)
                cluster.servers[0].kill()
                cluster.servers[0].start()
        finally:
            ends.set()
            thread.join()
        assert done[0] > 3
        assert (state.read() == done[0]).all()
        assert (weights.read() == done[0] + done[0] * (done[0] + 1) / 2).all()


def test_what_is_refused(client: smb.Client, connect: Connect) -> None:
    """With a sentence, and nothing is changed: elsewhere, too few segments, another client's, named, not taken."""
    both = ["server-0", "server-1"]
    target = client.create("w", SIZE, stripe="64KiB", servers=both)
    lies = r"'other', which lies on other servers, so that no server of 'w' can check it; create .* like= the other"
    for servers, stripe in ((both[::-1], "64KiB"), (both[:1], "64KiB")):
        other = client.create("other", SIZE, stripe=stripe, servers=servers)
        with other.lock() as lock, pytest.raises(smb.InvalidArgumentError, match=lies):
            target.fill(1, fence=lock)
        client.delete("other")
    beside = client.create("beside", like=target)
    with client.lock("w") as named, pytest.raises(smb.InvalidArgumentError, match=r"a lock that a buffer's lock\(\)"):
        target.fill(1, fence=named)
    theirs = connect(FAR)
    with theirs.open("beside").lock() as lock, pytest.raises(smb.InvalidArgumentError, match="another client"):
        target.fill(1, fence=lock)
    for call, _, _ in calls_on(target, beside, client.create("m", like=target)):
        with pytest.raises(smb.InvalidArgumentError, match="not held"):
            call(beside.lock())
    gone = beside.lock().acquire()
    client.delete("beside")
    with pytest.raises(smb.NotFoundError, match="'beside' was deleted"):
        target.fill(1, fence=gone)
    assert not target.read().any()


@pytest.fixture
def three() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=3, capacity="32MiB") as made:
        yield made


@pytest.fixture
def owner(three: smb.LocalCluster) -> Iterator[smb.Client]:
    with tidy(three, 60.0) as made:
        yield made


def test_who_fences_stays_together(three: smb.LocalCluster, owner: smb.Client) -> None:
    """With one copy: a fence binds both buffers to their servers, so a drain leaves them there and the fence holds. A
    buffer that has moved before fences nothing, and is not fenced; the call says so.
    """
    warden = owner.create("warden", 1000, servers=["server-0"])
    bound, moves = owner.create("bound", like=warden), owner.create("moves", like=warden)
    with warden.lock(ttl=30) as lock:
        bound.fill(1, fence=lock)
        owner._coordinator.drain_server("server-0", 20.0)
        wait_for(lambda: owner.open("moves").layout.segments[0].server != "server-0", "it to move")
        bound.fill(2, fence=lock)
        assert {owner.open(name).layout.segments[0].server for name in ("warden", "bound")} == {"server-0"}
        with pytest.raises(smb.InvalidArgumentError, match="one copy, and one of the two has moved"):
            moves.fill(3, fence=lock)
        with pytest.raises(smb.InvalidArgumentError, match="one copy, and one of the two has moved"):
            owner.open("moves").fill(3, fence=lock)
    with owner.open("moves").lock() as lock, pytest.raises(smb.InvalidArgumentError, match="has moved"):
        bound.fill(3, fence=lock)
    stale = stale_lock(warden)
    with warden.lock(), pytest.raises(smb.LockLostError):
        bound.fill(3, fence=stale)
    assert (bound.read() == 2).all()
    assert not moves.read().any()


def test_two_copies_need_one_bundle(owner: smb.Client) -> None:
    """state_of= makes one, and every call works in it; like= does not, and is refused."""
    warden = owner.create("warden", SIZE, stripe="64KiB", replicas=2)
    target, state = owner.create("w", state_of=warden), owner.create("m", state_of=warden)
    apart, one = owner.create("apart", like=warden, replicas=2), owner.create("one", like=warden, replicas=1)
    for first, second in ((warden, apart), (apart, warden), (warden, one), (one, warden)):
        with (
            first.lock() as lock,
            pytest.raises(smb.InvalidArgumentError, match=r"can be on another server after a failure.* state_of="),
        ):
            second.fill(1, fence=lock)
        assert not second.read().any()
    check_each(target, apart, state, warden)
    check_each(warden, apart, state, target)


# Copies begin slowly while servers miss leases, as they do beside two clients that never pause.
WHOLE_S = 150.0


@pytest.mark.timeout(4 * WHOLE_S)
@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_hosts_are_lost_under_a_lock(three: smb.LocalCluster, owner: smb.Client, way: str) -> None:
    """Two clients take turns under one buffer's lock to change two others, and share another lock for steps: while each
    host is lost with its memory, or drained, each turn counts once, and nobody sees half of another's turn.
    """
    warden = owner.create("turns", 1, "int64", replicas=2, servers=1)
    names = [f"w{number}" for number in range(2)]
    for name in names:
        owner.create(name, state_of=warden)
    weights = owner.create("weights", 50_000, stripe="64KiB", replicas=2)
    owner.create("g", like=weights, replicas=2).fill(1)
    owner.create("m", state_of=weights)
    ends, done, failed = threading.Event(), [0, 0], list[BaseException]()

    def work(number: int) -> None:
        try:
            with smb.connect(three.address, transport=way, timeout=60) as ours:
                turns, *counts = (ours.open(name) for name in ("turns", *names))
                w, g, m = (ours.open(name) for name in ("weights", "g", "m"))
                while not ends.is_set():
                    with turns.lock(ttl=20, timeout=60) as lock:
                        seen = [int(each.read()[0]) for each in counts]
                        assert seen[0] == seen[1], seen
                        counts[0].write(np.array([seen[0] + 1]), fence=lock)
                        counts[1].accumulate(np.array([1]), fence=lock)
                    with m.lock(ttl=20, timeout=60, shared=True) as lock:
                        w.apply("momentum", g, m, lr=-1, mu=1, fence=lock)
                    done[number] += 1
        except BaseException as error:  # noqa: BLE001 - told to the test
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    rng = random.Random(seed())
    try:
        for _ in range(times(1, 6)):
            for server in three.servers:
                before = list(done)
                wait_for(lambda before=before: failed or all(map(int.__gt__, done, before)), "turns", WHOLE_S)
                if rng.random() < 0.5:
                    server.kill()
                    second_copy.lose(three.memory_directory, server.name)
                    wait_for(lambda name=server.name: second_copy.are_whole(owner, name), "two copies", WHOLE_S)
                    server.start()
                else:
                    owner._coordinator.drain_server(server.name, 20.0)
                    wait_for(
                        lambda name=server.name: failed or name not in places(owner),
                        f"nothing on {server.name}",
                        WHOLE_S,
                    )
                    owner._coordinator.drain_server(server.name, 20.0, undo=True)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert not failed, failed
    steps = sum(done)
    assert [int(owner.open(name).read()[0]) for name in names] == [steps, steps]
    assert (owner.open("m").read() == steps).all()
    assert (weights.read() == steps * (steps + 1) / 2).all()
    second_copy.check_copies(owner, three.memory_directory)


def places(client: smb.Client) -> set[str]:
    """Return the servers on which any copy lies."""
    return {name for info in client.list() for each in info.layout.segments for name in (each.server, each.backup)}
