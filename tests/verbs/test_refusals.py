"""What a memory server's device refuses to a client that tries more than it was given, and what others notice of it.

The client is a stranger (stranger.py). Each refusal stands beside the same request with the right key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest

import smb
from smb.transport.verbs.devices import Port
from tests.conftest import Connect
from tests.support.daemons import wait_for
from tests.verbs.endpoint import LOCAL, OK, REFUSED, Memory
from tests.verbs.stranger import Keys, Stranger, strangers

COUNT = 50_000  # int64: 400 000 bytes in 2 chunks
NBYTES = COUNT * 8
pytestmark = pytest.mark.verbs("keys of a memory server: one client's, one segment's, no longer than a session")


@pytest.fixture
def buffer(connect: Connect) -> smb.Buffer:
    """On one server, with numbers in it."""
    buffer = connect("shm").create("guarded", COUNT, "int64", servers=1)
    buffer.write(np.arange(COUNT))
    return buffer


@pytest.fixture
def pair(cluster: smb.LocalCluster, buffer: smb.Buffer, ports: tuple[Port, Port]) -> Iterator[list[Stranger]]:
    """Two strangers, connected to the buffer's server."""
    with strangers(cluster.address, "guarded", ports[1], 2) as made:
        yield made


def memory(stranger: Stranger, fill: int = 0) -> Memory:
    return stranger.endpoint.register(np.full(COUNT, fill), LOCAL)


def test_a_key_gives_the_segment_and_all_of_it(pair: list[Stranger], buffer: smb.Buffer) -> None:
    """What is read and written past the server's processor is the buffer, to the last byte."""
    stranger, other = pair
    keys = stranger.open()
    sink = memory(stranger)
    assert stranger.endpoint.read(sink, keys.address, keys.key, NBYTES) == OK
    np.testing.assert_array_equal(sink.array, np.arange(COUNT))
    sink.array[:] = 7
    assert stranger.endpoint.write(sink, keys.address, keys.key, NBYTES) == OK
    np.testing.assert_array_equal(buffer.read(), np.full(COUNT, 7))
    assert keys == stranger.open()  # asked again, the same
    assert other.open().key != keys.key


def wrong(stranger: Stranger, other: Stranger, keys: Keys, source: Memory) -> str:
    return stranger.endpoint.write(source, keys.address, keys.key ^ 0x5A5A00, 8)


def of_the_other_client(stranger: Stranger, other: Stranger, keys: Keys, source: Memory) -> str:
    theirs = other.open()
    assert other.endpoint.write(memory(other, -5), theirs.address, theirs.key, 8) == OK
    return stranger.endpoint.write(source, theirs.address, theirs.key, 8)


def read_of_the_other_client(stranger: Stranger, other: Stranger, keys: Keys, source: Memory) -> str:
    theirs = other.open()
    return stranger.endpoint.read(source, theirs.address, theirs.key, 8)


def slot_of_the_other_client(stranger: Stranger, other: Stranger, keys: Keys, source: Memory) -> str:
    return stranger.endpoint.write(source, other.slots[0].address, other.slots[0].key, 8)


def past_the_end(stranger: Stranger, other: Stranger, keys: Keys, source: Memory) -> str:
    return stranger.endpoint.write(source, keys.address + 8, keys.key, NBYTES)


def before_the_beginning(stranger: Stranger, other: Stranger, keys: Keys, source: Memory) -> str:
    return stranger.endpoint.write(source, keys.address - 8, keys.key, 16)


def read_past_the_end(stranger: Stranger, other: Stranger, keys: Keys, source: Memory) -> str:
    return stranger.endpoint.read(source, keys.address + 8, keys.key, NBYTES)


def write_with_a_key_for_reading(stranger: Stranger, other: Stranger, keys: Keys, source: Memory) -> str:
    only = stranger.open(writable=False)
    assert stranger.endpoint.read(memory(stranger), only.address, only.key, 8) == OK
    return stranger.endpoint.write(source, only.address, only.key, 8)


def write_into_the_states_of_chunks(stranger: Stranger, other: Stranger, keys: Keys, source: Memory) -> str:
    assert stranger.endpoint.read(memory(stranger), keys.states_address, keys.states_key, 64) == OK
    return stranger.endpoint.write(source, keys.states_address, keys.states_key, 8)


def an_atomic_of_the_device(stranger: Stranger, other: Stranger, keys: Keys, source: Memory) -> str:
    """The device's additions and ours would not see each other: nobody may."""
    return stranger.endpoint.fetch_add(memory(stranger), keys.address, keys.key, 1)


@pytest.mark.parametrize(
    "attempt",
    [
        wrong,
        of_the_other_client,
        read_of_the_other_client,
        slot_of_the_other_client,
        past_the_end,
        before_the_beginning,
        read_past_the_end,
        write_with_a_key_for_reading,
        write_into_the_states_of_chunks,
        an_atomic_of_the_device,
    ],
    ids=lambda attempt: attempt.__name__,
)
def test_more_than_was_given_is_refused(
    pair: list[Stranger], buffer: smb.Buffer, attempt: Callable[[Stranger, Stranger, Keys, Memory], str]
) -> None:
    """The server's device refuses; nothing changes, others are served on, and the refused one may come again."""
    stranger, other = pair
    source = memory(stranger, 99)
    assert attempt(stranger, other, stranger.open(), source) != OK
    expected = np.arange(COUNT)
    expected[0] = -5 if attempt is of_the_other_client else 0
    np.testing.assert_array_equal(buffer.read(), expected)
    np.testing.assert_array_equal(source.array, np.full(COUNT, 99))
    theirs, sink = other.open(), memory(other)
    assert other.endpoint.read(sink, theirs.address, theirs.key) == OK
    np.testing.assert_array_equal(sink.array, expected)
    stranger.connect()
    keys = stranger.open()
    assert stranger.endpoint.write(source, keys.address, keys.key, 8) == OK
    assert buffer.read(count=1)[0] == 99


def test_a_key_ends_with_its_buffer(pair: list[Stranger], buffer: smb.Buffer, connect: Connect) -> None:
    """After delete nobody reaches the memory that was its, whatever it is by now."""
    stranger, _ = pair
    keys, sink = stranger.open(), memory(stranger, -1)
    assert stranger.endpoint.read(sink, keys.address, keys.key, 8) == OK
    connect("shm").delete("guarded")
    assert stranger.endpoint.read(sink, keys.address, keys.key, 8) == REFUSED
    assert sink.array[0] == 0  # as it was read before


def test_a_key_ends_with_its_session(pair: list[Stranger], buffer: smb.Buffer) -> None:
    """Once the session is over its queue pair is gone, and another one finds its key dead."""
    gone, other = pair
    keys = gone.open()
    assert gone.endpoint.read(memory(gone), keys.address, keys.key, 8) == OK
    gone.leave()
    wait_for(lambda: _refuses_to_connect(gone), "end of the session at the memory server")
    assert gone.endpoint.read(memory(gone), keys.address, keys.key, 8) != OK
    assert other.endpoint.read(memory(other), keys.address, keys.key, 8) == REFUSED


def _refuses_to_connect(stranger: Stranger) -> bool:
    try:
        stranger.open()
    except grpc.RpcError:
        return True
    return False


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"number": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"number": 1 << 24}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"gid": b"short"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"mtu": 1000}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"reads": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"packet_sequence": 1 << 24}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=str,
)
def test_ends_that_no_device_has_are_refused(pair: list[Stranger], fields: dict[str, object], code: object) -> None:
    """A request that makes no sense is answered with what is wrong with it, and ends no connection of others."""
    stranger, other = pair
    with pytest.raises(grpc.RpcError) as refused:
        stranger.server.ConnectVerbs(stranger.request(**fields), timeout=30)
    assert refused.value.code() is code
    stranger.connect()
    keys = other.open()
    assert other.endpoint.read(memory(other), keys.address, keys.key, 8) == OK


def test_segments_that_are_not_there_are_refused(
    pair: list[Stranger], cluster: smb.LocalCluster, ports: tuple[Port, Port]
) -> None:
    """An unknown segment, another epoch, a session without a connection: each has its error."""
    stranger, _ = pair
    assert stranger.open().key
    for fields, code in (
        ({"segment_id": stranger.segment.id ^ 1}, grpc.StatusCode.NOT_FOUND),
        ({"epoch": stranger.buffer.layout.epoch + 1}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"session_id": stranger.session_id ^ 1}, grpc.StatusCode.FAILED_PRECONDITION),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            stranger.open(**fields)
        assert refused.value.code() is code


def test_nonsense_ends_a_connection_and_no_more(pair: list[Stranger], buffer: smb.Buffer) -> None:
    """Messages that are no frames cost the sender its connection; the server serves on."""
    stranger, other = pair
    noise = stranger.endpoint.register(np.random.default_rng(7).integers(0, 256, 1024, np.uint8), LOCAL)
    for _ in range(4):  # the first is refused; what comes later finds no queue pair any more
        stranger.endpoint.send(noise, 1024)
    keys = other.open()
    assert other.endpoint.read(memory(other), keys.address, keys.key, 8) == OK
    np.testing.assert_array_equal(buffer.read(), np.arange(COUNT))
    stranger.connect()
    keys = stranger.open()
    assert stranger.endpoint.read(memory(stranger), keys.address, keys.key, 8) == OK
