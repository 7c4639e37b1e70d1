"""A lock's holder is stopped past its lease and wakes up: it is refused, and no change of it gets in among the next
one's.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import smb
from tests.fault.long import LIMIT_S, times
from tests.support.checkers import FencedWrite, Holding, check_locks
from tests.support.clients import in_process, write_fenced_for_ever
from tests.support.daemons import wait_for
from tests.support.transports import FAR

pytestmark = pytest.mark.timeout(LIMIT_S)

ROUNDS = times(5, 1000)
TTL_S = 0.15


def _holds(messages: Any, buffer: smb.Buffer) -> int:
    """Wait until it holds the lock and has written under it; return its token. On a busy machine it may lose a
    lease that nobody took from it: then it takes the lock again."""
    while True:
        kind, token = messages.get(timeout=30)
        if kind == "holds":
            wait_for(lambda token=token: not messages.empty() or buffer.read(0, 1)[0] == token, "its writes")
            if messages.empty():
                return int(token)


def test_stale_writes() -> None:
    """Each round: the holder writes under the lock without end, is stopped past its lease; another takes the lock and
    writes; the first is woken and goes on writing: none of its writes is accepted, and it is told.
    """
    stale = 0
    with (
        smb.LocalCluster(servers=2, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport=FAR) as client,
    ):
        buffer = client.create("w", 40_000, "int64", stripe="64KiB")
        holdings: list[Holding] = []
        writes: list[FencedWrite] = []
        with in_process(write_fenced_for_ever, cluster.address, "w", TTL_S) as (process, messages):
            for _ in range(ROUNDS):
                token = _holds(messages, buffer)
                granted = time.monotonic()
                os.kill(process.pid, signal.SIGSTOP)
                with buffer.lock(ttl=5, timeout=30) as lock:
                    taken = time.monotonic()
                    holdings += [Holding(0, token, granted, granted), Holding(1, lock.token, taken, taken)]
                    buffer.write(np.full(40_000, lock.token), fence=lock)
                    os.kill(process.pid, signal.SIGCONT)
                    assert messages.get(timeout=30) == ("lost", token)
                    found = np.unique(buffer.read())
                    stale += found.tolist() != [lock.token]
                    writes.append(FencedWrite(token, taken, time.monotonic(), bool(stale)))
            check_locks(holdings, writes)
    print(f"{ROUNDS} rounds: {stale} stale writes")
    assert stale == 0
