"""Processes that find heavy modules there, since they are forks of one that has imported them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction
from typing import IO, Any

from tests.support import stem


def forks_of(modules: Sequence[str]) -> Any:
    """Return a multiprocessing context whose processes have these modules.

    A process has one server of forks for all of its contexts, and what that imports counts at its start alone. One that
    another test file started with other modules is ended: each of its forks would import these by itself, PyTorch for
    instance in 3 s of processor time.
    """
    context = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None and server._preload_modules != [*modules]:
        server._stop()
    context.set_forkserver_preload([*modules])
    return context


def launch(
    context: Any, command: Sequence[str], streams: Sequence[int], environment: Mapping[str, str]
) -> Program | subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENT ...` as a fork of such a context, with these descriptors for its input, output
    and errors. One whose end is to be whole is a program, as multiprocessing takes none of its processes down.
    """
    if not stem.ends_whole(environment):
        return Program(context, command, streams, environment)
    entry, out, err = streams
    return subprocess.Popen(command, stdin=entry, stdout=out, stderr=err, env=environment, start_new_session=True)


def launch_with_pipes(
    context: Any, command: Sequence[str], err: int, environment: Mapping[str, str]
) -> Program | subprocess.Popen[bytes]:
    """As launch, with `stdin` and `stdout` that the test writes and reads, without buffers."""
    (read, told), (says, write) = os.pipe(), os.pipe()
    program = launch(context, command, (read, write, err), environment)
    os.close(read)
    os.close(write)
    program.stdin, program.stdout = os.fdopen(told, "wb", 0), os.fdopen(says, "rb", 0)
    return program


class Program:
    """Such a fork, to tests as a program is by its subprocess.Popen."""

    def __init__(
        self, context: Any, command: Sequence[str], streams: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        self.args = [*command]
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        sent = _Streams(streams)
        self._process = context.Process(target=_run, args=(stem.words_of(command), dict(environment), sent))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None as long as it runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it; return the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Streams:
    """Descriptors on their way to a process that is being started."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = [*numbers]

    def __reduce__(self) -> Any:
        return _arrived, ([reduction.DupFd(number) for number in self.numbers],)


def _arrived(descriptors: list[Any]) -> _Streams:
    return _Streams([descriptor.detach() for descriptor in descriptors])


def _run(words: list[str], environment: dict[str, str], streams: _Streams) -> None:
    entry, *outputs = streams.numbers
    os.dup2(entry, 0)
    os.close(entry)
    sys.stdin = open(0)  # noqa: SIM115 - as long as the process
    request = {"session": True, "outputs": outputs, "environment": environment, "words": words, "whole": False}
    stem.become({**request, "safe": True})  # it has the tests' path
