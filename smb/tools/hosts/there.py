"""The process on each host: starts what its standard input says, and ends it when that input ends or falls silent.

The first line of the input is JSON, with the keys that what is started needs; no key is in any command line. Further
lines are empty and come every few seconds. On standard output goes one line of JSON for each event: "ready", "ended",
"failed". What programs print, and the ends of daemons, go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from smb.cluster import Daemon, Supervisor
from smb.daemon.held_directory import HeldDirectory, sweep
from smb.daemon.launch import THIS_PYTHON
from smb.errors import Error

SPEC_BYTES_MAX = 4 << 20
SILENCE_S = 20.0  # after so long without a line the other side is lost; it sends one every HEARTBEAT_S
HEARTBEAT_S = 3.0
_MEMORY_ROOT = Path("/dev/shm")  # noqa: S108 - the system's place for shared memory
_PREFIX = "smb-cluster"  # as LocalCluster's directories, so each sweeps what the other one left
_LOOK_S = 0.5
_END_S = 10.0  # between SIGTERM and SIGKILL for programs
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def _say(**event: object) -> None:
    with contextlib.suppress(OSError):  # the other side is gone, and so will we be
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _listen(descriptor: int) -> None:
    """End this process, in order, when the input ends or is silent for too long."""
    while select.select([descriptor], [], [], SILENCE_S)[0] and os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _private() -> HeldDirectory:
    """Return a new directory in memory, for keys and segments."""
    for root in (_MEMORY_ROOT, Path(tempfile.gettempdir())):
        sweep(root, f"{_PREFIX}-*-*")
    path = _MEMORY_ROOT / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    return HeldDirectory(path)


def _write_credentials(files: dict[str, str], directory: Path) -> Path:
    """Write the files of a directory of credentials, readable by this user alone."""
    made = directory / "credentials"
    made.mkdir(mode=0o700)
    for name, text in files.items():
        with os.fdopen(os.open(made / Path(name).name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    return made


def run_daemon(spec: dict[str, Any], held: HeldDirectory) -> NoReturn:
    """Start the daemon, and again when it ends. A signal's exception ends this."""
    options = dict(spec["options"])
    options["credentials"] = str(_write_credentials(spec["credentials"], held.path))
    if spec["module"] == "memserver":
        memory = held.path / "memory"
        memory.mkdir(mode=0o700)
        options["memory_dir"] = str(memory)
    else:
        options["state"] = str(held.path / "state")
    descriptors = [held.fd] if held.fd is not None else []
    daemon = Daemon(spec["module"], spec["name"], options, held.path, descriptors)
    try:
        daemon.start()
        _say(event="ready", address=daemon.address, metrics=daemon.metrics)
        supervisor = Supervisor(daemon, _print)
        while True:
            supervisor.look()
            time.sleep(_LOOK_S)
    finally:
        daemon.release()


def run_programs(spec: dict[str, Any], held: HeldDirectory) -> int:
    """Run a command in `count` processes side by side; return 0 if all end with 0, else a status that is not 0."""
    environment = os.environ | spec["environment"]
    if spec["credentials"]:
        environment["SMB_CREDENTIALS"] = str(_write_credentials(spec["credentials"], held.path))
    directory = spec["directory"]
    if not Path(directory).is_dir():
        raise Error(
            f"there is no directory {directory}, where the program was started; it must be the same on all hosts"
        )
    programs: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(spec["count"]):
            command = [THIS_PYTHON, *spec["command"]]
            # Sessions of their own: a program's children end with it. stdout goes with stderr: ours has the events.
            programs.append(
                subprocess.Popen(  # noqa: S603 - the user's own program
                    command,
                    cwd=directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr,
                    start_new_session=True,
                )
            )
        _say(event="ready")
        return next((status for status in [_status(program) for program in programs] if status), 0)
    finally:
        _ignore_signals()
        _end([program for program in programs if program.returncode is None])


def _status(program: subprocess.Popen[bytes]) -> int:
    """Wait for a program, end its children, and return its status."""
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    # Before wait() frees the id: later it could be that of a stranger's processes.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    return program.wait()


def _end(programs: list[subprocess.Popen[bytes]]) -> None:
    """End programs that run, and their children: SIGTERM, and SIGKILL for those that are still there 10 s later."""
    deadline = time.monotonic() + _END_S
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGTERM)
    for program in programs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def _ignore_signals() -> None:
    """Let no signal interrupt the end. The other side closes our input as soon as it has read "failed"."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    _ignore_signals()
    raise KeyboardInterrupt


def main() -> int:
    """Read what to do, do it, and remove everything. Returns 0, or 1 after "failed"."""
    for each in _SIGNALS:
        signal.signal(each, _interrupt)
    held = None
    try:
        line = sys.stdin.buffer.readline(SPEC_BYTES_MAX)
        if not line.endswith(b"\n"):
            raise Error("the description of what to start was cut short")
        spec = json.loads(line)
        threading.Thread(target=_listen, args=(sys.stdin.fileno(),), daemon=True).start()
        held = _private()
        if spec["what"] == "daemon":
            run_daemon(spec, held)
        status = run_programs(spec, held)
        _say(event="ended", status=status)
        return 0
    except KeyboardInterrupt:
        return 0
    except (Error, OSError) as error:
        _ignore_signals()
        _say(event="failed", reason=str(error))
        return 1
    finally:
        _ignore_signals()
        if held is not None:
            held.remove()


if __name__ == "__main__":
    sys.exit(main())
