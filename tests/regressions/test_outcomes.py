"""Errors once did not say what became of their call; settle refused those of which nothing was applied."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.config.parse import parse_address
from tests.support.daemons import running_daemons, stop, wait_for
from tests.support.rights import may_mount
from tests.support.transports import FAR

_SIZE = 1 << 18  # float32 elements: a chunk on each of two servers, twice


@pytest.fixture
def two() -> Iterator[smb.LocalCluster]:
    """Two memory servers of their own."""
    with smb.LocalCluster(servers=2, capacity="32MiB") as cluster:
        yield cluster


def _failure(call: Callable[[], object], *kinds: type[smb.Error]) -> smb.Error:
    with pytest.raises(kinds or smb.Error) as caught:
        call()
    return caught.value


def _fill(descriptor: int) -> None:
    while True:
        os.write(descriptor, bytes(4096))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_nothing_was_applied_and_settle_returns_all_of_it(two: smb.LocalCluster, transport: str) -> None:
    """A closed client, a deleted buffer: "not applied", and the call's own range."""
    with smb.connect(two.address, transport=transport) as other:
        client = smb.connect(two.address, transport=transport)
        buffer, gone = client.create("w", _SIZE), client.create("gone", _SIZE)
        gone.read(0, 1)
        other.delete("gone")
        error = _failure(lambda: gone.write(np.ones(10, np.float32), 5), smb.NotFoundError)
        assert error.outcome == "not applied"
        assert gone.settle(error) == [range(5, 15)]
        client.close()
        for call in (
            lambda: buffer.write(np.ones(10, np.float32), 7),
            lambda: buffer.accumulate(np.ones(10, np.float32), 7),
            lambda: buffer.read(7, 10),
        ):
            error = _failure(call, smb.UnavailableError)
            assert error.outcome == "not applied"
            assert buffer.settle(error) == [range(7, 17)]


def test_the_outcome_is_unknown_until_it_is_settled(two: smb.LocalCluster) -> None:
    """A server that is stopped: "unknown"; what settle finds out then is the error's outcome."""
    with smb.connect(two.address, transport="tcp", timeout=0.5) as client:
        buffer = client.create("w", _SIZE)
        buffer.read(0, 1)
        for server in two.servers:
            stop(server.pid)
        try:
            error = _failure(lambda: buffer.accumulate(np.ones(_SIZE, np.float32)), smb.TimeoutError)
            assert error.outcome == "unknown"
            with pytest.raises(smb.TimeoutError):
                buffer.settle(error)
        finally:
            for server in two.servers:
                os.kill(server.pid, signal.SIGCONT)
        missing = buffer.settle(error, timeout=20)
        for part in missing:
            buffer.accumulate(np.ones(len(part), np.float32), part.start)
        if not missing:
            assert error.outcome == "applied"
        assert buffer.settle(error) == missing
        assert (buffer.read() == 1).all()


def test_what_is_no_call_of_a_buffer_says_its_outcome_too(two: smb.LocalCluster) -> None:
    """A lock that another holds, arguments that are refused, a coordinator that does not answer."""
    with smb.connect(two.address, timeout=1.0) as client, smb.connect(two.address) as other:
        buffer = client.create("w", _SIZE)
        with other.lock("turn"):
            assert _failure(client.lock("turn", timeout=0.05).acquire, smb.TimeoutError).outcome == "not applied"
        refused = _failure(lambda: buffer.write(np.ones(_SIZE + 1, np.float32)), smb.InvalidArgumentError)
        assert refused.outcome == "not applied"
        with pytest.raises(smb.InvalidArgumentError, match="nothing to settle"):
            buffer.settle(refused)
        assert _failure(lambda: client.create("w", 3), smb.AlreadyExistsError).outcome == "not applied"
        assert pickle.loads(pickle.dumps(refused)).outcome == "not applied"
        assert two.coordinator is not None
        stop(two.coordinator.pid)
        try:
            assert _failure(lambda: client.create("v", 3), smb.TimeoutError).outcome == "unknown"
            assert _failure(client.list, smb.TimeoutError).outcome == "not applied"
        finally:
            os.kill(two.coordinator.pid, signal.SIGCONT)


def test_a_full_tmpfs_is_out_of_memory_in_every_call(tmp_path: Path) -> None:
    """Changes over TCP, locks, and whatever is made: OutOfMemoryError, and nothing was applied."""
    if not may_mount():
        pytest.skip("a small disk is mounted by root, with the right to mount")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs", str(tmp_path)], check=True)
    try:
        with (
            smb.LocalCluster(servers=1, capacity="20MiB", memory_dir=tmp_path) as cluster,
            smb.connect(cluster.address, transport="tcp", timeout=5.0) as client,
        ):
            buffer, counter = client.create("w", _SIZE), client.create("n", 1, "int64")
            buffer.read(0, 1)
            filler = os.open(tmp_path / "filler", os.O_CREAT | os.O_WRONLY)
            try:
                with pytest.raises(OSError, match="No space"):
                    _fill(filler)
            finally:
                os.close(filler)
            for call in (
                lambda: buffer.write(np.ones(_SIZE, np.float32)),
                lambda: buffer.accumulate(np.ones(10, np.float32), 0),
                lambda: buffer.fill(3),
                lambda: counter.fetch_add(0, 1),
                lambda: buffer.lock(timeout=1).acquire(),
                lambda: client.lock("named", timeout=1).acquire(),
                lambda: client.create("x", 100_000),
            ):
                assert _failure(call, smb.OutOfMemoryError).outcome == "not applied"
            (tmp_path / "filler").unlink()
            buffer.accumulate(np.ones(_SIZE, np.float32))
            assert (buffer.read() == 1).all()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.skipif(FAR != "tcp", reason="connections are of TCP")
def test_a_server_out_of_descriptors_says_so(tmp_path: Path) -> None:
    """Connections that find no descriptor are counted, and the log says what to do."""
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator()
        server = daemons.memory_server(coordinator.address, "a")
        address = parse_address(server.address)
        used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + 2, hard))
        peers = [socket.create_connection(address) for _ in range(8)]
        try:
            peers[-1].settimeout(20)
            assert peers[-1].recv(1) == b""
            wait_for(lambda: "out of file descriptors" in server.log.read_text(), "a line in the log")
        finally:
            for peer in peers:
                peer.close()
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert "LimitNOFILE" in server.log.read_text()
        assert server.metric("smb_server_connections_turned_away_total") >= 1
