"""Nothing stays behind: no file in shared memory, no process, no thread, however clients and owners end."""

from __future__ import annotations

import gc
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.daemon.held_directory import is_held, sweep
from tests.support import clients
from tests.support.daemons import wait_for
from tests.support.transports import EACH_WAY, FAR

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def memory() -> Iterator[Path]:
    """An empty directory in shared memory, that has to be empty again."""
    directory = SHARED_MEMORY / f"smb-test-{os.getpid()}-{secrets.token_hex(4)}"
    directory.mkdir(mode=0o700)
    yield directory
    left = sorted(path.name for path in directory.iterdir())
    for name in left:
        (directory / name).unlink()
    directory.rmdir()
    assert left == []


def segments(memory: Path) -> list[Path]:
    return sorted(memory.glob("*.segment"))


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("transport", EACH_WAY)
def test_killed_clients_leave_nothing(memory: Path, transport: str) -> None:
    """Clients killed in the middle of accumulates harm nobody: others go on, and delete returns every byte."""
    with (
        smb.LocalCluster(servers=2, capacity="32MiB", memory_dir=memory) as cluster,
        smb.connect(cluster.address) as client,
    ):
        unused = [server.used for server in client.servers()]
        buffer = client.create("w", 1 << 20, "int64", stripe="64KiB")
        running = [clients.make_event() for _ in range(3)]
        adders = [clients.spawn(clients.add_forever, cluster.address, transport, "w", event) for event in running]
        for event, adder in zip(running, adders, strict=True):
            assert event.wait(30)
            adder.kill()
            adder.join()
            adder.close()
        before = buffer.read()
        buffer.accumulate(np.ones(1 << 20, np.int64))
        changed = buffer.read() - before
        assert (changed == 1).all(), (np.unique(changed), np.unique(before), np.flatnonzero(changed != 1)[[0, -1]])
        assert len(segments(memory)) == 2
        client.delete("w")
        assert segments(memory) == []
        assert [server.used for server in client.servers()] == unused


def test_a_killed_coordinators_and_servers_buffers_are_cleared_away(memory: Path) -> None:
    """A buffer deleted while one of its servers is dead leaves no file once that server is back."""
    with smb.LocalCluster(servers=2, memory_dir=memory) as cluster, smb.connect(cluster.address) as client:
        client.create("w", 100_000, stripe=4096).fill(1)
        cluster.servers[1].kill()
        client.delete("w")
        cluster.servers[1].start()
        wait_for(lambda: segments(memory) == [], "clean-up")
        assert client.list() == []


def test_closed_clients_leave_no_thread_and_no_descriptor() -> None:
    """Connecting, using every transport and closing, twenty times over, leaves the process as it was."""
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster:

        def use() -> None:
            for transport in ("shm", FAR):
                with smb.connect(cluster.address, transport=transport) as client:
                    buffer = client.create("w", 1000, exist_ok=True)
                    buffer.write_async(np.ones(1000, np.float32)).result()
                    assert buffer.read().sum() == 1000

        others = set(threading.enumerate())  # of clients that another test has forgotten, and nothing collected yet
        use()  # gRPC keeps some for the process's whole life
        before = open_descriptors()
        for _ in range(10):
            use()
        left = set(threading.enumerate()) - others
        assert [thread.name for thread in left if thread.name.startswith("smb")] == []
        wait_for(lambda: open_descriptors() <= before, "closed descriptor")


def test_a_forgotten_client_goes_away() -> None:
    """A client that is dropped without close() is not kept alive by its own thread."""
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster:
        client = smb.connect(cluster.address, transport=FAR)
        buffer = client.create("w", 1000)
        buffer.fill(1)
        gone = weakref.ref(client)
        del client
        assert buffer.read().sum() == 1000  # its buffers keep it
        del buffer
        gc.collect()
        assert gone() is None


def test_a_cluster_leaves_nothing() -> None:
    """After the block no daemon runs, and its directories are gone."""
    with smb.LocalCluster(servers=2, capacity="16MiB") as cluster, smb.connect(cluster.address) as client:
        client.create("kept", 1000).fill(1)
        daemons = [cluster.coordinator, *cluster.servers]
        pids = [daemon.pid for daemon in daemons]
        directories = {daemon.log.parent for daemon in daemons}
        directories |= {Path(place.unix_path).parent for place in client.open("kept").layout.segments}
        assert all(directory.exists() for directory in directories)
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    assert not any(directory.exists() for directory in directories)
    cluster.stop()


def test_a_cluster_without_a_block_ends_with_its_last_reference() -> None:
    """It runs as soon as it is made, start() and stop() may be called again, and a child of fork does not end it."""
    cluster = smb.LocalCluster(servers=1, capacity="16MiB")
    assert cluster.start() is cluster
    with smb.connect(cluster.address) as client:
        assert [server.alive for server in client.servers()] == [True]
    child = os.fork()
    if child == 0:
        del cluster
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    first = [cluster.coordinator.pid, cluster.servers[0].pid]
    assert all(is_running(pid) for pid in first)
    cluster.stop()
    assert not any(is_running(pid) for pid in first)
    assert "stopped" in repr(cluster)
    cluster.start()
    with smb.connect(cluster.address) as client:
        assert [server.name for server in client.servers()] == ["server-0"]
    pids, directory = [cluster.coordinator.pid, cluster.servers[0].pid], cluster.memory_directory
    del cluster
    gc.collect()
    assert not any(is_running(pid) for pid in pids)
    assert not directory.exists()


SCRIPT = """
import numpy as np, smb, smb.train
cluster = smb.LocalCluster(servers=1, capacity="16MiB")
client = smb.connect(cluster.address)
worker = smb.train.join(client, "run", np.zeros(10, np.float32), smb.train.LocalSGD(every=2))
worker.step(samples=1)
print(cluster.coordinator.pid, cluster.servers[0].pid, cluster.memory_directory)
"""


def test_a_script_that_closes_nothing_leaves_nothing() -> None:
    """At its exit: trainings first, then sessions, then the cluster, with no word about what is gone."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    coordinator, server, directory = ended.stdout.split()
    assert "WARNING" not in ended.stderr, ended.stderr
    assert "ERROR" not in ended.stderr, ended.stderr
    assert not is_running(int(coordinator))
    assert not is_running(int(server))
    assert not Path(directory).exists()


def is_running(pid: int) -> bool:
    """Whether the process lives; one that ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


OWNER = """
import sys, time, smb
with smb.LocalCluster(servers=2, capacity="16MiB") as cluster, smb.connect(cluster.address) as client:
    client.create("w", 1000).fill(1)
    daemons = [cluster.coordinator, *cluster.servers]
    print(*(daemon.pid for daemon in daemons), flush=True)
    print(daemons[0].log.parent, client.open("w").layout.segments[0].unix_path.rpartition("/")[0], flush=True)
    sys.stdin.read()
"""


def test_a_killed_owners_cluster_ends() -> None:
    """The daemons of a LocalCluster end with the process that made it, and the next one sweeps its directories: not
    before the last daemon has ended, here one that was stopped.
    """
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        directories = [Path(name) for name in owner.stdout.readline().split()]
        assert len(pids) == 3
        assert all(directory.exists() for directory in directories)
        os.kill(pids[-1], signal.SIGSTOP)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        try:
            wait_for(lambda: not any(is_running(pid) for pid in pids[:-1]), "end of the other daemons")
            for directory in directories:
                sweep(directory.parent, directory.name)
                assert directory.exists()
        finally:
            os.kill(pids[-1], signal.SIGCONT)
        # A process whose main thread has ended still holds its files until its last thread has ended.
        wait_for(lambda: not any(is_held(directory) for directory in directories), "end of the daemons")
    with smb.LocalCluster(servers=1, capacity="16MiB"):
        # A cluster of another test may be sweeping them just now.
        wait_for(lambda: not any(directory.exists() for directory in directories), "sweep of the directories")


TERMINAL = """
import os, subprocess, sys
os.environ["SMB_OWNER_PID"] = str(os.getpid())
up = [sys.executable, "-m", "smb.tools.cli.main", "up", "--servers", "1", "--capacity", "16MiB"]
up += ["--listen", "127.0.0.1:0"]
with open(sys.argv[1], "w") as told:
    subprocess.run(up, stdout=told, stderr=told)
"""


def test_a_killed_owners_smb_up_ends(tmp_path: Path) -> None:
    """`smb up` whose owner is named and killed ends as by Ctrl-C, with its daemons, and leaves nothing."""
    told = tmp_path / "told"
    with subprocess.Popen([sys.executable, "-c", TERMINAL, str(told)]) as owner:
        wait_for(lambda: told.exists() and "Ctrl-C" in told.read_text(), "cluster")
        owner.kill()
    (pid,) = re.findall(r"server-0 .*, pid (\d+)", told.read_text())
    wait_for(lambda: "stopped" in told.read_text(), "end of smb up")
    assert not is_running(int(pid))


# ---- starting one


def test_a_daemon_that_cannot_start_says_why() -> None:
    """A wrong option is an UnavailableError with the daemon's own words, and nothing runs or lies about afterwards."""
    before = set(SHARED_MEMORY.glob(f"smb-cluster-{os.getpid()}-*"))
    for options, told in (({"loops": "many"}, "loops"), ({"no_such_option": 1}, "no-such-option")):
        with pytest.raises(smb.UnavailableError, match=rf"server-0 ended during its start: .*{told}"):
            smb.LocalCluster(servers=1, **options).start()  # type: ignore[arg-type]
    with pytest.raises(smb.InvalidArgumentError, match="servers must be at least 1, not 0"):
        smb.LocalCluster(servers=0)
    with pytest.raises(smb.InvalidArgumentError, match="a size must be"):
        smb.LocalCluster(capacity="plenty")
    assert set(SHARED_MEMORY.glob(f"smb-cluster-{os.getpid()}-*")) == before
    with smb.LocalCluster(servers=1, loops=1) as cluster:
        with pytest.raises(smb.Error, match="runs already"):
            cluster.servers[0].start()
        with smb.connect(cluster.address) as client:
            assert client.servers()[0].alive
