"""The short way from Python to the engine (csrc/python/direct.c): taken for what is usual, and never another answer
than the method behind it gives."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import smb
from smb import engine
from smb.call.dispatcher import Dispatcher
from tests.conftest import Connect
from tests.support.walk import walks

COUNT = 1000


@pytest.fixture
def buffer(client: smb.Client) -> Iterator[smb.Buffer]:
    """Of both transports, by the fixture of clients."""
    made = client.create("direct", COUNT, "float32")
    made.write(np.arange(COUNT, dtype=np.float32))
    yield made
    client.delete("direct")


@pytest.fixture
def counter(client: smb.Client) -> Iterator[smb.Buffer]:
    made = client.create("direct-counter", 4, "int64")
    made.fill(0)
    yield made
    client.delete("direct-counter")


@pytest.mark.parametrize(("call", "most"), [("accumulate", (8, 1, 22)), ("publish", (35, 2, 50))])
def test_the_way_through_python_grows_no_longer(call: str, most: tuple[int, int, int]) -> None:
    """Whoever reads how a call gets to the engine meets few rooms and names, downwards. Only ever lowered. A call for
    which the server takes a fifth of a second waits in more places, so the shortest of three counts.
    """
    found = []
    for _ in range(3):
        with contextlib.closing(walks()) as walked:
            walk = next(walk for name, walk in walked if name == call)
        found.append((len(walk.stays), walk.returns, walk.names))
        if all(each <= limit for each, limit in zip(found[-1], most, strict=True)):
            return
    pytest.fail(f"stays, returns and names are {found}, the last by {[each.name for each in walk.visits]}")


def behind(buffer: smb.Buffer, name: str) -> Callable[..., Any]:
    """The Python method, without the short way."""
    function: Callable[..., Any] = inspect.unwrap(getattr(type(buffer), name))
    return lambda *args, **named: function(buffer, *args, **named)


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call that goes through Python."""
    calls: list[int] = []
    transfer = engine.BufferHandle.transfer

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(args[1].opcode)
        return transfer(*args, **named)

    monkeypatch.setattr(engine.BufferHandle, "transfer", counted)
    return calls


def test_the_usual_calls_are_direct(buffer: smb.Buffer, counter: smb.Buffer, long_way: list[int]) -> None:
    array, out = np.ones(10, np.float32), np.empty(10, np.float32)
    buffer.write(array, 0)
    buffer.write(array, 5)
    buffer.write(array, offset=20)
    buffer.accumulate(array, 5)
    buffer.accumulate(array, 20, scale=-0.5)
    assert buffer.read(0, 10, out=out) is out
    assert buffer.read(offset=20, count=10, out=out) is out
    assert out.tolist() == [0.5] * 10
    buffer.accumulate(array, 20, wire="exact")
    buffer.write(out, 20, wire=None)
    assert buffer.read(20, 10, out=out, wire="exact").tolist() == [0.5] * 10
    whole = np.empty((10, 100), np.float32)
    assert buffer.read(out=whole) is whole
    assert whole.ravel()[5:16].tolist() == [2.0] * 10 + [15.0]
    assert (counter.fetch_add(1, 5), counter.fetch_add(1, -7), counter.fetch_add(1, 2**63 - 1)) == (0, 5, -2)
    assert (counter.compare_swap(2, 0, -4), counter.compare_swap(2, 0, 9), counter.compare_swap(2, -4, 1)) == (
        0,
        -4,
        -4,
    )
    assert [buffer.fetch_add(3, 0.5), buffer.compare_swap(3, 1.5, -1.0), buffer.fetch_add(3, 0.0)] == [1.0, 1.5, -1.0]
    buffer.write(np.zeros(COUNT, np.float32))
    assert long_way == []
    buffer.accumulate(array, 0, op="max")  # and what only Python knows goes there
    assert long_way == [engine.Opcode.ACCUMULATE]


def a(values: Any, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.asarray(values, dtype)


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(COUNT, np.float32)
    array.flags.writeable = False
    return array


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("write", (), {}),
    ("write", (a([1, 2]), 3), {}),
    ("write", (a([[1, 2], [3, 4]]), np.int64(4)), {}),
    ("write", (a([[1, 2], [3, 4]]), 4), {}),
    ("write", (a([1, 2]),), {}),
    ("write", (a([1, 2]), None), {}),
    ("write", (np.arange(COUNT, dtype=np.float32),), {}),
    ("write", (np.arange(COUNT, dtype=np.float32), 0), {}),
    ("write", (np.arange(COUNT, dtype=np.float32).reshape(2, -1),), {}),
    ("write", (np.arange(COUNT, dtype=np.float32).reshape(-1, 1),), {}),
    ("write", (a(7), 3), {}),
    ("write", (a([]), 3), {}),
    ("write", ([1, 2], 3), {}),
    ("write", (a(7),), {}),
    ("write", (a([]),), {}),
    ("write", (a([1, 2], np.float64),), {}),
    ("write", (a([1, 2], ">f4"),), {}),
    ("write", (a([1, 2], np.int32),), {}),
    ("write", (np.arange(8, dtype=np.float32)[::2],), {}),
    ("write", (np.asfortranarray(np.arange(8, dtype=np.float32).reshape(2, 4)),), {}),
    ("write", (np.ma.masked_array(a([1, 2])),), {}),
    ("write", (a([1, 2]), COUNT - 1), {}),
    ("write", (a([1, 2]), -1), {}),
    ("write", (a([1, 2]), 1.0), {}),
    ("write", (a([1, 2]), True), {}),
    ("write", (a([1, 2]), 2**70), {}),
    ("write", (a([1, 2]),), {"offset": 3}),
    ("write", (a([1, 2]), 1), {"offset": 3}),
    ("write", (a([1, 2]), 1, 2), {}),
    ("write", (), {"array": a([1, 2])}),
    ("write", (a([1, 2]),), {"nothing": 1}),
    ("write", (np.zeros(COUNT + 1, np.float32),), {}),
    ("write", (read_only(),), {}),
    ("accumulate", (a([1, 2]), 3), {"scale": 2}),
    ("accumulate", (a([1, 2]), 3), {"scale": np.float32(2)}),
    ("accumulate", (a([1, 2]), 3), {"scale": "2"}),
    ("accumulate", (a([1, 2]), 3), {"scale": float("nan")}),
    ("accumulate", (a([1, 2]), 3), {"fetch": True}),
    ("accumulate", (a([1, 2]), 3), {"op": "elastic", "scale": 0.5}),
    ("accumulate", (a([1, 2]), 3), {"op": "none"}),
    ("read", (), {}),
    ("read", (5, 3), {}),
    ("read", (5, 3), {"out": np.zeros(3, np.float32)}),
    ("read", (5,), {"out": np.zeros(COUNT - 5, np.float32)}),
    ("read", (5, None), {"out": np.zeros(COUNT - 5, np.float32)}),
    ("read", (5, 3), {"out": np.zeros(4, np.float32)}),
    ("read", (5, 3), {"out": np.zeros(3, np.float64)}),
    ("read", (5, -3), {"out": np.zeros(3, np.float32)}),
    ("read", (0, COUNT), {"out": read_only()}),
    ("read", (), {"out": np.zeros(COUNT + 1, np.float32)}),
    ("read", (), {"out": np.zeros((2, COUNT), np.float32)[0]}),
    ("read", (), {"out": np.zeros((COUNT, 2), np.float32)[:, 0]}),
    ("read", (), {"out": [0.0] * COUNT}),
    ("read", (0, 3), {"out": None}),
    ("read", (5, 3), {"out": np.zeros(3, np.float32), "wire": "exact"}),
    ("read", (5, 3), {"out": np.zeros(3, np.float32), "wire": np.str_("exact")}),
    ("read", (5, 3), {"out": np.zeros(3, np.float32), "wire": "bfloat16"}),
    ("read", (5, 3), {"out": np.zeros(3, np.float32), "wire": "exactly"}),
    ("read", (5, 3), {"out": np.zeros(3, np.float32), "wire": 0}),
    ("write", (a([0.3, 2]), 3), {"wire": "exact"}),
    ("write", (a([0.3, 2]), 3), {"wire": "int8"}),
    ("accumulate", (a([0.3, 2]), 3), {"scale": 0.5, "wire": None}),
    ("accumulate", (a([0.3, 2]), 3), {"scale": 0.5, "wire": "float16"}),
]
COUNTER_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("fetch_add", (1,), {}),
    ("fetch_add", (1, 1, 1), {}),
    ("fetch_add", (1,), {"value": 4}),
    ("fetch_add", (np.int64(1), np.int32(4)), {}),
    ("fetch_add", (4, 1), {}),
    ("fetch_add", (-1, 1), {}),
    ("fetch_add", (1, 2**63), {}),
    ("fetch_add", (1, 1.0), {}),
    ("compare_swap", (1, 0), {}),
    ("compare_swap", (1, 0, 5), {}),
    ("compare_swap", (1, 2**63, 5), {}),
    ("fetch_add", (1, 1), {"wire": "exact"}),
    ("write", (a([1, 2], np.int64),), {}),
    ("write", (a([1, 2], np.uint64),), {}),
    ("accumulate", (a([1, 2], np.int64),), {}),
    ("accumulate", (a([1, 2], np.int64),), {"scale": 2}),
    ("accumulate", (a([1, 2], np.int64),), {"scale": 0.5}),
]


def outcome_of(buffer: smb.Buffer, call: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What a call returned or raised, and what the buffer holds then."""
    buffer.fill(3)
    try:
        returned = call(*args, **named)
        said: Any = (type(returned), np.array(returned).tolist() if returned is not None else None)
    except (smb.Error, TypeError) as error:
        said = (type(error), str(error))
    return said, buffer.read().tobytes()


def test_both_ways_answer_alike(buffer: smb.Buffer) -> None:
    for name, args, named in CALLS:
        direct, python = getattr(buffer, name), behind(buffer, name)
        assert outcome_of(buffer, direct, args, named) == outcome_of(buffer, python, args, named), (name, args, named)


def test_both_ways_count_alike(counter: smb.Buffer) -> None:
    for name, args, named in COUNTER_CALLS:
        direct, python = getattr(counter, name), behind(counter, name)
        assert outcome_of(counter, direct, args, named) == outcome_of(counter, python, args, named), (name, args, named)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint64", "float32", "float64"])
def test_both_ways_count_alike_in_each_dtype(client: smb.Client, dtype: str) -> None:
    """The largest and smallest numbers, those past them, signs, NaN and what is no number."""
    typed = client.create("typed", 4, dtype)
    ends = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, 2**64, -1, -(2**31), -(2**31) - 1]
    for value in [*ends, 0.1, -0.0, 1e300, float("nan"), float("-inf"), np.float32(0.1), "1", None, True]:
        for name, args in (("fetch_add", (1, value)), ("compare_swap", (1, 3, value)), ("compare_swap", (1, value, 0))):
            direct, python = getattr(typed, name), behind(typed, name)
            assert outcome_of(typed, direct, args, {}) == outcome_of(typed, python, args, {}), (name, args)
    client.delete("typed")


def test_other_dtypes_and_buffers_with_two_copies(client: smb.Client) -> None:
    """bfloat16 has no buffer protocol; two copies change by publish alone; a default wire rounds."""
    import ml_dtypes

    for dtype in ("float16", "float64", "bfloat16", "int32", "uint8"):
        typed = client.create("typed", 8, dtype)
        values = np.arange(8).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        typed.write(values)
        typed.accumulate(values)
        assert typed.read().tolist() == (values + values).tolist()
        client.delete("typed")
    published = client.create("two", 8, versions=2)
    published.publish(np.ones(8, np.float32))
    assert published.read(out=np.empty(8, np.float32)).tolist() == [1.0] * 8
    with pytest.raises(smb.InvalidArgumentError, match="publish"):
        published.write(np.ones(8, np.float32))
    client.delete("two")
    rounded = client.create("rounded", 8, wire="bfloat16")
    rounded.write(np.full(8, 1.001, np.float32))
    assert rounded.read().tolist() == [1.0] * 8
    client.delete("rounded")


def test_a_closed_client_and_a_child_of_fork_are_refused(connect: Connect) -> None:
    client = connect()
    made = client.create("closing", 8)
    array = np.ones(8, np.float32)
    made.write(array)
    import multiprocessing

    queue = multiprocessing.get_context("fork").Queue()

    def child() -> None:
        try:
            made.write(array)
            queue.put("written")
        except smb.Error as error:
            queue.put(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert "before fork" in queue.get(timeout=30)
    process.join(30)
    client.delete("closing")
    client.close()
    with pytest.raises(smb.UnavailableError, match="closed"):
        made.write(array)


def test_a_deleted_buffer_is_found_out(buffer: smb.Buffer, client: smb.Client) -> None:
    """The engine's refusal goes on in Python, which asks the coordinator and forgets the memory."""
    client.delete("direct")
    array = np.ones(COUNT, np.float32)
    for call in (lambda: buffer.write(array), lambda: buffer.read(out=array), lambda: buffer.accumulate(array)):
        with pytest.raises(smb.NotFoundError, match="deleted"):
            call()
    client.create("direct", COUNT)


def test_a_call_that_was_gone_on_with_returns_what_the_method_returns(
    buffer: smb.Buffer, counter: smb.Buffer, client: smb.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dispatcher finishes what the engine refuses, as after a server has moved; its number is a counter's alone."""
    array = np.ones(COUNT, np.float32)
    buffer.write(array)
    counter.fetch_add(0, 1)
    client.delete("direct")
    client.delete("direct-counter")
    monkeypatch.setattr(Dispatcher, "call", lambda *_, **__: 7)
    assert buffer.write(array) is None
    assert buffer.accumulate(array) is None
    assert buffer.read(out=array) is array
    assert (counter.fetch_add(0, 1), counter.compare_swap(0, 1, 2)) == (7, 7)
    monkeypatch.undo()
    client.create("direct", COUNT)
    client.create("direct-counter", 4, "int64")


def test_nothing_is_kept_or_lost(buffer: smb.Buffer, counter: smb.Buffer) -> None:
    """Arrays, integers and the buffer have as many references after many calls as before."""
    array, out = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    handle = buffer._dispatcher.paths.handle

    def counts() -> list[int]:
        gc.collect()
        return [sys.getrefcount(thing) for thing in (array, out, buffer, handle, None)]

    buffer.write(array)
    before = counts()
    for i in range(1000):
        buffer.write(array)
        buffer.accumulate(array, scale=0.5)
        buffer.read(out=out)
        counter.fetch_add(0, 10**12 + i)
        with pytest.raises(smb.InvalidArgumentError):
            buffer.write(array, 1)
    after = counts()
    assert all(abs(x - y) < 100 for x, y in zip(before, after, strict=True)), (before, after)


def test_a_forgotten_buffer_goes_at_once(client: smb.Client) -> None:
    """No circle keeps its mappings and links until a collection, also not after a call that failed."""
    made = client.create("forgotten", COUNT)
    array = np.ones(COUNT, np.float32)
    made.write(array)
    client.delete("forgotten")
    with contextlib.suppress(smb.NotFoundError):
        made.write(array)
    kept = weakref.ref(made._dispatcher)
    gc.disable()
    try:
        del made
        assert kept() is None
    finally:
        gc.enable()


def test_threads_call_while_ways_are_forgotten(buffer: smb.Buffer) -> None:
    """A call keeps the handle that it began with; the next one finds another."""
    array = np.ones(COUNT, np.float32)
    buffer.fill(0)
    start, rounds = threading.Barrier(4), 300
    failures: list[smb.Error] = []

    def add() -> None:
        start.wait()
        try:
            for _ in range(rounds):
                buffer.accumulate(array)
        except smb.Error as error:
            failures.append(error)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        buffer._dispatcher.paths.look_again()
        buffer.read(0, 1)
    assert failures == []
    assert buffer.read().tolist() == [3.0 * rounds] * COUNT


def test_it_is_documented_as_the_method_behind_it() -> None:
    for name in ("read", "write", "accumulate", "fetch_add", "compare_swap"):
        method = getattr(smb.Buffer, name)
        assert method.__doc__ == method.__wrapped__.__doc__
        assert method.__name__ == name
        assert "self" in inspect.signature(method).parameters
