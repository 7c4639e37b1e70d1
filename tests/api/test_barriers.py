"""Barriers: nobody leaves before all arrived; a death or a timeout breaks the round for all."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import smb
from tests.conftest import Connect
from tests.support.clients import arrive, in_process
from tests.support.daemons import wait_for, waiting
from tests.support.transports import FAR


def test_nobody_leaves_before_all_arrived(client: smb.Client, connect: Connect) -> None:
    """Four clients, many rounds: indexes are 0 to 3, and nobody is a round ahead of another that has not arrived."""
    clients = [client, *(connect(transport) for transport in (FAR, "shm", FAR))]
    arrived = [0] * 4
    indexes: list[list[int]] = [[] for _ in range(4)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                arrived[number] = turn + 1
                indexes[number].append(clients[number].barrier("all", 4, timeout=30))
                assert min(arrived) >= turn + 1
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for turn in range(20):
        assert sorted(each[turn] for each in indexes) == [0, 1, 2, 3]


def test_a_timeout_breaks_it_for_all_and_the_next_round_is_clean(
    cluster: smb.LocalCluster, client: smb.Client, connect: Connect
) -> None:
    """One gives up: all get BrokenBarrierError; afterwards the barrier works again."""
    other = connect(FAR)
    broken: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(smb.BrokenBarrierError, match="'b'") as caught:
            other.barrier("b", 3)
        broken.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: waiting(cluster) == 1, "it to wait")
    with pytest.raises(smb.BrokenBarrierError, match="3 parties"):
        client.barrier("b", 3, timeout=0.3)
    thread.join()
    assert broken
    again = threading.Thread(target=lambda: other.barrier("b", 2, timeout=20))
    again.start()
    client.barrier("b", 2, timeout=20)
    again.join()


def test_a_death_breaks_it_for_all(cluster: smb.LocalCluster, connect: Connect) -> None:
    """A party is killed while it waits: the others are told within seconds, not at the end of their time."""
    client = connect(FAR)
    with in_process(arrive, cluster.address, "deadly", 3) as (process, messages):
        assert messages.get(timeout=30) == "arriving"
        start = time.monotonic()
        wait_for(lambda: waiting(cluster) == 1, "it to wait")

        def kill() -> None:
            wait_for(lambda: waiting(cluster) == 2, "both to wait")
            os.kill(process.pid, signal.SIGKILL)

        killing = threading.Thread(target=kill)
        killing.start()
        with pytest.raises(smb.BrokenBarrierError):
            client.barrier("deadly", 3, timeout=60)
        killing.join()
        assert time.monotonic() - start < 20


def test_misuse(cluster: smb.LocalCluster, client: smb.Client, connect: Connect) -> None:
    """Parties that differ, or are no number, are refused; one party passes at once."""
    assert client.barrier("alone", 1) == 0
    for parties in (0, -1, 2.5, True):
        with pytest.raises(smb.InvalidArgumentError, match="parties"):
            client.barrier("x", parties)  # type: ignore[arg-type]
    with pytest.raises(smb.InvalidArgumentError, match="timeout"):
        client.barrier("x", 2, timeout=-1)
    with pytest.raises(smb.InvalidArgumentError):
        client.barrier("x", 10**6)
    other = connect(FAR)

    def give_up() -> None:
        with pytest.raises(smb.BrokenBarrierError):
            other.barrier("two", 2, timeout=1)

    thread = threading.Thread(target=give_up)
    thread.start()
    wait_for(lambda: waiting(cluster) == 1, "it to wait")
    with pytest.raises(smb.InvalidArgumentError, match="invalid"):
        client.barrier("two", 3)
    thread.join()


def test_a_barrier_survives_its_server() -> None:
    """kill -9 and restart of the home while some wait: the seats are kept, and all leave together."""
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster:
        clients = [smb.connect(cluster.address, transport=transport) for transport in (FAR, "shm", FAR)]
        indexes: list[int] = []
        threads = [
            threading.Thread(target=lambda own=own: indexes.append(own.barrier("home", 3, timeout=60)))  # type: ignore[misc]
            for own in clients
        ]
        for thread in threads[:2]:
            thread.start()
        wait_for(lambda: waiting(cluster) == 2, "two to wait")
        assert not indexes
        cluster.servers[0].kill()
        cluster.servers[0].start()
        threads[2].start()
        for thread in threads:
            thread.join()
        assert sorted(indexes) == [0, 1, 2]
        for own in clients:
            own.close()
