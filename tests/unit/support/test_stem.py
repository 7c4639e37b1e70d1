"""Daemons that are forked are to a test what programs are."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from smb.rpc import control_pb2 as pb
from tests.support import forks, stem
from tests.support.daemons import wait_for
from tests.support.memory_server import coordinator_stub

Start = Callable[..., "subprocess.Popen[bytes] | stem.Forked"]
COORDINATOR = ("coordinator", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")

# The thread ends after the main one does.
LEAVING = """
import atexit, os, sys, threading
class Taken:
    def __del__(self, write=os.write):
        write(2, b"taken down")
def thread():
    threading.main_thread().join()
    print("the thread")
sys.taken = Taken()
atexit.register(print, "what is registered")
threading.Thread(target=thread).start()
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def _stems_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stem, "_stems", {})
    monkeypatch.setattr(stem, "_seen", set())
    monkeypatch.setattr(stem, "_shared", None)
    yield
    for each in stem._stems.values():
        each.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `smb` with arguments; the output goes to a file of that number."""
    started: list[subprocess.Popen[bytes] | stem.Forked] = []

    def launch(*arguments: str, **variables: str) -> subprocess.Popen[bytes] | stem.Forked:
        command = [sys.executable, "-m", "smb.tools.cli.main", *arguments]
        with (tmp_path / str(len(started))).open("wb") as out:
            started.append(stem.launch(command, os.environ | variables, out))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["certs"], 2), (["coordinator"], 1)])
def test_a_fork_says_and_returns_what_the_program_does(
    start: Start, tmp_path: Path, arguments: list[str], code: int
) -> None:
    """The first of its kind is a program, the others are forks of one process."""
    if arguments == ["coordinator"]:
        arguments = [*COORDINATOR, "--state", "/proc/none"]
    processes = [start(*arguments) for _ in range(3)]
    assert [isinstance(each, stem.Forked) for each in processes] == [False, True, True]
    assert [each.wait(60) for each in processes] == [code] * 3
    said = [(tmp_path / str(number)).read_text() for number in range(3)]
    if code != 1:  # with the time
        assert said[0]
        assert said[1:] == said[:1] * 2
    else:
        assert all("/proc/none" in each for each in said)


def test_what_other_tests_had_as_a_program_is_a_fork(start: Start, tmp_path: Path) -> None:
    """Tests in several processes start the first of a kind as a program once, not in each process."""
    stem.share(tmp_path / "programs")
    assert not isinstance(start("--version"), stem.Forked)
    assert isinstance(start("--version"), stem.Forked)
    assert not isinstance(start("certs", "--help"), stem.Forked)
    stem._seen.clear()  # as in another process, which has a stem, too
    assert isinstance(start("certs", "--help"), stem.Forked)
    assert not isinstance(start("--help"), stem.Forked)


def test_a_fork_is_a_process_of_its_own(start: Start, tmp_path: Path) -> None:
    """A session, descriptors and signals as the program's; its end is seen, and told once it is there."""
    processes = []
    for number in range(2):
        ready = tmp_path / f"ready{number}"
        processes.append(start(*COORDINATOR, "--state", str(tmp_path / f"state{number}"), "--ready-file", str(ready)))
        wait_for(ready.exists, "a coordinator")
    program, fork = processes
    assert isinstance(fork, stem.Forked)
    assert [os.getsid(each.pid) for each in processes] == [program.pid, fork.pid]

    def looks(pid: int) -> tuple[list[str], set[str], str]:
        links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
        kinds = sorted("socket" if each.startswith("socket") else Path(each).name.rstrip("012") for each in links)
        status = Path(f"/proc/{pid}/status").read_text()
        masks = {line for line in status.splitlines() if line.startswith(("SigIgn", "SigBlk", "SigCgt"))}
        return kinds, masks, str(Path(f"/proc/{pid}/cwd").readlink())

    wait_for(lambda: looks(program.pid) == looks(fork.pid), "the same descriptors and signals")
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.01)
    assert fork.poll() is None
    fork.terminate()
    assert fork.wait(20) == 0
    assert fork.poll() == 0
    fork.kill()  # nothing: it has ended
    third = start(*COORDINATOR, "--state", str(tmp_path / "state2"), "--ready-file", str(tmp_path / "ready2"))
    wait_for((tmp_path / "ready2").exists, "a coordinator")
    third.send_signal(signal.SIGKILL)
    assert third.wait(20) == -signal.SIGKILL


def test_an_end_that_another_thread_hears_of_is_an_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between asking for it and waiting for it, and by many at once; the stem goes on."""
    start("--version")
    fork = start("--version")
    assert isinstance(fork, stem.Forked)
    opened = os.pidfd_open

    def late(pid: int) -> int:
        wait_for(lambda: fork.poll() is not None, "end")
        return opened(pid)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", late)
        assert fork.wait(20) == 0
    for _ in range(5):
        fork = start("--version")
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(lambda each: each.wait(20), [fork] * 8)] == [0] * 8
    assert start("--version").wait(20) == 0


def test_other_circumstances_are_those_of_a_program(start: Start) -> None:
    """The engine's failpoint, a variable that counts, the first of a kind, and modules that are no daemon's; who owns a
    daemon does not count.
    """
    assert not any(isinstance(start("--version", SMB_ENGINE_FAILPOINT="none"), stem.Forked) for _ in range(2))
    assert not isinstance(start("--version"), stem.Forked)
    assert isinstance(start("--version", SMB_OWNER_PID="1"), stem.Forked)
    assert isinstance(start("--version", SMB_LOG="debug"), stem.Forked)
    assert not isinstance(start("--version", SMB_ISA="generic"), stem.Forked)
    assert not isinstance(start("--version", PYTHONHASHSEED="1"), stem.Forked)
    assert not isinstance(start("certs"), stem.Forked)
    assert isinstance(start("certs", "--help"), stem.Forked)
    memserver = [sys.executable, "-m", "memserver"]
    assert stem._stem_for([*memserver, "--name", "a"], os.environ, None) is None
    assert stem._stem_for([*memserver, "--listen", "b"], os.environ, None) is not None
    assert stem._stem_for([sys.executable, "-m", "json.tool"], os.environ, None) is None
    assert stem._stem_for(["ip", "netns", "exec", "x"], os.environ, None) is None


def test_a_fork_reaches_the_failpoint_of_its_own_variables(start: Start, tmp_path: Path) -> None:
    """One is killed where its variables say; the next one, which has none, starts."""
    point = {"SMB_FAILPOINT": "coordinator.session.opened", "SMB_FAILPOINTS_ALLOWED": "1"}
    start("coordinator", "--help")  # the first of its kind
    for variables in (point, {}):
        ready = tmp_path / f"ready{len(variables)}"
        state = str(tmp_path / f"state{len(variables)}")
        process = start(*COORDINATOR, "--state", state, "--ready-file", str(ready), **variables)
        assert isinstance(process, stem.Forked)
        wait_for(ready.exists, "a coordinator")
        with coordinator_stub(json.loads(ready.read_text())["address"]) as stub, suppress(grpc.RpcError):
            stub.OpenSession(pb.OpenSessionRequest(), timeout=20)
        if variables:
            assert process.wait(20) == -signal.SIGKILL
        else:
            assert process.poll() is None


def test_an_answer_that_nobody_took_is_not_the_next_ones(start: Start) -> None:
    """A test's time-out may come between a request and its answer."""
    start("--version")
    fork = start("--version")
    assert isinstance(fork, stem.Forked)
    socket.send_fds(fork._stem._socket, [b'{"wait": %d, "number": 0}' % fork.pid], [])
    assert isinstance(start("--version"), stem.Forked)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_it_ends_beside_forks_of_the_tests(start: Start) -> None:
    """They have its socket, too."""
    start("--version")
    fork = start("--version")
    assert isinstance(fork, stem.Forked)
    assert fork.wait(60) == 0
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        for key in list(stem._stems):
            stem._stems.pop(key).end()
    finally:
        ended = os.waitpid(child, os.WNOHANG)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (0, 0)


@pytest.mark.parametrize(
    ("ours", "its", "whole"),
    [({}, {}, False), ({"SMB_LONG": "1"}, {}, True), ({}, {"ASAN_OPTIONS": "detect_leaks=0"}, True)],
)
def test_a_fork_ends_as_a_program_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: dict[str, str], its: dict[str, str], whole: bool
) -> None:
    """Threads are waited for, what is registered runs, and output that cannot be written is said. Python takes it down
    in the long form, whose variable no daemon has, and under sanitizers.
    """
    for name in ("SMB_LONG", "ASAN_OPTIONS", "LD_PRELOAD", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    assert stem.ends_whole({"LD_PRELOAD": "libasan.so"})
    assert not stem.ends_whole({"SMB_LONG": "1"})
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "memserver.py").write_text(LEAVING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stem, "IMPORTED", ())
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SMB_")}
    variables |= {"PYTHONPATH": str(tmp_path), **its}
    for number, output in enumerate([tmp_path / "out0", tmp_path / "out1", Path("/dev/full")]):
        errors = tmp_path / f"errors{number}"
        with output.open("wb") as out, errors.open("wb") as err:
            process = stem.launch([sys.executable, "-m", "memserver"], variables, out, err=err)
        assert isinstance(process, stem.Forked) == bool(number)
        full = output == Path("/dev/full")
        assert process.wait(60) == (120 if full else 3)  # Python's code for it
        assert full or output.read_text() == "the thread\nwhat is registered\n"
        assert ("No space left" in errors.read_text()) == full
        assert ("taken down" in errors.read_text()) == (whole or full or not number)


def test_a_fork_of_multiprocessing_is_none_where_its_end_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing has its processes end at once."""
    monkeypatch.setenv("SMB_LONG", "1")
    with Path("/dev/null").open("r+") as nothing:
        command = [sys.executable, "-m", "json.tool", "--help"]
        process = forks.launch(None, command, [nothing.fileno()] * 3, os.environ)
    assert isinstance(process, subprocess.Popen)
    assert process.wait(60) == 0


@pytest.mark.parametrize("safe", ["1", ""])
def test_it_imports_what_a_program_would(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, safe: str
) -> None:
    """From PYTHONPATH, in its order; from the working directory first where a program would."""
    (tmp_path / "first").mkdir()
    for place in (tmp_path, tmp_path / "first"):
        (place / "memserver.py").write_text(f"print({str(place)!r})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stem, "IMPORTED", ())
    command = [sys.executable, "-m", "memserver"]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "first"), "PYTHONSAFEPATH": safe}
    for number in range(2):
        with (tmp_path / f"out{number}").open("wb") as out:
            process = stem.launch(command, variables, out)
        assert process.wait(60) == 0
        assert isinstance(process, stem.Forked) == bool(number)
    first, second = [(tmp_path / f"out{number}").read_text() for number in range(2)]
    assert first == second != ""
