"""The remote lab: every contender's servers on one host, its clients on another one, and a cable between the two.

Both hosts are this machine: network namespaces and a veth pair (perf/netlab.py, without its switch), unshaped or with a
rate. Their addresses differ, so nobody takes them for one host by those; processes, files and shared memory are not
apart, which is why it is counted what the cable carries (perf/turns.py).

The measuring process is on the client's host: `python -m perf.turns`, started by `Hosts`, asked case by case. Processes
that it and its children start are there too, except within `on_server`. Elsewhere `on_server` changes nothing and gives
loopback's address, so that a contender is written once, for the loopback device and for two hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perf.contender import REMOTE_RATES, Case, Sample
from perf.netlab import NAMESPACES, Host, Lab

SERVER, CLIENT = "server0", "client0"
LOOPBACK = "127.0.0.1"
# Linux's default congestion control; where a namespace may not choose that, reno, which does not pace either. This
# machine's own may be BBR, whose timers few users have between two hosts of a rack.
_UNPACED = "f=/proc/sys/net/ipv4/tcp_congestion_control; { echo cubic > $f; } 2>/dev/null || echo reno > $f"
_ROOT = Path(__file__).parents[1]
_ADDRESS, _NAMESPACE = f"NETLAB_{SERVER.upper()}_ADDRESS", f"NETLAB_{SERVER.upper()}_NAMESPACE"  # netlab.Lab.variables
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_END_S = 30.0  # for daemons and clients to end in


# ---- in a measuring process, and in what it starts


def inside() -> bool:
    """Whether this process is on a host of the lab."""
    return _NAMESPACE in os.environ


def server_address() -> str:
    """Where servers listen."""
    return os.environ.get(_ADDRESS, LOOPBACK)


def device() -> str:
    """The network device that carries the bytes, on the clients' side and on the servers'."""
    return "eth0" if inside() else "lo"


def server_namespace() -> Path | None:
    """The file of the servers' network namespace; None where it is the clients' own."""
    return NAMESPACES / os.environ[_NAMESPACE] if inside() else None


@contextlib.contextmanager
def on_server() -> Iterator[str]:
    """Processes that this thread starts in the block are on the servers' host, and the sockets that it makes.

    Gives `server_address`. Threads that begin in the block stay there: start none that lives longer. Raises OSError
    where the kernel does not let us in.
    """
    namespace = server_namespace()
    if namespace is None:
        yield LOOPBACK
        return
    with Path("/proc/thread-self/ns/net").open("rb") as own, namespace.open("rb") as servers:
        _enter(servers.fileno())
        try:
            yield server_address()
        finally:
            _enter(own.fileno())


def move_to_server() -> None:
    """This process is on the servers' host from now on: for one that a launcher starts beside the clients. Its threads
    until now are not."""
    namespace = server_namespace()
    if namespace is not None:
        with namespace.open("rb") as servers:
            _enter(servers.fileno())


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns into a network namespace of the remote lab")


def carried_bytes() -> int:
    """Bytes that the device has carried so far, as this thread's host counts them: of both directions between hosts; on
    loopback, where what is sent is received, of one."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    counts = next(line.partition(":")[2].split() for line in lines if line.partition(":")[0].strip() == device())
    received, sent = int(counts[0]), int(counts[8])
    return received + sent if inside() else received


# ---- in the process that has the lab


class Hosts:
    """The lab, and the measuring process on its client's host; a context manager. Raises LabError where there can be
    none."""

    def __init__(self) -> None:
        self._lab = Lab([Host(SERVER), Host(CLIENT)], direct=True)
        self._rate: str | None = None
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            stack.enter_context(self._lab)
            for host in (SERVER, CLIENT):
                self._lab.run(host, ["sh", "-c", _UNPACED])
            environment = os.environ | self._lab.variables() | {"PYTHONPATH": str(_ROOT)}
            command = [sys.executable, "-m", "perf.turns"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = self._lab.popen(CLIENT, command, env=environment, cwd=_ROOT, **pipes)
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, contender: str, case: Case) -> Sample | str:
        """Return the sample, or why there is none. Blocks, as long as perf.turns.Turn may."""
        rate = REMOTE_RATES[case.transport]
        if rate != self._rate:
            for host in (SERVER, CLIENT):
                self._lab.set_rate(host, rate)
            self._rate = rate
        answer = self._ask({"contender": contender, "case": asdict(case)})
        return Sample(**answer["sample"]) if "sample" in answer else str(answer["failed"])

    def end_round(self) -> None:
        """End what the contenders have started there."""
        self._ask({})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer; where there is none, that the process has ended."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"failed": "the measuring process on the client's host has ended; it said why on stderr"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        """It ends with its stdin, and what it has started before it. The lab ends what does not."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
