"""A cluster on several hosts: a coordinator on the first one, a memory server on each."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from smb.config.parse import format_address, parse_address
from smb.security.roles import Role
from smb.tools.hosts.names import bare
from smb.tools.hosts.remote import START_S, Remote, Ssh, credentials_files, stop_all

_LOOK_S = 0.5
_ANY = "0.0.0.0"  # noqa: S104 - with certificates, without which nobody is let in


class HostsCluster:
    """The daemons, which end with the block, with this process, or when the connection to a host is lost.

    Every daemon and client has a certificate. `credentials` is the directory for them, made if it is missing; None: a
    directory that goes with the cluster. Raises UnavailableError, which names the host, if something does not start.
    """

    def __init__(
        self,
        ssh: Ssh,
        hosts: Sequence[str],
        *,
        capacity: int,
        port: int,
        metrics: str,
        credentials: Path | None,
        show: Callable[[str], None],
    ) -> None:
        self._ssh, self._show = ssh, show
        self._hosts = list(hosts)
        self._remotes: list[Remote] = []
        self._temporary = None if credentials else tempfile.mkdtemp(prefix="smb-hosts-")
        self.credentials = credentials or Path(self._temporary or "")
        self.address = ""
        self.page = ""
        try:
            self._start(capacity, port, metrics)
        except BaseException:
            self.stop()
            raise

    @property
    def client(self) -> Path:
        """The directory for SMB_CREDENTIALS."""
        return self.credentials / Role.CLIENT.value

    def _start(self, capacity: int, port: int, metrics: str) -> None:
        from smb.security.lab_ca import Holder, make_set  # needs an extra, which `smb run` does not

        names = [bare(host) for host in self._hosts]
        roles = (Role.COORDINATOR, Role.CLIENT, Role.READER, Role.OPERATOR)
        make_set(
            self.credentials, [*(Holder(role, "") for role in roles), *(Holder(Role.SERVER, name) for name in names)]
        )
        coordinator = self._spawn(
            self._hosts[0],
            "smb.tools.cli.main coordinator",
            "coordinator",
            {"listen": format_address(_ANY, port), "metrics": metrics},
        )
        ready = coordinator.wait_event(time.monotonic() + START_S)
        self.address = format_address(names[0], parse_address(str(ready["address"]))[1])
        self.page = str(ready["metrics"])
        servers = [
            self._spawn(
                host,
                "memserver",
                name,
                {
                    "coordinator": self.address,
                    "listen": format_address(_ANY, 0),
                    "advertise": name,
                    "metrics": "127.0.0.1:0",
                    "capacity": str(capacity),
                    "name": name,
                },
            )
            for host, name in zip(self._hosts, names, strict=True)
        ]
        deadline = time.monotonic() + START_S
        for server in servers:
            server.wait_event(deadline)

    def _spawn(self, host: str, module: str, name: str, options: dict[str, str]) -> Remote:
        files = credentials_files(self.credentials / name)
        spec = {"what": "daemon", "module": module, "name": name, "options": options, "credentials": files}
        what = name if name == "coordinator" else "the memory server"
        prefix = bare(host)
        remote = Remote(self._ssh, host, what, spec, lambda line: self._show(f"{prefix}: {line}"))
        self._remotes.append(remote)
        return remote

    def watch(self) -> None:
        """Block for as long as all connections are there. Raises UnavailableError for the first that is lost."""
        while True:
            for remote in self._remotes:
                if not remote.running:
                    raise remote.ended()
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """End all daemons, the coordinator last, and remove the certificates that were made for this cluster alone."""
        try:
            stop_all(self._remotes[1:])
            stop_all(self._remotes[:1])
        finally:
            self._remotes.clear()
            if self._temporary is not None:
                with contextlib.suppress(OSError):
                    shutil.rmtree(self._temporary)

    def __enter__(self) -> HostsCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
