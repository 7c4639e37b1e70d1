"""What the transport relies on: what a device carries, what it refuses, what it says when a peer is gone.

Bare pyverbs on both sides, so that a test that fails here speaks of the machine and not of Soft Memory Box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from smb.transport.verbs.devices import Port
from tests.verbs.conftest import Cable
from tests.verbs.endpoint import ATOMIC, BROKEN, LOCAL, OK, READ, REFUSED, UNREACHABLE, WRITE, Endpoint, Memory, connect

SIZE = 300_000  # many packets, and no whole number of them


@pytest.fixture
def pair(ports: tuple[Port, Port]) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Two connected endpoints, on two devices where there are two."""
    near, far = Endpoint(ports[1]), Endpoint(ports[0])
    connect(near, far)
    yield near, far
    near.close()
    far.close()


def counting(size: int = SIZE) -> np.ndarray:
    return (np.arange(size) % 251).astype(np.uint8)


@pytest.mark.verbs("one-sided WRITE", "one-sided READ")
def test_bytes_arrive_as_they_were(pair: tuple[Endpoint, Endpoint]) -> None:
    """A WRITE puts exactly its bytes where it was told, and a READ brings them back."""
    near, far = pair
    source, target = near.register(counting(), LOCAL), far.register(np.zeros(SIZE + 20, np.uint8), READ | WRITE)
    assert near.write(source, target.address + 10, target.key) == OK
    np.testing.assert_array_equal(target.array, np.concatenate([np.zeros(10), counting(), np.zeros(10)]))
    sink = near.register(np.zeros(SIZE, np.uint8), LOCAL)
    assert near.read(sink, target.address + 10, target.key) == OK
    np.testing.assert_array_equal(sink.array, counting())


@pytest.mark.skipif(
    not Path("/sys/class/infiniband/rxe0").exists(), reason="counts packets of two rxe devices: make verbs"
)
def test_packets_cross_the_cable(pair: tuple[Endpoint, Endpoint]) -> None:
    """Two devices of one machine talk over their cable, not past it."""
    near, far = pair
    sent = Path("/sys/class/net/cable1/statistics/tx_bytes")
    before = int(sent.read_text())
    target = far.register(np.zeros(SIZE, np.uint8), WRITE)
    assert near.write(near.register(counting(), LOCAL), target.address, target.key) == OK
    assert int(sent.read_text()) - before > SIZE


@pytest.mark.verbs("SEND into posted memory", "atomic fetch_add by the device")
def test_sends_and_device_atomics(pair: tuple[Endpoint, Endpoint]) -> None:
    """A SEND lands in the memory posted for it; a device's addition returns the value before it."""
    near, far = pair
    sink = far.register(np.zeros(128, np.uint8), LOCAL)
    far.receive(sink)
    assert near.send(near.register(counting(64), LOCAL), 64) == OK
    assert far.completion().byte_len == 64
    np.testing.assert_array_equal(sink.array[:64], counting(64))
    counter = far.register(np.array([40]), ATOMIC)
    before = near.register(np.array([0]), LOCAL)
    assert [near.fetch_add(before, counter.address, counter.key, 2) for _ in range(2)] == [OK, OK]
    assert (before.array[0], counter.array[0]) == (42, 44)


def wrong_key(near: Endpoint, far: Endpoint, target: Memory, source: Memory) -> str:
    return near.write(source, target.address, target.key ^ 0x5A5A00)


def wrong_key_read(near: Endpoint, far: Endpoint, target: Memory, source: Memory) -> str:
    return near.read(source, target.address, target.key ^ 0x5A5A00)


def revoked_key(near: Endpoint, far: Endpoint, target: Memory, source: Memory) -> str:
    assert near.write(source, target.address, target.key, 8) == OK
    target.array[:8] = 0
    key = target.key
    target.region.close()
    return near.write(source, target.address, key)


def revoked_key_read(near: Endpoint, far: Endpoint, target: Memory, source: Memory) -> str:
    key = target.key
    target.region.close()
    return near.read(source, target.address, key)


def key_of_another_domain(near: Endpoint, far: Endpoint, target: Memory, source: Memory) -> str:
    """The far side has two clients, each with a protection domain of its own; this one uses the other one's key."""
    other = Endpoint(far.port)
    try:
        theirs = other.register(target.array, READ | WRITE)
        return near.write(source, theirs.address, theirs.key)
    finally:
        other.close()


def past_the_end(near: Endpoint, far: Endpoint, target: Memory, source: Memory) -> str:
    return near.write(source, target.address + 1, target.key)


def before_the_beginning(near: Endpoint, far: Endpoint, target: Memory, source: Memory) -> str:
    return near.write(source, target.address - 1, target.key, 100)


def read_past_the_end(near: Endpoint, far: Endpoint, target: Memory, source: Memory) -> str:
    return near.read(source, target.address + 1, target.key)


def write_with_a_key_for_reading(near: Endpoint, far: Endpoint, target: Memory, source: Memory) -> str:
    only = far.register(target.array, READ)
    assert near.read(near.register(np.zeros(8, np.uint8), LOCAL), only.address, only.key) == OK
    return near.write(source, only.address, only.key)


def read_with_a_key_for_writing(near: Endpoint, far: Endpoint, target: Memory, source: Memory) -> str:
    only = far.register(target.array, WRITE)
    assert near.write(source, only.address, only.key, 8) == OK
    target.array[:8] = 0
    return near.read(source, only.address, only.key)


@pytest.mark.verbs("refusal by the device of a wrong, revoked, foreign, too small or read-only key")
@pytest.mark.parametrize(
    "attempt",
    [
        wrong_key,
        wrong_key_read,
        revoked_key,
        revoked_key_read,
        key_of_another_domain,
        past_the_end,
        before_the_beginning,
        read_past_the_end,
        write_with_a_key_for_reading,
        read_with_a_key_for_writing,
    ],
    ids=lambda attempt: attempt.__name__,
)
def test_the_device_refuses(
    pair: tuple[Endpoint, Endpoint], attempt: Callable[[Endpoint, Endpoint, Memory, Memory], str]
) -> None:
    """What no key allows is refused before a byte moves, and costs the queue pair; a new one works."""
    near, far = pair
    target, source = far.register(np.zeros(SIZE, np.uint8), READ | WRITE), near.register(counting(), LOCAL)
    assert attempt(near, far, target, source) == REFUSED
    assert not target.array.any()
    np.testing.assert_array_equal(source.array, counting())
    fresh = far.register(target.array, READ | WRITE)
    assert near.write(source, fresh.address, fresh.key) == BROKEN
    renew(near, far)
    assert near.write(source, fresh.address, fresh.key) == OK
    np.testing.assert_array_equal(target.array, counting())


@pytest.mark.verbs("recovery from lost packets")
def test_lost_packets_are_sent_again(pair: tuple[Endpoint, Endpoint], cable: Cable) -> None:
    """With packets lost both ways the bytes still arrive, once and in order."""
    near, far = pair
    source, target = near.register(counting(), LOCAL), far.register(np.zeros(SIZE, np.uint8), READ | WRITE)
    cable.lose(1)
    assert near.write(source, target.address, target.key) == OK
    np.testing.assert_array_equal(target.array, counting())
    source.array[:] = 0
    assert near.read(source, target.address, target.key) == OK
    np.testing.assert_array_equal(source.array, counting())


@pytest.mark.verbs("error of a broken link, and a new queue pair")
@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize("broken", ["cut", "down"])
def test_a_broken_cable_is_noticed_and_a_new_queue_pair_works(
    pair: tuple[Endpoint, Endpoint], cable: Cable, broken: str, operation: str
) -> None:
    """After its last repetition the device says that nobody answers; once there is a cable again, a new pair works."""
    near, far = pair
    renew(near, far, timeout=12, retries=3)  # gives up after about 0.1 s
    here, there = near.register(counting(), LOCAL), far.register(np.zeros(SIZE, np.uint8), READ | WRITE)
    call = near.write if operation == "write" else near.read
    if broken == "cut":
        cable.lose(100)
        assert call(here, there.address, there.key) == UNREACHABLE
    else:  # the device may say at once that its own port has no link
        cable.down()
        assert call(here, there.address, there.key) not in (OK, REFUSED)
    assert near.write(here, there.address, there.key) == BROKEN
    assert not there.array.any()
    cable.mend()
    renew(near, far)
    assert near.write(here, there.address, there.key) == OK
    np.testing.assert_array_equal(there.array, counting())


@pytest.mark.verbs("error of a peer that is gone")
@pytest.mark.parametrize(
    ("operation", "nbytes"), [("write", 0), ("write", 8), ("read", 8), ("write", SIZE), ("read", SIZE)]
)
def test_a_peer_that_is_gone_is_noticed(pair: tuple[Endpoint, Endpoint], operation: str, nbytes: int) -> None:
    """Once the other end's queue pair is destroyed, as at its process's death, requests fail after the repetitions."""
    near, far = pair
    renew(near, far, timeout=12, retries=3)
    here, there = near.register(counting(), LOCAL), far.register(np.zeros(SIZE, np.uint8), READ | WRITE)
    call = near.write if operation == "write" else near.read
    assert call(here, there.address, there.key, nbytes) == OK
    far.queue_pair.close()
    assert call(here, there.address, there.key, nbytes) == UNREACHABLE
    far.renew()


def renew(near: Endpoint, far: Endpoint, **options: int) -> None:
    """Connect two endpoints by new queue pairs."""
    near.renew()
    far.renew()
    connect(near, far, **options)
