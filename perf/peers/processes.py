"""What all peers need: client processes with a common start, a server process whose CPU time is known, checked bytes.

A peer is a way to connect (`Connect`, called in every client's process) and whatever has to run meanwhile. Its module
defines module-level functions and classes only, since processes are spawned: forked ones would inherit the threads of
gRPC, UCX and others in an unknown state.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perf.contender import FETCH_ADD, READ, WRITE, Case, Run, Sample, run_calls, sample_of

Floats = NDArray[np.float32]
SPAWN = multiprocessing.get_context("spawn")
DEADLINE_S = 120.0  # for one case on top of its own length: the slowest peer takes 2 s for one call with 256 MiB
EXACT_BELOW = 1 << 24  # float32 has all whole numbers up to here


class Connection(Protocol):
    """One process' way to the shared array. A peer that lacks an operation leaves it out and says so in `takes`.

    `write` and `accumulate` return when the array has the values (not when they are on their way), `read` when the
    caller has them. Arrays are contiguous float32, as long as the shared one.
    """

    def write(self, source: Floats) -> object: ...

    def read(self, into: Floats) -> Floats:
        """Give the contents: in `into` where the peer can put them there, else in memory of its own, uncopied."""

    def accumulate(self, contribution: Floats) -> object: ...

    def fetch_add(self, value: int) -> int:
        """Give what the counter had before."""

    def close(self) -> None: ...


Connect = Callable[[Case, int], Connection]  # the int: which client, from 0; NOBODY for the process that checks
NOBODY = -1


# -- contents, and what they must end as ------------------------------------------------------------------------------


def start_values(case: Case) -> Floats:
    return (np.arange(case.nbytes // 4) % 1000).astype(np.float32)


def client_values(case: Case, client: int) -> Floats:
    """What a client writes (told from the start and from other clients' by its thousands), or adds (1 to 3).

    No period is a power of two, so that bytes at the wrong place are wrong values.
    """
    if case.operation == WRITE:
        return start_values(case) + np.float32(1000 * (client + 1))
    numbers = np.arange(case.nbytes // 4)
    return ((numbers + numbers // 3 + client) % 3 + 1).astype(np.float32)


def check_array(case: Case, found: Floats, runs: list[Run]) -> None:
    """RuntimeError unless the array is what those runs leave behind."""
    start = start_values(case)
    if case.operation == WRITE:
        by_clients = [found == start + np.float32(1000 * (client + 1)) for client in range(case.clients)]
        right = np.logical_or.reduce(by_clients)
    else:
        expected = start.astype(np.float64)
        for client, run in enumerate(runs):
            expected += float(run.calls) * client_values(case, client)
        if expected.max(initial=0) >= EXACT_BELOW:
            raise RuntimeError(f"{case}: so many calls that float32 sums are inexact: make it shorter")
        right = found == expected
    if found.shape != start.shape or not right.all():
        at = int(np.argmin(right))
        raise RuntimeError(f"{case}: wrong bytes, the first at element {at} of {start.size}: {found[at]}")


def check_counter(case: Case, before: int, after: int, runs: list[Run]) -> None:
    calls = sum(run.calls for run in runs)
    if after - before != calls:
        raise RuntimeError(f"{case}: the counter grew by {after - before} in {calls} calls that add 1")


# -- one client ----------------------------------------------------------------------------------------------------


def work(case: Case, client: int, connection: Connection, wait_for_start: Callable[[], object]) -> Run:
    """What a client does once connected; RuntimeError where it read something else than what stands there."""
    if case.operation == FETCH_ADD:
        return run_calls(lambda: connection.fetch_add(1), case.seconds, wait_for_start)
    if case.operation == READ:
        into = np.zeros(case.nbytes // 4, np.float32)
        run = run_calls(lambda: connection.read(into), case.seconds, wait_for_start)
        into[:] = 0  # or the check would take an earlier read's
        if not np.array_equal(connection.read(into), start_values(case)):
            raise RuntimeError(f"{case}: client {client} read wrong bytes")
        return run
    values = client_values(case, client)
    operation = connection.write if case.operation == WRITE else connection.accumulate
    return run_calls(lambda: operation(values), case.seconds, wait_for_start)


def die_with_parent() -> None:
    """Let the kernel end this process when its parent dies, however that dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _client_main(pipe: Pipe, case: Case, client: int, connect: Connect) -> None:
    die_with_parent()

    def wait_for_start() -> None:
        pipe.send("warm")
        pipe.recv()

    try:
        with contextlib.closing(connect(case, client)) as connection:
            pipe.send(asdict(work(case, client, connection, wait_for_start)))
            pipe.recv()  # the connection may be what keeps the array
    except EOFError:  # the parent gave up
        pass
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


# -- all of them -----------------------------------------------------------------------------------------------------


def measure(case: Case, connect: Connect, server_pid: int | None = None) -> Sample:
    """Measure a peer whose array any process can reach through `connect`: set the array, run the clients, check it."""
    with contextlib.closing(connect(case, NOBODY)) as checker:
        before = checker.fetch_add(0) if case.operation == FETCH_ADD else 0
        if case.operation != FETCH_ADD:
            checker.write(start_values(case))
        runs, server_cpu_s = run_clients(case, connect, server_pid)
        if case.operation == FETCH_ADD:
            check_counter(case, before, checker.fetch_add(0), runs)
        elif case.operation != READ:
            check_array(case, checker.read(np.zeros(case.nbytes // 4, np.float32)), runs)
    return sample_of(case, runs, server_cpu_s)


def run_clients(case: Case, connect: Connect, server_pid: int | None = None) -> tuple[list[Run], float | None]:
    """The clients' runs, and the CPU seconds that the server used from their start on. All have ended on return."""
    deadline = time.monotonic() + DEADLINE_S + case.seconds
    processes, pipes = [], []
    try:
        for client in range(case.clients):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_client_main, args=(theirs, case, client, connect), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            _answer(pipe, deadline, case)
        cpu_s = None if server_pid is None else cpu_seconds(server_pid)
        for pipe in pipes:
            pipe.send("start")
        runs = [Run(**_answer(pipe, deadline, case)) for pipe in pipes]
        used_s = None if server_pid is None or cpu_s is None else cpu_seconds(server_pid) - cpu_s
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(10)
        return runs, used_s
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            stop(process)


def _answer(pipe: Pipe, deadline: float, case: Case) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise RuntimeError(f"{case}: a client has not answered in {DEADLINE_S + case.seconds:.0f} s")
    try:
        answer = pipe.recv()
    except EOFError:
        raise RuntimeError(f"{case}: a client died without a word") from None
    if isinstance(answer, str) and answer != "warm":
        raise RuntimeError(f"{case}: a client failed:\n{answer}")
    return answer


def apart(measure_case: Callable[[Case], Sample], case: Case) -> Sample:
    """measure_case(case) in a process of its own: for libraries that change the process they are loaded into."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_apart_main, args=(theirs, measure_case, case))
    process.start()
    theirs.close()
    try:
        sample = _answer(ours, time.monotonic() + 2 * DEADLINE_S + case.seconds, case)
        assert isinstance(sample, Sample)
        return sample
    finally:
        ours.close()
        stop(process)


def _apart_main(pipe: Pipe, measure_case: Callable[[Case], Sample], case: Case) -> None:
    die_with_parent()
    try:
        pipe.send(measure_case(case))
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


# -- servers -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(serve: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Any]]:
    """A process that runs serve(ready, *arguments), which calls ready(answer) once and never returns. (pid, answer)."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_server_main, args=(theirs, serve, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(60):
            raise RuntimeError(f"{serve.__module__}: the server has not started in 60 s")
        try:
            answer = ours.recv()
        except EOFError:
            raise RuntimeError(f"{serve.__module__}: the server ended at its start, see above") from None
        assert process.pid is not None
        yield process.pid, answer
    finally:
        ours.close()
        stop(process)


def _server_main(pipe: Pipe, serve: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    die_with_parent()
    serve(pipe.send, *arguments)


def stop(process: BaseProcess) -> None:
    process.terminate()
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()


@contextlib.contextmanager
def program(*command: str | Path, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A program in a process group of its own, which is ended on exit. Its output is read by who started it."""
    process = subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **(environment or {})},
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def cpu_seconds(pid: int) -> float:
    """What a process, all its threads together, has used so far, to the nanosecond (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def missing_modules(*names: str) -> str | None:
    """What `missing` says of the first module that can't be found; None if all can. Nothing is imported."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            return f"no Python module {name} (make perf-peers)"
    return None
