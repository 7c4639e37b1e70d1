"""Elements in fewer bits on the way: the same values over every path, as near as promised, and each change once."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import urllib.request
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import smb
from tests.conftest import Connect
from tests.support.daemons import stop
from tests.support.transports import FAR

Array = np.ndarray[Any, np.dtype[Any]]
WIRES = ("bfloat16", "float16", "int8", "int4")
STRIPE = "64KiB"  # a chunk too: calls have many pieces
COUNT = 100_003
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

every_wire = pytest.mark.parametrize("wire", WIRES)


def values(seed: int, count: int = COUNT) -> Array:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def arriving(wire: str, array: Array, start: int, chunk: int) -> Array:
    """What the array, at element `start` of a buffer in chunks of so many elements, is at the other end."""
    if wire == "bfloat16":
        return array.astype(ml_dtypes.bfloat16).astype(np.float32)
    if wire == "float16":
        return array.astype(np.float16).astype(np.float32)
    elements, limit = (256, 127) if wire == "int8" else (64, 7)
    result, at = np.empty_like(array), 0
    while at < array.size:
        piece_end = min(array.size, at + chunk - (start + at) % chunk)
        while at < piece_end:
            end = min(at + elements, piece_end)
            block = array[at:end]
            scale = np.float32(np.abs(block).max() / np.float32(limit))
            result[at:end] = np.rint(block / scale).astype(np.float32) * scale
            at = end
    return result


@every_wire
@pytest.mark.parametrize("start", [0, 5])
def test_each_call_rounds_as_it_says(client: smb.Client, wire: str, start: int) -> None:
    """write, accumulate, its fetch (exact) and read: the bits that numpy gives, piece by piece."""
    buffer = client.create("w", COUNT + 9, servers=3, stripe=STRIPE)
    chunk = buffer.layout.chunk_bytes // 4
    first, second = values(1), values(2)
    buffer.write(first, start, wire=wire)
    expected = arriving(wire, first, start, chunk)
    np.testing.assert_array_equal(buffer.read(start, COUNT), expected)
    fetched = buffer.accumulate(second, start, scale=0.5, fetch=True, wire=wire)
    expected = expected + np.float32(0.5) * arriving(wire, second, start, chunk)
    np.testing.assert_array_equal(fetched, expected)
    np.testing.assert_array_equal(buffer.read(start, COUNT), expected)
    np.testing.assert_array_equal(buffer.read(start, COUNT, wire=wire), arriving(wire, expected, start, chunk))
    for op, combine in (("max", np.maximum), ("replace", lambda b, a: a), ("elastic", lambda b, a: b + (a - b))):
        buffer.accumulate(first, start, op=op, wire=wire)
        expected = combine(expected, arriving(wire, first, start, chunk))
        np.testing.assert_array_equal(buffer.read(start, COUNT), expected)


@every_wire
def test_the_path_makes_no_difference(connect: Connect, wire: str) -> None:
    """The same calls over shared memory and over TCP leave the same bits, also in a fenced write and a future."""
    found = []
    for transport in ("shm", FAR):
        buffer = connect(transport).create(f"{transport}-{wire}", COUNT, servers=2, stripe=STRIPE, wire=wire)
        assert buffer.transports == (transport,)
        buffer.write(values(3))
        buffer.accumulate(values(4), scale=-0.3)
        buffer.accumulate_async(values(5)[7:60_000], 70).result()
        with buffer.lock() as lock:
            buffer.write(values(6)[:300], 1, fence=lock)
            fetched = buffer.accumulate(values(7)[:20_000], 40_000, fence=lock, fetch=True)
        found.append((buffer.read(), buffer.read(wire="exact"), fetched))
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert one.tobytes() == other.tobytes()
    assert found[0][0].tobytes() != found[0][1].tobytes()


def test_a_buffers_default(cluster: smb.LocalCluster, connect: Connect) -> None:
    """It is stored with the buffer; like= takes it along; a call may say otherwise; publish is exact."""
    client = connect(FAR)
    buffer = client.create("default", 1000, wire="bfloat16")
    assert (buffer.wire, connect("shm").open("default").wire) == ("bfloat16", "bfloat16")
    assert next(info.wire for info in client.list() if info.name == "default") == "bfloat16"
    assert client.create("other", like=buffer).wire == "bfloat16"
    assert client.create("plain", like=buffer, wire="exact").wire == "exact"
    assert client.create("plainest", 10).wire == "exact"
    assert client.create("default", 1000, exist_ok=True).wire == "bfloat16"
    with pytest.raises(smb.AlreadyExistsError, match="with wire bfloat16, not int8"):
        client.create("default", 1000, exist_ok=True, wire="int8")
    array = values(8, 1000)
    rounded = array.astype(ml_dtypes.bfloat16).astype(np.float32)
    for given, expected in ((None, rounded), ("exact", array), ("bfloat16", rounded)):
        buffer.write(array, wire=given)
        np.testing.assert_array_equal(buffer.read(wire="exact"), expected)
    published = client.create("published", 1000, versions=2, wire="bfloat16")
    published.publish(array)
    np.testing.assert_array_equal(published.read(wire="exact"), array)
    np.testing.assert_array_equal(published.read(), rounded)


def test_what_is_refused(client: smb.Client) -> None:
    """Other dtypes, other words, feedback of another buffer or operation: said so, and nothing is done."""
    floats, integers = client.create("floats", 10), client.create("integers", 10, "int64")
    for call in (
        lambda: integers.read(wire="bfloat16"),
        lambda: integers.write(np.ones(10, np.int64), wire="float16"),
        lambda: integers.accumulate(np.ones(10, np.int64), wire="int8"),
        lambda: client.create("bad", 10, "float64", wire="int8"),
        lambda: client.create("bad", like=integers, wire="int8"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match="float32"):
            call()
    integers.write(np.ones(10, np.int64), wire="exact")
    for call in (
        lambda: floats.read(wire="fp8"),
        lambda: floats.write(np.ones(10, np.float32), wire=""),
        lambda: client.create("bad", 10, wire="bf16"),
    ):
        with pytest.raises(smb.InvalidArgumentError, match="unknown wire"):
            call()
    with pytest.raises(smb.InvalidArgumentError, match="must be float32"):
        smb.ErrorFeedback(integers)
    feedback = smb.ErrorFeedback(client.create("elsewhere", 10))
    with pytest.raises(smb.InvalidArgumentError, match="of this buffer"):
        floats.accumulate(np.ones(10, np.float32), wire="int8", feedback=feedback)
    with pytest.raises(smb.InvalidArgumentError, match="op='sum'"):
        floats.accumulate(np.ones(10, np.float32), op="max", wire="int8", feedback=smb.ErrorFeedback(floats))
    assert (floats.read() == 0).all()


@every_wire
def test_feedback_keeps_what_rounding_leaves_out(client: smb.Client, wire: str) -> None:
    """After any number of calls, buffer and residual together are the sum of what was added; without it they drift."""
    buffer, plain = (client.create(name, COUNT, servers=2, stripe=STRIPE) for name in ("fed", "plain"))
    feedback = smb.ErrorFeedback(buffer)
    exact = np.zeros(COUNT)
    step = np.abs(values(9)) * np.linspace(1e-3, 1, COUNT, dtype=np.float32)  # rounding this always errs the same way
    for turn in range(30):
        start = turn % 3 * 1000
        buffer.accumulate(step[start:], start, scale=0.1, wire=wire, feedback=feedback)
        plain.accumulate(step[start:], start, scale=0.1, wire=wire)
        exact[start:] += np.float64(np.float32(0.1)) * step[start:]
    together = np.abs(buffer.read().astype(np.float64) + feedback.residual - exact).max()
    fed, unfed = (np.abs(b.read() - exact).mean() for b in (buffer, plain))
    assert together < 1e-4
    assert fed < unfed / 5
    feedback.reset()
    assert (feedback.residual == 0).all()


def test_int8_with_feedback_converges_where_plain_int8_does_not(client: smb.Client) -> None:
    """Gradient descent on ill-scaled quadratics: one large entry hides the small ones from plain int8."""
    curvature = np.logspace(-3, 0, 256, dtype=np.float32)
    errors = {}
    for fed in (True, False):
        buffer = client.create(f"descent-{fed}", 256)
        buffer.write(np.ones(256, np.float32))
        feedback = smb.ErrorFeedback(buffer) if fed else None
        for _ in range(400):
            noise = np.zeros(256, np.float32)
            noise[255] = 1.0  # a large entry that sets the block's scale at every step
            buffer.accumulate(curvature * buffer.read() + noise, scale=-0.5, wire="int8", feedback=feedback)
            buffer.accumulate(noise, scale=0.5)
        errors[fed] = float(np.abs(buffer.read() - (1 - 0.5 * curvature) ** 400).max())
    assert errors[True] < 0.05
    assert errors[False] > 5 * errors[True]


def test_a_call_that_was_not_made_leaves_the_residual(client: smb.Client) -> None:
    """Deleted before the call: nothing was sent, nothing is kept, nothing is lost."""
    buffer = client.create("gone", 1000)
    feedback = smb.ErrorFeedback(buffer)
    buffer.accumulate(values(10, 1000), wire="int8", feedback=feedback)
    before = feedback.residual
    assert np.abs(before).max() > 0
    client.delete("gone")
    with pytest.raises(smb.Error):
        buffer.accumulate(values(11, 1000), wire="int8", feedback=feedback)
    np.testing.assert_array_equal(feedback.residual, before)


def test_feedback_of_arrays_that_must_be_copied_first(client: smb.Client) -> None:
    """Every other element, a transposed tensor, a list: what is added is what was given."""
    whole = values(12, 2000)
    tensor = torch.from_numpy(whole.reshape(40, 50)).T
    for name, array in (("strided", whole[::2]), ("tensor", tensor), ("list", whole[:100].tolist())):
        buffer = client.create(name, np.asarray(array).shape)
        for _ in range(5):
            gc.collect(1)  # what is young: a copy that nobody holds
            buffer.accumulate(array, wire="exact", feedback=smb.ErrorFeedback(buffer))
        np.testing.assert_allclose(buffer.read(), 5 * np.asarray(array), rtol=1e-6)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_call_that_was_refused_leaves_the_residual(client: smb.Client, connect: Connect, sparse: bool) -> None:
    """Under a lock that was lost the servers refuse it: nothing was applied, and all of it is still to be sent."""
    buffer = client.create("fenced", 1000)
    feedback = smb.ErrorFeedback(buffer)
    buffer.accumulate(values(13, 1000), wire="int8", feedback=feedback)
    before = feedback.residual
    assert np.abs(before).max() > 0
    lock = buffer.lock(ttl=0.2).acquire()
    client._session.renewals.remove(lock)
    with connect(FAR).open("fenced").lock(timeout=20):
        add = (
            functools.partial(buffer.accumulate_sparse, *feedback.top_k(np.zeros(1000, np.float32), 100))
            if sparse
            else functools.partial(buffer.accumulate, values(14, 1000), wire="int8")
        )
        with pytest.raises(smb.LockLostError):
            add(fence=lock, feedback=feedback)
    np.testing.assert_array_equal(feedback.residual, before)


def test_refused_arguments_leave_the_residual(client: smb.Client) -> None:
    """A k that is no whole number, a scale twice, somebody else's feedback."""
    buffer = client.create("refused", 10)
    feedback = smb.ErrorFeedback(buffer)
    buffer.accumulate(values(15, 10), wire="int8", feedback=feedback)
    before, ones = feedback.residual, np.ones(10, np.float32)
    with pytest.raises(smb.InvalidArgumentError, match="k must be an integer"):
        feedback.top_k(ones, 2.5)  # type: ignore[arg-type]
    for bad in ({"feedback": feedback, "scale": 2.0}, {"feedback": "x"}, {"feedback": feedback, "op": "max"}):
        with pytest.raises(smb.InvalidArgumentError, match=r"feedback="):
            buffer.accumulate_sparse(np.arange(10), ones, **bad)
    np.testing.assert_array_equal(feedback.residual, before)


def test_checksums_of_an_array_that_changes(cluster: smb.LocalCluster) -> None:
    """What is sent is what the checksum is of, although another thread writes to the array all the time."""
    with smb.connect(cluster.address, transport=FAR, checksum=True) as client:
        buffer = client.create("changing", 1 << 20)
        array = np.zeros(1 << 20, np.float32)
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                np.add(array, 1, out=array)

        writer = threading.Thread(target=write)
        writer.start()
        before = spoilt_frames(cluster)
        try:
            for _ in range(20):
                buffer.accumulate(array)
                buffer.write(array)
        finally:
            stop.set()
            writer.join(20)
        client.delete("changing")
        assert spoilt_frames(cluster) == before
        assert client._session.engine.spoilt() == 0


def spoilt_frames(cluster: smb.LocalCluster) -> list[str]:
    pages = (urllib.request.urlopen(f"http://{server.metrics}/metrics").read().decode() for server in cluster.servers)
    return [line for page in pages for line in page.splitlines() if "errors_total" in line and "checksum" in line]


def test_some_elements_only(client: smb.Client) -> None:
    """Few, many, neighbours, one, the first and the last, over chunks and servers: those change, no others."""
    for dtype, op in itertools.product(("float32", "float16", "int64", "uint8"), ("sum", "max", "replace")):
        print(dtype, op)  # the one that fails is the last
        random = np.random.default_rng(20)
        buffer = client.create("some", COUNT, dtype, servers=3, stripe=STRIPE)
        expected = random.integers(0, 50, COUNT).astype(dtype)
        buffer.write(expected)
        chosen = (
            np.array([0]), np.array([COUNT - 1]), np.array([0, COUNT - 1]), np.arange(70_000, 70_900), np.arange(COUNT),
            np.sort(random.choice(COUNT, 1000, replace=False)), np.sort(random.choice(COUNT, 40_000, replace=False)),
        )  # fmt: skip
        for indices in chosen:
            values = random.integers(0, 60, indices.size).astype(dtype)
            buffer.accumulate_sparse(indices, values, op=op, scale=2.0)
            with np.errstate(over="ignore"):
                scaled = values * np.array(2, dtype)
                old = expected[indices]
                new = old + scaled if op == "sum" else np.maximum(old, scaled) if op == "max" else scaled
            expected[indices] = new
            np.testing.assert_array_equal(buffer.read(), expected)
        client.delete("some")


def test_more_entries_than_a_frame_holds(client: smb.Client) -> None:
    """Every element of chunks of 1 MiB, as bytes: five times the chunk in entries, cut into frames that fit."""
    buffer = client.create("bytes", 2**20 + 5, "uint8", stripe="1MiB", servers=1)
    values = np.random.default_rng(21).integers(0, 255, buffer.size).astype(np.uint8)
    buffer.accumulate_sparse(np.arange(buffer.size), values)
    with buffer.lock() as lock:
        buffer.accumulate_sparse(np.arange(buffer.size), values, fence=lock)
    np.testing.assert_array_equal(buffer.read(), 2 * values)


def test_refused_indices(client: smb.Client) -> None:
    """Out of range, too few values, no int64: refused, and nothing changes."""
    buffer = client.create("indices", 100)
    for indices, count in (([-1, 2], 2), ([5, 100], 2), ([1, 2], 3), ([1], 2), ([], 1)):
        with pytest.raises(smb.InvalidArgumentError, match="indices"):
            buffer.accumulate_sparse(np.array(indices, np.int64), np.ones(count, np.float32))
    with pytest.raises(smb.InvalidArgumentError, match="pass int64"):
        buffer.accumulate_sparse(np.array([1], np.int32), np.ones(1, np.float32))
    with pytest.raises(smb.InvalidArgumentError, match="float64"):
        buffer.accumulate_sparse(np.array([1]), np.ones(1))
    assert (buffer.read() == 0).all()


def test_the_largest_with_feedback(client: smb.Client) -> None:
    """Each time the k largest of what is left; in the end all has been sent, and buffer and residual are the sum."""
    buffer = client.create("largest", 5000, servers=2, stripe="4KiB")
    feedback = smb.ErrorFeedback(buffer)
    exact = np.zeros(5000)
    for turn in range(20):
        array = values(turn, 5000)
        indices, taken = feedback.top_k(array, 100, scale=0.5)
        assert indices.size == taken.size == 100
        assert np.abs(taken).min() >= np.abs(feedback.residual).max()
        buffer.accumulate_sparse(indices, taken, feedback=feedback)
        exact += 0.5 * array
    np.testing.assert_allclose(buffer.read() + feedback.residual, exact, atol=1e-4)
    buffer.accumulate(np.zeros(5000, np.float32), wire="exact", feedback=feedback)  # the rest
    assert (feedback.residual == 0).all()
    np.testing.assert_allclose(buffer.read(), exact, atol=1e-4)


@pytest.mark.parametrize("stopped", [False, True], ids=["gone", "stopped"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_what_a_failed_call_missed_goes_back_into_the_residual(sparse: bool, stopped: bool) -> None:
    """A server that is gone did not get it, and that is known at once; of one that is stopped in the middle and killed
    settle finds out. Sent again, all of it counts once."""
    size = 300_000
    with (
        smb.LocalCluster(servers=2, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport=FAR, timeout=0.5) as hasty,
        smb.connect(cluster.address, transport=FAR, timeout=30) as patient,
    ):
        buffer = hasty.create("w", size, stripe=STRIPE)
        feedback = smb.ErrorFeedback(buffer)
        array = np.arange(size, dtype=np.float32) % 1000 + 1
        buffer.write(np.zeros(size, np.float32))
        if stopped:
            stop(cluster.servers[1].pid)
        else:
            cluster.servers[1].kill()
        add = (
            functools.partial(buffer.accumulate_sparse, *feedback.top_k(array, size // 2))
            if sparse
            else functools.partial(buffer.accumulate, array, wire="int8")
        )
        with pytest.raises(smb.TimeoutError if stopped else smb.UnavailableError, match="settle") as caught:
            add(feedback=feedback)
        if stopped:
            cluster.servers[1].kill()
        cluster.servers[1].start()
        before = feedback.residual
        assert buffer.settle(caught.value, timeout=20) == []
        assert (np.abs(feedback.residual - before).max() > 0) == stopped
        after = feedback.residual
        assert buffer.settle(caught.value, timeout=20) == []  # again: nothing is put back twice
        np.testing.assert_array_equal(feedback.residual, after)
        together = patient.open("w").read() + after
        np.testing.assert_allclose(together, array, rtol=1e-5)
        patient.open("w").accumulate(np.zeros(size, np.float32), wire="exact", feedback=feedback)
        np.testing.assert_allclose(patient.open("w").read(), array, rtol=1e-5)
