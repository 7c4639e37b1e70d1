"""A real etcd of one or three members on loopback, and coordinators on it that stand by for each other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clocks import Clock
from tests.support.daemons import Daemon, Daemons, keep_port, stop, wait_for
from tests.support.transports import SLOWNESS

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not here (`make etcd` installs Debian's etcd-server)"
)
LEASE_S = 8


class Member:
    """One member. Its ports are kept for it while it is down."""

    def __init__(self, index: int, directory: Path) -> None:
        self.name = f"m{index}"
        self.directory = directory
        self._kept = [keep_port() for _ in range(2)]
        self.address, self.peers = (f"127.0.0.1:{kept.getsockname()[1]}" for kept in self._kept)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: str, options: Sequence[str] = ()) -> None:
        """Start it, with the data that it left."""
        scheme = "https" if any(option.startswith("--cert-file") for option in options) else "http"
        command = [
            "etcd", "--name", self.name, "--data-dir", str(self.directory / self.name), "--initial-cluster", cluster,
            "--listen-client-urls", f"{scheme}://{self.address}", "--advertise-client-urls", f"{scheme}://{self.address}",
            "--listen-peer-urls", f"http://{self.peers}", "--initial-advertise-peer-urls", f"http://{self.peers}",
            "--log-level", "warn", "--logger", "zap", *options,
        ]  # fmt: skip
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """SIGSTOP."""
        assert self.process is not None
        stop(self.process.pid)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def release(self) -> None:
        """For good."""
        if self.process is not None:
            self.kill()
        for kept in self._kept:
            kept.close()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST to etcd's JSON gateway, in the clear."""
        request = urllib.request.Request(f"http://{self.address}/v3/{path}", json.dumps(body or {}).encode())
        with urllib.request.urlopen(request, timeout=2) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


class EtcdCluster:
    """The members."""

    def __init__(self, directory: Path, members: int, options: Sequence[str] = ()) -> None:
        self.members = [Member(index, directory) for index in range(members)]
        self._cluster = ",".join(f"{member.name}=http://{member.peers}" for member in self.members)
        self._options = options
        for member in self.members:
            self.start(member)

    @property
    def addresses(self) -> str:
        """Of all, with commas between."""
        return ",".join(member.address for member in self.members)

    def start(self, member: Member) -> None:
        """Start one again."""
        member.start(self._cluster, self._options)

    def leader(self) -> Member:
        """Return the member that leads; waits for one."""

        def find() -> Member | None:
            for member in self.members:
                with contextlib.suppress(OSError, ValueError):
                    status = member.ask("maintenance/status")
                    leads = status.get("leader") == status["header"]["member_id"]
                    if leads and member.ask("kv/range", {"key": "AA=="}):  # which takes a majority
                        return member
            return None

        return wait_for(find, "leader of etcd", 30 * SLOWNESS)

    def wait_ready(self) -> None:
        """Until it answers."""
        self.leader()


@contextmanager
def running_etcd(members: int = 1, options: Sequence[str] = ()) -> Iterator[EtcdCluster]:
    """Give a cluster of etcd. Its data are in memory: a flush of the disk of a busy machine takes seconds."""
    directory = Path("/dev/shm") / f"smb-test-etcd-{os.getpid()}-{time.monotonic_ns()}"
    directory.mkdir()
    cluster = EtcdCluster(directory, members, options)
    try:
        yield cluster
    finally:
        for member in cluster.members:
            member.release()
        shutil.rmtree(directory, ignore_errors=True)


class Coordinators:
    """Coordinators on one prefix, each at a port of its own that it has again after a kill."""

    def __init__(
        self, daemons: Daemons, state: str | Sequence[str], count: int, *options: str, clocks: Sequence[Clock] = ()
    ) -> None:
        """`state` is one for all, or each one's. `clocks`: each one's wall clock, if that is not the machine's."""
        self._daemons = daemons
        self._clocks = clocks
        self._states = [state] * count if isinstance(state, str) else list(state)
        self._options = options
        self._kept = [keep_port() for _ in range(count)]
        self.addresses = [f"127.0.0.1:{kept.getsockname()[1]}" for kept in self._kept]
        self.running: list[Daemon] = []
        for index in range(count):
            self.running.append(self._begun(index))
        for daemon in self.running:
            assert daemon.address

    @property
    def address(self) -> str:
        """Of all, for smb.connect."""
        return ",".join(self.addresses)

    def start(self, index: int) -> Daemon:
        """Start one again, after it was killed."""
        self.running[index] = self._begun(index)
        return self.running[index]

    def health(self, index: int) -> dict[str, Any]:
        """Return what one says at /healthz; empty where it does not answer."""
        daemon = self.running[index]
        try:
            with urllib.request.urlopen(f"http://{daemon.metrics}/healthz", timeout=1) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            found = json.load(error)
        except (OSError, AssertionError, ValueError):
            found = {}
        return found

    def leader(self, but: int | None = None) -> int:
        """Return which one leads, waiting until one does that is not `but`."""

        def find() -> list[int]:
            leads = [
                index
                for index in range(len(self.running))
                if index != but and self.health(index).get("leadership") == "leader"
            ]
            assert len(leads) <= 1, f"{len(leads)} lead at once"
            return leads

        return wait_for(find, "coordinator that leads", 60 * SLOWNESS)[0]

    def close(self) -> None:
        """Give the ports back."""
        for kept in self._kept:
            kept.close()

    def _begun(self, index: int) -> Daemon:
        before = self._daemons.variables
        if self._clocks:
            self._daemons.variables = self._clocks[index].variables(before)
        try:
            return self._daemons.coordinator(
                self.addresses[index], self._states[index], *self._options, name=f"coordinator-{index}"
            )
        finally:
            self._daemons.variables = before


class Gate:
    """A relay to an address that can be shut: what comes then stays unanswered, as behind a broken switch."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def shut(self) -> None:
        """Let nothing through."""
        self._open.clear()

    def open(self) -> None:
        """Let through what has waited, and what comes."""
        self._open.set()

    def close(self) -> None:
        """End all."""
        self._open.set()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._upstream, 5)
                except OSError:  # it is down: so is this
                    near.close()
                    continue
                far.settimeout(None)
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
