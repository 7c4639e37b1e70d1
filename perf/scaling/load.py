"""Experiment on a coordinator with very much to know: 10 000 buffers, 1 000 clients, 1 000 locks and 200 trainings.

The coordinator has one processor (taskset); the members of size_worker.py share the others. No data moves.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import time
import urllib.request
from typing import Any

from perf.scaling.fleet import POLL_S, ask_all
from perf.scaling.report import Answer, Column
from perf.scaling.size import LEADER_LEASE_S, PROCESSES, Coordinators, worker_in

BUFFERS, CLIENTS, LOCKS, TRAININGS, SERVERS = 10_000, 1000, 1000, 200, 8
STEADY_S = 30.0
PAUSE_S = 0.05  # of each client that creates, opens and uses locks, between two calls
AGAIN_S_MAX = 60.0
PAGE_S = 60.0


def how_loaded(quick: bool) -> Answer:
    """Creates, opens, locks and renewals, the pages, and a change of leader, on SQLite and, where it is, on etcd."""
    part = 20 if quick else 1
    kinds = ["SQLite", *(["etcd"] if shutil.which("etcd") else [])]
    rows = [_run(kind, part, 3.0 if quick else STEADY_S) for kind in kinds]
    return Answer(
        name="load",
        title=f"A coordinator of one processor with {BUFFERS // part} buffers and {LOCKS // part} locks",
        setup=f"{SERVERS} memory servers without memory, {CLIENTS // part} clients with a connection each, which all "
        f"report their part in one of {TRAININGS // part} trainings every 2 s. One process creates and deletes a "
        f"buffer, opens one and uses a lock that exists, {PAUSE_S:g} s apart. All buffers have two copies. "
        "Milliseconds unless said otherwise. SQLite: the coordinator is killed and started again at once. etcd: three "
        f"members in memory, two coordinators, a leader's lease of {LEADER_LEASE_S} s; the leader is killed.",
        columns=(
            Column("state", "records in"),
            Column("made_per_s", "buffers made a second", "{:.0f}"),
            Column("calls_per_s", "calls a second", "{:.0f}"),
            Column("cpu", "coordinator's processors", "{:.2f}"),
            Column("create_p99", "create, 99 %", "{:.0f}"),
            Column("open_p99", "open, 99 %", "{:.0f}"),
            Column("lock_p99", "lock, 99 %", "{:.0f}"),
            Column("renew_session_p99", "a session's renewal, 99 %", "{:.0f}"),
            Column("renew_server_p99", "a server's, 99 %", "{:.0f}"),
            Column("resident_mb", "MB", "{:.0f}"),
            Column("page_ms", "the page's data", "{:.0f}"),
            Column("metrics_ms", "metrics", "{:.0f}"),
            Column("create_again_s", "next create after the kill, s", "{:.1f}"),
            Column("leases_lost", "servers' leases lost"),
        ),
        rows=rows,
        limit="; ".join(
            f"on {row['state']} {row['calls_per_s']:.0f} calls a second take {100 * row['cpu']:.0f} % of the processor"
            for row in rows
        )
        + ". All share one machine with what measures them.",
    )


def _run(kind: str, part: int, steady_s: float) -> dict[str, Any]:
    with Coordinators(kind, processor=0) as coordinators, contextlib.ExitStack() as stack:
        workers = [worker_in(stack) for _ in range(PROCESSES)]
        addresses, each = coordinators.addresses, SERVERS // PROCESSES
        for index, worker in enumerate(workers):
            worker.tell(do="servers", first=index * each, count=each, coordinators=addresses)
        for worker in workers:
            worker.answer()
        begun = time.monotonic()
        for index, worker in enumerate(workers):
            count = BUFFERS // part // PROCESSES
            worker.tell(do="fill", coordinators=addresses, kind="buffer", first=index * count, count=count)
        for worker in workers:
            worker.answer()
        made_s = time.monotonic() - begun
        workers[0].ask(do="fill", coordinators=addresses, kind="lock", first=0, count=LOCKS // part)
        count = CLIENTS // part // PROCESSES
        ask_all(workers, do="clients", count=count, coordinators=addresses, trainings=TRAININGS // part)
        workers[0].ask(do="use", coordinators=addresses, pause_s=PAUSE_S, buffers=BUFFERS // part, locks=LOCKS // part)
        ask_all(workers, do="report")

        cpu, begun = coordinators.cpu_seconds(), time.monotonic()
        time.sleep(steady_s)
        paths = {"page": "/api/state", "metrics": "/metrics"}
        pages = {what: _page(coordinators.page(), path) for what, path in paths.items()}
        reports = ask_all(workers, do="report")
        seconds = time.monotonic() - begun
        cpu = coordinators.cpu_seconds() - cpu
        found = {
            kind: sorted(each for report in reports for each in report["seconds"].get(kind, []))
            for kind in ("create", "open", "lock", "RenewSession", "RenewServer")
        }
        row: dict[str, Any] = {
            "state": kind, "made_per_s": BUFFERS // part / made_s,
            "calls_per_s": sum(map(len, found.values())) / seconds, "cpu": cpu / seconds,
            **{f"{name}_p99": _p99(found[of]) for name, of in _SHOWN.items()},
            **{f"{name}_median": 1000 * statistics.median(found[of]) for name, of in _SHOWN.items()},
            **{f"{what}_ms": 1000 * took for what, (took, _) in pages.items()},
            **{f"{what}_bytes": size for what, (_, size) in pages.items()},
            "resident_mb": coordinators.resident_bytes() / 1e6,
        }  # fmt: skip
        coordinators.kill_leader()
        killed = time.monotonic()
        ask_all(workers, do="mark", at=killed)
        row["create_again_s"] = _again(workers, killed)
        lost = sum(report["registered_again"] for report in ask_all(workers, do="report"))
        row["leases_lost"] = sum(report["registered_again"] for report in reports)
        row["registered_again"] = lost
        print(json.dumps(row), flush=True)
        return row


_SHOWN = {
    "create": "create", "open": "open", "lock": "lock", "renew_session": "RenewSession", "renew_server": "RenewServer",
}  # fmt: skip


def _again(workers: list[Any], killed: float) -> float:
    """Wait until a buffer was created after the kill, and return how long that took."""
    while time.monotonic() < killed + AGAIN_S_MAX:
        created = [each for report in ask_all(workers, do="report") for each in report["created"]]
        if done := [float(end) for start, end in created if end > killed]:
            return min(done) - killed
        time.sleep(POLL_S)
    raise RuntimeError(f"no buffer was created within {AGAIN_S_MAX:g} s of the kill")


def _page(address: str, path: str) -> tuple[float, int]:
    begun = time.monotonic()
    with urllib.request.urlopen(f"http://{address}{path}", timeout=PAGE_S) as answer:
        return time.monotonic() - begun, len(answer.read())


def _p99(seconds: list[float]) -> float:
    return 1000 * seconds[int(0.99 * len(seconds))]
