"""Code that all peers need: their clients' calls, a server process whose CPU time is known, programs of others.

A peer is a way to connect (`Connect`, called in every client's process) and whatever has to run meanwhile. Its module
defines module-level functions and classes only, since processes are spawned. Every case has new processes, so that none
inherits another's warm state and nothing runs between cases.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from perf import remote
from perf.clients import (
    ANSWER_S,
    SPAWN,
    Array,
    Clients,
    added,
    check,
    cpu_seconds,
    end_with_parent,
    stop,
    written,
    zeros,
)
from perf.contender import FETCH_ADD, PEER, READ, WRITE, Case, Run, Sample, run_calls, sample_of

_START_S = 60.0
_END_S = 5.0


class Peer:
    """The usual kind of peer: nothing of it runs but within `measure`."""

    kind = PEER
    not_remote: str | None = None  # why it isn't measured between two hosts, where it is over loopback

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Connection(Protocol):
    """One process' way to the shared array. A peer that lacks an operation leaves it out and says so in `takes`.

    `write` and `accumulate` return when the array has the values (not when they are on their way), `read` when the
    caller has them. Arrays are contiguous float32, as long as the shared one.
    """

    def write(self, source: Array) -> object: ...

    def read(self, into: Array) -> Array:
        """Give the contents: in `into` where the peer can put them there, else in memory of its own, uncopied."""

    def accumulate(self, contribution: Array) -> object: ...

    def fetch_add(self, value: int) -> int:
        """Give what the counter had before."""

    def close(self) -> None: ...


Connect = Callable[[Case, int], Connection]  # the int: which client, from 0; NOBODY for the process that checks
NOBODY = -1


# ---- a client's process


def start_values(case: Case) -> Array:
    """The array's values before the clients start, shape (nbytes / 4,)."""
    count = case.nbytes // 4
    return written(count, 0) if case.operation == READ else zeros(count)


def work(case: Case, client: int, connection: Connection, wait_for_start: Callable[[], object]) -> Run:
    """A connected client's work; RuntimeError if it read something else than the array's values."""
    count = case.nbytes // 4
    if case.operation == FETCH_ADD:
        return run_calls(functools.partial(connection.fetch_add, 1), case, wait_for_start)
    if case.operation == READ:
        into = zeros(count)
        run = run_calls(functools.partial(connection.read, into), case, wait_for_start)
        into[:] = 0  # or the check would take an earlier read's
        check(case, connection.read(into), run.calls)
        return run
    values = written(count, client) if case.operation == WRITE else added(count)
    operation = connection.write if case.operation == WRITE else connection.accumulate
    return run_calls(functools.partial(operation, values), case, wait_for_start)


class _Client:
    """The function that perf.clients runs in a client's process. Its connection stays open until all is checked: it may
    be what keeps the array."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._open = contextlib.ExitStack()

    def run(self, case: Case, index: int, wait_for_start: Callable[[], object], **_: Any) -> Run:
        connection = self._open.enter_context(contextlib.closing(self._connect(case, index)))
        return work(case, index, connection, wait_for_start)

    def close(self) -> None:
        self._open.close()


def measure(case: Case, connect: Connect, server_pid: int | None = None) -> Sample:
    """Measure a peer whose array any process can reach through `connect`: set the array, run the clients, check it."""
    server_cpu = None if server_pid is None else functools.partial(cpu_seconds, server_pid)
    with contextlib.closing(connect(case, NOBODY)) as owner:
        before = owner.fetch_add(0) if case.operation == FETCH_ADD else 0
        if case.operation != FETCH_ADD:
            owner.write(start_values(case))
        with contextlib.closing(Clients.start(case.clients, _Client, connect)) as clients:
            runs, server_cpu_s = clients.run(case, server_cpu)
            if case.operation == FETCH_ADD:
                check(case, np.array([owner.fetch_add(0) - before]), sum(run.calls for run in runs))
            elif case.operation != READ:
                found = owner.read(zeros(case.nbytes // 4))
                check(case, found, sum(run.calls for run in runs))
    return sample_of(case, runs, server_cpu_s)


# ---- processes that serve


def apart(measure_case: Callable[[Case], Sample], case: Case) -> Sample:
    """measure_case(case) in a process of its own: for libraries that change the process they are loaded into."""
    with _child(_apart_main, 2 * ANSWER_S + case.seconds, measure_case, case) as (_, sample):
        assert isinstance(sample, Sample)
        return sample


def _apart_main(ready: Callable[[Any], None], measure_case: Callable[[Case], Sample], case: Case) -> None:
    ready(measure_case(case))


@contextlib.contextmanager
def server(serve: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Any]]:
    """A process on the servers' host that runs serve(ready, *arguments), which calls ready(answer) once and never
    returns. (pid, answer)."""
    with _child(serve, _START_S, *arguments, there=True) as answer:
        yield answer


@contextlib.contextmanager
def _child(
    main: Callable[..., None], seconds: float, *arguments: Any, there: bool = False
) -> Iterator[tuple[int, Any]]:
    """(pid, what it answers within so many seconds) of a process that ends with the block, on the servers' host if it
    is to be `there`. It may have children."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_child_main, args=(theirs, main, arguments))
    with remote.on_server() if there else contextlib.nullcontext():
        process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise RuntimeError(f"{main.__module__}: {main.__qualname__} gave no answer within {seconds:g} s")
        try:
            good, answer = ours.recv()
        except EOFError:
            raise RuntimeError(f"{main.__module__}: {main.__qualname__} ended without an answer") from None
        if not good:
            raise RuntimeError(answer)
        assert process.pid is not None
        yield process.pid, answer
    finally:
        ours.close()
        stop(process)


def _child_main(pipe: Pipe, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    try:
        main(lambda answer: pipe.send((True, answer)), *arguments)
    except BaseException as error:
        with contextlib.suppress(OSError):
            said = str(error) if type(error) is RuntimeError else traceback.format_exc()
            pipe.send((False, said))
        raise


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
        preexec_fn=end_with_parent,
    )
    try:
        yield process
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def free_port() -> int:
    """A TCP port of the servers' host that nobody had a moment ago."""
    with remote.on_server() as address, socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def missing_modules(*names: str) -> str | None:
    """The result of `missing` for the first module that can't be found; None if all can. Nothing is imported."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            return f"no Python module {name} (perf/peers/README.md)"
    return None
