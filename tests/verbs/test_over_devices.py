"""The verbs transport over real devices: server and clients in one process, but for those that are killed."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from smb.engine import BufferHandle, EngineClient, Lane, Link, Opcode, Request, memory_of
from smb.errors import UnavailableError
from smb.transport.verbs.devices import Port
from smb.transport.verbs.queue_pair import QueuePair, Work
from smb.transport.verbs.registration import WORTH_BYTES
from tests.support.rdma import CHUNK_BYTES, SEGMENT, RdmaClient, RdmaServer, wait_until

ELEMENTS = 100_003  # 13 chunks of 64 KiB, the last one odd
PER_CHUNK = CHUNK_BYTES // 8


@pytest.fixture
def server(ports: tuple[Port, Port]) -> Iterator[RdmaServer]:
    server = RdmaServer(ports[0], ELEMENTS)
    yield server
    server.close()


@pytest.fixture
def client(server: RdmaServer, ports: tuple[Port, Port]) -> Iterator[RdmaClient]:
    client = RdmaClient(server, ports[1])
    yield client
    client.close()


@pytest.mark.verbs("one-sided READ", "one-sided WRITE", "accumulate through slots", "SEND with the 64-byte frame")
def test_operations_do_what_they_do_on_arrays(client: RdmaClient) -> None:
    """Random ranges, read, written and added in random order, are what they are on a plain array; and reads and writes
    have gone past the server."""
    seed = 20261201
    draw, model = random.Random(seed), np.zeros(ELEMENTS, np.int64)
    print("seed", seed)
    for _ in range(40):
        offset = draw.randrange(ELEMENTS)
        array = np.arange(draw.randrange(1, ELEMENTS - offset + 1), dtype=np.int64) + draw.randrange(1000)
        part = slice(offset, offset + len(array))
        match draw.randrange(4):
            case 0:
                client.write(array, offset)
                model[part] = array
            case 1:
                client.add(array, offset)
                model[part] += array
            case 2:
                out = np.zeros_like(array)
                client.add(array, offset, out)
                model[part] += array
                np.testing.assert_array_equal(out, model[part])
            case _:
                np.testing.assert_array_equal(client.read(offset, len(array)), model[part])
    assert client.fetch_add(7, 5) == model[7]
    model[7] += 5
    np.testing.assert_array_equal(client.read(), model)
    assert client.carrier.one_sided_bytes > 0
    operations = client.server.engine.figures.counters().operations
    assert operations["verbs", "read"] == operations["verbs", "write"] == 0
    assert operations["verbs", "accumulate"] > 0


def test_without_keys_all_goes_through_the_server(server: RdmaServer, ports: tuple[Port, Port]) -> None:
    """A segment that is not opened is read and written by messages; one that may only be read is written so."""
    client = RdmaClient(server, ports[1], opened=False)
    array = np.arange(ELEMENTS)
    client.write(array)
    np.testing.assert_array_equal(client.read(), array)
    assert client.carrier.one_sided_bytes == 0
    client.open(writable=False)
    client.write(array * 2)
    assert client.carrier.one_sided_bytes == 0
    np.testing.assert_array_equal(client.read(), array * 2)
    assert client.carrier.one_sided_bytes == array.nbytes
    client.close()


@pytest.mark.verbs("untorn one-sided READ")
def test_reads_are_not_torn(client: RdmaClient, ports: tuple[Port, Port]) -> None:
    """While another client adds whole chunks, each chunk that is read one-sidedly is of one moment."""
    stop = threading.Event()
    adder = RdmaClient(client.server, ports[1])
    ones = np.ones(PER_CHUNK * 4, np.int64)

    def add() -> None:
        while not stop.is_set():
            adder.add(ones)

    thread = threading.Thread(target=add)
    thread.start()
    out = np.zeros_like(ones)
    for _ in range(25):
        chunks = client.read(out=out).reshape(4, PER_CHUNK)
        assert (chunks == chunks[:, :1]).all()
    stop.set()
    thread.join()
    assert client.carrier.one_sided_bytes > 0
    adder.close()


@pytest.mark.verbs("mixed shm, tcp and verbs")
def test_mixed_sums_are_exact(server: RdmaServer, ports: tuple[Port, Port]) -> None:
    """Two clients by RDMA, one by TCP and one that maps the segment add to overlapping ranges: nothing is lost."""
    clients = [RdmaClient(server, ports[1]) for _ in range(2)]
    rounds, ranges = 12, [(0, 50_000), (20_000, 60_000), (0, ELEMENTS), (40_000, 50_000)]

    def other(map_it: bool) -> EngineClient:
        engine = EngineClient(random.getrandbits(60) | 1)
        if map_it:
            link, _ = engine.connect_unix(str(server.directory / "socket"), Lane.UNIX_ATTACH, 10_000)
            segment = link.attach(SEGMENT, 1, 10_000)
        else:
            link, _ = engine.connect_tcp("127.0.0.1", server.tcp_port, Lane.TCP_DATA, 10_000)
        handle = BufferHandle(engine, ELEMENTS * 8, CHUNK_BYTES, CHUNK_BYTES, 1, 6)
        if map_it:
            handle.set_local(0, segment)
        else:
            handle.set_link(0, SEGMENT, 1, link)
        handles.append(handle)
        links.append(link)  # it closes when it is collected
        return engine

    handles = [client.handle for client in clients]
    links: list[Link] = []
    engines = [other(False), other(True)]
    failures: list[object] = []

    def add(which: int) -> None:
        offset, count = ranges[which]
        delta = (np.arange(offset, offset + count) % 251 + 1).astype(np.int64)
        for _ in range(rounds):
            done = handles[which].transfer(
                Request(Opcode.ACCUMULATE, offset * 8, delta.nbytes, memory_of(delta), op=1), 120_000
            )
            if not isinstance(done, int):
                failures.append(done)

    threads = [threading.Thread(target=add, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    expected = np.zeros(ELEMENTS, np.int64)
    for offset, count in ranges:
        expected[offset : offset + count] += rounds * (np.arange(offset, offset + count) % 251 + 1)
    np.testing.assert_array_equal(clients[0].read(), expected)
    for engine in engines:
        engine.close()
    for client in clients:
        client.close()


@pytest.mark.verbs("broken queue pair rebuilt", "falling back to TCP")
def test_broken_queue_pairs_lose_and_double_nothing(client: RdmaClient) -> None:
    """Additions count once however often the queue pair breaks under them; at last the same link goes on over TCP."""
    client.tcp_after = 6
    delta, done = np.arange(ELEMENTS) + 1, 0
    stop = threading.Event()

    def breaker() -> None:
        while not stop.wait(0.15) and client.resumed.count("tcp") == 0:
            client.break_queue()

    thread = threading.Thread(target=breaker)
    thread.start()
    end = time.monotonic() + 200
    # The addition that falls back may be found applied already, and is not made again: the next is the first over TCP.
    while client.server.engine.figures.counters().operations["tcp", "accumulate"] == 0 or done < 10:
        assert time.monotonic() < end, client.resumed
        client.add(delta)
        done += 1
        if done % 3 == 0:
            np.testing.assert_array_equal(client.read(), delta * done)
    stop.set()
    thread.join()
    np.testing.assert_array_equal(client.read(), delta * done)
    assert client.resumed.count("verbs") >= 2
    assert "tcp" in client.resumed


def refused(client: RdmaClient, write: bool, address: int, key: int) -> bool:
    """Whether a queue pair of the client's fails over one access to that memory at the server."""
    queue = QueuePair(client.memory.domain)
    end, _ = client.server.rdma.connect(client.session, queue.end())
    queue.connect(end)
    block = client.memory.empty((4096,), np.dtype(np.uint8))
    local = client.memory.key_of(block.ctypes.data, 4096)
    done = threading.Event()
    assert local is not None
    queue.post([Work(write, block.ctypes.data, local, 64, address, key)], done.set)
    wait_until(lambda: queue.poll() < 0 or done.is_set() or bool(queue.failed))
    failed = queue.failed
    queue.close()
    print(failed)
    return "refused" in failed


@pytest.mark.verbs("wrong, revoked and another client's key refused", "beyond the region refused")
def test_keys_are_narrow(server: RdmaServer, ports: tuple[Port, Port]) -> None:
    """The card at the server refuses another session's key, memory past the segment's data, writing what may only be
    read, and each key once the segment is deleted; beside them, what may be done is done."""
    mine, theirs = (RdmaClient(server, ports[1]) for _ in range(2))
    right, foreign = mine.rights[SEGMENT], theirs.rights[SEGMENT]
    assert not refused(mine, True, right.address, right.key)
    assert not refused(mine, False, right.states_address, right.states_key)
    assert refused(mine, False, foreign.address, foreign.key)
    assert refused(mine, False, right.address, right.key ^ 0x55)
    assert refused(mine, False, right.address + right.nbytes - 63, right.key)
    assert refused(mine, True, right.states_address, right.states_key)
    read_only = mine.open(writable=False)
    assert not refused(mine, False, read_only.address, read_only.key)
    assert refused(mine, True, read_only.address, read_only.key)
    server.engine.delete_segment(SEGMENT)
    server.rdma.forget_segment(SEGMENT)
    assert refused(mine, False, read_only.address, read_only.key)
    theirs.close()
    mine.close()


@pytest.mark.verbs("keys revoked at the session's end")
def test_an_ended_session_reaches_nothing(client: RdmaClient) -> None:
    """Once its session has ended a client's queue pair is gone and it is not let in again."""
    client.write(np.ones(ELEMENTS, np.int64))
    server = client.server
    server.ended.add(client.session)
    server.engine.end_session(client.session)
    server.rdma.end_session(client.session)
    assert server.rdma.connections() == 0
    array = np.ones(64, np.int64)
    done = client.handle.transfer(Request(Opcode.READ, 0, 512, sink=memory_of(array)), 3_000)
    assert not isinstance(done, int)
    assert (array == 1).all()
    with pytest.raises(UnavailableError, match="no RDMA connection"):
        server.rdma.open_segment(client.session, SEGMENT, 1, True)


def test_memory_is_registered_when_used_again_and_no_longer_than_it_lives(client: RdmaClient) -> None:
    """An array is registered at its second use, forgotten when it is collected, and small ones are not."""
    memory = client.memory
    array = np.ones(WORTH_BYTES // 8, np.int64)
    address, nbytes = array.ctypes.data, array.nbytes
    memory.note(array)
    assert memory.key_of(address, nbytes) is None
    memory.note(array[5:])
    assert memory.key_of(address, nbytes) is not None
    assert memory.key_of(address + 8, nbytes) is None
    assert memory.registered_bytes == nbytes
    with pytest.raises(ValueError, match="cannot resize"):  # numpy's answer for what has a weak reference
        array.resize(4 * array.size, refcheck=False)
    del array
    gc.collect()
    assert memory.key_of(address, 8) is None
    assert memory.registered_bytes == 0
    small = np.ones(16, np.int64)
    memory.note(small)
    memory.note(small)
    assert memory.key_of(small.ctypes.data, small.nbytes) is None
    ours = memory.empty((3, 5), np.dtype(np.float32))
    assert ours.shape == (3, 5)
    assert memory.key_of(ours.ctypes.data, ours.nbytes) is not None
    part, address = ours[1:], ours.ctypes.data
    del ours
    assert memory.key_of(address, 8) is not None
    del part
    gc.collect()
    assert memory.key_of(address, 8) is None
    client.write(memory.empty((ELEMENTS,), np.dtype(np.int64)) + 3)
    assert (client.read() == 3).all()


@pytest.mark.verbs("no CPU while idle")
def test_idle_ends_sleep(client: RdmaClient) -> None:
    """With connections that nobody uses, neither the client's thread nor the server's takes the processor."""
    client.write(np.ones(ELEMENTS, np.int64))
    time.sleep(0.5)  # the short look for more is over
    before = time.process_time()
    time.sleep(3)
    used = time.process_time() - before
    print(f"{used:.3f} s of CPU in 3 s")
    assert used < 0.1
