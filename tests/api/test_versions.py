"""Versions: a reader sees one of them, whole; who waits for one is woken by its publication."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import smb
from smb.call import versions
from smb.engine import AskOpcode
from smb.spi import versions_of
from tests.conftest import Connect
from tests.support.daemons import wait_for
from tests.support.transports import FAR, MIXED, SLOWNESS

SIZE = 300_000


def test_versions_are_numbered_from_one(client: smb.Client) -> None:
    """publish counts, version tells, read gives the latest; before the first there is nothing to be read."""
    buffer = client.create("w", (3, 100), "float32", versions=2)
    assert buffer.version == 0
    out = np.ones((3, 100), np.float32)
    for nothing in (
        buffer.read, lambda: buffer.read(0, 1, out=out[0, :1]), lambda: buffer.read(version=0),
        lambda: buffer.read_version(out), lambda: buffer.read_async().result(), lambda: buffer.read(timeout=0.01),
        lambda: buffer.pin().__enter__(), lambda: buffer.pin(0).__enter__(),
    ):  # fmt: skip
        with pytest.raises(smb.NotFoundError, match=r"nothing is published yet; |version 0 "):
            nothing()
    assert out.all()
    for number in range(1, 6):
        assert buffer.publish(np.full((3, 100), number, np.float32)) == number
        assert buffer.version == number
        assert (buffer.read() == number).all()
        assert (buffer.read(150, 10) == number).all()
    assert buffer.nbytes == 1200
    assert client.open("w").version == 5


def test_a_read_waits_for_the_first_version(client: smb.Client, connect: Connect) -> None:
    """read(timeout=) waits until something is published, or the version that it is to read."""
    buffer = connect().create("w", 10, "int64", versions=2)
    theirs = client.open("w")
    for number in (1, 2):
        with ThreadPoolExecutor(1) as thread:
            version = None if number == 1 else 2
            waiting = thread.submit(lambda version=version: theirs.read(version=version, timeout=30 * SLOWNESS))
            assert buffer.publish(np.full(10, number)) == number
            assert waiting.result().tolist() == [number] * 10
    assert theirs.read(timeout=30).tolist() == [2] * 10
    with pytest.raises(smb.InvalidArgumentError, match="must not be negative"):
        theirs.read(timeout=-1)


def test_reads_never_mix_versions(connect: Connect) -> None:
    """A publisher at full rate, readers over every transport: each read is all of one version, and none goes back."""
    publisher = connect(FAR)
    buffer = publisher.create("w", SIZE, "int64", versions=2, stripe="64KiB")
    buffer.publish(np.ones(SIZE, np.int64))
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

    threads = [threading.Thread(target=read, args=(connect(way).open("w"),)) for way in MIXED]
    for thread in threads:
        thread.start()
    # An emulated machine is so slow that the first transfer over verbs, beside the other readers, takes 45 s.
    deadline = time.monotonic() + 60 * SLOWNESS
    while (len(reads) < 200 or len(set(reads)) <= 20) and not failures and time.monotonic() < deadline:
        buffer.publish(np.full(SIZE, buffer.version + 1))
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(reads) >= 200
    assert len(set(reads)) > 20


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
    waiting = threading.Thread(target=lambda: got.append(connect(FAR).open("w").wait(2, timeout=30 * SLOWNESS)))
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
    with pytest.raises(smb.InvalidArgumentError, match="pass all of them"):
        buffer.publish(np.ones(9, np.int64))
    with pytest.raises(smb.InvalidArgumentError, match="the array has the shape"):
        buffer.publish(ones.reshape(2, -1))
    with pytest.raises(smb.InvalidArgumentError, match="create it with versions=2"):
        plain.read(timeout=1)
    assert buffer.version == 0
    assert plain.publish(ones) == 1  # a buffer with one copy has version numbers too
    assert (plain.read() == 1).all()


def test_a_pin_holds_one_version(client: smb.Client, connect: Connect) -> None:
    """What is read through a pin, piece by piece, is of one version, while the next is published and the one after it
    waits; the pin's end lets it go on.
    """
    buffer = client.create("w", (3, 100), "int64", versions=2)
    mine = connect(FAR).open("w")
    for number in (1, 2):
        buffer.publish(np.full((3, 100), number))
    with mine.pin(ttl=30) as pin, buffer.pin(ttl=30) as other:
        assert pin.version == other.version == 2
        assert pin.read(7, 3).tolist() == [2, 2, 2]
        buffer.publish(np.full((3, 100), 3))
        with pytest.raises(smb.TimeoutError, match=r"holds version 2 .* was in the way for 0\.2 s; nothing was done"):
            buffer.publish(np.full((3, 100), 4), timeout=0.2)
        assert (buffer.version, mine.version) == (3, 3)
        assert (buffer.read() == 3).all()
        assert (pin.read() == 2).all()
        out = np.empty(300, np.int64)
        assert other.read(out=out) is out
        assert (out == 2).all()
        publishing = threading.Thread(target=lambda: buffer.publish(np.full((3, 100), 4), timeout=30))
        publishing.start()
        with mine.pin() as later:
            assert later.version == 3
            assert (later.read() == 3).all()
        assert (pin.read(299, 1) == 2).all()
    publishing.join()
    assert buffer.version == 4
    for call in (
        lambda: pin.read(),
        lambda: buffer.pin(ttl=31),
        lambda: buffer.pin(ttl=0),
        lambda: buffer.pin(ttl="1"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match="pin of buffer 'w'"):
            call()
    with pytest.raises(smb.InvalidArgumentError, match="create it with versions=2"):
        client.create("v", 3).pin()


def test_a_publisher_that_waits_says_for_whom(
    client: smb.Client, connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while a warning names the reader and its version, or the publisher that has the turn; the error, too."""
    monkeypatch.setattr(versions, "_SILENT_S", 0.05)
    buffer = client.create("w", 10, "float32", versions=2)
    reader = connect(FAR)
    publisher = client.open("w")
    buffer.publish(np.ones(10, np.float32))
    with reader.open("w").pin(ttl=30):
        buffer.publish(np.ones(10, np.float32))
        assert not caplog.records
        done = publisher.submit(lambda: publisher.publish(np.ones(10, np.float32), timeout=60))
        wait_for(lambda: caplog.messages, "the warning")
        told = f"publish of buffer 'w': waits for the reader {reader.name}, which holds version 1 (versions=2); for at"
        assert caplog.messages[0].startswith(told)
        with pytest.raises(smb.TimeoutError, match=rf"reader {re.escape(reader.name)}, which holds version 1 .*0\.2 s"):
            connect(FAR).open("w").publish(np.ones(10, np.float32), timeout=0.2)
    assert done.result(60) == 3
    assert len([text for text in caplog.messages if text.startswith(told)]) == 2  # each publisher once
    turn = versions_of(reader.open("w")).begin(1.0, 60.0, 30.0)
    for timeout in (0.0, 0.2):
        with pytest.raises(smb.TimeoutError, match=f"the publisher {re.escape(reader.name)} was in the way"):
            buffer.publish(np.ones(10, np.float32), timeout=timeout)
    assert caplog.messages[-1].startswith(f"publish of buffer 'w': waits for the publisher {reader.name}; for at most")
    turn.give_up()


def test_a_pin_ends_by_itself(client: smb.Client, connect: Connect) -> None:
    """A reader that holds a pin for too long delays a publisher until the pin's ttl is over, and is told that it has
    lost: it never gets another version's values.
    """
    buffer = client.create("w", 1000, "int64", versions=2)
    mine = connect(FAR).open("w")
    for number in (1, 2):
        buffer.publish(np.full(1000, number))
    with mine.pin(ttl=1.0) as pin:
        began = time.monotonic()
        buffer.publish(np.full(1000, 3))
        buffer.publish(np.full(1000, 4))
        assert 0.5 < time.monotonic() - began < 8
        for _ in range(2):
            with pytest.raises(smb.LockLostError, match="version 2 was overwritten: the pin expired after 1 s, or a"):
                pin.read(0, 10)
    with mine.pin(ttl=1.0) as pin:
        assert (pin.version, pin.read(0, 1)[0]) == (4, 4)


def test_a_whole_version_and_its_number(client: smb.Client) -> None:
    """read_version fills an array and says which version it is."""
    buffer = client.create("w", (3, 100), "int64", versions=2)
    out = np.ones((3, 100), np.int64)
    for number in (1, 2, 3):
        buffer.publish(np.full(300, number))
        assert buffer.read_version(out) == number
        assert (out == number).all()
    for wrong in (np.zeros(299, np.int64), np.zeros(300, np.int32)):
        with pytest.raises(smb.InvalidArgumentError):
            buffer.read_version(wrong)
    with pytest.raises(smb.InvalidArgumentError, match="create it with versions=2"):
        client.create("v", 3).read_version(np.zeros(3, np.float32))
    for timeout in (-1, float("nan"), 1e9):
        with pytest.raises(smb.InvalidArgumentError, match="timeout must be between"):
            buffer.publish(out, timeout=timeout)


def test_a_publication_survives_its_server() -> None:
    """kill -9 and restart of the home: what was published stays, who waits goes on waiting, the next number follows."""
    with (
        smb.LocalCluster(servers=2, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport=FAR, timeout=30 * SLOWNESS) as publisher,
        smb.connect(cluster.address, transport=FAR, timeout=30 * SLOWNESS) as reader,
    ):
        buffer = publisher.create("w", SIZE, "int64", versions=2, stripe="64KiB")
        mine = reader.open("w")
        got: list[int] = []

        def wait(own: smb.Buffer, version: int) -> None:
            got.append(own.wait(version, timeout=60 * SLOWNESS))

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
    clients = [connect(way) for way in (FAR, "shm", FAR)]
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


def test_too_many_waits_name_their_bound(client: smb.Client) -> None:
    """While 4096 requests of a connection wait, the next is refused, with the bound; what does not wait goes on."""
    buffer = client.create("w", 8, versions=2)
    lock = buffer.lock().acquire()
    home = buffer._dispatcher.paths.homes()[0]
    waiting = [home.start(AskOpcode.AWAIT_VERSION, 0, (99, 600_000)) for _ in range(4096)]
    assert waiting[0].wait(1) is None  # whoever waits sends what is to be sent
    with pytest.raises(smb.OutOfMemoryError, match="may have 4096 requests waiting there"):
        buffer.wait(99, timeout=600)
    lock.release()
    for pending in waiting:
        pending.end()


def test_too_many_pins_name_their_bound(client: smb.Client) -> None:
    """One pin more than a session may have: the error says how many, and how many requests may wait."""
    home = client.create("w", 8, versions=2)._dispatcher.paths.homes()[0]
    for _ in range(1024):
        home.ask("pin", AskOpcode.PIN)
    with pytest.raises(smb.OutOfMemoryError, match="may have 4096 requests waiting there, a session 1024 pins"):
        home.ask("pin", AskOpcode.PIN)


@pytest.mark.parametrize("way", [FAR, "shm"])
def test_several_versions_can_be_read(client: smb.Client, connect: Connect, way: str) -> None:
    """Of versions=K the last K - 1 are there by their numbers, whole, over both ways; others are refused by name."""
    client.create("w", (3, 100), "int64", versions=4, stripe="4KiB")
    buffer = connect(way).open("w")
    assert (buffer.versions, buffer.nbytes) == (4, 2400)
    with pytest.raises(smb.NotFoundError, match="version 1 is not published yet: the latest is 0"):
        buffer.read(version=1)
    for latest in range(1, 12):
        assert buffer.publish(np.full((3, 100), latest)) == latest
        assert (buffer.read() == latest).all()
        with pytest.raises(smb.NotFoundError):
            buffer.read(version=0)
        for there in range(max(1, latest - 2), latest + 1):
            assert (buffer.read(version=there) == there).all()
            assert (buffer.read(150, 10, version=there) == there).all()
            with buffer.pin(there) as pin:
                assert (pin.version, pin.read(299, 1)[0]) == (there, there)
    with pytest.raises(smb.NotFoundError, match=r"version 7 was overwritten: the latest is 11; a buffer with .* 4 "):
        buffer.read(version=7)
    for missing in (7, 12):
        with pytest.raises(smb.NotFoundError, match=f"version {missing} was overwritten or is not published"):
            buffer.pin(missing).__enter__()
    for call in (lambda: buffer.read(version=-1), lambda: client.create("v", 3).read(version=1)):
        with pytest.raises(smb.InvalidArgumentError):
            call()
    for count in (0, 17, 2.0):
        with pytest.raises(smb.InvalidArgumentError, match="must be an integer from 1 to 16"):
            client.create("x", 3, versions=count)  # type: ignore[arg-type]


def test_one_slow_reader_delays_nobody(client: smb.Client, connect: Connect) -> None:
    """With three copies a reader that holds a version keeps no publisher waiting; two that hold two versions do."""
    buffer = client.create("w", 1000, "int64", versions=3)
    mine = connect(FAR).open("w")
    buffer.publish(np.full(1000, 1))
    with mine.pin(ttl=30) as first:
        for number in range(2, 30):
            buffer.publish(np.full(1000, number), timeout=0)
            assert (first.read() == 1).all()
        assert (mine.read(version=1) == 1).all()
        with mine.pin(ttl=30) as second:
            buffer.publish(np.full(1000, 30), timeout=0)
            with pytest.raises(smb.TimeoutError, match="nothing was done"):
                buffer.publish(np.full(1000, 31), timeout=0)
            assert (second.read() == 29).all()
        buffer.publish(np.full(1000, 31), timeout=0)
        assert (first.read() == 1).all()
    assert mine.version == 31


def test_versions_survive_their_server() -> None:
    """kill -9 and restart of the home: each version is in the copy where it was, and the next takes a free one."""
    with (
        smb.LocalCluster(servers=2, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport=FAR, timeout=30 * SLOWNESS) as client,
    ):
        buffer = client.create("w", SIZE, "int64", versions=4, stripe="64KiB")
        for number in range(1, 8):
            buffer.publish(np.full(SIZE, number))
        cluster.servers[0].kill()
        cluster.servers[0].start()
        for there in (5, 6, 7):
            assert (buffer.read(version=there) == there).all()
        buffer.publish(np.full(SIZE, 8))
        for there in (6, 7, 8):
            assert (buffer.read(version=there) == there).all()
