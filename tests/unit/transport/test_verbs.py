"""smb.transport.{verbs,records,memory,progress,queues}: what needs no device."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest

from smb._engine import lib
from smb.engine import EngineClient
from smb.errors import InvalidArgumentError, NotFoundError, TransportError
from smb.rpc import control_pb2 as pb
from smb.rpc.client_tokens import ClientTokens
from smb.transport.base import Deadline, NoAnswerError, NoPathError, SegmentLocation
from smb.transport.connector import ServerAddress
from smb.transport.reconnect import Links
from smb.transport.tls import ClientTls
from smb.transport.verbs import queue_pair as queues
from smb.transport.verbs.descriptors import HEADER, RECORD, answers, runs
from smb.transport.verbs.progress_thread import ProgressThread
from smb.transport.verbs.queue_pair import End, NoDeviceError, Settings, Users
from smb.transport.verbs.registration import WORTH_BYTES, ClientMemory
from smb.transport.verbs.transport import Verbs
from tests.support.daemons import wait_for

_DEADLINE_S = 20.0


def test_settings_come_from_the_environment() -> None:
    """Each variable sets what it names; what is out of range is refused by its name."""
    given = {"DEVICE": "mlx5_1", "PORT": "2", "GID_INDEX": "0", "MTU": "2048", "SERVICE_LEVEL": "3"}
    assert Settings.of({f"SMB_VERBS_{name}": text for name, text in given.items()}) == Settings("mlx5_1", 2, 0, 2048, 3)
    assert Settings.of({}) == Settings()
    for name, text in (("PORT", "0"), ("GID_INDEX", "-1"), ("MTU", "1500"), ("SERVICE_LEVEL", "16"), ("PORT", "x")):
        with pytest.raises(InvalidArgumentError, match=f"SMB_VERBS_{name} must be .*, not {text}"):
            Settings.of({f"SMB_VERBS_{name}": text})


def test_ends_are_checked() -> None:
    """An end that no device could have is refused, field by field; one that could have been is itself."""
    good = {"number": 17, "gid": bytes(16), "lid": 0, "packet_sequence": 5, "mtu": 4096, "reads": 16}
    assert End(**good).check() == End(**good)  # type: ignore[arg-type]
    for name, value in (
        ("number", 0), ("number", 1 << 24), ("gid", b""), ("lid", 1 << 16), ("packet_sequence", 1 << 24), ("mtu", 1500),
        ("reads", 0), ("reads", 256),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="does not describe a queue pair"):
            End(**good | {name: value}).check()  # type: ignore[arg-type]


def _never(*_: object) -> NoReturn:
    raise AssertionError("nobody is to be reached")


def test_a_machine_without_the_device_says_so_and_starts_nothing() -> None:
    """Without its device the transport leads nowhere, and says what is missing; no thread is started."""
    client = EngineClient(12345)
    links = Links(client, lambda server: None, ClientTokens(_never), ClientTls(None))
    verbs = Verbs(client, links, 12345, Settings(device="none0"))
    place = SegmentLocation(1, "a", 8, "10.0.0.2:7071", "", 5, "10.0.0.2:7072")
    before = set(threading.enumerate())
    for _ in range(2):
        with pytest.raises(NoPathError, match="no RDMA here: "):
            verbs.reach(place, 1, Deadline(1))
    with pytest.raises(NoPathError, match="no RDMA here: "):
        verbs.gated(place, Deadline(1))
    verbs.note(np.zeros(1 << 20))
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("smb")]
    verbs.close()
    client.close()


def records(*places: tuple[int, int, int, int]) -> np.ndarray[Any, Any]:
    """Reads of (segment, offset, length, memory)."""
    made = np.zeros(len(places), RECORD)
    made["opcode"], made["sequence"] = lib.SMB_READ, np.arange(len(places)) + 1
    for record, (segment, offset, length, memory) in zip(made, places, strict=True):
        record["segment"], record["offset"], record["length"], record["sink"] = segment, offset, length, memory
    return made


def test_adjoining_requests_are_one_run() -> None:
    """Requests that adjoin in segment and memory are cut only where one jumps, the kind changes, or it is enough."""
    made = records(
        (1, 0, 100, 5000), (1, 100, 100, 5100), (1, 200, 50, 5200),  # adjoin
        (1, 250, 50, 9000),  # elsewhere in memory
        (1, 400, 50, 9050),  # elsewhere in the segment
        (2, 450, 50, 9100),  # another segment
    )  # fmt: skip
    kinds = np.ones(len(made), np.int64)
    assert runs(made, 1 << 20, kinds) == [(0, 3), (3, 4), (4, 5), (5, 6)]
    assert runs(made[:3], 200, kinds[:3]) == [(0, 2), (2, 3)]
    assert runs(made[:3], 10, kinds[:3]) == [(0, 1), (1, 2), (2, 3)]
    assert runs(made[:3], 1 << 20, np.array([1, 0, 0])) == [(0, 1), (1, 3)]
    assert runs(made[:0], 1 << 20, kinds[:0]) == []
    assert runs(records((1, 0, 0, 0)), 1 << 20, kinds[:1]) == [(0, 1)]  # without a range: AUTHORIZE, WATERMARK


def test_answers_name_their_requests() -> None:
    """An answer repeats its request's name and says how much data was read; a write's has none."""
    made = records((7, 64, 100, 5000), (7, 164, 100, 5100))
    made["opcode"][1] = lib.SMB_WRITE
    made["session"], made["lane"], made["offset"] = 99, 5, 64
    replies = np.frombuffer(answers(made), HEADER)
    assert replies["flags"].tolist() == [1, 1]
    assert replies["sequence"].tolist() == [1, 2]
    assert replies["payload"].tolist() == replies["length"].tolist() == [100, 0]
    assert replies["session"].tolist() == [99, 99]
    assert replies["offset"].tolist() == replies["status"].tolist() == [0, 0]


class FakeRegion:
    def __init__(self, domain: FakeDomain, address: int, nbytes: int) -> None:
        self.domain, self.address, self.nbytes, self.local_key = domain, address, nbytes, len(domain.live) + 1
        domain.live.append(self)

    def close(self) -> None:
        self.domain.live.remove(self)


class FakeDomain:
    """Registers nothing, and remembers it."""

    def __init__(self) -> None:
        self.live: list[FakeRegion] = []

    def register(self, address: int, nbytes: int) -> FakeRegion:
        return FakeRegion(self, address, nbytes)

    def close(self) -> None:
        assert not self.live


def test_memory_is_registered_at_its_second_use_for_as_long_as_it_lives() -> None:
    """What is used again is registered once, through any view of it, within the bound; and forgotten when collected."""
    domain = FakeDomain()
    memory = ClientMemory(domain, registered_bytes_max=3 * WORTH_BYTES)  # type: ignore[arg-type]
    array = np.ones(2 * WORTH_BYTES, np.uint8)
    address = array.ctypes.data
    memory.note(array)
    assert memory.key_of(address, 8) is None
    memory.note(array[100:])
    memory.note(array)
    assert len(domain.live) == 1
    assert memory.key_of(address + 8, 2 * WORTH_BYTES - 8) is not None
    assert memory.key_of(address + 9, 2 * WORTH_BYTES - 8) is None
    assert memory.key_of(address - 1, 8) is None
    other = np.ones(2 * WORTH_BYTES, np.uint8)  # past the bound
    for _ in range(3):
        memory.note(other)
    assert memory.key_of(other.ctypes.data, 8) is None
    del array
    gc.collect()
    assert domain.live == []
    assert memory.key_of(address, 8) is None
    memory.note(other)
    assert memory.key_of(other.ctypes.data, 8) is not None
    small, foreign = np.ones(8), np.frombuffer(bytearray(2 * WORTH_BYTES), np.uint8)
    for _ in range(3):
        memory.note(small)
        memory.note(foreign)  # who owns it could free it without our hearing
    assert memory.key_of(small.ctypes.data, 8) is memory.key_of(foreign.ctypes.data, 8) is None
    memory.close()


def test_empty_memory_lives_with_its_last_view() -> None:
    """Memory of `empty` is zeros of the shape, registered until nothing refers to it; plain memory after a close."""
    domain = FakeDomain()
    memory = ClientMemory(domain)  # type: ignore[arg-type]
    array = memory.empty((3, 5), np.dtype(np.float32))
    assert array.shape == (3, 5)
    assert not array.any()
    assert array.flags.writeable
    part = array[1]
    del array
    assert memory.key_of(part.ctypes.data, part.nbytes) is not None
    del part
    gc.collect()
    assert domain.live == []
    left = memory.empty((7,), np.dtype(np.int64))
    memory.close()
    left[:] = 3
    assert left.sum() == 21


class Echo:
    """A relay that sends back what it gets, and counts how often it is asked."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.closed = False
        self.turns = 0
        self.probed = threading.Event()
        self.owed = False
        self.wanting: threading.Event | None = None  # it moves nothing before this is set
        self.fails = False

    def queue_fd(self) -> int:
        return self.event

    def socket_fd(self) -> int:
        return self.ours.fileno()

    def hang_up(self) -> None:
        self.close()

    def wants_socket(self) -> bool:
        return not self.short()

    def arm(self) -> None:
        pass

    def take_event(self) -> None:
        os.eventfd_read(self.event)

    def short(self) -> bool:
        return self.wanting is not None and not self.wanting.is_set()

    def awaits(self) -> bool:
        return self.owed

    def probe(self) -> None:
        self.probed.set()

    def turn(self) -> bool:
        self.turns += 1
        if self.fails:
            raise RuntimeError("on purpose")
        if self.short():
            return False
        try:
            data = self.ours.recv(100)
        except BlockingIOError:
            return False
        return self.ours.send(data) > 0

    def close(self) -> None:
        self.closed = True
        self.ours.close()
        os.close(self.event)


def test_the_thread_sleeps_wakes_and_outlives_faults() -> None:
    """It moves what comes, is not asked while nothing does, closes one that fails or is hung up, and goes on."""
    progress = ProgressThread("test")
    relays = [Echo() for _ in range(4)]
    for relay in relays:
        progress.add(relay)
        relay.theirs.settimeout(_DEADLINE_S)
        relay.theirs.send(b"a")
        assert relay.theirs.recv(1) == b"a"
    relays[0].fails = True
    relays[0].theirs.send(b"b")
    with contextlib.suppress(ConnectionResetError):  # it had not read what we sent
        assert relays[0].theirs.recv(1) == b""
    relays[1].theirs.shutdown(socket.SHUT_WR)
    assert relays[1].theirs.recv(1) == b""
    progress.close_relay(relays[2])
    assert relays[2].closed
    for _ in range(3):
        relays[3].theirs.send(b"c")
        assert relays[3].theirs.recv(1) == b"c"
    turns = relays[3].turns
    assert turns < 100_000
    assert not relays[3].probed.is_set()
    progress.close()
    assert all(relay.closed for relay in relays)
    for relay in relays:
        relay.theirs.close()


def test_a_peer_that_owes_an_answer_is_probed_again_and_again() -> None:
    """A card notices that its peer is gone only by sending: it sends for as long as an answer is awaited, while nothing
    else happens, and to nobody else."""
    progress = ProgressThread("test")
    owing, other = Echo(), Echo()
    owing.owed = True
    for relay in (owing, other):
        progress.add(relay)
    for _ in range(2):
        assert owing.probed.wait(_DEADLINE_S)
        owing.probed.clear()
    progress.close()
    assert not other.probed.is_set()
    for relay in (owing, other):
        relay.theirs.close()


def test_who_is_short_of_something_goes_on_when_another_one_moves() -> None:
    """A relay that waits for what another one has in use, and that nothing of its own will wake, has its turn again."""
    progress = ProgressThread("test")
    wanting, other = Echo(), Echo()
    wanting.wanting = threading.Event()
    for relay in (wanting, other):
        relay.theirs.settimeout(_DEADLINE_S)
        progress.add(relay)
    wanting.theirs.send(b"a")
    other.theirs.send(b"b")
    assert other.theirs.recv(1) == b"b"
    wait_for(lambda: wanting in progress._short, "sleep")
    wanting.wanting.set()
    other.theirs.send(b"c")
    assert other.theirs.recv(1) == b"c"
    assert wanting.theirs.recv(1) == b"a"
    progress.close()
    for relay in (wanting, other):
        relay.theirs.close()


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, NoAnswerError),  # as after a restart
        (grpc.StatusCode.DEADLINE_EXCEEDED, NoAnswerError),
        (grpc.StatusCode.UNIMPLEMENTED, NoPathError),
        (grpc.StatusCode.INVALID_ARGUMENT, NoPathError),
        (grpc.StatusCode.NOT_FOUND, NotFoundError),
    ],
)
def test_what_a_server_answers_says_whether_waiting_helps(
    code: grpc.StatusCode, refusal: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has just begun, or is slow to, may lead there later; one that refuses never does."""

    class Refused(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return code

        def details(self) -> str:
            return "for a reason"

    class Stub:
        def OpenSegmentVerbs(self, request: object, timeout: float) -> NoReturn:  # noqa: N802 - the method's name
            raise Refused

    client = EngineClient(12345)
    verbs = Verbs(
        client,
        Links(client, lambda server: None, ClientTokens(_never), ClientTls(None)),
        12345,
        Settings(device="none0"),
    )
    monkeypatch.setattr(verbs, "_stub", lambda *_: (Stub(), b""))
    server: Any = SimpleNamespace(name="a")
    with pytest.raises(refusal, match=r"a at 10\.0\.0\.2:7072: for a reason|does not support RDMA") as caught:
        verbs._ask(server, "10.0.0.2:7072", "OpenSegmentVerbs", None, ())
    assert isinstance(caught.value, NoAnswerError) == issubclass(refusal, NoAnswerError)
    verbs.close()
    client.close()


def test_what_is_freed_is_freed_after_its_last_user() -> None:
    """Nobody is let in once it is to end; it ends when the last one has left, or says that it has not."""
    users = Users("it")
    users.enter()
    with users.using():
        assert not users.end(0.0)
        with pytest.raises(TransportError, match="it is closed"):
            users.enter()
    ended: list[bool] = []
    ending = threading.Thread(target=lambda: ended.append(users.end(_DEADLINE_S)))
    ending.start()
    assert not ended
    users.leave()
    ending.join()
    assert ended == [True]


class CountedDomain(FakeDomain):
    """Frees as Domain does."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__()
        self.users = Users("the domain")
        self.happened = happened

    def close(self) -> None:
        assert self.users.end(_DEADLINE_S)
        self.happened.append("freed")


@pytest.mark.parametrize("at_exit", [False, True])
def test_close_waits_for_a_queue_pair_that_is_being_made(at_exit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its domain is freed after it, and not under it; also where the process ends and nobody has closed the client."""
    happened: list[str] = []
    domain, making, go = CountedDomain(happened), threading.Event(), threading.Event()

    class SlowQueue:
        def __init__(self, domain: CountedDomain) -> None:
            domain.users.enter()
            making.set()
            assert go.wait(_DEADLINE_S)
            happened.append("made")

        def end(self) -> End:
            return End(17, bytes(16), 0, 5, 4096, 16)

        def close(self) -> None:
            happened.append("closed")
            domain.users.leave()

    monkeypatch.setattr("smb.transport.verbs.transport.Device", lambda _settings: "none0")
    monkeypatch.setattr("smb.transport.verbs.transport.Domain", lambda _device: domain)
    monkeypatch.setattr("smb.transport.verbs.transport.QueuePair", SlowQueue)
    client = EngineClient(12345)
    verbs = Verbs(
        client,
        Links(client, lambda server: None, ClientTokens(_never), ClientTls(None)),
        12345,
        Settings(device="none0"),
    )
    told: list[str] = []

    def connect() -> None:
        try:
            verbs._carry(verbs._server("a"), ServerAddress("127.0.0.1:1", "", 1, "127.0.0.1:2"), 1000, _never)
        except NoPathError as error:
            told.append(str(error))

    connecting = threading.Thread(target=connect)
    connecting.start()
    assert making.wait(_DEADLINE_S)
    closing = threading.Thread(target=verbs._parts.close if at_exit else verbs.close)
    closing.start()
    wait_for(lambda: verbs._parts.closed, "close")
    assert happened == []
    go.set()
    closing.join()
    connecting.join()
    assert happened == ["made", "closed", "freed"]
    assert told == ["the client is closed"]
    with pytest.raises(NoPathError, match="closed"):
        verbs.memory()
    client.close()


def test_an_interrupt_while_a_server_is_greeted_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C out of the HELLO: our end of the queue pair is closed, and the server is told to close its own."""

    class Queue:
        def __init__(self, _domain: object) -> None:
            pass

        def end(self) -> End:
            return End(17, bytes(16), 0, 5, 4096, 16)

        def connect(self, _end: End) -> None:
            pass

    class Carrier(Echo):
        def __init__(self, *_: object) -> None:
            super().__init__()
            self.engine_end = self.theirs.dup()

    asked: list[str] = []

    def answer(_server: object, _address: str, method: str, _request: object, *_: object) -> Any:
        asked.append(method)
        return SimpleNamespace(server=pb.VerbsEnd(number=1, gid=bytes(16), mtu=4096, reads=16), slots=[])

    def greet(fd: int, _ms: int) -> NoReturn:
        os.close(fd)
        raise KeyboardInterrupt

    monkeypatch.setattr("smb.transport.verbs.transport.Device", lambda _settings: "none0")
    monkeypatch.setattr("smb.transport.verbs.transport.Domain", lambda _device: FakeDomain())
    monkeypatch.setattr("smb.transport.verbs.transport.QueuePair", Queue)
    monkeypatch.setattr("smb.transport.verbs.transport.Carrier", Carrier)
    client = EngineClient(12345)
    verbs = Verbs(
        client,
        Links(client, lambda server: None, ClientTokens(_never), ClientTls(None)),
        12345,
        Settings(device="none0"),
    )
    monkeypatch.setattr(verbs, "_ask", answer)
    server: Any = verbs._server("a")
    with pytest.raises(KeyboardInterrupt):
        verbs._carry(server, ServerAddress("127.0.0.1:1", "", 1, "127.0.0.1:2"), 1000, greet)
    assert asked == ["ConnectVerbs", "CloseVerbs"]
    assert server.carrier.closed
    verbs.close()
    client.close()
    server.carrier.theirs.close()


def test_a_connection_that_comes_after_the_end_is_closed() -> None:
    """The thread has ended: nobody would move it, and nobody close it."""
    progress, late = ProgressThread("test"), Echo()
    progress.close()
    progress.add(late)
    assert late.closed
    late.theirs.close()


class Channel:
    """Stands for a completion channel; `told` is its descriptor, where pyverbs says it."""

    def __init__(self, told: int | None = None) -> None:
        if told is not None:
            self.fd = told
        self.open = True

    def close(self) -> None:
        self.open = False


def test_a_completion_channel_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another library opens or closes one at that moment it is made again; where pyverbs tells, that is it."""
    looks = iter([{3}, {3, 7, 8}, {3, 8}, {8}, {8}, {8, 5}])
    monkeypatch.setattr(queues, "_event_fds", lambda: next(looks))
    made: list[Channel] = []

    def make(_context: object) -> Channel:
        made.append(Channel())
        return made[-1]

    assert queues._completion_channel(make, None) == (made[2], 5)
    assert [one.open for one in made] == [False, False, True]
    monkeypatch.setattr(queues, "_event_fds", lambda: {3})
    told = Channel(9)
    assert queues._completion_channel(lambda _: told, None) == (told, 9)
    with pytest.raises(NoDeviceError, match="another library"):
        queues._completion_channel(make, None)
    assert sum(one.open for one in made) == 1
