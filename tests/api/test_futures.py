"""The asynchronous forms: futures of calls that run on threads of the client's."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import numpy as np
import pytest

import smb


def test_futures_of_every_form(client: smb.Client) -> None:
    """write_async, accumulate_async and read_async do what their namesakes do, and give their results."""
    buffer = client.create("w", 1000, "int64")
    assert buffer.write_async(np.arange(1000)).result() is None
    assert buffer.accumulate_async([5], offset=3).result() is None
    fetched = buffer.accumulate_async([1, 1], 3, scale=2, fetch=True).result()
    assert fetched is not None
    assert fetched.tolist() == [10, 6]
    out = np.empty(2, np.int64)
    assert buffer.read_async(3, 2, out=out).result() is out
    assert out.tolist() == [10, 6]


def test_many_in_flight(client: smb.Client) -> None:
    """Two hundred additions at once, on two buffers, all count."""
    buffers = [client.create(name, 100_000, "int64") for name in "ab"]
    ones = np.ones(100_000, np.int64)
    pending = [buffers[number % 2].accumulate_async(ones) for number in range(200)]
    for future in pending:
        future.result()
    for buffer in buffers:
        assert (buffer.read() == 100).all()


def test_exceptions_are_delivered(client: smb.Client) -> None:
    """What a call raises comes out of its future; the calls beside it are done."""
    buffer = client.create("w", 10)
    bad, good = buffer.write_async(np.ones(11, np.float32)), buffer.write_async(np.ones(10, np.float32))
    with pytest.raises(smb.InvalidArgumentError, match="11 elements"):
        bad.result()
    good.result()
    assert buffer.read().sum() == 10


def test_asyncio_awaits_them(client: smb.Client) -> None:
    """Through asyncio.wrap_future several calls are awaited together."""
    buffer = client.create("w", 10)

    async def train() -> float:
        await asyncio.gather(*(asyncio.wrap_future(buffer.accumulate_async([1.0], i)) for i in range(10)))
        return float((await asyncio.wrap_future(buffer.read_async())).sum())

    assert asyncio.run(train()) == 10


def test_closing_ends_what_is_pending(client: smb.Client) -> None:
    """close() leaves no future undecided: each is done, cancelled, or fails with UnavailableError."""
    buffer = client.create("w", 1 << 20)
    ones = np.ones(1 << 20, np.float32)
    pending = [buffer.accumulate_async(ones) for _ in range(50)]
    client.close()
    for future in pending:
        assert future.done()
        if not future.cancelled():
            assert isinstance(future.exception(), (type(None), smb.UnavailableError))


def test_closing_in_a_callback(client: smb.Client) -> None:
    """A callback runs on a thread that close() waits for elsewhere: it raised, and left the session open."""
    buffer = client.create("w", 1000)
    ended: Future[None] = Future()

    def close(_: object) -> None:
        try:
            client.close()
        except BaseException as error:  # noqa: BLE001 - the test's own thread judges
            ended.set_exception(error)
        else:
            ended.set_result(None)

    go = threading.Event()
    client.submit(go.wait).add_done_callback(close)
    go.set()
    ended.result(timeout=60)
    with pytest.raises(smb.UnavailableError, match="closed"):
        buffer.read()
