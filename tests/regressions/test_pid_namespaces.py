"""A process of another PID namespace once mapped a segment and took its chunk locks: the kernel took the death of its
thread 1 for that of a living holder with the same number, an update was lost, and readers saw halves from then on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import smb
from tests.support.daemons import Daemon, Daemons, running_daemons, wait_for

TIMES = 300
COUNT = 3000
# Adds from where it runs, and says how.
_ADDER = """
import json, logging, os, sys, numpy, smb
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
with smb.connect(sys.argv[1], transport=sys.argv[2], timeout=60) as client:
    buffer = client.open("w")
    try:
        for _ in range(int(sys.argv[3])):
            buffer.accumulate(numpy.ones(3000, numpy.int64))
        print(json.dumps([os.getpid(), *buffer.transports]))
    except smb.TransportError as error:
        print(json.dumps([os.getpid(), str(error)]))
"""


def _namespaces_may_be_made() -> bool:
    command = ["unshare", "--pid", "--fork", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not _namespaces_may_be_made(), reason="it takes the right to make a PID namespace")


def _inside(*proc: str) -> list[str]:
    """Run what follows as process 1 of a PID namespace; with "--mount-proc" its /proc is its own, as in a container."""
    return ["unshare", "--pid", "--fork", "--kill-child", *proc]


@pytest.mark.parametrize("proc", [(), ("--mount-proc",)])
def test_a_container_that_shares_the_volume_goes_over_tcp(proc: tuple[str, ...]) -> None:
    """It says so where it says how it reaches the server; what both add counts; and asked for shm, it says why not."""
    with smb.LocalCluster(servers=1) as cluster, smb.connect(cluster.address, timeout=60) as client:
        buffer = client.create("w", COUNT, "int64")
        assert buffer.transports == ("shm",)
        command = [*_inside(*proc), sys.executable, "-c", _ADDER, cluster.address]
        adder = subprocess.Popen(
            [*command, "auto", str(TIMES)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(TIMES):
            buffer.accumulate(np.ones(COUNT, np.int64))
        out, log = adder.communicate(timeout=120)
        assert json.loads(out) == [1, "tcp"], log
        assert "tcp to server-0: " in log
        assert "this process is in another PID namespace than the server" in log
        assert (buffer.read() == 2 * TIMES).all()
        refused = subprocess.run([*command, "shm", "1"], capture_output=True, text=True, timeout=120, check=True)
        pid, told = json.loads(refused.stdout)
        assert pid == 1
        assert "another PID namespace" in told
        assert "transport='auto'" in told


def _in_a_namespace(daemons: Daemons, coordinator: str, name: str, server: Daemon) -> subprocess.Popen[bytes]:
    """Start the memory server that was killed again, in a PID namespace of its own."""
    arguments = ["memserver", "--coordinator", coordinator, "--name", name, "--capacity", "64MiB"]
    arguments += ["--memory-dir", str(daemons.memory), "--ready-file", str(server.ready_file)]
    # Without its owner's process id, which is nobody's in there.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    environment |= daemons.variables
    return subprocess.Popen([*_inside("--mount-proc"), sys.executable, "-m", *arguments], env=environment)


def test_a_server_that_moves_takes_its_segments_along(tmp_path: Path) -> None:
    """Started again in another namespace it has its data; a client that had it mapped goes on over TCP by itself."""
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator()
        server = daemons.memory_server(coordinator.address, "a")
        _ = server.address
        with smb.connect(coordinator.address, timeout=60) as client:
            buffer, same = client.create("w", COUNT, "int64"), client.open("w")
            buffer.accumulate(np.ones(COUNT, np.int64))
            same.accumulate(np.ones(COUNT, np.int64))
            assert buffer.transports == same.transports == ("shm",)
            server.kill()
            moved = _in_a_namespace(daemons, coordinator.address, "a", server)
            try:
                wait_for(server.ready_file.exists, "server in its namespace")
                buffer.accumulate(np.ones(COUNT, np.int64))
                same.accumulate(np.ones(COUNT, np.int64))
                assert (buffer.read() == 4).all()
                assert buffer.transports == same.transports == ("tcp",)
                with smb.connect(coordinator.address) as later:
                    assert later.open("w").transports == ("tcp",)
            finally:
                moved.kill()  # and with it the server
                moved.wait(20)


def test_a_call_over_a_server_that_moved_and_one_that_did_not(tmp_path: Path) -> None:
    """What the one does not take goes there in the new way, once, and what the other took does not go again."""
    ones = np.ones(COUNT, np.int64)
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator()
        moving, staying = (daemons.memory_server(coordinator.address, name) for name in "ab")
        _ = moving.address, staying.address
        with smb.connect(coordinator.address, timeout=60) as client:
            buffer = client.create("w", COUNT, "int64", stripe="4KiB")
            buffer.accumulate(ones)
            assert set(buffer.transports) == {"shm"}
            assert {segment.server for segment in buffer.layout.segments} == {"a", "b"}
            moving.kill()
            moved = _in_a_namespace(daemons, coordinator.address, "a", moving)
            try:
                wait_for(moving.ready_file.exists, "server in its namespace")
                buffer.accumulate(ones)
                assert (buffer.read() == 2).all()
                assert set(buffer.transports) == {"shm", "tcp"}
            finally:
                moved.kill()  # and with it the server
                moved.wait(20)
