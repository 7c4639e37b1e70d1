"""Versions: a reader sees one of them, whole; who waits for one is woken by its publication."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import smb
from tests.conftest import Connect
from tests.support.daemons import wait_for

SIZE = 300_000


def test_versions_are_numbered_from_one(client: smb.Client) -> None:
    """publish counts, version tells, read gives the latest; before the first there are zeros."""
    buffer = client.create("w", (3, 100), "float32", versions=2)
    assert buffer.version == 0
    assert not buffer.read().any()
    for number in range(1, 6):
        assert buffer.publish(np.full((3, 100), number, np.float32)) == number
        assert buffer.version == number
        assert (buffer.read() == number).all()
        assert (buffer.read(150, 10) == number).all()
    assert buffer.nbytes == 1200
    assert client.open("w").version == 5


def test_reads_never_mix_versions(connect: Connect) -> None:
    """A publisher at full rate, readers over every transport: each read is all of one version, and none goes back."""
    publisher = connect("tcp")
    buffer = publisher.create("w", SIZE, "int64", versions=2, stripe="64KiB")
    stop = threading.Event()
    reads: list[int] = []
    failures: list[BaseException] = []

    def read(own: smb.Buffer) -> None:
        out, last = np.empty(SIZE, np.int64), 0
        try:
            while not stop.is_set():
                own.read(out=out)
                assert (out == out[0]).all(), f"a mix of {np.unique(out)}"
                assert out[0] >= last
                last = int(out[0])
                reads.append(last)
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            failures.append(error)

    threads = [threading.Thread(target=read, args=(connect(way).open("w"),)) for way in ("shm", "tcp", "shm", "tcp")]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while (len(reads) < 200 or buffer.version < 40) and not failures and time.monotonic() < deadline:
        buffer.publish(np.full(SIZE, buffer.version + 1))
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(reads) >= 200
    assert len(set(reads)) > 10


def test_waiting_for_a_version(client: smb.Client, connect: Connect) -> None:
    """wait returns at once for what is there, sleeps until it is published, and gives up in time."""
    buffer = client.create("w", 10, "float32", versions=2)
    buffer.publish(np.ones(10, np.float32))
    assert buffer.wait(0) == buffer.wait(1) == 1
    start = time.monotonic()
    with pytest.raises(smb.TimeoutError, match="version 2"):
        buffer.wait(2, timeout=0.3)
    assert 0.3 <= time.monotonic() - start < 5
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(connect("tcp").open("w").wait(2, timeout=30)))
    waiting.start()
    buffer.publish(np.ones(10, np.float32))
    waiting.join()
    assert got == [2]
    with pytest.raises(smb.InvalidArgumentError):
        buffer.wait(-1)


def test_such_a_buffer_changes_by_publish_alone(client: smb.Client) -> None:
    """Writes, additions and views of it are refused; so is a publication of another size."""
    buffer = client.create("w", 10, "int64", versions=2)
    plain = client.create("v", 10, "int64")
    ones = np.ones(10, np.int64)
    for call in (
        lambda: buffer.write(ones),
        lambda: buffer.accumulate(ones),
        lambda: buffer.fill(1),
        lambda: buffer.fetch_add(0, 1),
        lambda: buffer.compare_swap(0, 0, 1),
        lambda: buffer.accumulate_from(plain),
        buffer.view,
    ):
        with pytest.raises(smb.InvalidArgumentError):
            call()
    with pytest.raises(smb.InvalidArgumentError, match="give all"):
        buffer.publish(np.ones(9, np.int64))
    assert buffer.version == 0
    assert plain.publish(ones) == 1  # a buffer with one copy has version numbers too
    assert (plain.read() == 1).all()


def test_a_publication_survives_its_server() -> None:
    """kill -9 and restart of the home: what was published stays, who waits goes on waiting, the next number follows."""
    with (
        smb.LocalCluster(servers=2, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport="tcp", timeout=30) as publisher,
        smb.connect(cluster.address, transport="tcp", timeout=30) as reader,
    ):
        buffer = publisher.create("w", SIZE, "int64", versions=2, stripe="64KiB")
        mine = reader.open("w")
        got: list[int] = []

        def wait(own: smb.Buffer, version: int) -> None:
            got.append(own.wait(version, timeout=60))

        for turn in range(1, 4):
            assert buffer.publish(np.full(SIZE, turn)) == turn
            waiting = threading.Thread(target=wait, args=(mine, turn + 1))
            waiting.start()
            cluster.servers[turn % 2].kill()
            cluster.servers[turn % 2].start()
            assert mine.version == turn
            assert (mine.read() == turn).all()
            buffer.publish(np.full(SIZE, -turn))
            waiting.join()
            assert got[-1] == turn + 1
            publisher.delete("w")
            buffer = publisher.create("w", SIZE, "int64", versions=2, stripe="64KiB")
            mine = reader.open("w")
            for number in range(1, turn + 1):
                buffer.publish(np.full(SIZE, number))


def test_publishers_take_turns(connect: Connect) -> None:
    """Several publish at once: every version is one publisher's, whole, and no number is given twice."""
    clients = [connect(way) for way in ("tcp", "shm", "tcp")]
    clients[0].create("w", SIZE, "int64", versions=2, stripe="64KiB")
    numbers: list[int] = []

    def publish(number: int) -> None:
        buffer = clients[number].open("w")
        for _ in range(5):
            numbers.append(buffer.publish(np.full(SIZE, number)))

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 16))
    last = clients[0].open("w").read()
    assert (last == last[0]).all()
    wait_for(lambda: clients[0].open("w").version == 15, "the last version")
