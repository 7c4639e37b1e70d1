"""Daemons as forks of a process that has imported them: most tests begin with one, and importing is most of its start.

A stem is a child of the tests' process: a Python that imports the daemons' modules, and then forks for each daemon that
is to run. The fork goes on as `python -m MODULE` does: a process of its own, with arguments, environment, output and
session of its own. In /proc its start is the stem's. `launch` starts a program where the environment, or what else a
program inherits, is not that of a stem, and for the first of each kind: of all of pytest's processes, if they share a
folder (`share`). Other commands of `smb` are started so, too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from smb.daemon.launch import python_m

MODULES = ("memserver", "smb.tools.cli.main")
IMPORTED = ("memserver.cli", "smb.tools.cli.main", "smb.tools.cli.coordinator", "smb.coordinator.process")
# What they import when they run, if it is installed: typer's module brings pydantic, most of a daemon's start; the
# client brings numpy, most of a command's.
WHEN_RUN = (
    "typer._adapters", "typer._click.decorators", "grpc._server", "grpc._channel", "encodings.idna", "smb.client",
    "rich.table",
)  # fmt: skip
SAFE = python_m()  # how the product starts a module
_MESSAGE_BYTES = 1 << 17
_STEMS_MAX = 8
_DESCRIPTORS_MAX = 5  # the output, that for errors, and what a daemon holds
_POLL_S = 0.005
# Variables that do not count. Ours are read when needed, but for one that the engine reads once. PyTorch's compiler
# sets its own when something imports it.
_FREE = ("PYTEST_CURRENT_TEST", "COLUMNS", "TORCHINDUCTOR_CACHE_DIR")
_READ_ONCE = "SMB_ISA"
_NEVER = {"SMB_ENGINE_FAILPOINT"}  # each such daemon is another one


def launch(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: IO[bytes],
    *,
    err: IO[bytes] | None = None,
    cwd: str | None = None,
    new_session: bool = True,
    held: Sequence[int] = (),
) -> subprocess.Popen[bytes] | Forked:
    """Start `python -m MODULE ARGUMENT ...` with its output to a file, and errors to that or another one; `held` are
    open in it, too.
    """
    stem = _stem_for(command, environment, cwd)
    if stem is None:
        return program(command, environment, out, err=err, cwd=cwd, new_session=new_session, held=held)
    return stem.fork(command, environment, out, err or out, new_session, held)


def program(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: IO[bytes],
    *,
    err: IO[bytes] | None = None,
    cwd: str | None = None,
    new_session: bool = True,
    held: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """As launch, with a new program in any case."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err or out, env=environment, cwd=cwd,
        start_new_session=new_session, pass_fds=held,
    )  # fmt: skip


class Forked:
    """A fork, to tests as a program is by its subprocess.Popen."""

    def __init__(self, stem: _Stem, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = list(args)
        self.returncode: int | None = None
        self._stem = stem
        self._asking = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with self._asking:  # the stem can tell it once
            if self.returncode is None:
                self.returncode = self._stem.ask({"wait": self.pid})["code"]
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it; return the exit code. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            # Without such a process: another thread has heard meanwhile that it ended.
            with contextlib.suppress(ProcessLookupError), _ended(self.pid) as ended:
                if not ended.poll(None if timeout is None else max(0, 1000 * timeout)):
                    assert timeout is not None
                    raise subprocess.TimeoutExpired(self.args, timeout)
        while (code := self.poll()) is None:
            time.sleep(_POLL_S)  # between its last thread's end and its own
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def _ended(pid: int) -> Iterator[select.poll]:
    """Yield what becomes ready when a process ends: asking its stem again and again would take the processor."""
    descriptor, waiting = os.pidfd_open(pid), select.poll()
    try:
        waiting.register(descriptor, select.POLLIN)
        yield waiting
    finally:
        os.close(descriptor)


class _Stem:
    """The tests' side of a stem."""

    def __init__(self, environment: Mapping[str, str], cwd: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *IMPORTED],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, cwd=cwd,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._socket = ours
        self._lock = threading.Lock()
        self._number = 0
        self.ask({})  # it is there

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        out: IO[bytes],
        err: IO[bytes],
        new_session: bool,
        held: Sequence[int],
    ) -> Forked:
        request = {
            "words": words_of(command), "environment": dict(environment), "session": new_session,
            "whole": ends_whole(environment),
            "safe": list(command[: len(SAFE)]) == SAFE or bool(environment.get("PYTHONSAFEPATH")),
        }  # fmt: skip
        return Forked(self, self.ask(request, out.fileno(), err.fileno(), *held)["pid"], command)

    def ask(self, request: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        """Send a request; return the answer."""
        with self._lock:
            self._number += 1
            message = json.dumps({**request, "number": self._number}).encode()
            socket.send_fds(self._socket, [message], descriptors)
            while True:
                answer = self._socket.recv(_MESSAGE_BYTES)
                assert answer, f"the stem ended: {self._process.wait()}"
                found: dict[str, Any] = json.loads(answer)
                if found["number"] == self._number:  # else of a call that a time-out or Ctrl-C has left
                    return found

    def end(self) -> None:
        """Let it end. Its forks go on."""
        self._socket.shutdown(socket.SHUT_RDWR)  # forks of the tests' process may have it, too
        self._socket.close()
        self._process.wait()


_stems: dict[Any, _Stem] = {}
_seen: set[Any] = set()
_owner = 0
_shared: Path | None = None
_guard = threading.Lock()


def _stem_for(command: Sequence[str], environment: Mapping[str, str], cwd: str | None) -> _Stem | None:
    """Return the stem for these circumstances: it is made when one kind of daemon or command comes for the second time.
    The first of each kind is a program, unless another process had a program of this kind, and there is the stem or
    this is the first one. Stems for other circumstances are made late, as most of these are those of a single test.
    """
    global _owner
    module, *arguments = words_of(command)
    if module not in MODULES or _NEVER & environment.keys():
        return None
    environment = {**environment, "PYTHONSAFEPATH": "1"}  # a fork gets its path from its command
    where = cwd or str(Path.cwd())
    key = (where, tuple(sorted(item for item in environment.items() if _counts(item[0]))), _circumstances())
    with _guard:
        if _owner not in (0, os.getpid()):  # a fork of the tests' process: its stems are not ours
            return None
        _owner = os.getpid()
        kind = (key, module, *(arguments[:1] if module != "memserver" else []))  # a command of smb
        if kind not in _seen:
            _seen.add(kind)
            if _is_first_of_all(*kind[1:]) or (_stems and key not in _stems):
                return None
        if key not in _stems:
            if len(_stems) == _STEMS_MAX:
                return None
            _stems[key] = _Stem(environment, where)
        return _stems[key]


def _counts(variable: str) -> bool:
    return variable == _READ_ONCE or not (variable in _FREE or variable.startswith("SMB_"))


def share(folder: Path) -> None:
    """Look there for what other processes of these tests have had as programs."""
    global _shared
    folder.mkdir(exist_ok=True)
    _shared = folder


def _is_first_of_all(*kind: str | None) -> bool:
    if _shared is None:
        return True
    try:
        (_shared / f"{zlib.crc32(repr(kind).encode()):x}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def words_of(command: Sequence[str]) -> list[str]:
    """Return the module that a Python is told to run, and its arguments; another program has an empty module."""
    for start in (SAFE, [sys.executable, "-m"]):
        if list(command[: len(start)]) == start:
            return list(command[len(start) :])
    return [""]


def ends_whole(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables is to be taken down at its end as a program is: in the long form of the
    tests, and under a sanitizer, which looks at that, too.
    """
    checked = os.environ | dict(environment)
    return bool(os.environ.get("SMB_LONG") or checked.get("ASAN_OPTIONS") or checked.get("LD_PRELOAD"))


def _circumstances() -> Any:
    """Return what a program inherits beside its variables."""
    spaces = [Path(f"/proc/thread-self/ns/{name}").readlink() for name in ("net", "mnt", "pid")]
    limits = [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)]
    return *spaces, *limits, *sorted(os.sched_getaffinity(0))


@atexit.register
def _end_all() -> None:
    if _owner == os.getpid():
        for stem in _stems.values():
            stem.end()


# ---- the stem itself


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Answer requests until there are no more; then it ends. Returns in a fork alone, with what that is to run."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, _DESCRIPTORS_MAX)
        if not message:
            os._exit(0)
        request: dict[str, Any] = json.loads(message)
        answer: dict[str, Any] = {}
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        elif "words" in request:
            with contextlib.ExitStack() as closing:
                for descriptor in descriptors:
                    closing.callback(os.close, descriptor)
                pid = os.fork()
                if pid == 0:
                    closing.pop_all()
                    requests.close()
                    request["outputs"] = descriptors[:2]
                    return request
                answer = {"pid": pid}
        requests.send(json.dumps({**answer, "number": request["number"]}).encode())


def become(request: dict[str, Any]) -> None:
    """Be what `python -m` would have made."""
    if request["session"]:
        os.setsid()
    for number, descriptor in enumerate(request["outputs"], 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    if not request["safe"]:
        sys.path.insert(0, str(Path.cwd()))  # as -m has it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, *arguments = request["words"]
    sys.argv[:] = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            raise
        _leave(leaving.code or 0, request["whole"])
    _leave(0, request["whole"])


def _leave(code: int, whole: bool) -> None:
    """End as Python does, but, unless it is to be whole, keep its modules: taking them down writes to all memory that a
    fork shares, which is more work than a daemon's start.
    """
    if whole:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # Python has a code for that
    os._exit(code)


def _arm_late() -> None:
    """Have failpoints armed in the fork, whose variables say which."""
    from smb.daemon import failpoint

    armed = functools.cache(lambda: failpoint.arm(os.environ))
    failpoint.failpoint = lambda name: armed()(name)


def _make_memservers_options() -> None:
    """Have Typer make the options of a memory server once: that is a third of its start."""
    import typer.main

    from memserver.cli import app

    typer.main.get_command = functools.cache(typer.main.get_command)
    with contextlib.suppress(AttributeError):  # of Typer's inside, and not of each release
        for option in typer.main.get_command(app).params:
            option.get_runtime_param()  # type: ignore[attr-defined]


def _main() -> None:
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's directory, with a Python that does not know the variable
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else numpy starts threads, which no fork has
    descriptor, *modules = sys.argv[1:]
    _arm_late()
    for module in modules:
        __import__(module)
    for module in WHEN_RUN:
        with contextlib.suppress(ImportError):
            __import__(module)
    if "memserver.cli" in modules:
        _make_memservers_options()
    for module in MODULES:
        sys.modules.pop(module, None)  # it runs as __main__
    assert len(list(Path("/proc/self/task").iterdir())) == 1, f"{modules} start threads"
    gc.freeze()
    become(_serve(socket.socket(fileno=int(descriptor))))


if __name__ == "__main__":
    _main()
