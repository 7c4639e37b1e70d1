"""Two copies with credentials: only the server that the coordinator has named may feed a backup, and tokens are of the
epoch of a segment's roles.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import smb
from memserver.engine import Engine, SegmentForm
from memserver.replication import BACKUP, PRIMARY
from smb.call.dispatcher import Dispatcher
from smb.engine import Tls
from smb.security.bond import first_of
from smb.security.credentials import load_directory, server_name
from tests.security.test_tokens import GENERATION, KEY, NOW_MS, Token
from tests.support import second_copy
from tests.support.daemons import tidy, wait_for
from tests.support.raw import Dtype, Frame, Opcode, RawClient, Status

SEGMENT, EPOCH, CHUNK, FEED_LANE = 0x77, 3, 16384, 65535
INSTANCES = (0xA0, 0xA1)


def tls_of(certificates: Path, name: str) -> Tls:
    files = load_directory(certificates / name)
    return Tls(files.ca, files.certificate, files.key)


class Pair:
    """Guarded engines: the primary of server-0, and its backup on server-1, which no connection feeds yet."""

    def __init__(self, directory: Path, certificates: Path) -> None:
        self.certificates = certificates
        self.engines = [Engine(instance, 1, 1 << 24) for instance in INSTANCES]
        self.ports = []
        for number, engine in enumerate(self.engines):
            engine.guard()
            engine.set_keys({GENERATION: KEY}, NOW_MS)
            engine.use_tls(tls_of(certificates, f"server-{number}"))
            form = SegmentForm(SEGMENT, EPOCH, Dtype.FLOAT32, CHUNK, CHUNK)
            engine.create_segment(directory / str(number), form, bundle_id=0)
            engine.copies.serve_until(time.clock_gettime(time.CLOCK_BOOTTIME) + 600)
            self.ports.append(engine.listen_tcp("127.0.0.1", 0))
        self.primary, self.backup = self.engines
        self.backup.copies.set_replica(SEGMENT, EPOCH, BACKUP, "server-0")
        self.primary.copies.set_replica(SEGMENT, EPOCH, PRIMARY, "server-1")

    def feed(self, shown: str = "server-0", expected: str = "server-1", *, plain: bool = False) -> None:
        connection = socket.create_connection(("127.0.0.1", self.ports[1]))
        connection.setblocking(False)
        tls = None if plain else tls_of(self.certificates, shown)
        self.primary.copies.feed(SEGMENT, EPOCH, connection.detach(), INSTANCES[1], tls, server_name(expected))

    def refused(self) -> str:
        (status,) = self.primary.copies.replicas()
        return status.refused

    def connect(self, who: str | None, server: int = 1) -> RawClient:
        """Inside TLS with that certificate; None: without TLS."""
        client = RawClient(self.ports[server])
        if who is not None:
            context = ssl.create_default_context(cafile=self.certificates / "client" / "ca.pem")
            context.load_cert_chain(self.certificates / who / "cert.pem", self.certificates / who / "key.pem")
            client.certificate = first_of((self.certificates / who / "cert.pem").read_bytes())
            client.socket = context.wrap_socket(client.socket, server_hostname=server_name(f"server-{server}"))
        client.session = secrets.randbits(63)
        return client

    def changes(self) -> bytes:
        """What the backup has, read by a client of its own once it is promoted in the next epoch."""
        self.backup.copies.set_replica(SEGMENT, EPOCH + 1, PRIMARY, "")
        with self.connect("client") as client:
            authorize(client, EPOCH + 1)
            reply, found = client.ask(
                Frame(Opcode.READ, Dtype.FLOAT32, lane=256, epoch=EPOCH + 1, segment=SEGMENT, length=CHUNK)
            )
            assert reply.status == Status.OK
            return found


def authorize(client: RawClient, epoch: int, *, server: int = 1) -> int:
    hello, _ = client.ask(Frame(Opcode.HELLO, lane=256))
    assert hello.status == Status.OK
    token = Token(client.session, segment=SEGMENT, epoch=epoch)
    payload = token.payload(hello.offset, instance=INSTANCES[server], lane=256, bond=client.bond(hello))
    reply, _ = client.ask(Frame(Opcode.AUTHORIZE, lane=256, segment=SEGMENT, epoch=epoch), payload)
    return reply.status


@pytest.fixture
def pair(certificates: Path) -> Iterator[Pair]:
    directory = Path("/dev/shm") / f"smb-test-{secrets.token_hex(6)}"
    directory.mkdir()
    made = Pair(directory, certificates)
    yield made
    for engine in made.engines:
        engine.close()
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def write(client: RawClient, epoch: int = EPOCH) -> None:
    """Without waiting for the answer: that comes once the backup has it."""
    client.send(
        Frame(Opcode.WRITE, Dtype.FLOAT32, lane=256, epoch=epoch, segment=SEGMENT, length=8), b"\0\0\x80?\0\0\x80?"
    )


def test_the_named_server_feeds_the_backup(pair: Pair) -> None:
    """Over TLS, with both names right: a client's change is answered once it is there."""
    with pair.connect("client", 0) as client:
        assert authorize(client, EPOCH, server=0) == Status.OK
        write(client)
        pair.feed()
        assert client.receive()[0].status == Status.OK
    assert pair.refused() == ""
    assert pair.changes()[:8] == b"\0\0\x80?\0\0\x80?"


@pytest.mark.parametrize(
    ("shown", "expected", "why"),
    [
        ("server-2", "server-1", "DENIED"),  # the coordinator named another one
        ("client", "server-1", "DENIED"),
        ("operator", "server-1", "DENIED"),
        ("coordinator", "server-1", "UNTRUSTED"),  # of no role that uses data ports
        ("other/operator", "server-1", "UNTRUSTED"),  # of another authority
        ("server-0", "server-2", "UNTRUSTED"),  # the backup is not whom the primary was told
    ],
)
def test_who_may_not_feed(pair: Pair, shown: str, expected: str, why: str) -> None:
    """Neither gets anywhere, and the primary's changes stay where they are until the right one is fed."""
    with pair.connect("client", 0) as client:
        assert authorize(client, EPOCH, server=0) == Status.OK
        write(client)
        pair.feed(shown, expected)
        wait_for(lambda: pair.refused().upper() == why, why)
        (status,) = pair.backup.copies.replicas()
        assert status.broken_ms > 0
        assert not any(pair.changes())


def test_nobody_feeds_without_tls(pair: Pair) -> None:
    """A guarded server hands changes to nobody whom it does not know."""
    with pytest.raises(smb.Error, match="forward changes"):
        pair.feed(plain=True)


REPLICATE = Frame(Opcode.REPLICATE, lane=FEED_LANE, epoch=EPOCH, segment=SEGMENT)


def part(op: int, payload: bytes = b"", **fields: int) -> tuple[Frame, bytes]:
    frame = Frame(Opcode.COPY, lane=FEED_LANE, epoch=EPOCH, segment=SEGMENT, op=op)
    return replace(frame, **fields), payload


FEEDS = {
    "replicate": (REPLICATE, b""),
    "a change": (
        Frame(Opcode.WRITE, Dtype.FLOAT32, lane=FEED_LANE, epoch=EPOCH, segment=SEGMENT, length=8), b"\1" * 8,
    ),
    "a refusal": (Frame(Opcode.REFUSED, lane=FEED_LANE, epoch=EPOCH, segment=SEGMENT), b""),
    "a chunk": part(0, b"\1" * CHUNK, dtype=Dtype.FLOAT32, length=CHUNK),
    "a record": part(1, bytes(128)),
    "a counter": part(2, argument=5),
}  # fmt: skip


@pytest.mark.parametrize("who", ["server-2", "client", "reader", "operator"])
def test_a_feeder_by_hand(pair: Pair, who: str) -> None:
    """HELLO on the servers' lane with the segment's id, then each frame of a feed or copy: none does anything. Another
    server is let in, and refused; a client is not let in.
    """
    for name, (frame, payload) in FEEDS.items():
        with pair.connect(who) as client:
            client.session = SEGMENT
            hello, _ = client.ask(Frame(Opcode.HELLO, lane=FEED_LANE))
            if who != "server-2":
                assert hello.status == Status.DENIED, name
                assert client.closed(), name
                continue
            assert hello.status == Status.OK
            assert client.ask(frame, payload)[0].status == Status.DENIED, name
            if name != "replicate":
                assert client.ask(REPLICATE)[0].status == Status.DENIED, name  # nor later
            assert client.closed(), name
    assert not any(pair.changes())


@pytest.mark.parametrize("who", [None, "coordinator", "other/operator", "expired"])
def test_a_stranger_feeds_nothing(pair: Pair, who: str | None) -> None:
    """Without TLS, or with a certificate that no user of data has."""
    with contextlib.suppress(ConnectionError, ssl.SSLError, AssertionError), pair.connect(who) as client:
        client.session = SEGMENT
        for frame, payload in ((Frame(Opcode.HELLO, lane=FEED_LANE), b""), *FEEDS.values()):
            client.send(frame, payload)
        assert client.closed()
    (status,) = pair.backup.copies.replicas()
    assert status.broken_ms > 0
    assert not any(pair.changes())


def test_the_named_server_feeds_what_it_was_named_for(pair: Pair, tmp_path: Path) -> None:
    """Not another segment, not in another epoch, not over a client's lane; and no more once roles have changed."""
    path = Path("/dev/shm") / f"smb-test-{secrets.token_hex(6)}"
    other = SegmentForm(SEGMENT + 1, EPOCH, Dtype.FLOAT32, CHUNK, CHUNK)
    pair.backup.create_segment(path, other, bundle_id=0)
    pair.backup.copies.set_replica(SEGMENT + 1, EPOCH, BACKUP, "server-2")
    with pair.connect("server-0") as client:  # on a client's lane it needs a client's token, as its relay does
        assert client.ask(Frame(Opcode.HELLO, lane=256))[0].status == Status.OK
        for frame, payload in (
            (Frame(Opcode.READ, Dtype.FLOAT32, lane=256, epoch=EPOCH, segment=SEGMENT, length=8), b""),
            (replace(FEEDS["a change"][0], lane=256), FEEDS["a change"][1]),
            (replace(REPLICATE, lane=256), b""),
        ):
            assert client.ask(frame, payload)[0].status == Status.DENIED
    with pair.connect("server-0") as client:
        client.session = SEGMENT
        assert client.ask(Frame(Opcode.HELLO, lane=FEED_LANE))[0].status == Status.OK
        assert client.ask(replace(REPLICATE, epoch=EPOCH + 1))[0].status == Status.STALE_EPOCH
        change, payload = FEEDS["a change"]
        assert client.ask(change, payload)[0].status == Status.DENIED  # it was not taken yet
        assert client.ask(REPLICATE)[0].status == Status.OK
        assert client.ask(change, payload)[0].status == Status.OK
        assert client.ask(replace(change, segment=SEGMENT + 1), payload)[0].status == Status.DENIED
        copied, image = FEEDS["a chunk"]
        assert client.ask(replace(copied, segment=SEGMENT + 1), image)[0].status == Status.DENIED
        pair.backup.copies.set_replica(SEGMENT, EPOCH + 1, BACKUP, "server-2")
        client.send(replace(change, epoch=EPOCH + 1), payload)
        assert client.closed()
    pair.backup.delete_segment(SEGMENT + 1)


def test_a_feeders_lane_is_not_taken_over(pair: Pair) -> None:
    """Another server that says HELLO as the feeder does ends none of its connections."""
    with pair.connect("server-0") as right, pair.connect("server-2") as wrong:
        right.session = wrong.session = SEGMENT
        for client in (right, wrong):
            assert client.ask(Frame(Opcode.HELLO, lane=FEED_LANE))[0].status == Status.OK
        assert right.ask(REPLICATE)[0].status == Status.OK
        assert wrong.ask(REPLICATE)[0].status == Status.DENIED
        assert right.ask(*FEEDS["a change"])[0].status == Status.OK


def test_tokens_are_of_an_epoch(pair: Pair) -> None:
    """One of another epoch opens nothing at the primary, and one that was good is refused after a change of roles; the
    one that is issued then works.
    """
    read = Frame(Opcode.READ, Dtype.FLOAT32, lane=256, epoch=EPOCH, segment=SEGMENT, length=8)
    for epoch in (EPOCH - 1, EPOCH + 1):
        with pair.connect("client", 0) as client:
            assert authorize(client, epoch, server=0) == Status.OK
            for asked in (EPOCH, epoch):
                assert client.ask(replace(read, epoch=asked))[0].status == Status.STALE_EPOCH
    with pair.connect("client", 0) as client, pair.connect("client", 0) as later:
        assert authorize(client, EPOCH, server=0) == Status.OK
        assert client.ask(read)[0].status == Status.OK
        pair.primary.copies.set_replica(SEGMENT, EPOCH + 1, PRIMARY, "")
        for asked in (EPOCH, EPOCH + 1):
            assert client.ask(replace(read, epoch=asked))[0].status == Status.STALE_EPOCH
        client.send(replace(FEEDS["a change"][0], lane=256, epoch=EPOCH + 1), b"\1" * 8)
        assert client.receive()[0].status == Status.STALE_EPOCH
        assert authorize(later, EPOCH + 1, server=0) == Status.OK
        reply, found = later.ask(replace(read, epoch=EPOCH + 1))
        assert (reply.status, found) == (Status.OK, bytes(8))


ConnectAs = Callable[..., smb.Client]


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_clients_go_on_with_new_tokens(certificates: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server and its memory vanish: no call of a writer or a reader fails, and the copies are made anew over TLS."""
    monkeypatch.setenv("SMB_CREDENTIALS", str(certificates / "operator"))
    with (
        smb.LocalCluster(servers=3, capacity="16MiB", credentials=certificates) as cluster,
        tidy(cluster, 60.0) as ours,
    ):
        buffer = ours.create("w", 300_000, "int64", stripe="64KiB", replicas=2)
        ours.create("source", like=buffer, replicas=2).fill(10)
        who = {"transport": way, "timeout": 60.0}
        with (
            smb.connect(cluster.address, credentials=certificates / "client", **who) as writer,  # type: ignore[arg-type]
            smb.connect(cluster.address, credentials=certificates / "reader", **who) as reader,  # type: ignore[arg-type]
        ):
            theirs, seen = writer.open("w"), reader.open("w")
            ones = np.ones(300_000, np.int64)
            theirs.accumulate(ones)
            assert (seen.read() == 1).all()
            with pytest.raises(smb.PermissionDeniedError):
                seen.write(ones)
            # Its servers combine the two: its token for the source is shown where the buffer is.
            with monkeypatch.context() as patched:
                patched.setattr(Dispatcher, "_bring", None)
                theirs.accumulate_from(writer.open("source"))
            with pytest.raises(smb.PermissionDeniedError):
                seen.accumulate_from(reader.open("source"))
            assert (seen.read() == 11).all()
            victim = next(each for each in cluster.servers if each.name == buffer.layout.segments[0].server)
            victim.kill()
            second_copy.lose(cluster.memory_directory, victim.name)
            theirs.accumulate(ones)
            theirs.accumulate_from(writer.open("source"))
            assert (seen.read() == 22).all()
            with pytest.raises(smb.PermissionDeniedError):
                seen.accumulate(ones)
            wait_for(lambda: second_copy.are_whole(ours), "two copies of each segment", 60.0)
            theirs.accumulate(ones)
            theirs.accumulate_from(writer.open("source"))
            assert (seen.read() == 33).all()
        assert second_copy.check_copies(ours, cluster.memory_directory) == 2 * len(buffer.layout.segments)


def test_a_server_without_tls_is_no_place_for_copies(certificates: Path) -> None:
    """Nothing is forwarded in the clear: create says which server has to be started anew, and how."""
    with (
        smb.LocalCluster(servers=2, capacity="16MiB", credentials=certificates, data_tls="off") as cluster,
        smb.connect(cluster.address, credentials=certificates / "client") as client,
    ):
        with pytest.raises(smb.InvalidArgumentError, match=r"\(--data-tls off\): server-0, server-1"):
            client.create("w", 100, replicas=2)
        assert client.create("w", 100).info.replicas == 1


def test_a_step_goes_on_with_newer_tokens_of_its_state(certificates: Path) -> None:
    """If roles change, the link to the weights gets a newer token. Nobody has asked for one of the state since, and its
    old one is shown again.
    """
    with (
        smb.LocalCluster(servers=3, capacity="32MiB", credentials=certificates) as cluster,
        smb.connect(cluster.address, credentials=certificates / "client", timeout=15) as client,
    ):
        weights = client.create("weights", 1000, replicas=2)
        client.create("gradient", like=weights, replicas=2).fill(1)
        gradient, state = client.open("gradient"), client.create("m", state_of=weights)
        turns = client.create("turns", state_of=weights)
        weights.apply("momentum", gradient, state, lr=1, mu=1)
        for number in (2, 3, 4):
            place = client.open("weights").layout.segments[0]
            name = place.server if number == 3 else place.backup
            (lost,) = (each for each in cluster.servers if each.name == name)
            lost.kill()
            second_copy.lose(cluster.memory_directory, name)
            with turns.lock(ttl=60, timeout=15) as lock:
                weights.apply("momentum", gradient, state, lr=1, mu=1, fence=lock)
            assert (state.read() == number).all()
            wait_for(lambda name=name: second_copy.are_whole(client, name), "two copies of each segment")
            lost.start()
        assert (weights.read() == -10).all()
