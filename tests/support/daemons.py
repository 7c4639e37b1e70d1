"""Real daemons as child processes of a test."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import smb
from smb.config.parse import OWNER_VARIABLE
from tests.support import stem
from tests.support.builds import daemons_build
from tests.support.transports import SLOWNESS

DEADLINE_S = 20.0 * SLOWNESS
ANY_PORT = "127.0.0.1:0"
Value = TypeVar("Value")


def wait_for(condition: Callable[[], Value], what: str, deadline_s: float = DEADLINE_S) -> Value:
    """Return the condition's first true value; fail the test after the deadline. The longer it takes, the less often it
    looks: most conditions are a call or a command.
    """
    began = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - began
        assert waited < deadline_s, f"no {what} within {deadline_s:g} s"
        time.sleep(min(max(waited / 20, 0.01), 0.05))
    return value


def add_over_kills(cluster: smb.LocalCluster, buffer: smb.Buffer, values: Any, rounds: int) -> int:
    """Add the values again and again while the servers are killed in turn and started; return how often."""
    done, stop = 0, threading.Event()

    def add() -> None:
        nonlocal done
        while not stop.is_set():
            buffer.accumulate(values)
            done += 1

    adding = threading.Thread(target=add)
    adding.start()
    try:
        for turn in range(rounds):
            before = done
            wait_for(lambda before=before: done > before + 3, "additions")
            server = cluster.servers[turn % len(cluster.servers)]
            server.kill()
            server.start()
        before = done
        wait_for(lambda: done > before + 3, "additions after the last kill")
    finally:
        stop.set()
        adding.join()
    return done


def relay_of(server: smb.cluster.Daemon) -> int:
    """The process that fills the mirrors of a memory server."""
    children = Path(f"/proc/{server.pid}/task").glob("*/children")
    (pid,) = [pid for each in children for pid in each.read_text().split()]
    return int(pid)


@contextmanager
def tidy(cluster: smb.LocalCluster, timeout: float) -> Iterator[smb.Client]:
    """A client, at whose end the cluster has no buffer."""
    with smb.connect(cluster.address, timeout=timeout) as client:
        yield client
        for info in client.list():
            client.delete(info.name, missing_ok=True)


def state_of_process(pid: int) -> str:
    """The kernel's letter for it: "T" of one that is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has its effect: a thread that runs on another core goes on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")

    def is_stopped() -> bool:
        try:
            return all((task / "stat").read_text().rsplit(")")[-1].split()[0] in "TZX" for task in tasks.iterdir())
        except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
            return False

    wait_for(is_stopped, f"process {pid} is stopped")


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """The processes are stopped inside, and go on after it."""
    try:
        for pid in pids:
            stop(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def keep_port() -> socket.socket:
    """A port of this host that the system gives to nobody else; who asks for it with SO_REUSEADDR gets it."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    return kept


def cluster_metric(cluster: smb.LocalCluster, name: str) -> float:
    """A metric, summed over its labels and the cluster's memory servers."""
    total = 0.0
    for server in cluster.servers:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=5) as page:
            found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page.read().decode(), re.M)
        assert found, name
        total += sum(map(float, found))
    return total


def waiting(cluster: smb.LocalCluster) -> int:
    """How many requests wait for a lock, a barrier or a version."""
    return int(cluster_metric(cluster, "smb_server_waiting_requests"))


class Daemon:
    """One run of a daemon. Its standard error goes into `log`."""

    def __init__(self, arguments: list[str], ready_file: Path, log: Path, variables: Mapping[str, str]) -> None:
        self.ready_file = ready_file
        self.log = log
        command = [sys.executable, "-m", *arguments]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
        environment |= {OWNER_VARIABLE: str(os.getpid()), **variables}
        with log.open("ab") as out:
            self.process = stem.launch(command, environment, out, cwd=variables.get("PYTHONPATH"), new_session=False)
        self.pid = self.process.pid

    @property
    def address(self) -> str:
        """Where it serves; waits until it does."""
        return str(self._ready()["address"])

    @property
    def metrics(self) -> str:
        """Where its pages are; waits until it serves."""
        return str(self._ready()["metrics"])

    def page(self, path: str) -> str:
        """GET a page."""
        with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def metric(self, sample: str) -> float:
        """Return the value of a sample, named as on the page: name{label="value"}."""
        for line in self.page("/metrics").splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        raise AssertionError(f"no sample {sample}")

    def stop(self) -> int:
        """SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL. The ready file stays, as after any crash; it goes here so that the next run's can be waited for."""
        self.process.kill()
        self.wait()
        self.ready_file.unlink(missing_ok=True)

    def wait(self) -> int:
        """Return the exit code."""
        return self.process.wait(DEADLINE_S)

    def _ready(self) -> dict[str, Any]:
        try:
            wait_for(
                lambda: self.ready_file.exists() or self.process.poll() is not None, f"ready file {self.ready_file}"
            )
        except AssertionError as late:
            raise AssertionError(f"{late}; what the daemon waits for is in its log:\n{self.log.read_text()}") from None
        assert self.process.poll() is None, f"the daemon died:\n{self.log.read_text()}"
        found: dict[str, Any] = json.loads(self.ready_file.read_text())
        assert found["pid"] == self.pid
        return found


class Daemons:
    """Starts daemons below one directory; memory goes below /dev/shm. `variables` go to each that is started then; they
    hold from the start what the build needs on which daemons are to run (SMB_TEST_DAEMON_BUILD).

    Where a daemon is to listen on ANY_PORT, its port is kept while it is down: it can be started again there. Without
    that, another test may get the port meanwhile."""

    def __init__(self, directory: Path, memory: Path) -> None:
        self.directory = directory
        self.memory = memory
        self.build = daemons_build()
        self.variables: dict[str, str] = dict(self.build.environment) if self.build else {}
        self._started: list[Daemon] = []
        self._ports: list[socket.socket] = []

    def coordinator(
        self, listen: str = ANY_PORT, state: str | None = None, *options: str, name: str = "coordinator"
    ) -> Daemon:
        """Start a coordinator, by default always on the same state; later options override the defaults here."""
        state = state or str(self.directory / "state")
        arguments = [
            "smb.tools.cli.main",
            "coordinator",
            "--listen",
            listen,
            "--state",
            state,
            "--metrics",
            ANY_PORT,
        ]
        return self._start(name, arguments, options)

    def memory_server(self, coordinator: str, name: str, *options: str) -> Daemon:
        """Start a memory server; later options override the defaults here."""
        arguments = ["memserver", "--coordinator", coordinator, "--name", name, "--listen", ANY_PORT]
        arguments += ["--memory-dir", str(self.memory), "--capacity", "64MiB", "--loops", "1"]
        return self._start(name, arguments, options)

    def files(self) -> list[str]:
        """Return the names of all files in the memory directory."""
        return sorted(path.name for path in self.memory.iterdir())

    def kill_all(self) -> None:
        """Leave no process behind, and keep no port."""
        for daemon in self._started:
            if daemon.process.poll() is None:
                daemon.process.kill()
                daemon.wait()
        for kept in self._ports:
            kept.close()

    def _start(self, name: str, arguments: list[str], options: Sequence[str] = ()) -> Daemon:
        number = len(self._started)
        ready_file = self.directory / f"{name}.ready"
        arguments = [*arguments, "--ready-file", str(ready_file), *options]
        for at, option in enumerate(arguments):
            if option == "--listen" and arguments[at + 1] == ANY_PORT:
                self._ports.append(keep_port())
                arguments[at + 1] = f"127.0.0.1:{self._ports[-1].getsockname()[1]}"
        daemon = Daemon(arguments, ready_file, self.directory / f"{number}-{name}.log", self.variables)
        self._started.append(daemon)
        return daemon


@contextmanager
def running_daemons(directory: Path) -> Iterator[Daemons]:
    """Give a Daemons and take everything away afterwards."""
    memory = Path("/dev/shm") / f"smb-test-{os.getpid()}-{time.monotonic_ns()}"
    memory.mkdir(mode=0o700)
    daemons = Daemons(directory, memory)
    if daemons.build:
        daemons.build.forget_reports()
    try:
        yield daemons
        if daemons.build:
            daemons.build.check_reports()
    finally:
        daemons.kill_all()
        for path in memory.iterdir():
            path.unlink()
        memory.rmdir()
