"""Processes that find heavy modules there, since they are forks of one that has imported them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import context, forkserver, reduction, resource_tracker
from typing import IO, Any

from tests.support import stem

# What forks import, each by itself if it is not there: PyTorch with what its optimizers and ranks need, and what test
# files and the functions in them begin with.
PRELOADED = [
    "torch.distributed.fsdp", "torch._dynamo", "torch.profiler", "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint", "smb.torch.meshes.mesh", "pytest", "hypothesis", "tests.support.clients",
    "tests.support.meshes", "tests.support.settled",
]  # fmt: skip
_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


class _Process(context.ForkServerProcess):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._variables, self._outputs = dict(os.environ), _Streams([1, 2])

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._variables)
        for number, descriptor in enumerate(self._outputs.numbers, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        super().run()


class Forks(context.ForkServerContext):
    """Processes with the variables and outputs of the one that starts them, which their parent need not have."""

    Process = _Process  # type: ignore[assignment]


def preload() -> Forks:
    """Return forks that have PyTorch and what else is PRELOADED.

    A process has one server of forks, and what that imports counts at its start alone. One that another test file
    started with other modules is ended: each of its forks would import these by itself, PyTorch for instance in 3 s of
    processor time.
    """
    if _server._forkserver_pid is not None and _server._preload_modules != PRELOADED:
        _server._stop()
    _server.set_forkserver_preload(PRELOADED)
    return Forks()


def serve() -> dict[str, Any]:
    """Start the server of this process, with which it ends; return what `use` takes."""
    preload()
    _server.ensure_running()
    told = ("_forkserver_address", "_forkserver_authkey")  # newer Pythons have a key
    return {name: getattr(_server, name) for name in told if hasattr(_server, name)}


def use(served: Mapping[str, Any]) -> None:
    """Have another process's server make the forks of this one."""
    preload()
    for name, value in served.items():
        setattr(_server, name, value)
    _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # forks, who get it, do not keep the server alive
    _server.ensure_running = resource_tracker.ensure_running


def launch(
    forks: Any, command: Sequence[str], streams: Sequence[int], environment: Mapping[str, str]
) -> Program | subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENT ...` as one of such forks, with these descriptors for its input, output
    and errors. One whose end is to be whole is a program, as multiprocessing takes none of its processes down.
    """
    if not stem.ends_whole(environment):
        return Program(forks, command, streams, environment)
    entry, out, err = streams
    return subprocess.Popen(command, stdin=entry, stdout=out, stderr=err, env=environment, start_new_session=True)


def launch_with_pipes(
    forks: Any, command: Sequence[str], err: int, environment: Mapping[str, str]
) -> Program | subprocess.Popen[bytes]:
    """As launch, with `stdin` and `stdout` that the test writes and reads, without buffers."""
    (read, told), (says, write) = os.pipe(), os.pipe()
    program = launch(forks, command, (read, write, err), environment)
    os.close(read)
    os.close(write)
    program.stdin, program.stdout = os.fdopen(told, "wb", 0), os.fdopen(says, "rb", 0)
    return program


class Program:
    """Such a fork, to tests as a program is by its subprocess.Popen."""

    def __init__(
        self, forks: Any, command: Sequence[str], streams: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        self.args = [*command]
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        sent = _Streams(streams)
        self._process = forks.Process(target=_run, args=(stem.words_of(command), dict(environment), sent))
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
