"""A client asks whose process listens at a Unix socket before it sends anything there: where everybody may write
another user puts one in the place of a server's that is on another host, or gone."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
import smb.transport.base
from smb.engine import EngineClient, EngineError, Lane, Status, believes
from smb.transport.base import is_here
from tests.support.other_users import AS_ROOT, DAEMON, STRANGER, start_as, sticky

# Listens at each path, and tells of every connection what it got there first.
IMPOSTOR = """
import socket, threading
become()
def accept(listener):
    while True:
        connection, _ = listener.accept()
        print("connected" if not connection.recv(1) else "GOT SOMETHING", flush=True)
listeners = []
for path in sys.argv[2:]:
    listeners.append(socket.socket(socket.AF_UNIX))
    listeners[-1].bind(path)
    os.chmod(path, 0o777)
    listeners[-1].listen(64)
for each in listeners:
    threading.Thread(target=accept, args=(each,)).start()
print("ready", flush=True)
"""
SERVER = """
from pathlib import Path
from memserver.engine import Engine
become()
engine = Engine(7, 1, 1 << 20)
engine.listen_unix(Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


def _own(around: Path) -> str:
    place = around / "own"
    place.mkdir(mode=0o700)
    return str(place)


def await_ready(process: subprocess.Popen[str]) -> None:
    """Its first line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", line + process.stdout.read()


def end(process: subprocess.Popen[str]) -> str:
    """What it told since."""
    process.kill()
    return process.communicate()[0]


@pytest.fixture(scope="module")
def robbed() -> Iterator[tuple[smb.LocalCluster, subprocess.Popen[str]]]:
    """Two servers whose sockets are a stranger's: as on a host on which the servers are not."""
    with sticky() as around, smb.LocalCluster(servers=2, capacity="16MiB", memory_dir=_own(around)) as cluster:
        place = cluster.memory_directory
        place.chmod(0o1777)  # so that the stranger's sockets can be where the servers' were
        paths = sorted(place.glob("*.sock"))
        assert len(paths) == 2
        for path in paths:
            path.unlink()
        impostor = start_as(STRANGER, IMPOSTOR, *paths)
        await_ready(impostor)
        yield cluster, impostor
        end(impostor)


@AS_ROOT
@pytest.mark.parametrize("replaced_meanwhile", [False, True])
def test_nothing_is_sent_to_an_impostor(
    robbed: tuple[smb.LocalCluster, subprocess.Popen[str]], replaced_meanwhile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is reached over TCP, with one copy and with two. It is the listener that counts, not the file:
    that may have been another one when it was looked at.
    """
    cluster, impostor = robbed
    if replaced_meanwhile:
        monkeypatch.setattr(smb.transport.base, "believes", lambda _user: True)
    with smb.connect(cluster.address, timeout=20) as client:
        for copies in (1, 2):
            buffer = client.create(f"w{copies}", 1000, servers=1, replicas=copies)
            buffer.write(np.ones(1000, np.float32))
            assert (buffer.read() == 1).all()
            assert set(buffer.transports) == {"tcp"}
            with buffer.lock():
                pass
            client.delete(f"w{copies}")
    assert impostor.poll() is None


@AS_ROOT
def test_the_refusal_says_whose_socket_it_is(robbed: tuple[smb.LocalCluster, subprocess.Popen[str]]) -> None:
    """Asked for by name, shared memory is refused."""
    cluster, impostor = robbed
    with smb.connect(cluster.address, transport="shm") as client:
        buffer = client.create("w", 1000)
        with pytest.raises(smb.TransportError, match=rf"was made by user {STRANGER}, whom this process \(user 0\)"):
            buffer.read()
    told = end(impostor)  # the last test of the module
    assert "GOT" not in told, told


@AS_ROOT
def test_root_believes_no_other_user() -> None:
    """Wherever its socket is: a process of root that took locks in another user's memory would write where that user
    says. Root's own server is believed.
    """
    for user in (DAEMON, 0):
        with tempfile.TemporaryDirectory(dir="/run") as place:
            Path(place).chmod(0o755)
            os.chown(place, user, user)
            path = Path(place, "smb.a.sock")
            server = start_as(user, SERVER, path)
            await_ready(server)
            client = EngineClient(1)
            assert believes(user) == is_here(str(path)) == (user == 0)
            if user == 0:
                _, instance = client.connect_unix(str(path), Lane.UNIX_DATA, 5000)
                assert instance == 7
            else:
                with pytest.raises(EngineError) as refused:
                    client.connect_unix(str(path), Lane.UNIX_DATA, 5000)
                assert refused.value.status is Status.UNTRUSTED
            client.close()
            end(server)
