"""Access as users meet it: clients with certificates on real daemons."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.control import Coordinator
from smb.credentials import is_loopback, load_directory
from smb.proto import control_pb2 as pb
from tests.support.daemons import wait_for

ConnectAs = Callable[..., smb.Client]


@pytest.mark.parametrize("transport", ["shm", "tcp", "auto"])
def test_a_client_does_all_that_there_is(connect_as: ConnectAs, transport: str) -> None:
    """With a client's certificate every call works as without credentials, over each transport and over two servers."""
    client = connect_as("client", transport)
    buffer = client.create("all", (200_000,), servers=2)
    other = client.create("other", like=buffer)
    buffer.write(np.ones(200_000, dtype="float32"))
    other.fill(2)
    buffer.accumulate(np.ones(200_000, dtype="float32"), wire="int8")
    buffer.accumulate_from(other)
    assert buffer.read().sum() == 800_000
    states = [client.create(f"state-{index}", like=buffer) for index in range(2)]
    buffer.apply("adam", other, *states, lr=0.1, step=1)
    with buffer.lock() as lock:
        buffer.write(np.zeros(200_000, dtype="float32"), fence=lock)
    counter = client.create("counter", (1,), dtype="int64")
    assert [counter.fetch_add(0, 3), counter.fetch_add(0, 3)] == [0, 3]
    assert client.barrier("b", 1) == 0
    with client.lock("l"):
        pass
    versions = client.create("versions", (10,), versions=2)
    assert versions.publish(np.ones(10, dtype="float32")) == 1
    assert versions.wait(1) == 1
    assert versions.read().sum() == 10


def test_a_reader_only_reads(connect_as: ConnectAs) -> None:
    """A reader reads, follows versions, and maps nothing; each change is refused, and applied nowhere."""
    writer, reader = connect_as("client"), connect_as("reader")
    writer.create("plain", (8,)).fill(4)
    versions = writer.create("versions", (8,), versions=2)
    versions.publish(np.full(8, 5, dtype="float32"))
    plain, followed = reader.open("plain"), reader.open("versions")
    assert plain.read().sum() == 32
    assert set(plain.transports) == {"tcp"}
    assert followed.wait(1) == 1
    assert followed.read().sum() == 40
    ones = np.ones(8, dtype="float32")
    for change in (
        lambda: plain.write(ones),
        lambda: plain.accumulate(ones),
        lambda: plain.fill(0),
        lambda: followed.publish(ones),
        lambda: reader.create("mine", (8,)),
        lambda: reader.delete("plain"),
        lambda: reader.lock("l").__enter__(),
        lambda: reader.barrier("b", 1),
        lambda: plain.lock(timeout=5).__enter__(),
    ):
        with pytest.raises(smb.PermissionDeniedError):
            change()
    with pytest.raises(smb.TransportError, match="may only read is not given the memory"):
        connect_as("reader", "shm").open("plain").read()
    assert writer.open("plain").read().sum() == 32


def test_a_session_is_its_clients(guarded: smb.LocalCluster, certificates: Path) -> None:
    """Who knows another session's id can neither end it, nor renew it, nor get tokens for it."""
    mine = Coordinator(guarded.address, load_directory(certificates / "client"))
    thief = Coordinator(guarded.address, load_directory(certificates / "operator"))
    session_id, _, _ = mine.open_session("mine", 5)
    thief.open_session("thief", 5)
    for theft in (
        lambda: thief.close_session(session_id, 5),
        lambda: thief.renew_session(session_id, "thief", 5),
    ):
        with pytest.raises(smb.PermissionDeniedError, match="another client's"):
            theft()
    thief._session_id = session_id
    for kind in (pb.BUFFER, pb.LOCK):
        with pytest.raises(smb.PermissionDeniedError, match="another client's"):
            thief.create_buffer(pb.CreateBufferRequest(name="x", kind=kind, shape=[1], dtype="int64"), 5)
    with pytest.raises(smb.PermissionDeniedError, match="another client's"):
        thief.open_buffer("x", 0, 5)
    mine.renew_session(session_id, "mine", 5)
    mine.close_session(session_id, 5)
    for coordinator in (mine, thief):
        coordinator.close()


@pytest.fixture(params=["8"])
def short(certificates: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> smb.LocalCluster:
    """A cluster whose tokens live for so many seconds."""
    monkeypatch.setenv("SMB_COORDINATOR_TOKEN_LIFETIME", str(request.param))
    return smb.LocalCluster(servers=1, capacity="16MiB", credentials=certificates)


def test_tokens_are_renewed_and_daemons_restarted(short: smb.LocalCluster, certificates: Path) -> None:
    """Work goes on past the life of tokens, over the restart of a memory server (which hears of its keys again) and of
    the coordinator (which makes the same ones).
    """
    with short as cluster, smb.connect(cluster.address, transport="tcp", credentials=certificates / "client") as client:
        counter = client.create("counter", (1,), dtype="int64")
        done, stop, failures = [0], threading.Event(), []

        def count() -> None:
            try:
                while not stop.is_set():
                    counter.fetch_add(0, 1)
                    done[0] += 1
            except smb.Error as error:
                failures.append(error)

        thread = threading.Thread(target=count)
        thread.start()

        def goes_on(calls: int) -> None:
            goal = done[0] + calls
            wait_for(lambda: failures or done[0] >= goal, "more calls")
            assert not failures

        first = client.coordinator.tokens._opened[pb.BUFFER, "counter"]
        wait_for(lambda: client.coordinator.tokens._opened[pb.BUFFER, "counter"] is not first, "renewed token")
        cluster.servers[0].kill()
        cluster.servers[0].start()
        goes_on(100)
        cluster.coordinator.kill()
        cluster.coordinator.start()
        second = client.coordinator.tokens._opened[pb.BUFFER, "counter"]
        wait_for(lambda: client.coordinator.tokens._opened[pb.BUFFER, "counter"] is not second, "renewed token")
        goes_on(100)
        stop.set()
        thread.join()
        assert not failures
        assert counter.fetch_add(0, 0) == done[0]


@pytest.mark.parametrize("short", ["2"], indirect=True)
def test_what_expires_is_refused(short: smb.LocalCluster, certificates: Path) -> None:
    """A client that renews nothing (its thread is dead, or it was stopped) gets nothing after the token's life; opening
    again gives it a new one.
    """
    with short as cluster, smb.connect(cluster.address, transport="tcp", credentials=certificates / "client") as client:
        buffer = client.create("b", (4,))
        buffer.fill(1)
        client._stop.set()
        client._renewal.join()

        def refused() -> bool:
            try:
                buffer.read()
            except smb.PermissionDeniedError:
                return True
            return False

        wait_for(refused, "end of the token")
        assert client.open("b").read().sum() == 4


def test_no_secret_is_told(certificates: Path, tmp_path: Path) -> None:
    """Neither logs, nor pages, nor errors, nor command lines have a key, a session's secret or a token in them."""
    with smb.LocalCluster(servers=2, capacity="16MiB", credentials=certificates, log_level="debug") as cluster:
        seen = ""
        with smb.connect(cluster.address, transport="tcp", credentials=certificates / "client") as client:
            client.create("b", (4,)).fill(1)
            tokens = client.coordinator.tokens
            told = [token.secret for token in tokens._tokens.values()]
            told.append(client.coordinator._session_secret)
            assert len(told) == 2
            assert all(len(secret) == 32 for secret in told)
            seen += repr(tokens._tokens) + repr(load_directory(certificates / "client"))
            with pytest.raises(smb.PermissionDeniedError) as denied:
                smb.connect(cluster.address, credentials=certificates / "server-0")
            seen += str(denied.value)
        import urllib.request

        for daemon in (cluster.coordinator, *cluster.servers):
            for page in ("metrics", "healthz"):
                with urllib.request.urlopen(f"http://{daemon.metrics}/{page}", timeout=5) as answer:
                    seen += answer.read().decode()
            seen += Path(f"/proc/{daemon.pid}/cmdline").read_text()
            environment = Path(f"/proc/{daemon.pid}/environ").read_text()
            seen += environment
        logs = [daemon.log for daemon in (cluster.coordinator, *cluster.servers)]
        seen += "".join(log.read_text(errors="replace") for log in logs)
    assert "registered" in seen
    for path in certificates.rglob("*key.pem"):
        lines = path.read_text().splitlines()[1:-1]
        assert not any(line in seen for line in lines), path
    for secret in told:
        for form in (secret.hex(), repr(secret)[2:-1], str(list(secret))):
            assert form not in seen


def test_public_without_credentials_does_not_start() -> None:
    """A daemon that other machines could reach says why it does not start, and what to do; with --insecure it does."""
    for listen in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(smb.Error, match=r"coordinator at .*, without credentials.*--insecure"):
            smb.LocalCluster(servers=1, capacity="16MiB", listen=listen).start()
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster:
        cluster.servers[0].kill()
        options = cluster.servers[0]._options
        options["listen"] = "0.0.0.0:0"
        with pytest.raises(smb.Error, match=r"memory server at .*, without credentials.*--insecure"):
            cluster.servers[0].start()
        options["insecure"] = ""
        cluster.servers[0].start()


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("127.8.9.10", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("::ffff:10.0.0.1", False), ("no.such.host.invalid", True)],
)  # fmt: skip
def test_what_is_loopback(host: str, alone: bool) -> None:
    """What can't be told to be this machine alone counts as public."""
    assert is_loopback(host) is alone


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda place: (place / "key.pem").unlink(), "cannot read .*key.pem"),
        (lambda place: (place / "key.pem").chmod(0o604), "anybody may read the key"),
        (lambda place: (place / "ca.pem").write_text("nothing"), "ca.pem is not in PEM form"),
        (lambda place: (place / "key.pem").write_bytes((place.parent / "other.pem").read_bytes()), "do not belong"),
    ],
)
def test_bad_credentials_say_what_is_wrong(
    certificates: Path, tmp_path: Path, spoil: Callable[[Path], None], told: str
) -> None:
    """Where they are incomplete, open to all, or not of one another, the file is named and nothing is tried."""
    place = tmp_path / secrets.token_hex(4)
    place.mkdir()
    (tmp_path / "other.pem").write_bytes((certificates / "reader" / "key.pem").read_bytes())
    for file in (certificates / "client").iterdir():
        (place / file.name).write_bytes(file.read_bytes())
        (place / file.name).chmod(file.stat().st_mode)
    load_directory(place)
    spoil(place)
    with pytest.raises(smb.InvalidArgumentError, match=told) as refused:
        smb.connect("127.0.0.1:1", credentials=place)
    assert not re.search("[A-Za-z0-9+/]{40}", str(refused.value))
