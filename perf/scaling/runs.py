"""One measurement: client processes that call at the same time, what they reach, and whether the bytes are right."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from perf.scaling.fleet import Fleet, Process, started_together

OPERATIONS = ("write", "read", "accumulate")


@dataclass(frozen=True)
class Run:
    """What clients reached together. Bandwidth in bytes per second, over the time from the first start to the last end
    of a call that began in time; CPU in seconds per 1e9 bytes moved.
    """

    bandwidth: float
    calls: int
    p50_seconds: float
    p99_seconds: float
    fairness: float  # calls of the client that made fewest, by those of the one that made most
    client_cpu: float
    server_cpu: float


def run_calls(fleet: Fleet, workers: Sequence[Process], operation: str, nbytes: int, seconds: float) -> Run:
    """Let all workers' clients call for about `seconds`; they have opened one float32 buffer. Blocks.

    RuntimeError where an element is not what it must be: written once, read as it was, or added as often as was called.
    """
    workers[0].ask(do="fill", value=7.0 if operation == "read" else 0.0)
    server_cpu = fleet.servers_cpu_seconds()
    answers = started_together(workers, do="run", operation=operation, nbytes=nbytes, seconds=seconds)
    server_cpu = fleet.servers_cpu_seconds() - server_cpu
    clients = [times for answer in answers for times in answer["calls"]]
    times = [end - start for client in clients for start, end in client]
    _check(workers[0], operation, nbytes, len(times), answers)
    moved = len(times) * nbytes
    elapsed = max(client[-1][1] for client in clients) - min(client[0][0] for client in clients)
    return Run(
        bandwidth=moved / elapsed,
        calls=len(times),
        p50_seconds=statistics.median(times),
        p99_seconds=sorted(times)[int(0.99 * (len(times) - 1) + 0.5)],
        fairness=min(map(len, clients)) / max(map(len, clients)),
        client_cpu=sum(answer["cpu"] for answer in answers) / (moved / 1e9),
        server_cpu=server_cpu / (moved / 1e9),
    )


def _check(worker: Process, operation: str, nbytes: int, calls: int, answers: Sequence[dict]) -> None:  # type: ignore[type-arg]
    if operation == "read":
        wrong = sum(answer["wrong"] + (answer["first"] != 7.0) for answer in answers)
    else:
        wrong = worker.ask(do="check", value=1.0 if operation == "write" else float(calls), nbytes=nbytes)["wrong"]
    if wrong:
        raise RuntimeError(f"{wrong} elements are wrong after {calls} calls of {operation} of {nbytes} bytes")
