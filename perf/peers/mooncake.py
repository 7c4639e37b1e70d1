"""Mooncake's transfer engine: synchronous write and read over TCP loopback. It has no atomics and adds nothing."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from perf.clients import Array, zeros
from perf.contender import READ, TCP, WRITE, Case, Sample
from perf.peers import processes


def _engine() -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    status = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    if status:
        raise RuntimeError(f"Mooncake: the engine did not start over tcp: {status}")
    return engine


class Client:
    def __init__(self, target: tuple[str, int], _case: Case, _client: int) -> None:
        self._engine = _engine()
        self._target, self._address = target
        self._registered: set[int] = set()

    def _transfer(self, transfer: Callable[..., int], array: Array) -> None:
        at = array.ctypes.data
        if at not in self._registered:
            self._engine.register_memory(at, array.nbytes)
            self._registered.add(at)
        status = transfer(self._target, at, self._address, array.nbytes)
        if status:
            raise RuntimeError(f"Mooncake: a transfer of {array.nbytes} bytes failed: {status}")

    def write(self, source: Array) -> None:
        self._transfer(self._engine.transfer_sync_write, source)

    def read(self, into: Array) -> Array:
        self._transfer(self._engine.transfer_sync_read, into)
        return into

    def accumulate(self, contribution: Array) -> None:
        raise NotImplementedError("Mooncake adds nothing at the target")

    def fetch_add(self, value: int) -> int:
        raise NotImplementedError("Mooncake has no atomics")

    def close(self) -> None:
        for at in self._registered:
            self._engine.unregister_memory(at)


def serve(ready: Callable[[Any], None], case: Case) -> None:
    array = zeros(case.nbytes // 4)
    engine = _engine()
    engine.register_memory(array.ctypes.data, array.nbytes)
    ready((f"127.0.0.1:{engine.get_rpc_port()}", array.ctypes.data))
    threading.Event().wait()


def _measure(case: Case) -> Sample:
    os.environ["MC_TCP_BIND_ADDRESS"] = "127.0.0.1"  # of this process and of those it starts
    os.environ["MC_FORCE_TCP"] = "1"
    os.environ["MC_LOG_LEVEL"] = "ERROR"
    with processes.server(serve, case) as (pid, target):
        return processes.measure(case, functools.partial(Client, target), pid)


class Mooncake(processes.Peer):
    name = "Mooncake"
    not_remote = "not tried there yet"

    def missing(self) -> str | None:
        return processes.missing_modules("mooncake")

    def takes(self, case: Case) -> bool:
        return case.transport == TCP and case.operation in (WRITE, READ)

    def measure(self, case: Case) -> Sample:
        return processes.apart(_measure, case)


CONTENDERS = [Mooncake()]
