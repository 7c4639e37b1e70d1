"""The fleet of an experiment: a coordinator, memory servers and client processes, on the hosts of a lab or on loopback.

All of it is this machine: the servers' links have a rate, its processors are shared by everybody.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from perf.netlab import Host, Lab

ROOT = Path(__file__).parents[2]
START_S = 60.0
POLL_S = 0.01
LEAD_S = 0.05  # between a request to start together and the start
CLIENTS = "clients"  # the host of the coordinator and of all clients: without a rate
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process:
    """One that takes a request a line on stdin and answers each by a line: a worker, or the bare sockets' end."""

    def __init__(self, process: subprocess.Popen[str], what: str) -> None:
        self.process = process
        self._what = what

    def tell(self, **request: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next answer. Blocks. RuntimeError if the process has ended instead: it said why on stderr."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._what} ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        self.tell(**request)
        return self.answer()

    def end(self) -> None:
        """Close its stdin, which ends it, and wait."""
        self.process.communicate()


def ask_all(processes: Sequence[Process], **request: Any) -> list[dict[str, Any]]:
    """Tell all, then take the answers of all."""
    for process in processes:
        process.tell(**request)
    return [process.answer() for process in processes]


def started_together(processes: Sequence[Process], **request: Any) -> list[dict[str, Any]]:
    """As ask_all, with a moment to start at."""
    return ask_all(processes, start=time.monotonic() + LEAD_S, **request)


class Fleet:
    """A running cluster whose server i is `server{i}` behind a link of `rates[i]` (None: no lab, all on loopback); a
    context manager.
    """

    def __init__(
        self, rates: Sequence[str] | None, servers: int = 1, capacity: str = "256MiB", weights: Sequence[float] = ()
    ) -> None:
        self.names = [f"server{i}" for i in range(len(rates) if rates else servers)]
        self.lab = None
        if rates:
            self.lab = Lab([*(Host(*pair) for pair in zip(self.names, rates, strict=True)), Host(CLIENTS)])
        self._capacity = capacity
        self._weights = weights
        self._stack = contextlib.ExitStack()
        self._daemons: dict[str, subprocess.Popen[str]] = {}
        self.coordinator = ""
        self._coordinator_pages = ""

    def __enter__(self) -> Fleet:
        with contextlib.ExitStack() as stack:
            if self.lab:
                stack.enter_context(self.lab)
            self._directory = Path(tempfile.mkdtemp(prefix="smb-scaling-", dir="/dev/shm"))
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            stack.callback(self._end_daemons)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def worker(self, count: int = 1, module: str = "perf.scaling.worker", host: str = CLIENTS) -> Process:
        """Start a client process with that many clients, connected. It ends with the fleet."""
        process = self._python("worker", host, "-m", module)
        process.ask(do="connect", coordinator=self.coordinator, count=count)
        return process

    def bare(self) -> Process:
        """Start the bare sockets on every server's host and return the process that moves bytes to and from them."""
        for name in self.names:
            server = self._python("bare socket", name, "-m", "perf.scaling.links", "serve", self.address(name))
            assert server.process.stdout
            server.process.stdout.readline()
        return self._python("bare socket", CLIENTS, "-m", "perf.scaling.links", "move")

    def address(self, host: str) -> str:
        return self.lab.address(host) if self.lab else "127.0.0.1"

    def servers_cpu_seconds(self) -> float:
        """CPU time of all memory servers so far."""
        return sum(cpu_seconds(self._daemons[name].pid) for name in self.names)

    def server_resident_bytes(self, name: str) -> int:
        """Memory of a memory server, with the shared memory that it has touched: its segments, and its journal, in
        which additions of a connection are staged.
        """
        status = Path(f"/proc/{self._daemons[name].pid}/status").read_text()
        return 1024 * sum(int(kib) for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.M))

    def coordinator_cpu_seconds(self) -> float:
        return cpu_seconds(self._daemons["coordinator"].pid)

    def coordinator_calls(self) -> dict[str, float]:
        """Calls that the coordinator has answered so far, by method."""
        command = [sys.executable, "-c", _PAGE, f"http://{self._coordinator_pages}/metrics"]
        if self.lab:
            page = self.lab.run(CLIENTS, command, capture_output=True, text=True).stdout
        else:
            with urllib.request.urlopen(command[-1], timeout=10) as answer:
                page = answer.read().decode()
        calls: dict[str, float] = {}
        for method, count in re.findall(r'^smb_coordinator_rpcs_total\{.*method="(\w+)".*\} (\S+)$', page, re.M):
            calls[method] = calls.get(method, 0.0) + float(count)
        return calls

    def _start(self) -> None:
        listen = f"{self.address(CLIENTS)}:0"
        state = str(self._directory / "state")
        self._daemon(
            "coordinator", CLIENTS, ["smb.tools.cli.main", "coordinator", "--listen", listen, "--state", state]
        )
        ready = self._ready("coordinator")
        self.coordinator, self._coordinator_pages = ready["address"], ready["metrics"]
        for index, name in enumerate(self.names):
            options = ["--coordinator", self.coordinator, "--listen", f"{self.address(name)}:0", "--name", name]
            options += ["--memory-dir", str(self._directory), "--capacity", self._capacity, "--loops", "1"]
            if self._weights:
                options += ["--weight", str(self._weights[index])]
            self._daemon(name, name, ["memserver", *options])
        for name in self.names:
            self._ready(name)

    def _daemon(self, name: str, host: str, arguments: list[str]) -> None:
        options = [
            "--insecure",  # the lab's hosts are all ours
            "--metrics",
            f"{self.address(host)}:0",
            "--ready-file",
            str(self._directory / f"{name}.ready"),
        ]
        with (self._directory / f"{name}.log").open("ab") as log:
            self._daemons[name] = self._popen(host, ["-m", *arguments, *options], stdout=log, stderr=log)

    def _ready(self, name: str) -> dict[str, Any]:
        file, deadline = self._directory / f"{name}.ready", time.monotonic() + START_S
        while not file.exists():
            if self._daemons[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not serve: {(self._directory / f'{name}.log').read_text()[-500:]}")
            time.sleep(POLL_S)
        ready: dict[str, Any] = json.loads(file.read_text())
        return ready

    def _python(self, what: str, host: str, *arguments: str) -> Process:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = self._popen(host, list(arguments), **pipes)
        self._stack.callback(_end, process)
        return Process(process, f"the {what} on {host}")

    def _popen(self, host: str, arguments: list[str], **options: Any) -> subprocess.Popen[Any]:
        command = [sys.executable, *arguments]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
        environment |= {"SMB_OWNER_PID": str(os.getpid()), "PYTHONPATH": str(ROOT)}
        if self.lab:
            return self.lab.popen(host, command, env=environment, **options)
        return subprocess.Popen(command, env=environment, **options)

    def _end_daemons(self) -> None:
        for process in self._daemons.values():
            process.terminate()
        for process in self._daemons.values():
            process.wait()


_PAGE = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"


def links_per_second(bare: Process, fleet: Fleet, names: Sequence[str], operation: str, nbytes: int) -> list[float]:
    """Bytes of payload per second of each of the servers' links, all at work at once, by bare sockets."""
    addresses = [fleet.address(name) for name in names]
    bare.tell(do="move", addresses=addresses, operation=operation, nbytes=nbytes, start=time.monotonic() + LEAD_S)
    return [nbytes / seconds for seconds in bare.answer()["seconds"]]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.communicate()
