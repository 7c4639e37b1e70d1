"""NIXL's write and read, with its UCX backend, over shared memory and TCP loopback. It has no atomics and adds nothing.

The target's memory is registered plain memory, which is how NIXL is used; its progress thread answers over TCP.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from perf.clients import Array, zeros
from perf.contender import READ, SHM, TCP, WRITE, Case, Sample
from perf.peers import processes

TARGET = "target"
# Over shared memory, connections are still made over TCP: nothing else tells NIXL of a peer that died.
TRANSPORTS = {
    SHM: {"UCX_TLS": "shm,self,tcp", "UCX_NET_DEVICES": "lo"},
    TCP: {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"},
}


def _agent(name: str, answers: bool) -> Any:
    """An agent; `answers` is whether a thread of it polls for what others want of it.

    The target's does, or TCP would stand still. A client polls by itself: with a thread beside it, it fell to a tenth
    on two cores.
    """
    from nixl_cu12 import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(answers, backends=["UCX"]))


class Client:
    def __init__(self, target: tuple[bytes, int], case: Case, client: int) -> None:
        metadata, address = target
        self._agent = _agent(f"client {client}", answers=False)
        self._agent.add_remote_agent(metadata)
        self._there = self._agent.get_xfer_descs([(address, case.nbytes, 0)], "DRAM")
        self._transfers: dict[tuple[str, int], Any] = {}
        self._registered: list[Any] = []

    def _transfer(self, direction: str, array: Array) -> None:
        at = array.ctypes.data
        handle = self._transfers.get((direction, at))
        if handle is None:  # prepared once for each buffer, as a program would
            self._registered.append(self._agent.register_memory([(at, array.nbytes, 0, "")], "DRAM"))
            here = self._agent.get_xfer_descs([(at, array.nbytes, 0)], "DRAM")
            handle = self._agent.initialize_xfer(direction, here, self._there, TARGET)
            self._transfers[direction, at] = handle
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL: {direction} of {array.nbytes} bytes ended as {state}")

    def write(self, source: Array) -> None:
        self._transfer("WRITE", source)

    def read(self, into: Array) -> Array:
        self._transfer("READ", into)
        return into

    def accumulate(self, contribution: Array) -> None:
        raise NotImplementedError("NIXL adds nothing at the target")

    def fetch_add(self, value: int) -> int:
        raise NotImplementedError("NIXL has no atomics")

    def close(self) -> None:
        for handle in self._transfers.values():
            self._agent.release_xfer_handle(handle)
        for registered in self._registered:
            self._agent.deregister_memory(registered)


def serve(ready: Callable[[Any], None], case: Case) -> None:
    array = zeros(case.nbytes // 4)
    agent = _agent(TARGET, answers=True)
    agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
    ready((agent.get_agent_metadata(), array.ctypes.data))
    threading.Event().wait()


def _measure(case: Case) -> Sample:
    os.environ.update(TRANSPORTS[case.transport])  # of this process and of those it starts
    os.environ["NIXL_LOG_LEVEL"] = "WARN"
    with processes.server(serve, case) as (pid, target):
        return processes.measure(case, functools.partial(Client, target), None if case.transport == SHM else pid)


class Nixl(processes.Peer):
    name = "NIXL"
    not_remote = "not tried there yet"

    def missing(self) -> str | None:
        return processes.missing_modules("nixl_cu12")

    def takes(self, case: Case) -> bool:
        return case.transport in TRANSPORTS and case.operation in (WRITE, READ)

    def measure(self, case: Case) -> Sample:
        return processes.apart(_measure, case)


CONTENDERS = [Nixl()]
