"""The room of clusters on one machine: real daemons as child processes, for tests, demos and first steps.

It starts the daemons' command lines and imports nothing of a daemon or a client. `smb.LocalCluster` imports it.
`smb up --hosts` and smb.ray start the daemons of other hosts with its `Daemon`, and they and `smb up` start a daemon
again by its `Supervisor`. smb/daemon/held_directory.py removes what killed clusters left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

from smb.config import settings
from smb.config.at_exit import AtExit, at_exit
from smb.config.backoff import Backoff
from smb.config.host_address import reachable
from smb.config.parse import OWNER_VARIABLE, format_address, parse_address, parse_bytes
from smb.config.pickling import refuse_pickle
from smb.daemon.held_directory import HeldDirectory, sweep
from smb.daemon.launch import python_m
from smb.daemon.own_files import open_own, take_directory
from smb.errors import Error, InvalidArgumentError, UnavailableError
from smb.html_tables import described
from smb.security.credentials import VARIABLES as CREDENTIALS_VARIABLES

_START_S = 30.0  # the start of a Python process that imports gRPC, on a loaded machine
_STOP_S = 10.0
_POLL_S = 0.01
# Between two starts of a daemon that keeps ending. Longer pauses would keep it away after it can start again.
_RESTART_FIRST_S, _RESTART_MAX_S = 0.5, 2.0
_MEMORY_ROOT = Path("/dev/shm")  # noqa: S108 - the system's place for shared memory
_PREFIX = "smb-cluster"
_KEPT = "smb-kept"  # prefix of memory directories that outlive their cluster; sweep() does not remove these


class Daemon:
    """A daemon process that can be killed and started again under the same name.

    It inherits the file descriptors `held`.
    """

    def __init__(
        self, module: str, name: str, options: Mapping[str, str], directory: Path, held: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.address = ""
        self.metrics = ""
        self.log = directory / f"{name}.log"
        self._module = module
        self._options = dict(options)
        self._held = tuple(held)
        self._ready = directory / f"{name}.ready"
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: list[socket.socket] = []
        for option in ("listen", "metrics"):
            self._keep_port(option)

    @property
    def pid(self) -> int:
        """The id of the process, or of the last process if none runs. Raises Error before the first start."""
        if self._process is None:
            raise Error(f"{self.name} was not started yet; call start() first")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def _keep_port(self, option: str) -> None:
        """Choose a port if the option leaves it open, and keep it for as long as the daemon may be started again.

        A bound socket that does not listen reserves its port: the system gives the port neither to a server on port 0
        nor to an outgoing connection. The daemon binds the same port with SO_REUSEADDR and gets it.
        """
        host, port = parse_address(self._options[option])
        if port != 0:
            return
        with contextlib.suppress(OSError):  # if the address is not one of this host, the daemon's own error is better
            family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            kept = socket.socket(family, kind, protocol)
            self._kept.append(kept)
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(where)
            self._options[option] = format_address(host, kept.getsockname()[1])

    def spawn(self) -> None:
        """Start the process, on its old address if it had one."""
        if self.running:
            raise Error(f"{self.name} runs already (pid {self.pid}); kill() or terminate() it first")
        self._ready.unlink(missing_ok=True)
        command = python_m(*self._module.split(), "--ready-file", str(self._ready))
        for option, value in self._options.items():
            command += [f"--{option.replace('_', '-')}", *([value] if value else [])]
        # Daemons get their credentials as options, so this process's own client credentials are left out.
        taken_away = {*CREDENTIALS_VARIABLES, *settings.file_variables()}
        environment = {name: value for name, value in os.environ.items() if name not in taken_away}
        environment |= {OWNER_VARIABLE: str(os.getpid())}
        with os.fdopen(open_own(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
            self._process = _launch(command, environment, log, held=self._held)

    def wait_ready(self, deadline: float) -> None:
        """Wait until the daemon serves. Raises UnavailableError, with the end of its log, if the daemon ends or the
        deadline passes.
        """
        while not self._ready.exists():
            if not self.running:
                raise UnavailableError(f"{self.name} ended during its start: {self._last_words()}")
            if time.monotonic() > deadline:
                raise UnavailableError(f"{self.name} does not serve after {_START_S:g} s: {self._last_words()}")
            time.sleep(_POLL_S)
        ready = json.loads(self._ready.read_text())
        host, port = parse_address(ready["address"])
        self.address, self.metrics = format_address(reachable(host), port), ready["metrics"]

    def start(self) -> None:
        """Start the daemon again, with the same name, address and memory, and wait until it serves."""
        self.spawn()
        self.wait_ready(time.monotonic() + _START_S)

    def kill(self) -> None:
        """End the process with SIGKILL, which allows no clean-up, like a crash."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """End the process with SIGTERM and wait for its end. After 10 s, end it with SIGKILL."""
        self._end(signal.SIGTERM)

    def ask_to_end(self) -> None:
        """Send SIGTERM without waiting."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def release(self) -> None:
        """End the process as `terminate` does, and free its ports for other processes."""
        try:
            self.terminate()
        finally:
            for kept in self._kept:
                kept.close()

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-5:]) or "it wrote no log"


class Supervisor:
    """Starts a daemon again when it has ended, however often. For one thread."""

    def __init__(
        self, daemon: Daemon, say: Callable[[str], object], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`say` gets a sentence about each end and each start."""
        self._daemon, self._say, self._now_s = daemon, say, now_s
        self._backoff = Backoff(_RESTART_FIRST_S, _RESTART_MAX_S)
        self._due_s = now_s()  # the earliest time of the next start

    def look(self) -> None:
        """Start the daemon if it has ended and its pause is over. Blocks until it serves or its start has failed, which
        a later call tries again.
        """
        if self._daemon.running or self._now_s() < self._due_s:
            return
        self._due_s = self._now_s() + self._backoff.next_s()
        self._say(f"{self._daemon.name} (pid {self._daemon.pid}) has ended; restarting it with its data")
        try:
            self._daemon.start()
            self._say(f"{self._daemon.name} is back, pid {self._daemon.pid}")
        except (Error, OSError) as error:  # OSError: the daemon's directory is gone, or no process can be started
            self._say(f"{error}; the start will be tried again")


class LocalCluster:
    """One coordinator and `servers` memory servers as real processes on this machine. Blocks until all of them serve.

    ```python
    with smb.LocalCluster(servers=2, capacity="1GiB") as cluster, smb.connect(cluster.address) as client:
        print([server.name for server in client.servers()])
    ```

    Without `with`, as in a notebook, they run until stop(), or until nobody refers to the object any more.

    - `capacity` of each server: bytes, or text such as "1GiB".
    - `listen` is the coordinator's address, on loopback by default. The memory servers listen on the same host, on
      ports of their own. With "0.0.0.0:PORT" other hosts can reach the cluster: all daemons, and `address`, then have
      this host's address.
    - `credentials` is a directory made by `smb certs`. An address other than loopback needs it, or insecure=True: then
      every process that can connect may read and write.
    - `metrics` is the address of the coordinator's dashboard.
    - `session_lease`, in seconds: a client that has not been heard of for this long counts as dead.
    - `data_dir`: a directory. The next cluster with this directory has the same data, until the machine restarts.
    - Other options go to the memory servers: loops=2 becomes --loops 2.

    The daemons end with the block, at the latest with this process. Without `data_dir` they leave nothing. Raises
    UnavailableError, with the daemon's own message, if one does not start.
    """

    def __init__(
        self,
        servers: int = 2,
        capacity: int | str = "256MiB",
        *,
        listen: str = "127.0.0.1:0",
        metrics: str = "127.0.0.1:0",
        data_dir: Path | str | None = None,
        session_lease: float | None = None,
        credentials: Path | str | None = None,
        insecure: bool = False,
        **daemon_options: object,
    ) -> None:
        if servers < 1:
            raise InvalidArgumentError(f"LocalCluster: servers must be at least 1, not {servers}")
        parse_address(listen)
        parse_address(metrics)
        self._metrics = metrics
        self._data_dir = Path(data_dir).absolute() if data_dir is not None else None
        self._count = servers
        self._capacity = parse_bytes(capacity)
        self._listen = listen
        self._session_lease = session_lease
        self._credentials = Path(credentials) if credentials is not None else None
        self._insecure = insecure
        self._daemon_options = {option: str(value) for option, value in daemon_options.items()}
        self._directories: list[HeldDirectory] = []
        self._daemons: list[Daemon] = []  # in the order of their start
        self.coordinator: Daemon
        self.memory_directory: Path
        self.state_directory: Path
        self._kept: IO[bytes] | None = None  # the lock of the data directory
        self.servers: list[Daemon] = []
        self._end: weakref.finalize[..., LocalCluster] | None = None  # ends the daemons; None if there are none
        self.start()

    @property
    def address(self) -> str:
        """The coordinator's "host:port", for smb.connect."""
        return self.coordinator.address

    def start(self) -> LocalCluster:
        """Start the daemons again after stop(), and block until all of them serve. Does nothing while they run.

        ```python
        cluster = smb.LocalCluster(servers=1)
        cluster.stop()
        cluster.start()  # other daemons; without data_dir they have nothing of the former ones
        cluster.stop()
        ```
        """
        if self._end is not None:
            return self
        # Nothing below refers to this object, so a cluster that nobody refers to any more ends.
        self._end = weakref.finalize(self, _end, os.getpid(), self._daemons, self._directories)
        self._end.atexit = False  # _end_all() does it, after clients have left
        _clusters.add(self)
        self.servers.clear()
        # Remove directories of clusters whose processes were killed and could not remove them.
        for root in (_MEMORY_ROOT, Path(tempfile.gettempdir())):
            sweep(root, f"{_PREFIX}-*-*")
        private = self._data_dir or Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-"))
        if self._data_dir is None:
            self._directories.append(HeldDirectory(private))
        else:
            self._keep(private)
        self.state_directory = private / "state"
        memory = self._daemon_options.get("memory_dir")
        if memory is None:
            memory_directory = self._memory_of(private)
            memory_directory.mkdir(mode=0o700, exist_ok=self._data_dir is not None)
            if self._data_dir is None:
                self._directories.append(HeldDirectory(memory_directory))
            memory = str(memory_directory)
        self.memory_directory = Path(memory)
        try:
            deadline = time.monotonic() + _START_S
            # The daemons hold the directories too, because a daemon may outlive this process and still use them.
            held = [directory.fd for directory in self._directories if directory.fd is not None]
            options = {"listen": self._listen, "state": str(self.state_directory), "metrics": self._metrics}
            if self._session_lease is not None:
                options["session_lease"] = str(self._session_lease)
            options |= self._access("coordinator")
            self.coordinator = Daemon("smb.tools.cli.main coordinator", "coordinator", options, private, held)
            self._daemons.append(self.coordinator)
            self.coordinator.spawn()
            self.coordinator.wait_ready(deadline)
            host = parse_address(self._listen)[0]
            for index in range(self._count):
                name = f"server-{index}"
                options = {
                    "coordinator": self.address,
                    "listen": format_address(host, 0),
                    "advertise": reachable(host),
                    "metrics": "127.0.0.1:0",
                    "capacity": str(self._capacity),
                    "name": name,
                    **self._access(name),
                    **self._daemon_options,
                    "memory_dir": memory,
                }
                self.servers.append(Daemon("memserver", name, options, private, held))
                self._daemons.append(self.servers[-1])
                self.servers[-1].spawn()
            for server in self.servers:
                server.wait_ready(deadline)
        except BaseException:
            self.stop()
            raise
        return self

    def _keep(self, directory: Path) -> None:
        """Lock the data directory for this cluster. Raises InvalidArgumentError if another cluster uses it, and
        UnavailableError if other users can write in it or have put files there.
        """
        take_directory(directory, "data_dir")
        self._kept = os.fdopen(open_own(directory / "lock", os.O_WRONLY | os.O_CREAT), "wb")
        try:
            fcntl.flock(self._kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._kept.close()
            raise InvalidArgumentError(
                f"LocalCluster: another cluster uses data_dir={str(directory)!r}; stop it, or give another directory"
            ) from None

    def _memory_of(self, private: Path) -> Path:
        """Return the directory of the servers' memory. The same data directory gives the same memory directory."""
        if self._data_dir is None:
            return _MEMORY_ROOT / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
        found = private.stat()
        return _MEMORY_ROOT / f"{_KEPT}-{found.st_dev:x}-{found.st_ino:x}"

    def _access(self, name: str) -> dict[str, str]:
        """Return the access options of the daemon of that name. An option with an empty value is a flag."""
        options = {"credentials": str(self._credentials / name)} if self._credentials is not None else {}
        return options | ({"insecure": ""} if self._insecure else {})

    def stop(self) -> None:
        """End all daemons and remove their files. A second call does nothing.

        ```python
        cluster = smb.LocalCluster(servers=1).start()
        cluster.stop()
        ```
        """
        end, self._end = self._end, None
        if end is not None and (detached := end.detach()):  # a finalizer itself does nothing any more at exit
            _, function, arguments, _ = detached
            function(*arguments)
        if self._kept is not None:
            self._kept.close()

    def __repr__(self) -> str:
        state = f"{len(self.servers)} memory server{'s'[: len(self.servers) > 1]}" if self._end else "stopped"
        return f"<smb.LocalCluster {self.address}, {state}>"

    def _repr_html_(self) -> str:
        servers = ", ".join(f"{server.name} ({'runs' if server.running else 'ended'})" for server in self.servers)
        page = f"http://{self.coordinator.metrics}/"
        row = {"address": self.address, "page": page, "state": "runs" if self._end else "stopped", "servers": servers}
        return described("LocalCluster", row)

    def __reduce__(self) -> NoReturn:
        refuse_pickle(repr(self), f"call smb.connect({self.address!r})")

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


# Clusters that run.
_clusters: weakref.WeakSet[LocalCluster] = weakref.WeakSet()


@at_exit(AtExit.CLUSTERS)
def _end_all() -> None:
    for cluster in list(_clusters):
        cluster.stop()


def _end(owner: int, daemons: list[Daemon], directories: list[HeldDirectory]) -> None:
    """End the daemons of a cluster, the coordinator last, and remove their files. Does nothing in a child of fork."""
    if os.getpid() != owner:
        return
    for daemon in daemons[1:]:
        daemon.ask_to_end()
    for daemon in [*daemons[1:], *daemons[:1]]:
        with contextlib.suppress(ProcessLookupError):
            daemon.release()
    for directory in directories:
        directory.remove()
    daemons.clear()
    directories.clear()


def _launch(
    command: list[str], environment: dict[str, str], log: IO[bytes], *, held: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own module
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
        pass_fds=held,
    )  # fmt: skip
