"""Soft Memory Box as a contender: real daemons, client processes of their own, the public API."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import smb
from perf import remote
from perf.clients import Clients, added, check, cpu_seconds, written, zeros
from perf.contender import (
    ACCUMULATE,
    FETCH_ADD,
    OURS,
    READ,
    SHM,
    TCP,
    TLS,
    WRITE,
    Case,
    Run,
    Sample,
    run_calls,
    sample_of,
)

_CAPACITY_BYTES = 640 << 20  # two arrays of the largest size, and what goes with them
_CLIENTS_MAX = 8
_TIMEOUT_S = 30.0


class Ours:
    """smb over one transport of the case's choice. `servers`: how many memory servers hold the array."""

    kind = OURS

    def __init__(self, name: str = "smb", servers: int = 1, *, secured: bool = False) -> None:
        """secured: with credentials, and so inside TLS."""
        self.name = name
        self._secured = secured
        self._credentials: Path | None = None
        self._servers = servers
        self._names = itertools.count()
        self._clients: Clients | None = None

    def missing(self) -> str | None:
        forced = os.environ.get("SMB_TRANSPORT")
        return f"SMB_TRANSPORT={forced} would override the transport: unset it" if forced else None

    def takes(self, case: Case) -> bool:
        ours = case.transport == TLS if self._secured else case.transport == SHM or case.over_tcp
        return ours and case.clients <= _CLIENTS_MAX

    def __enter__(self) -> Ours:
        space = os.statvfs("/dev/shm")
        capacity = min(_CAPACITY_BYTES, space.f_blocks * space.f_frsize * 9 // 10) // self._servers
        with ExitStack() as stack:
            with remote.on_server() as address:
                # Without the lab nothing is asked that older commits, which perf.compare measures, do not know.
                there: dict[str, Any] = {"listen": f"{address}:0", "insecure": True} if remote.inside() else {}
                if self._secured:
                    self._credentials = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smb-perf-")))
                    _make_certificates(self._credentials, self._servers)
                    there["credentials"] = self._credentials
                cluster = smb.LocalCluster(servers=self._servers, capacity=capacity, **there)
                self._cluster = stack.enter_context(cluster)
            self._owner = stack.enter_context(_connect(self._cluster.address, self._credentials))
            stack.callback(self._end_clients)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, case: Case) -> Sample:
        count, dtype = (1, "int64") if case.operation == FETCH_ADD else (case.nbytes // 4, "float32")
        buffer = self._owner.create(f"perf-{next(self._names)}", count, dtype, servers=self._servers)
        try:
            if case.operation == READ:
                buffer.write(written(count, 0))
            runs, server_cpu = self._run(case, buffer.name)
            if case.operation != READ:  # clients check what they have read themselves
                check(case, buffer.read(), sum(run.calls for run in runs))
        finally:
            self._owner.delete(buffer.name, missing_ok=True)
        return sample_of(case, runs, server_cpu)

    def _run(self, case: Case, name: str) -> tuple[list[Run], float | None]:
        if self._clients is None:
            self._clients = Clients.start(_CLIENTS_MAX, Client, self._cluster.address, self._credentials)
        try:
            return self._clients.run(case, self._server_cpu, name=name)
        except BaseException:
            self._end_clients()
            raise

    def _server_cpu(self) -> float:
        return sum(cpu_seconds(server.pid) for server in self._cluster.servers)

    def _end_clients(self) -> None:
        if self._clients is not None:
            self._clients.close()
            self._clients = None


class Client:
    """One client process: a connection for each transport, kept over the cases."""

    def __init__(self, address: str, credentials: Path | None = None) -> None:
        self._address = address
        self._credentials = credentials
        self._connections: dict[str, smb.Client] = {}

    def run(self, case: Case, index: int, wait_for_start: Callable[[], object], **about: Any) -> Run:
        transport = TCP if case.carried else case.transport
        client = self._connections.get(case.transport)  # one for each rate of a link, too
        if client is None:
            client = _connect(self._address, self._credentials, transport=transport)
            self._connections[case.transport] = client
        buffer = client.open(about["name"])
        if buffer.transports != (transport,):
            raise RuntimeError(f"reached over {buffer.transports}, not over {transport}")
        array = zeros(buffer.size)
        if case.operation in (WRITE, ACCUMULATE):
            array = written(buffer.size, index) if case.operation == WRITE else added(buffer.size)
        calls: dict[str, Callable[[], object]] = {
            WRITE: partial(buffer.write, array),
            READ: lambda: buffer.read(out=array),  # as in a script: partial would put the names into a dictionary first
            ACCUMULATE: partial(buffer.accumulate, array),
            FETCH_ADD: partial(buffer.fetch_add, 0, 1),
        }
        run = run_calls(calls[case.operation], case, wait_for_start)
        if case.operation == READ:
            check(case, array, run.calls)
        return run

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


def _connect(address: str, credentials: Path | None, **options: Any) -> smb.Client:
    if credentials is not None:  # older commits, which perf.compare measures, do not know of any
        options["credentials"] = credentials / "client"
    return smb.connect(address, timeout=_TIMEOUT_S, **options)


def _make_certificates(place: Path, servers: int) -> None:
    from smb.security.lab_ca import Holder, make_set
    from smb.security.roles import Role

    holders = [Holder(Role.COORDINATOR, ""), Holder(Role.CLIENT, "")]
    make_set(place, [*holders, *(Holder(Role.SERVER, f"server-{index}") for index in range(servers))])


CONTENDERS = [Ours(), Ours("smb, TLS", secured=True)]
