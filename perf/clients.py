"""Client processes of a contender: started once, then asked case by case over pipes; and what all of them check."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perf.contender import ACCUMULATE, READ, Case, Run
from smb.arrays.memory import whole_pages

SPAWN = multiprocessing.get_context("spawn")  # the threads of gRPC, UCX and others do not survive a fork
ANSWER_S = 60.0  # to get ready, and to come to an end: the slowest peer takes 2 s for one call with 256 MiB
_END_S = 5.0

Array = NDArray[np.float32]


class Worker(Protocol):
    """The function that runs in a client process. Made there, once, by a callable that pickle can name."""

    def run(self, case: Case, index: int, wait_for_start: Callable[[], object], **about: Any) -> Run:
        """Do the case's calls as client `index` (perf.contender.run_calls) and check what was read."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Clients:
    """Processes that wait, without using the processor, until they are asked. Close them, also after an error."""

    processes: list[multiprocessing.process.BaseProcess]
    pipes: list[Connection]

    @classmethod
    def start(cls, count: int, make_worker: Callable[..., Worker], *arguments: Any) -> Clients:
        """Start `count` processes, each with a worker of its own. Returns when all have imported what they need: one
        that still does takes a core from those that are measured."""
        clients = cls([], [])
        for _ in range(count):
            pipe, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_serve, args=(theirs, make_worker, arguments), daemon=True)
            process.start()
            theirs.close()  # so that they see the pipe end with us
            clients.processes.append(process)
            clients.pipes.append(pipe)
        try:
            _gather(clients.pipes, ANSWER_S)
        except BaseException:
            clients.close()
            raise
        return clients

    def run(
        self, case: Case, server_cpu_seconds: Callable[[], float] | None, **about: Any
    ) -> tuple[list[Run], float | None]:
        """Let the first `case.clients` of them run the case, started together when all are warm.

        Returns their runs, and the server's CPU seconds meanwhile (None where none was to be asked). RuntimeError where
        one fails; close them then.
        """
        pipes = self.pipes[: case.clients]
        for index, pipe in enumerate(pipes):
            pipe.send((case, index, about))
        _gather(pipes, ANSWER_S)
        before = server_cpu_seconds() if server_cpu_seconds else None
        for pipe in pipes:
            pipe.send("start")
        runs = _gather(pipes, ANSWER_S + case.seconds)
        return runs, None if server_cpu_seconds is None or before is None else server_cpu_seconds() - before

    def close(self) -> None:
        """End them all; those that do not end by themselves, by force."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + _END_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            stop(process)


def _gather(pipes: list[Connection], seconds: float) -> list[Any]:
    """One answer from each."""
    answers: dict[Connection, Any] = {}
    deadline = time.monotonic() + seconds
    while len(answers) < len(pipes):
        left = deadline - time.monotonic()
        ready = wait([pipe for pipe in pipes if pipe not in answers], max(0.0, left))
        if not ready and left <= 0:
            raise RuntimeError(f"{len(pipes) - len(answers)} clients gave no answer within {seconds:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                answer = pipe.recv()
            except EOFError:
                raise RuntimeError("a client process ended in the middle of a case") from None
            if isinstance(answer, Exception):
                raise RuntimeError(f"{type(answer).__name__}: {answer}") from answer
            answers[pipe] = answer
    return [answers[pipe] for pipe in pipes]


def _serve(pipe: Connection, make_worker: Callable[..., Worker], arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    worker: Worker | None = None

    def wait_for_start() -> None:
        pipe.send("ready")
        pipe.recv()

    with contextlib.suppress(EOFError, OSError), pipe:
        pipe.send("here")
        while True:
            case, index, about = pipe.recv()
            try:
                worker = worker or make_worker(*arguments)
                answer: Run | Exception = worker.run(case, index, wait_for_start, **about)
            except (EOFError, OSError) as error:
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            except Exception as error:  # noqa: BLE001 - it is reported, with its type
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send(answer)
    if worker is not None:
        worker.close()


def end_with_parent() -> None:
    """Let the kernel end this process when its parent dies, however that dies; Ctrl-C, which reaches the whole group,
    is the parent's affair."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def stop(process: multiprocessing.process.BaseProcess) -> None:
    """End it, by force where it does not end by itself."""
    process.terminate()
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join()


def cpu_seconds(pid: int) -> float:
    """Return what a process has used so far, all threads, in nanosecond steps (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


# ---- bytes


def zeros(count: int) -> Array:
    """Return an array of shape (count,) in pages of its own, as the limits' arrays are and those of smb.Client.empty:
    where an array lies makes up to 15 % (README.md), and is to be the same for all."""
    array: Array = whole_pages((count,), np.dtype(np.float32))
    return array


def written(count: int, client: int) -> Array:
    """Return what a client writes, and what is read for client 0: whole numbers, no short period, shape (count,)."""
    array = zeros(count)
    array[:] = (_hash(count) >> np.uint32(21)) + np.uint32(2048 * client + 1)
    return array


def added(count: int) -> Array:
    """Return what one accumulate adds: ones and twos, shape (count,)."""
    array = zeros(count)
    array[:] = (_hash(count) >> np.uint32(31)) + np.uint32(1)
    return array


def _hash(count: int) -> NDArray[np.uint32]:
    return np.arange(count, dtype=np.uint32) * np.uint32(2654435761)  # Knuth's multiplicative hash


def check(case: Case, got: NDArray[Any], calls: int) -> None:
    """Raise RuntimeError where the array is not what `calls` calls of all clients leave.

    write: every element is one of those that the clients wrote there. read: `got` is what a client has read.
    accumulate: the start was 0. fetch_add: of 1 each, from 0.
    """
    if case.operation == READ:
        _check_equal(case, got, written(got.size, 0))
    elif case.operation == ACCUMULATE:
        if 2 * calls >= 1 << 24:
            raise RuntimeError(f"{calls} additions are too many for exact sums in float32: fewer seconds")
        _check_equal(case, got, added(got.size) * np.float32(calls))
    elif case.operation == "fetch_add":
        _check_equal(case, got, np.array([calls]))
    else:
        expected = written(got.size, 0)
        # The clients' values at one place differ by multiples of 2048.
        right = np.isin((got.ravel() - expected) / 2048, range(case.clients))
        _check_equal(case, np.where(right, expected, got.ravel()), expected)


def _check_equal(case: Case, got: NDArray[Any], expected: NDArray[Any]) -> None:
    wrong = np.flatnonzero(got.ravel() != expected)
    if len(wrong):
        first = int(wrong[0])
        raise RuntimeError(
            f"wrong bytes after {case.operation}: {len(wrong)} of {expected.size} elements; element {first} is "
            f"{got.ravel()[first]}, expected {expected[first]}"
        )
