"""Experiment on the control plane at its size: 1 000 memory servers and 10 000 clients, and a change of leader.

All of them speak the real control plane, each over a connection of its own, from two processes (size_worker.py).
They have no memory, and no data moves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf.scaling.fleet import POLL_S, ROOT, START_S, Process, ask_all, cpu_seconds
from perf.scaling.report import Answer, Column

SERVERS, CLIENTS = 1000, 10_000
QUICK_SERVERS, QUICK_CLIENTS = 20, 200
PROCESSES = 2
STEADY_S = 40.0  # longer than a client waits between two renewals
OVER_S = 180.0  # a change of leader that takes longer has failed
CREATE_PAUSE_S = 0.2
LEADER_LEASE_S = 8
LINES_SHOWN = 50  # of a coordinator's log, if the experiment failed


def how_large(quick: bool) -> Answer:
    """Renewals, opens, creations, and a change of leader, on SQLite and, where it is installed, on etcd."""
    servers, clients = (QUICK_SERVERS, QUICK_CLIENTS) if quick else (SERVERS, CLIENTS)
    kinds = ["SQLite", *(["etcd"] if shutil.which("etcd") else [])]
    rows = [_run(kind, servers, clients, 5.0 if quick else STEADY_S) for kind in kinds]
    return Answer(
        name="size",
        title=f"{servers} memory servers and {clients} clients at one coordinator",
        setup=f"Every one has a connection of its own and renews as the daemon and the library do, from {PROCESSES} "
        "processes on the same two processors. SQLite: the coordinator is killed and started again at once. etcd: "
        f"three members in memory, two coordinators, a leader's lease of {LEADER_LEASE_S} s; the leader is killed. "
        "One client creates and deletes buffers all the time. `all again`: from the kill until each of the members "
        "was answered.",
        columns=(
            Column("state", "records in"),
            Column("register_per_s", "servers registered a second", "{:.0f}"),
            Column("open_per_s", "sessions opened a second", "{:.0f}"),
            Column("calls_per_s", "renewals a second", "{:.0f}"),
            Column("cpu", "coordinator's processors", "{:.2f}"),
            Column("renew_p50_ms", "a renewal, median ms", "{:.1f}"),
            Column("renew_p99_ms", "99 % ms", "{:.1f}"),
            Column("create_p50_ms", "create, median ms", "{:.0f}"),
            Column("opens_per_s", "buffers opened a second", "{:.0f}"),
            Column("resident_mb", "coordinator's MB", "{:.0f}"),
            Column("create_again_s", "next create after the kill, s", "{:.1f}"),
            Column("all_again_s", "all again, s", "{:.1f}"),
            Column("ended", "sessions lost"),
        ),
        rows=rows,
        limit="; ".join(
            f"on {row['state']} the coordinator is busy for {100 * row['cpu']:.0f} % of a processor with "
            f"{row['calls_per_s']:.0f} renewals a second"
            for row in rows
        )
        + ".",
    )


def _run(kind: str, servers: int, clients: int, steady_s: float) -> dict[str, Any]:
    with Coordinators(kind) as coordinators, contextlib.ExitStack() as stack:
        workers = [worker_in(stack) for _ in range(PROCESSES)]
        addresses = coordinators.addresses
        begun = time.monotonic()
        for index, worker in enumerate(workers):
            each = servers // PROCESSES
            worker.tell(do="servers", first=index * each, count=each, coordinators=addresses)
        for worker in workers:
            worker.answer()
        register_s = time.monotonic() - begun
        begun = time.monotonic()
        ask_all(workers, do="clients", count=clients // PROCESSES, coordinators=addresses)
        open_s = time.monotonic() - begun
        workers[0].ask(do="create", coordinators=addresses, pause_s=CREATE_PAUSE_S)
        ask_all(workers, do="report")

        cpu, begun = coordinators.cpu_seconds(), time.monotonic()
        _until(begun + steady_s)
        steady = ask_all(workers, do="report")
        seconds = time.monotonic() - begun
        cpu = coordinators.cpu_seconds() - cpu
        renewals = sorted(_all(steady, "RenewSession") + _all(steady, "RenewServer"))
        created = sorted(end - start for report in steady for start, end in report["created"])

        begun = time.monotonic()
        ask_all(workers, do="open", buffer=workers[0].ask(do="make", coordinators=addresses)["name"])
        opens_per_s = clients / (time.monotonic() - begun)
        resident = coordinators.resident_bytes()
        ask_all(workers, do="report")

        coordinators.kill_leader()
        killed = time.monotonic()
        ask_all(workers, do="mark", at=killed)
        over = _over(workers, killed)
        row = {
            "state": kind, "servers": servers, "clients": clients,
            "register_per_s": servers / register_s, "open_per_s": clients / open_s,
            "calls_per_s": len(renewals) / seconds, "cpu": cpu / seconds,
            "renew_p50_ms": 1000 * statistics.median(renewals),
            "renew_p99_ms": 1000 * renewals[int(0.99 * len(renewals))],
            "create_p50_ms": 1000 * statistics.median(created), "opens_per_s": opens_per_s,
            "resident_mb": resident / 1e6, **over,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        return row


def _over(workers: Sequence[Process], killed: float) -> dict[str, Any]:
    """Wait until every member was answered after the kill. Return what that took, in seconds and errors."""
    errors: dict[str, int] = {}
    create_again_s = 0.0
    while True:
        reports = ask_all(workers, do="report")
        for report in reports:
            for code, count in report["errors"].items():
                errors[code] = errors.get(code, 0) + count
            done = [end - killed for _, end in report["created"] if end > killed]
            create_again_s = create_again_s or (min(done) if done else 0.0)
        again = [at for report in reports for at in report["again_at"]]
        if create_again_s and min(again) > 0:
            return {
                "create_again_s": create_again_s,
                "all_again_s": max(again) - killed,
                "ended": sum(report["ended"] for report in reports),
                "registered_again": sum(report["registered_again"] for report in reports),
                "errors": errors,
            }
        if time.monotonic() > killed + OVER_S:
            raise RuntimeError(
                f"{again.count(0.0)} of {len(again)} had no answer {OVER_S:g} s after the kill: {errors}"
            )
        time.sleep(POLL_S)


def _all(reports: Sequence[dict[str, Any]], kind: str) -> list[float]:
    return [seconds for report in reports for seconds in report["seconds"].get(kind, [])]


def _until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def worker_in(stack: contextlib.ExitStack) -> Process:
    """Start a process of members, which ends with `stack`."""
    command = [sys.executable, "-m", "perf.scaling.size_worker"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )

    def end() -> None:
        process.kill()
        process.communicate()

    stack.callback(end)
    return Process(process, "process of servers and clients")


class Coordinators:
    """One on SQLite, or two on an etcd of three; a context manager."""

    def __init__(self, kind: str, processor: int | None = None) -> None:
        """`processor`: the one on which all coordinators run; None: any."""
        self._etcd = kind == "etcd"
        self._processor = processor
        self._processes: list[subprocess.Popen[bytes]] = []
        self._members: list[subprocess.Popen[bytes]] = []
        self._pages: dict[int, str] = {}

    def __enter__(self) -> Coordinators:
        with contextlib.ExitStack() as stack:
            self._directory = Path(tempfile.mkdtemp(prefix="smb-size-", dir="/dev/shm"))
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            stack.callback(self._end)
            count = 2 if self._etcd else 1
            self._state = self._start_etcd() if self._etcd else str(self._directory / "state")
            self.addresses = [f"127.0.0.1:{port}" for port in _ports(count)]
            for index in range(count):
                self._processes.append(self._start(index))
            for index in range(count):
                self._pages[index] = self._ready(index)["metrics"]
            self._leader()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for log in sorted(self._directory.glob("coordinator-*.log")):
                worse = [line for line in log.read_text().splitlines() if " INFO " not in line]
                print("\n".join([f"{log.name}:", *worse[-LINES_SHOWN:]]), file=sys.stderr)
        self._stack.close()

    def cpu_seconds(self) -> float:
        """CPU time of the leader so far."""
        return cpu_seconds(self._processes[self._leader()].pid)

    def page(self) -> str:
        """The address of the leader's pages."""
        return self._pages[self._leader()]

    def resident_bytes(self) -> int:
        """Memory of the leader."""
        status = Path(f"/proc/{self._processes[self._leader()].pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))

    def kill_leader(self) -> None:
        """SIGKILL. Where nobody stands by it is started again at once, as systemd or Kubernetes would."""
        leader = self._leader()
        self._processes[leader].kill()
        self._processes[leader].wait()
        if not self._etcd:
            self._processes[leader] = self._start(leader)

    def _leader(self) -> int:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for index, page in self._pages.items():
                url = f"http://{page}/healthz"
                with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=5) as answer:
                    if json.load(answer).get("leadership", "leader") == "leader":
                        return index
            time.sleep(POLL_S)
        raise RuntimeError("no coordinator leads")

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        pinned = [] if self._processor is None else ["taskset", "--cpu-list", str(self._processor)]
        command = [*pinned, sys.executable, "-m", "smb.tools.cli.main", "coordinator", "--listen"]
        command += [self.addresses[index]]
        command += ["--state", self._state, "--metrics", "127.0.0.1:0", "--insecure"]
        command += ["--ready-file", str(self._directory / f"coordinator-{index}.ready")]
        if self._etcd:
            command += ["--leader-lease", str(LEADER_LEASE_S)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
        environment |= {"SMB_OWNER_PID": str(os.getpid()), "PYTHONPATH": str(ROOT)}
        with (self._directory / f"coordinator-{index}.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _ready(self, index: int) -> dict[str, Any]:
        file, deadline = self._directory / f"coordinator-{index}.ready", time.monotonic() + START_S
        while not file.exists():
            if self._processes[index].poll() is not None or time.monotonic() > deadline:
                log = (self._directory / f"coordinator-{index}.log").read_text()
                raise RuntimeError(f"the coordinator does not serve: {log[-500:]}")
            time.sleep(POLL_S)
        ready: dict[str, Any] = json.loads(file.read_text())
        return ready

    def _start_etcd(self) -> str:
        ports = _ports(6)
        clients, peers = ports[:3], ports[3:]
        cluster = ",".join(f"m{index}=http://127.0.0.1:{port}" for index, port in enumerate(peers))
        for index, (client, peer) in enumerate(zip(clients, peers, strict=True)):
            here, there = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
            command = ["etcd", "--name", f"m{index}", "--data-dir", str(self._directory / f"m{index}")]
            command += ["--initial-cluster", cluster, "--listen-client-urls", here, "--advertise-client-urls", here]
            command += ["--listen-peer-urls", there, "--initial-advertise-peer-urls", there, "--log-level", "error"]
            with (self._directory / f"m{index}.log").open("ab") as log:
                self._members.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        return f"etcd://{','.join(f'127.0.0.1:{port}' for port in clients)}/size"

    def _end(self) -> None:
        for process in (*self._processes, *self._members):
            process.kill()
            process.wait()


def _ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]
