"""Access as users meet it: clients with certificates on real daemons."""

from __future__ import annotations

import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.engine import EngineError, Lane, Status
from smb.rpc import control_pb2 as pb
from smb.rpc.coordinator_client import Coordinator
from smb.security.credentials import is_loopback, load_directory
from smb.security.lab_ca import Authority, Holder, make_set
from smb.security.roles import Role
from tests.support import stem
from tests.support.daemons import wait_for

ConnectAs = Callable[..., smb.Client]
LIFETIME_S = 2  # of tokens that a test sees expire


@pytest.mark.parametrize("transport", ["shm", "tcp"])
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
    with pytest.raises(smb.TransportError, match="may only read the segment"):
        connect_as("reader", "shm").open("plain").read()
    assert writer.open("plain").read().sum() == 32


def test_a_reader_sees_who_trains(connect_as: ConnectAs) -> None:
    """It may not ask for leases: a worker that holds its slot counts as alive, one that left has finished."""
    reader, values = connect_as("reader"), np.zeros(8, np.float32)
    with smb.train.join(connect_as("client"), "run", values, smb.train.SEASGD()):
        assert [worker.alive for worker in smb.train.status(reader, "run").workers] == [True]
    assert [(worker.alive, worker.finished) for worker in smb.train.status(reader, "run").workers] == [(False, True)]


@pytest.mark.parametrize("count", [8, 700_001])
def test_a_readers_change_is_refused_in_plain_words(connect_as: ConnectAs, count: int) -> None:
    """The error names the buffer and the right, and says that nothing was applied, however many parts were sent."""
    array = np.ones(count, "int64")
    written = connect_as("client").create("weights", count, "int64")
    buffer = connect_as("reader").open("weights")
    said = "buffer 'weights': memory server .* the session may only read the buffer; nothing was applied$"
    for change in (
        lambda: buffer.write(array),
        lambda: buffer.accumulate(array),
        lambda: buffer.fill(1),
        lambda: buffer.fetch_add(0, 1),
    ):
        with pytest.raises(smb.PermissionDeniedError, match=said):
            change()
    assert not written.read().any()


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
        with pytest.raises(smb.PermissionDeniedError, match="this session belongs to another client"):
            theft()
    thief._session_id = session_id
    for kind in (pb.BUFFER, pb.LOCK):
        with pytest.raises(smb.PermissionDeniedError, match="this session belongs to another client"):
            thief.create_buffer(pb.CreateBufferRequest(name="x", kind=kind, shape=[1], dtype="int64"), 5)
    with pytest.raises(smb.PermissionDeniedError, match="this session belongs to another client"):
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

        opened, key = client._session.coordinator.tokens._opened, (pb.BUFFER, counter.info.id)
        first = opened[key]
        wait_for(lambda: opened[key] is not first, "renewed token")
        cluster.servers[0].kill()
        cluster.servers[0].start()
        goes_on(100)
        cluster.coordinator.kill()
        cluster.coordinator.start()
        second = opened[key]
        wait_for(
            lambda: opened[key] is not second,
            "renewed token",
        )
        goes_on(100)
        stop.set()
        thread.join()
        assert not failures
        assert counter.fetch_add(0, 0) == done[0]


def stopped_renewing(client: smb.Client) -> smb.Client:
    """Its thread is dead, as of a process that was stopped: from here on its tokens run out."""
    client._session._stop.set()
    client._session._renewal.join()
    return client


@pytest.mark.parametrize("short", [LIFETIME_S], indirect=True)
def test_what_expires_is_refused(short: smb.LocalCluster, certificates: Path) -> None:
    """A client that renews nothing gets new tokens by its next call, whatever that is, and no call is made twice;
    without the coordinator, who could be asked whether it still may, it gets nothing.
    """
    with short as cluster, smb.connect(cluster.address, transport="tcp", credentials=certificates / "client") as client:
        values = client.create("values", (40_000,))
        counter = client.create("counter", (2,), dtype="int64")
        published = client.create("published", (4,), versions=2)
        lock = client.lock("lock", ttl=60)
        published.publish(np.zeros(4, np.float32))
        for use in (values.read, lambda: counter.fetch_add(0, 1), published.read, lock.acquire, lock.release):
            use()
        stopped_renewing(client)
        secrets = dict(client._session.coordinator.tokens._tokens)

        def expired() -> bool:
            place = values.layout.segments[0]
            link = client._session._links._table[place.server, Lane.TCP_DATA].link()
            try:
                link.authorize(secrets[place.id], 1000)
            except EngineError as error:
                return error.status is Status.DENIED
            return False

        for _ in range(2):
            wait_for(expired, "end of the tokens")
            secrets = dict(client._session.coordinator.tokens._tokens)
            values.fill(1)
            values.accumulate(np.ones(40_000, np.float32))
            assert values.read().sum() == 80_000
            before = counter.fetch_add(1, 5)
            assert counter.fetch_add(1, 0) == before + 5
            published.publish(np.ones(4, np.float32))
            assert published.read().sum() == 4
            with lock:
                pass
            secrets = dict(client._session.coordinator.tokens._tokens)
        client.open("published")  # this token is shown by the next call, which is too late
        last = time.monotonic()
        cluster.coordinator.kill()
        wait_for(lambda: time.monotonic() > last + LIFETIME_S + 0.5 and expired(), "end of the tokens")
        for refused in (
            values.read,
            lambda: counter.fetch_add(1, 1),
            lambda: published.publish(np.ones(4, np.float32)),
        ):
            with pytest.raises(smb.PermissionDeniedError):
                refused()


@pytest.mark.parametrize("short", [LIFETIME_S], indirect=True)
def test_renamed_buffers_keep_their_tokens(short: smb.LocalCluster, certificates: Path) -> None:
    """Handles of buffers that change their names with each other work past the life of the first tokens; who opens
    again and again does not keep what is older from being renewed.
    """
    with short as cluster, smb.connect(cluster.address, transport="tcp", credentials=certificates / "client") as client:
        one, other = client.create("team/one", (4,)), client.create("team/other", (4,))
        one.fill(1)
        other.fill(2)
        lock = one.lock(ttl=60)
        with lock:
            pass
        tokens = client._session.coordinator.tokens
        seen: dict[int, set[float]] = {one.info.id: set(), other.info.id: set()}
        client.rename("team/one", "team/aside")
        client.rename("team/other", "team/one")
        client.rename("team/aside", "team/other")

        def renewed() -> bool:
            client.open("team/one")
            for number, generations in seen.items():
                generations.add(tokens._opened[pb.BUFFER, number].renew_at)
            return all(len(generations) >= 4 for generations in seen.values())

        client._session.coordinator.open_buffer = refused_to_data(client._session.coordinator.open_buffer)  # type: ignore[method-assign]
        wait_for(renewed, "renewed tokens of both")
        assert (one.read().tolist(), other.read().tolist()) == ([1] * 4, [2] * 4)
        with lock:
            pass


def refused_to_data(open_buffer: Any) -> Any:
    """What a client's handles may not do here, so that renewals alone keep them going; opening anew they may."""

    def ask(name: str, wait: float, timeout: float, known_id: int = 0) -> Any:
        assert not known_id, "a handle was refused"
        return open_buffer(name, wait, timeout)

    return ask


def test_a_buffer_that_leaves_the_namespace_is_lost(connect_as: ConnectAs) -> None:
    """Who is limited to a namespace gets no token for what was moved out of it, though it knows its id; what stays in
    it is renamed under its hands.
    """
    everybody, team = connect_as("client"), connect_as("of-team", "tcp")
    moved, kept = team.create("team/moved", (4,)), team.create("team/kept", (4,))
    lost = pb.CreateBufferRequest(name="team/lost", shape=[4], dtype="float32", attempt_id=7)
    team._session.coordinator._opened("CreateBuffer", lost, 5)
    team.rename("team/kept", "team/called")
    everybody.rename("team/moved", "other/moved")
    assert team._session.coordinator.open_buffer("team/kept", 0, 5, kept.info.id).name == "team/called"
    with pytest.raises(smb.PermissionDeniedError, match="that your certificate does not open"):
        team._session.coordinator.open_buffer("team/moved", 0, 5, moved.info.id)
    everybody.rename("team/lost", "other/lost")
    with pytest.raises(smb.PermissionDeniedError, match="that your certificate does not open") as asked_again:
        team._session.coordinator._opened("CreateBuffer", lost, 5)
    assert asked_again.value.outcome == "applied"
    with pytest.raises(smb.NotFoundError):
        team.open("team/moved")


def test_no_secret_is_told(certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither logs, nor pages, nor errors, nor command lines have a key, a session's secret or a token in them."""
    monkeypatch.setattr(smb.cluster, "_launch", stem.program)  # a fork has its stem's command line
    with smb.LocalCluster(servers=2, capacity="16MiB", credentials=certificates, log_level="debug") as cluster:
        seen = ""
        with smb.connect(cluster.address, transport="tcp", credentials=certificates / "client") as client:
            client.create("b", (4,)).fill(1)
            tokens = client._session.coordinator.tokens
            told = [token.secret for token in tokens._tokens.values()]
            told.append(client._session.coordinator._session_secret)
            assert len(told) == 2
            assert all(len(secret) == 32 for secret in told)
            seen += repr(tokens._tokens) + repr(load_directory(certificates / "client"))
            with smb.connect(cluster.address, credentials=certificates / "server-0") as relay:
                with pytest.raises(smb.PermissionDeniedError) as denied:
                    relay.open("b")
                seen += str(denied.value)
        import urllib.request

        for daemon in (cluster.coordinator, *cluster.servers):
            for page in ("metrics", "healthz"):
                with urllib.request.urlopen(f"http://{daemon.metrics}/{page}", timeout=5) as answer:
                    seen += answer.read().decode()
            line = Path(f"/proc/{daemon.pid}/cmdline").read_text()
            assert "--credentials" in line
            seen += line
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


def encrypt(key: Path, *how: str) -> None:
    """Give a key a password, as openssl does."""
    command = ["openssl", *how, "-in", str(key), "-passout", "pass:secret"]
    key.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda place: (place / "key.pem").unlink(), "cannot read .*key.pem"),
        (lambda place: (place / "key.pem").chmod(0o604), "anybody may read the key"),
        (lambda place: (place / "ca.pem").write_text("nothing"), "ca.pem is not in PEM form"),
        (lambda place: (place / "key.pem").write_bytes((place.parent / "other.pem").read_bytes()), "do not belong"),
        (lambda place: encrypt(place / "key.pem", "pkcs8", "-topk8"), "key.pem has a password, which a daemon cannot"),
        (lambda place: encrypt(place / "key.pem", "ec", "-aes128"), "key.pem has a password, which a daemon cannot"),
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


def test_the_directory_of_all_credentials_is_no_credential(certificates: Path) -> None:
    """What `smb certs DIR` made as a whole, in place of DIR/client: the error names what is in it."""
    with pytest.raises(
        smb.InvalidArgumentError, match=r"cannot read .*; name one of its directories: .*client, .*reader"
    ):
        load_directory(certificates)


def test_a_client_takes_its_new_certificate_without_a_restart(tmp_path: Path) -> None:
    """The files are replaced under a client that is connected, here by a reader's: it is one from then on. A call that
    was under way ends over the connection that it began on."""
    roles = (Role.COORDINATOR, Role.CLIENT, Role.OPERATOR)
    make_set(tmp_path, [*(Holder(role, "") for role in roles), Holder(Role.SERVER, "server-0")])
    ours = tmp_path / "client"
    with (
        smb.LocalCluster(servers=1, capacity="32MiB", credentials=tmp_path, session_lease=3.0) as cluster,
        smb.connect(cluster.address, credentials=ours) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(client.open, "late", timeout=60.0)
        client.create("w", 10).write(np.ones(10, np.float32))
        Authority.load(tmp_path / "ca").issue(Holder(Role.READER, ""), tmp_path / "new")
        for name in ("key.pem", "cert.pem"):
            (tmp_path / "new" / name).rename(ours / name)

        def is_reader() -> bool:
            try:
                client.delete("nothing", missing_ok=True)
            except smb.PermissionDeniedError:
                return True
            return False

        wait_for(is_reader, "its new certificate")
        assert client.open("w").read().sum() == 10
        assert not waiting.done()
        with smb.connect(cluster.address, credentials=tmp_path / "operator") as operator:
            operator.create("late", 10)
        assert waiting.result(30).name == "late"
