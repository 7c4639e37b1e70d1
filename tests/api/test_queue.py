"""A client's queue: operations by priority, a window of bytes in flight, the order on overlapping elements kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

import numpy as np
import pytest

import smb
from smb.call import async_order
from smb.engine import EngineError, Status
from tests.support.daemons import stopped

_PATIENCE_S = 60.0
_PART = 16_384  # elements: 64 KiB


@pytest.fixture(params=["shm", "tcp"])
def path(request: pytest.FixtureRequest, connect: Callable[..., smb.Client]) -> smb.Client:
    """A client over each path."""
    return connect(request.param)


@pytest.fixture
def held(path: smb.Client) -> Iterator[tuple[smb.Buffer, Future[bool], threading.Event]]:
    """A buffer all of whose elements wait behind a call until the event is set."""
    buffer, gate = path.create("held", 65 * _PART, servers=1), threading.Event()
    buffer.fill(0)  # paths are found: from now on the engine does what is asked for
    future = buffer.submit(lambda: gate.wait(_PATIENCE_S))
    yield buffer, future, gate
    gate.set()


def test_each_operation_does_what_its_namesake_does(path: smb.Client) -> None:
    """Reads, writes and additions of a queue give what the blocking calls give, with out= and fence=, too."""
    buffer = path.create("w", 1000)
    with path.queue() as queue, buffer.lock() as lock:
        assert queue.write(buffer, np.arange(1000, dtype=np.float32)).result(_PATIENCE_S) is None
        assert queue.write(buffer, np.zeros(2, np.float32), 5, fence=lock).result(_PATIENCE_S) is None
        assert queue.accumulate(buffer, [1.0, 1.0], 3, scale=2.0).result(_PATIENCE_S) is None
        out = np.empty(2, np.float32)
        added = queue.accumulate(buffer, [1.0, 1.0], 3, fetch=True, out=out, fence=lock)
        assert added.result(_PATIENCE_S) is out
        assert out.tolist() == [6, 7]
        fetched = queue.accumulate(buffer, [1.0], 3, op="max", fetch=True).result(_PATIENCE_S)
        assert fetched is not None
        assert fetched.tolist() == [6]
        assert queue.read(buffer, 3, 4, out=(four := np.empty(4, np.float32))).result(_PATIENCE_S) is four
        assert four.tolist() == [6, 7, 0, 0]
        assert queue.read(buffer).result(_PATIENCE_S).shape == (1000,)
        rounded = queue.write(buffer, np.full(1000, 1 + 2**-12, np.float32), wire="bfloat16")
        rounded.result(_PATIENCE_S)
        assert (buffer.read() == 1).all()
        beside = path.create("x", like=buffer)
        with pytest.raises(smb.InvalidArgumentError, match="not held"):
            queue.write(buffer, np.zeros(2, np.float32), 0, fence=beside.lock()).result(_PATIENCE_S)


def test_the_most_urgent_goes_first(path: smb.Client, held: tuple[smb.Buffer, Future[bool], threading.Event]) -> None:
    """Of operations that wait those with a larger priority end first, equal ones in the order of the calls."""
    buffer, first, gate = held
    order: list[int] = []
    with path.queue(credit=4 * _PART) as queue:  # one at a time
        futures = []
        for number, priority in enumerate([0, 0, 5, -1, 5, 7]):
            future = queue.write(buffer, np.ones(_PART, np.float32), number * _PART, priority=priority)
            future.add_done_callback(lambda _, number=number: order.append(number))
            futures.append(future)
        assert not any(future.done() for future in futures)
        gate.set()
        for future in futures:
            future.result(_PATIENCE_S)
    assert first.result()
    assert order == [5, 2, 4, 0, 1, 3]


def test_an_urgent_read_overtakes_what_is_queued(
    path: smb.Client, held: tuple[smb.Buffer, Future[bool], threading.Event]
) -> None:
    """A read of large priority, asked for behind 64 writes, ends before all but one window of them."""
    buffer, _, gate = held
    window, done, writing = 4, list[str](), list[Future[None]]()
    with path.queue(credit=4 * window * _PART) as queue:
        for number in range(64):
            writing.append(queue.write(buffer, np.ones(_PART, np.float32), number * _PART))
            writing[-1].add_done_callback(lambda _: done.append("write"))
        reading = queue.read(buffer, 64 * _PART, priority=9)
        reading.add_done_callback(lambda _: done.append("read"))
        gate.set()
        for future in (reading, *writing):
            future.result(_PATIENCE_S)
    assert done.index("read") <= window


def test_a_later_operation_lends_its_priority(
    path: smb.Client, held: tuple[smb.Buffer, Future[bool], threading.Event]
) -> None:
    """What an urgent operation waits for on the same elements goes before what is more urgent than that by itself."""
    buffer, _, gate = held
    order: list[str] = []

    def note(name: str) -> Callable[[Future[object]], None]:
        return lambda _: order.append(name)

    with path.queue(credit=4 * _PART) as queue:
        ones = np.ones(_PART, np.float32)
        queue.write(buffer, ones, 3 * _PART, priority=5).add_done_callback(note("other"))
        queue.write(buffer, 2 * ones, 0, priority=-5).add_done_callback(note("slow"))
        seen = queue.read(buffer, 0, _PART, priority=9)
        seen.add_done_callback(note("read"))
        gate.set()
        assert (seen.result(_PATIENCE_S) == 2).all()
    assert order[:2] == ["slow", "read"]


def test_close_cancels_what_has_not_begun(
    path: smb.Client, held: tuple[smb.Buffer, Future[bool], threading.Event]
) -> None:
    """close() cancels what waits and leaves the client's other operations alone; the queue then refuses more."""
    buffer, first, gate = held
    queue = path.queue()
    waiting = [queue.write(buffer, np.ones(_PART, np.float32), number * _PART) for number in range(8)]
    beside = buffer.write_async(np.full(10, 3, np.float32), 0)
    queue.close()
    queue.close()
    assert all(future.cancelled() for future in waiting)
    with pytest.raises(smb.UnavailableError, match="the queue is closed"):
        queue.read(buffer)
    gate.set()
    beside.result(_PATIENCE_S)
    assert first.result()
    assert buffer.read().sum() == 30


def test_the_end_of_a_block_waits_for_all(
    path: smb.Client, held: tuple[smb.Buffer, Future[bool], threading.Event]
) -> None:
    """Nothing that was asked for is dropped; unless an exception leaves the block, as it does close()."""
    buffer, first, gate = held
    dropped: list[Future[None]] = []

    def leave() -> None:
        with path.queue() as queue:
            dropped.extend(queue.write(buffer, np.ones(_PART, np.float32), number * _PART) for number in range(8))
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert len(dropped) == 8
    assert all(future.cancelled() for future in dropped)
    with path.queue() as queue:
        futures = [queue.accumulate(buffer, np.ones(_PART, np.float32), number * _PART) for number in range(8)]
        threading.Timer(0.05, gate.set).start()  # the end of the block waits by then, or soon
    assert all(future.done() and not future.cancelled() for future in futures)
    assert first.result()
    assert (buffer.read(0, 8 * _PART) == 1).all()


def test_close_beside_a_call(path: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that had found the queue open, and comes to the engine once close() has returned, is refused."""
    buffer, queue = path.create("w", 10), path.queue()
    buffer.fill(0)
    calls = path._session.calls
    transfer = calls.transfer

    def late(*arguments: object, **options: object) -> object:
        queue.close()
        return transfer(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(calls, "transfer", late)
    with pytest.raises(smb.UnavailableError, match="the queue was closed before this call"):
        queue.write(buffer, np.ones(10, np.float32))
    monkeypatch.undo()
    assert calls.pending() == 0
    assert buffer.read().sum() == 0


def test_what_a_failed_operation_did_is_found_out() -> None:
    """Behind stopped servers an operation of many slices fails as unknown; done again as settle() says it counts once,
    also in the slices that were never begun.
    """
    size = 1 << 20
    with smb.LocalCluster(servers=2) as cluster, smb.connect(cluster.address, transport="tcp", timeout=0.5) as client:
        buffer = client.create("w", size)
        buffer.fill(0)
        with client.queue(credit=1 << 20) as queue:
            with stopped(*(server.pid for server in cluster.servers)):
                failed = queue.accumulate(buffer, np.ones(size, np.float32)).exception(_PATIENCE_S)
                assert isinstance(failed, (smb.TimeoutError, smb.UnavailableError)), failed
                assert failed.outcome == "unknown"
            missing = buffer.settle(failed, timeout=_PATIENCE_S)
            assert sum(map(len, missing)) >= size // 2  # what the window has kept back
        with smb.connect(cluster.address, transport="tcp", timeout=60) as patient, patient.queue() as queue:
            whole = patient.open("w")
            for part in missing:
                queue.accumulate(whole, np.ones(len(part), np.float32), part.start)
            assert (queue.read(whole).result(_PATIENCE_S) == 1).all()


def test_each_counts_once_over_a_restart() -> None:
    """Additions by a queue whose server is killed and started again meanwhile: each counts once."""
    size = 2 << 20
    with smb.LocalCluster(servers=1) as cluster, smb.connect(cluster.address, transport="tcp", timeout=60) as client:
        buffer = client.create("w", size)
        buffer.fill(0)
        with client.queue() as queue:
            begun = threading.Event()
            ones = np.ones(size, np.float32)
            futures = [queue.accumulate(buffer, ones) for _ in range(8)]
            futures[0].add_done_callback(lambda _: begun.set())
            assert begun.wait(_PATIENCE_S)
            cluster.servers[0].kill()
            cluster.servers[0].start()
            for future in futures:
                future.result(_PATIENCE_S)
        assert (buffer.read() == 8).all()


def test_what_a_queue_refuses(path: smb.Client, connect: Callable[..., smb.Client]) -> None:
    """Credits and priorities have bounds, and buffers are the client's own; a bad range comes out of the future."""
    buffer = path.create("w", 10)
    for credit in (0, -1, 2**30 + 1, 1.5, True, "1"):
        with pytest.raises(smb.InvalidArgumentError, match="credit must be a number of bytes"):
            path.queue(credit)  # type: ignore[arg-type]
    with path.queue(credit=1) as queue:
        assert queue.credit == 1
        for priority in (2**31, -(2**31), 1.0, None):
            with pytest.raises(smb.InvalidArgumentError, match="priority must be an integer"):
                queue.read(buffer, priority=priority)  # type: ignore[arg-type]
        with pytest.raises(smb.InvalidArgumentError, match="the queue's client"):
            queue.read(connect("tcp").open("w"))
        with pytest.raises(smb.InvalidArgumentError, match="11 elements"):
            queue.write(buffer, np.ones(11, np.float32)).result(_PATIENCE_S)
        with pytest.raises(smb.InvalidArgumentError, match="out= needs fetch=True"):
            queue.accumulate(buffer, np.ones(10, np.float32), out=np.empty(10, np.float32)).result(_PATIENCE_S)
        ones = np.ones(10, np.float32)
        with pytest.raises(smb.InvalidArgumentError, match="must not share memory"):
            queue.accumulate(buffer, ones[:9], 0, fetch=True, out=ones[1:]).result(_PATIENCE_S)
        assert queue.read(buffer, priority=2**31 - 1).result(_PATIENCE_S).sum() == 0


def test_close_does_not_wait_for_what_the_engine_refused(path: smb.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is closed while the engine refuses one of its operations does not wait for that."""
    buffer, queue = path.create("w", 10), path.queue()
    buffer.fill(0)  # paths are found: from now on the engine does what is asked for
    calls = path._session.calls
    closes = threading.Thread(target=queue.close)
    seen = threading.Event()

    def found(futures: list[Future[object]]) -> None:
        assert len(futures) == 1
        seen.set()
        wait_for(futures, _PATIENCE_S)

    def refused(*_: object) -> None:
        closes.start()
        assert seen.wait(_PATIENCE_S)
        raise EngineError(Status.BUSY)

    monkeypatch.setattr(async_order, "wait_for", found)
    monkeypatch.setattr(calls._operations, "submit", refused)
    with pytest.raises(smb.Error, match="too many async calls"):
        queue.write(buffer, np.ones(10, np.float32))
    closes.join(_PATIENCE_S / 3)
    assert not closes.is_alive()


def test_two_queues_keep_the_order_on_the_same_elements(path: smb.Client) -> None:
    """Random ranges by two queues, async and blocking calls: all that is read is as if made one after the other."""
    seed = 27
    random = np.random.default_rng(seed)
    buffer, expected = path.create("w", 1000, "int64"), np.zeros(1000, np.int64)
    reads = []
    with path.queue() as one, path.queue(credit=800) as two:
        for _ in range(600):
            start, stop = sorted(int(x) for x in random.integers(0, 1001, 2))
            values, priority = random.integers(-1000, 1000, stop - start), int(random.integers(-3, 4))
            queue = one if random.integers(2) else two
            kind = random.integers(5)
            if kind == 0:
                queue.write(buffer, values, start, priority=priority)
                expected[start:stop] = values
            elif kind == 1:
                queue.accumulate(buffer, values, start, priority=priority)
                expected[start:stop] += values
            elif kind == 2:
                buffer.accumulate_async(values, start, op="max")
                np.maximum(expected[start:stop], values, out=expected[start:stop])
            elif kind == 3:
                assert (buffer.read(start, stop - start) == expected[start:stop]).all(), f"seed {seed}"
            else:
                reads.append((queue.read(buffer, start, stop - start, priority=priority), expected[start:stop].copy()))
        for future, then in reads:
            np.testing.assert_array_equal(future.result(_PATIENCE_S), then, err_msg=f"seed {seed}")
        for queue in (one, two):
            queue.read(buffer).result(_PATIENCE_S)
    np.testing.assert_array_equal(buffer.read(), expected, err_msg=f"seed {seed}")


def test_apply_takes_a_range(path: smb.Client) -> None:
    """An optimizer's step on some elements leaves the others alone; a range that is not inside is refused."""
    weights = path.create("w", 1000)
    gradient = path.create("g", like=weights)
    gradient.fill(1)
    weights.apply("sgd", gradient, offset=10, count=20, lr=0.5)
    expected = np.zeros(1000, np.float32)
    expected[10:30] = -0.5
    np.testing.assert_array_equal(weights.read(), expected)
    weights.apply("sgd", gradient, offset=990, lr=1.0)
    assert weights.read(989, 11).tolist() == [0, *[-1.0] * 10]
    with pytest.raises(smb.InvalidArgumentError, match="not inside"):
        weights.apply("sgd", gradient, offset=990, count=11, lr=1.0)
