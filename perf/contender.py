"""The cases, and the one interface of all contenders: us, the physical limits and the peers.

A contender is entered once a round; it starts what it needs (daemons, a store, a launcher) and ends it on exit,
whatever happened in between. `measure` runs one case and checks the bytes: a benchmark of wrong results is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np

WRITE, READ, ACCUMULATE, FETCH_ADD = OPERATIONS = ("write", "read", "accumulate", "fetch_add")
# remote: TCP between the two hosts of perf/remote.py, unshaped and with a rate; tcp: over loopback, of one address;
# tls: that inside TLS.
SHM, REMOTE, REMOTE_10GBIT, REMOTE_1GBIT, TCP, TLS, VERBS = TRANSPORTS = (
    *("shm", "remote", "remote-10gbit", "remote-1gbit", "tcp", "tls", "verbs"),
)
REMOTE_RATES = {REMOTE: None, REMOTE_10GBIT: "10gbit", REMOTE_1GBIT: "1gbit"}
OURS, LIMIT, ASIDE, PEER = KINDS = ("ours", "limit", "aside", "peer")


@dataclass(frozen=True)
class Case:
    """One cell: `clients` processes do `operation` at once, each call on all `nbytes` of ONE float32 array that they
    share (fetch_add: on one int64, nbytes is 8), each for about `seconds` after a common start and a warm-up.

    accumulate is `array += contribution`, done where the array is; every element must end as its start plus all that
    was added. Contributions are small whole numbers, so that float32 sums are exact: the check is equality.
    """

    transport: str
    operation: str
    nbytes: int
    clients: int = 1
    seconds: float = 0.3

    @property
    def remote(self) -> bool:
        """Whether servers and clients are on the two hosts of perf/remote.py."""
        return self.transport in REMOTE_RATES

    @property
    def over_tcp(self) -> bool:
        """Over loopback or between two hosts, as it is."""
        return self.transport == TCP or self.remote

    @property
    def carried(self) -> bool:
        """Whether a network device carries the bytes, in TCP, inside TLS or not."""
        return self.over_tcp or self.transport == TLS


@dataclass(frozen=True)
class Sample:
    """The observations of one round of one case.

    `bytes_per_second` sums over the clients: calls done in the common window times nbytes by its length. Latencies are
    per call, of all clients. CPU seconds are per 1e9 bytes moved; `server_cpu` None where no process serves (one-sided)
    or it can't be told apart.
    """

    bytes_per_second: float
    p50_seconds: float
    p99_seconds: float
    calls: int
    client_cpu: float
    server_cpu: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Contender(Protocol):
    """Something that can do some of the cases. All take turns case by case, so between them it uses no processor."""

    name: str  # in tables: "smb", "memcpy", "bare socket, polling", "Open MPI 5", ...
    kind: str  # of KINDS; aside: shown beside the limits, without being one

    def missing(self) -> str | None:
        """Why it can't run here (a module, a program), in words for the table's footnotes; None if it can."""

    def takes(self, case: Case) -> bool:
        """Whether it has that operation over that transport, at that size and with so many clients."""

    def __enter__(self) -> Contender: ...

    def __exit__(self, *_: object) -> None: ...

    def measure(self, case: Case) -> Sample:
        """Run it. Blocks. RuntimeError with what differs where the bytes are wrong."""


@dataclass(frozen=True)
class Run:
    """One client process's observations: start and end (time.monotonic) of every `batch` calls that count, and its CPU
    seconds."""

    starts: list[float]
    ends: list[float]
    cpu_seconds: float
    calls: int  # warm-up included: what the check must find added
    batch: int = 1


WARM_UP_CALLS = 3
_BATCH_BYTES = 4 << 20  # as in limits.c
_BATCH_SECONDS = 0.001


def run_calls(call: Callable[[], object], case: Case, wait_for_start: Callable[[], object]) -> Run:
    """The work of every client process of every contender: warm up, wait for the others, call for about `case.seconds`.

    Clocks are read around each call; over shm, as by the limits, around calls of 4 MiB together (1 ms at most): to
    read the clock and keep what it says takes as long as a small call. At least 3 times of it count.
    """
    began = time.monotonic()
    for _ in range(WARM_UP_CALLS):
        call()
    took = (time.monotonic() - began) / WARM_UP_CALLS
    batch = max(1, min(_BATCH_BYTES // case.nbytes, int(_BATCH_SECONDS / took))) if case.transport == SHM else 1
    wait_for_start()
    starts: list[float] = []
    ends: list[float] = []
    cpu = time.process_time()
    now = time.monotonic()
    deadline = now + case.seconds
    while now < deadline or len(ends) < 3:
        starts.append(now)
        for _ in repeat(None, batch):
            call()
        now = time.monotonic()
        ends.append(now)
    return Run(starts, ends, time.process_time() - cpu, WARM_UP_CALLS + batch * len(ends), batch)


def sample_of(case: Case, runs: list[Run], server_cpu_seconds: float | None) -> Sample:
    """Put the clients' runs together. Bandwidth is taken over the window in which all of them were at work. If that is
    less than half of the whole, it is taken over the whole."""
    first, last = max(run.starts[0] for run in runs), min(run.ends[-1] for run in runs)
    whole_first, whole_last = min(run.starts[0] for run in runs), max(run.ends[-1] for run in runs)
    if last - first < 0.5 * (whole_last - whole_first):
        first, last = whole_first, whole_last
    done = sum(_calls_in(run, first, last) for run in runs)
    times = np.concatenate([np.subtract(run.ends, run.starts) / run.batch for run in runs])
    calls = sum(run.batch * len(run.ends) for run in runs)
    gigabytes = calls * case.nbytes / 1e9
    return Sample(
        bytes_per_second=done * case.nbytes / (last - first),
        p50_seconds=float(np.median(times)),
        p99_seconds=float(np.quantile(times, 0.99, method="higher")),
        calls=calls,
        client_cpu=sum(run.cpu_seconds for run in runs) / gigabytes,
        server_cpu=None if server_cpu_seconds is None else server_cpu_seconds / gigabytes,
    )


def _calls_in(run: Run, first: float, last: float) -> float:
    """Calls within the window, the ones at its edges by their share."""
    starts, ends = np.array(run.starts), np.array(run.ends)
    inside = np.minimum(ends, last) - np.maximum(starts, first)
    return run.batch * float(np.sum(np.clip(inside, 0, None) / (ends - starts)))
