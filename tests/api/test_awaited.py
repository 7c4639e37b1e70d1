"""smb.to_thread, `async with` a lock, and Follower.wait_async: calls that block, awaited from asyncio and cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smb
import smb.torch
import smb.train
from smb.config import cancellation
from smb.train import members
from tests.conftest import Connect
from tests.support.daemons import wait_for, waiting
from tests.support.transports import FAR

DEADLINE_S = 60.0


@pytest.fixture
def client(connect: Connect) -> smb.Client:
    """A client. What waits goes through a server over each transport."""
    return connect()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it in an event loop. Afterwards no thread of ours waits any more."""
    result = asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))
    wait_for(lambda: threads() == 0, "the end of all threads")
    return result


def threads() -> int:
    return sum(thread.name == "smb-awaited" for thread in threading.enumerate())


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, while the event loop goes on."""
    await asyncio.to_thread(wait_for, condition, what)


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task; when it is over, its thread is, too."""
    before = threads()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: threads() < before, "the end of its thread")


def test_results_errors_and_context_come_back(client: smb.Client) -> None:
    """Many waits at once hold up nothing; a call sees the caller's context and raises what it raises."""
    variable = contextvars.ContextVar("variable", default=0)
    buffer = client.create("versions", 10, versions=2)

    async def main() -> None:
        variable.set(7)
        assert await smb.to_thread(variable.get) == 7
        with pytest.raises(smb.NotFoundError, match="nowhere"):
            await smb.to_thread(client.open, "nowhere")
        with pytest.raises(smb.TimeoutError, match=r"not published within 0.1 s"):
            await smb.to_thread(buffer.wait, 1, timeout=0.1)
        waits = [asyncio.create_task(smb.to_thread(buffer.wait, 1)) for _ in range(40)]
        await until(lambda: threads() >= 40, "40 waits")
        await smb.to_thread(buffer.publish, np.ones(10, np.float32))
        assert await asyncio.gather(*waits) == [1] * 40

    run(main())


# More than 5 s: waits are longer than the turns in which they are made.
def test_a_wait_that_is_longer_than_a_turn(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when it is published, or after its own time, which its error names."""
    monkeypatch.setattr(cancellation, "TURN_S", 0.2)
    buffer = client.create("versions", 10, versions=2)

    async def main() -> None:
        with pytest.raises(smb.TimeoutError, match=r"not published within 0.7 s"):
            await smb.to_thread(buffer.wait, 1, timeout=0.7)
        with pytest.raises(smb.NotFoundError, match=r"appeared within 0.7 s"):
            await smb.to_thread(client.open, "later", timeout=0.7)
        asked = asyncio.create_task(smb.to_thread(client.open, "later", timeout=DEADLINE_S))
        waits = asyncio.create_task(smb.to_thread(buffer.wait, 1))
        await asyncio.sleep(0.5)  # two turns and a half
        assert not asked.done()
        assert not waits.done()
        await smb.to_thread(client.create, "later", 10)
        await smb.to_thread(buffer.publish, np.ones(10, np.float32))
        assert await waits == 1
        assert (await asked).name == "later"

    run(main())


def test_a_follower_is_awaited(client: smb.Client, cluster: smb.LocalCluster) -> None:
    """wait_async() returns the new generation; a cancelled one is forgotten by the server, and the next one works."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    publisher = smb.torch.Publisher(client, "policy", model)
    follower = smb.torch.follow(client, "policy")

    async def main() -> None:
        waits = asyncio.create_task(follower.wait_async())
        await until(lambda: waiting(cluster) == 1, "the wait")
        await cancelled(waits)
        assert waiting(cluster) == 0
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(follower.wait_async(), 0.1)
        waits = asyncio.create_task(follower.wait_async())
        await until(lambda: threads() == 1, "the wait")
        await smb.to_thread(publisher.publish)
        assert await waits == 1
        assert await smb.to_thread(follower.load, other) == 1
        assert torch.equal(model.weight, other.weight)
        assert await follower.wait_async(generation=1) == 1

    run(main())


def test_a_cancelled_task_does_not_get_the_lock(
    client: smb.Client, connect: Connect, cluster: smb.LocalCluster
) -> None:
    """Nobody holds it after its holder, and who waits behind the cancelled one gets it."""
    other = connect(FAR)
    held = client.lock("one").acquire()
    entered = []

    async def want() -> None:
        async with other.lock("one", ttl=60):
            entered.append(True)

    async def behind() -> int:
        async with connect(FAR).lock("one", ttl=60, timeout=DEADLINE_S) as lock:
            return lock.token

    async def main() -> None:
        wants = asyncio.create_task(want())
        await until(lambda: waiting(cluster) == 1, "the first one to wait")
        waits = asyncio.create_task(behind())
        await until(lambda: waiting(cluster) == 2, "the second one to wait")
        await cancelled(wants)
        held.release()
        assert await waits > 0

    run(main())
    assert entered == []
    with client.lock("one", timeout=0):
        pass


def test_a_lock_is_awaited_over_turns(
    client: smb.Client, connect: Connect, cluster: smb.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder is waited for, however often the awaited call has to ask; its own time ends it, too."""
    monkeypatch.setattr(cancellation, "TURN_S", 0.1)
    held = client.lock("turns").acquire()

    async def main() -> None:
        with pytest.raises(smb.TimeoutError, match=r"not acquired within 0.35 s: .* holds it"):
            async with connect(FAR).lock("turns", ttl=60, timeout=0.35):
                raise AssertionError("it is held")
        wants = asyncio.create_task(connect(FAR).lock("turns", ttl=60).__aenter__())
        await until(lambda: waiting(cluster) == 1, "it to wait")
        await asyncio.sleep(0.5)  # some turns
        assert not wants.done()
        held.release()
        (await wants).release()

    run(main())


def test_a_lock_that_is_granted_as_its_task_is_cancelled(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is released, and not kept for its ttl."""
    acquire, loops = smb.Lock.acquire, []

    def acquire_and_cancel(lock: smb.Lock) -> smb.Lock:
        acquire(lock)
        over = threading.Event()

        def cancel() -> None:
            tasks[0].cancel()
            over.set()

        loops[0].call_soon_threadsafe(cancel)
        assert over.wait(DEADLINE_S)
        return lock

    tasks: list[asyncio.Task[None]] = []

    async def want() -> None:
        async with client.lock("granted", ttl=600):
            raise AssertionError("the task was cancelled")

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        with monkeypatch.context() as patch:
            patch.setattr(smb.Lock, "acquire", acquire_and_cancel)
            tasks.append(asyncio.create_task(want()))
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
        with client.lock("granted", timeout=0):
            pass

    run(main())


def test_a_task_that_is_cancelled_in_the_block_releases_its_lock(client: smb.Client) -> None:
    """Also if it is cancelled again while it releases the lock."""

    async def hold(inside: asyncio.Event) -> None:
        async with client.lock("block", ttl=600):
            inside.set()
            await asyncio.sleep(DEADLINE_S)

    async def main() -> None:
        inside = asyncio.Event()
        holds = asyncio.create_task(hold(inside))
        await inside.wait()
        holds.cancel()
        await asyncio.sleep(0)
        holds.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holds
        with client.lock("block", timeout=0):
            pass

    run(main())


def test_a_cancelled_party_breaks_the_barrier(client: smb.Client, connect: Connect, cluster: smb.LocalCluster) -> None:
    """The others do not leave as if it had come, nor wait for ever; the next round starts clean."""
    other = connect(FAR)

    async def main() -> None:
        first = asyncio.create_task(smb.to_thread(client.barrier, "all", 3))
        second = asyncio.create_task(smb.to_thread(other.barrier, "all", 3))
        await until(lambda: waiting(cluster) == 2, "two parties")
        await cancelled(first)
        with pytest.raises(smb.BrokenBarrierError, match="'all'"):
            await second
        again = (smb.to_thread(each.barrier, "all", 2, timeout=DEADLINE_S) for each in (client, other))
        assert sorted(await asyncio.gather(*again)) == [0, 1]

    run(main())
    assert waiting(cluster) == 0


def test_a_cancelled_open_ends(client: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a name that nobody creates ends within a turn."""
    monkeypatch.setattr(cancellation, "TURN_S", 0.2)

    async def main() -> None:
        opens = asyncio.create_task(smb.to_thread(client.open, "never", timeout=600))
        await until(lambda: threads() == 1, "the call")
        await cancelled(opens)

    run(main())


def test_a_coroutine_that_is_closed_ends_its_call(
    client: smb.Client, connect: Connect, cluster: smb.LocalCluster
) -> None:
    """As one whose loop was stopped: otherwise its thread would wait for ever, and the lock be granted to nobody."""
    held = client.lock("closed").acquire()

    async def main() -> None:
        wants = connect(FAR).lock("closed", ttl=600).__aenter__()
        wants.send(None)  # as a loop does
        await until(lambda: waiting(cluster) == 1, "the wait")
        wants.close()
        await until(lambda: threads() == 0, "the end of its thread")

    run(main())
    held.release()
    with client.lock("closed", timeout=0):
        pass


def test_a_join_that_is_cancelled_does_not_try_again(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would become a member for whose steps the others wait, and of which nobody knows."""
    client = connect(timeout=10 * DEADLINE_S)
    attempts: list[int] = []

    def none_free(*_: Any) -> Any:
        attempts.append(1)
        raise members.NoSlotError("all slots are taken")

    monkeypatch.setattr(members, "admit", none_free)

    async def main() -> None:
        joins = asyncio.create_task(
            smb.to_thread(smb.train.join, client, "run", np.zeros(8, np.float32), smb.train.ASP())
        )
        await until(lambda: len(attempts) > 1, "a second attempt")
        await cancelled(joins)

    run(main())


def test_data_that_moves_is_moved_to_the_end(client: smb.Client) -> None:
    """A call that changes a buffer comes to its end before its cancelled task goes on."""
    buffer = client.create("sums", 4_000_000, "float32")
    ones, begun, go_on = np.ones(4_000_000, np.float32), threading.Event(), threading.Event()

    def add() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)  # otherwise it could be over before it is cancelled
        buffer.accumulate(ones)

    async def main() -> None:
        adds = asyncio.create_task(smb.to_thread(add))
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        asyncio.get_running_loop().call_soon(go_on.set)
        await cancelled(adds)
        assert (buffer.read() == 1).all()

    run(main())


# More than 5 s: a cluster of its own is started, and its server killed.
def test_a_wait_for_a_server_that_is_away_is_cancelled() -> None:
    """The task does not wait for the server for as long as the client would."""
    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as own,
        smb.connect(own.address, timeout=10 * DEADLINE_S) as client,
    ):
        held = client.lock("away", ttl=10 * DEADLINE_S).acquire()

        async def want() -> None:
            async with client.lock("away", ttl=60):
                raise AssertionError("it is held")

        async def main() -> None:
            wants = asyncio.create_task(want())
            await until(lambda: waiting(own) == 1, "it to wait")
            own.servers[0].kill()
            await cancelled(wants)

        run(main())
        own.servers[0].start()
        held.release()
