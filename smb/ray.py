"""A memory server on each node of a Ray cluster, for as long as a job runs. It uses smb.cluster, which starts daemons.

    import smb.ray
    with smb.ray.start(capacity_per_node="16GiB") as cluster:
        ...  # any task, actor or Ray Train worker: smb.connect(cluster.address)

Each daemon is the child of an actor that is bound to its node. If a daemon dies, the actor starts it again, with the
memory that it left. If the actor or its node dies, that memory is lost; when the job ends, the memory of all of them
is. This module needs the extra `ray`.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from smb.cluster import Daemon, Supervisor
from smb.config.parse import format_address, parse_bytes
from smb.errors import Error, InvalidArgumentError, UnavailableError

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    raise Error('smb.ray needs Ray: pip install "soft-memory-box[ray]"') from None

__all__ = ["RayCluster", "start"]

_START_S = 120.0  # Ray starts a process for the actor, on a node that may be busy
_LOOK_S = 0.5
# A shell process that deletes the directories when the pipe is closed, which happens when the actor's process ends in
# any way. It is not the actor's child, because Ray ends children together with the actor.
_JANITOR = 'exec 3<&0; (read -r _ <&3; sleep 1; rm -rf "$@") >/dev/null 2>&1 &'
_log = logging.getLogger("smb")


class _Supervised:
    """The actor: one daemon, which is started again if it dies. Methods run one at a time, beside the thread that
    watches.
    """

    def __init__(self, module: str, name: str, options: dict[str, str], host: str) -> None:
        self._directories = [Path(tempfile.mkdtemp(prefix="smb-ray-"))]
        options = options | {"listen": format_address(host, 0), "metrics": "127.0.0.1:0"}
        if module == "memserver":
            self._directories.append(Path(tempfile.mkdtemp(prefix="smb-ray-", dir="/dev/shm")))
            options["memory_dir"] = str(self._directories[1])
        else:
            options["state"] = str(self._directories[0] / "state")
        shell = ["/bin/sh", "-c", _JANITOR, "sh", *map(str, self._directories)]
        # The shell gets a session of its own, since Ray may end the actor's whole process group.
        self._janitor = subprocess.Popen(shell, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603 - our words
        self._janitor.wait()
        self._daemon = Daemon(module, name, options, self._directories[0])
        self._daemon.start()
        self._ending = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def address(self) -> str:
        """Return the daemon's HOST:PORT."""
        return self._daemon.address

    def pid(self) -> int:
        """Return the daemon's process id, of this node."""
        return self._daemon.pid

    def stop(self) -> None:
        """End the daemon in order, and delete its directories."""
        self._ending.set()
        self._watcher.join()
        self._daemon.release()
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def _watch(self) -> None:
        supervisor = Supervisor(self._daemon, _log.warning)
        while not self._ending.wait(_LOOK_S):
            supervisor.look()


class RayCluster:
    """The daemons that start() started. A context manager. The daemons also end with the Ray job that started them."""

    def __init__(self, address: str, servers: dict[str, Any], coordinator: Any = None) -> None:
        self.address = address
        self._servers = servers
        self._coordinator = coordinator

    @property
    def servers(self) -> list[str]:
        """The names of the memory servers, one for each node."""
        return list(self._servers)

    def stop(self) -> None:
        """End the daemons, memory servers first. Their data is lost. A second call does nothing."""
        for actors in (list(self._servers.values()), [self._coordinator] if self._coordinator else []):
            if ending := [actor.stop.remote() for actor in actors]:
                ray.wait(ending, num_returns=len(ending), timeout=_START_S)
            for actor in actors:
                ray.kill(actor)
        self._servers, self._coordinator = {}, None

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(
    capacity_per_node: int | str = "1GiB",
    *,
    coordinator: str | None = None,
    nodes: Sequence[str] | None = None,
    credentials: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> RayCluster:
    """Start a memory server on each Ray node. Blocks until all of them serve.

    ```python
    with smb.ray.start("4GiB", insecure=True) as cluster, smb.connect(cluster.address) as client:
        print(cluster.servers)
    ```

    - `capacity_per_node`: bytes, or text such as "1GiB", that each memory server lends.
    - `nodes`: ids of Ray nodes; default: all that are alive.
    - `coordinator`: the address of a running coordinator. By default one is started on this process's node.
    - `credentials`: a directory that all nodes see. Each daemon uses the subdirectory of its name, as `smb certs` makes
      it: "coordinator", or "ray-" and the first 12 digits of the node's id. Without credentials pass insecure=True:
      every process that reaches the ports may then read and write. If all nodes are on this machine, the daemons use
      loopback, which needs neither.

    Raises UnavailableError if a daemon did not start in time, after which no daemon is left, and InvalidArgumentError.
    """
    capacity = str(parse_bytes(capacity_per_node))
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    chosen = list(hosts) if nodes is None else list(nodes)
    if not chosen or not set(chosen) <= set(hosts):
        raise InvalidArgumentError(
            f"smb.ray.start: nodes must be ids of live Ray nodes, not {nodes!r}; the live ones are {list(hosts)}"
        )

    def access(name: str) -> dict[str, str]:
        given = {"credentials": str(Path(credentials).absolute() / name)} if credentials is not None else {}
        return given | ({"insecure": ""} if insecure else {})

    here = ray.get_runtime_context().get_node_id()
    if set(hosts.values()) == {hosts[here]}:  # all on this machine
        hosts = dict.fromkeys(hosts, "127.0.0.1")

    def supervised(module: str, name: str, node: str, options: dict[str, str]) -> Any:
        bound = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actor = ray.remote(num_cpus=0)(_Supervised).options(scheduling_strategy=bound)
        return actor.remote(module, name, options | access(name), hosts[node])

    leader, servers = None, {}
    deadline = time.monotonic() + _START_S

    def left_s() -> float:
        return max(0.0, deadline - time.monotonic())

    try:
        if coordinator is None:
            leader = supervised("smb.tools.cli.main coordinator", "coordinator", here, {})
            coordinator = ray.get(leader.address.remote(), timeout=left_s())
        for node in chosen:
            name = f"ray-{node[:12]}"
            servers[name] = supervised(
                "memserver", name, node, {"coordinator": coordinator, "name": name, "capacity": capacity}
            )
        ray.get([server.address.remote() for server in servers.values()], timeout=left_s())
    except BaseException as error:
        for actor in [*servers.values(), *([leader] if leader is not None else [])]:
            ray.kill(actor)
        if isinstance(error, ray.exceptions.RayError):
            raise UnavailableError(f"smb.ray.start: {error}") from error
        raise
    return RayCluster(coordinator, servers, leader)
