"""Gloo, through torch.distributed, over TCP: its send and recv.

It is for ranks that call at once, and has no one-sided operations: a thread of the server answers each client, which is
what one would write with it. Accumulate is a send, added with PyTorch at the server, and an answer. No fetch_add.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from perf import remote
from perf.clients import Array
from perf.contender import ACCUMULATE, FETCH_ADD, READ, WRITE, Case, Sample
from perf.peers import processes

SERVER, CLIENT = range(2)  # ranks in a group that each client has with the server
QUESTIONS = (WRITE, READ, ACCUMULATE)


class Pair:
    """The group of one client and the server."""

    def __init__(self, port: int, client: int, rank: int) -> None:
        import torch
        from torch import distributed

        self._torch = torch
        store = distributed.TCPStore(remote.server_address(), port, is_master=False, timeout=timedelta(seconds=60))
        prefixed = distributed.PrefixStore(str(client), store)
        self._group = distributed.ProcessGroupGloo(prefixed, rank, 2, timedelta(hours=1))
        self._other = 1 - rank

    def send(self, values: Any) -> None:
        self._group.send([self._torch.as_tensor(values)], self._other, 0).wait()

    def receive(self, values: Any) -> None:
        self._group.recv([self._torch.as_tensor(values)], self._other, 0).wait()


class Client:
    def __init__(self, port: int, _case: Case, client: int) -> None:
        self._pair = Pair(port, client, CLIENT)
        self._word = np.zeros(1, np.int64)

    def _ask(self, operation: str) -> None:
        self._word[0] = QUESTIONS.index(operation)
        self._pair.send(self._word)

    def write(self, source: Array) -> None:
        self._ask(WRITE)
        self._pair.send(source)
        self._pair.receive(self._word)

    def read(self, into: Array) -> Array:
        self._ask(READ)
        self._pair.receive(into)
        return into

    def accumulate(self, contribution: Array) -> None:
        self._ask(ACCUMULATE)
        self._pair.send(contribution)
        self._pair.receive(self._word)

    def fetch_add(self, value: int) -> int:
        raise NotImplementedError("gloo has no fetch_add")

    def close(self) -> None:
        pass


def serve(ready: Callable[[int], None], case: Case) -> None:
    import torch
    from torch import distributed

    store = distributed.TCPStore(remote.server_address(), 0, is_master=True, wait_for_workers=False)
    array = torch.zeros(case.nbytes // 4)
    lock = threading.Lock()

    def answer(client: int) -> None:
        pair = Pair(store.port, client, SERVER)
        word, received = np.zeros(1, np.int64), torch.zeros_like(array)
        while True:
            try:
                pair.receive(word)
            except RuntimeError:  # the client has gone
                return
            operation = QUESTIONS[word[0]]
            if operation == READ:
                pair.send(array)
                continue
            pair.receive(array if operation == WRITE else received)
            if operation == ACCUMULATE:
                with lock:
                    array.add_(received)
            pair.send(word)

    clients = (processes.NOBODY, *range(case.clients))
    threads = [threading.Thread(target=answer, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    ready(store.port)
    threading.Event().wait()


def _measure(case: Case) -> Sample:
    os.environ["GLOO_SOCKET_IFNAME"] = remote.device()  # of this process and of those it starts
    with processes.server(serve, case) as (pid, port):
        return processes.measure(case, functools.partial(Client, port), pid)


class Gloo(processes.Peer):
    name = "gloo"

    def missing(self) -> str | None:
        return processes.missing_modules("torch")

    def takes(self, case: Case) -> bool:
        return case.over_tcp and case.operation != FETCH_ADD

    def measure(self, case: Case) -> Sample:
        return processes.apart(_measure, case)


CONTENDERS = [Gloo()]
