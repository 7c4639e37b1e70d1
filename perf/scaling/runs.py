"""One measurement: client processes that call at the same time, what they reach, and whether the bytes are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perf.contender import ACCUMULATE, READ, TCP, WRITE, Case, sample_of
from perf.contender import Run as ClientRun
from perf.scaling.fleet import Fleet, Process, started_together

OPERATIONS = (WRITE, READ, ACCUMULATE)


@dataclass(frozen=True)
class Run:
    """The rates that clients reached together. Bandwidth in bytes per second, over the time in which all of them were
    at work (perf.contender.sample_of); CPU in seconds per 1e9 bytes moved.
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
    clients = [
        ClientRun(
            [start for start, _ in times], [end for _, end in times], answer["cpu"] / len(answer["calls"]), len(times)
        )
        for answer in answers
        for times in answer["calls"]
    ]
    calls = [client.calls for client in clients]
    _check(workers[0], operation, nbytes, sum(calls), answers)
    sample = sample_of(Case(TCP, operation, nbytes, len(clients), seconds), clients, server_cpu)
    return Run(
        bandwidth=sample.bytes_per_second,
        calls=sum(calls),
        p50_seconds=sample.p50_seconds,
        p99_seconds=sample.p99_seconds,
        fairness=min(calls) / max(calls),
        client_cpu=sample.client_cpu,
        server_cpu=sample.server_cpu or 0.0,
    )


def _check(worker: Process, operation: str, nbytes: int, calls: int, answers: Sequence[dict]) -> None:  # type: ignore[type-arg]
    if operation == "read":
        wrong = sum(answer["wrong"] + (answer["first"] != 7.0) for answer in answers)
    else:
        wrong = worker.ask(do="check", value=1.0 if operation == "write" else float(calls), nbytes=nbytes)["wrong"]
    if wrong:
        raise RuntimeError(f"{wrong} elements are wrong after {calls} calls of {operation} of {nbytes} bytes")
