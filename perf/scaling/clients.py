"""Experiments over clients and connections, on loopback: how many at once, how many at all, and what each costs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import smb
from perf.scaling.fleet import Fleet, Process, ask_all
from perf.scaling.report import Answer, Column, Line
from perf.scaling.runs import OPERATIONS, run_calls
from smb.engine import BufferHandle, EngineClient, Lane, Link, Opcode, Request, memory_at

MIB = 1 << 20
PROCESSES_MAX = 8  # more clients than that are threads of these


def how_many(quick: bool) -> Answer:
    """1 to 64 clients that call on one buffer at once."""
    counts, seconds, nbytes = ((1, 8), 0.3, 4 * MIB) if quick else ((1, 2, 4, 8, 16, 32, 64), 0.7, 4 * MIB)
    rows: list[dict[str, Any]] = []
    with Fleet(None, servers=2, capacity="64MiB") as fleet:
        workers: list[Process] = []
        have: list[int] = []
        for count in counts:
            while len(workers) < min(count, PROCESSES_MAX):
                workers.append(fleet.worker())
                have.append(1)
            for index, worker in enumerate(workers):
                more = count // len(workers) - have[index]
                if more > 0:
                    worker.ask(do="connect", coordinator=fleet.coordinator, count=more)
                    have[index] += more
            if not rows:
                workers[0].ask(do="create", buffer="w", nbytes=nbytes, servers=2)
            ask_all(workers, do="open", buffer="w")
            for operation in OPERATIONS:
                run = run_calls(fleet, workers, operation, nbytes, seconds)
                rows.append(
                    {
                        "operation": operation,
                        "clients": count,
                        "gb_per_s": run.bandwidth / 1e9,
                        "p50_ms": 1000 * run.p50_seconds,
                        "p99_ms": 1000 * run.p99_seconds,
                        "fairness": run.fairness,
                        "server_cpu": run.server_cpu,
                        "client_cpu": run.client_cpu,
                    }
                )
    rows.sort(key=lambda row: (OPERATIONS.index(row["operation"]), row["clients"]))
    kept = min(
        rows[i]["gb_per_s"] / max(row["gb_per_s"] for row in rows if row["operation"] == rows[i]["operation"])
        for i in range(len(rows))
        if rows[i]["clients"] == counts[-1]
    )
    return Answer(
        name="clients",
        title="Clients on one buffer",
        setup=f"2 servers of one loop on loopback, one buffer of {nbytes // MIB} MiB, moved whole by each call of "
        f"each client, all at once; up to {PROCESSES_MAX} processes, then threads of these. CPU in seconds per GB "
        "moved.",
        columns=(
            Column("operation", "operation"),
            Column("clients", "clients"),
            Column("gb_per_s", "GB/s together", "{:.2f}"),
            Column("p50_ms", "median call, ms", "{:.2f}"),
            Column("p99_ms", "99 %, ms", "{:.1f}"),
            Column("fairness", "fewest / most calls of a client", "{:.2f}"),
            Column("server_cpu", "servers' CPU, s/GB", "{:.2f}"),
            Column("client_cpu", "clients' CPU, s/GB", "{:.2f}"),
        ),
        rows=rows,
        limit=f"The two processors, which servers and clients share, are busy from the first client on: {counts[-1]} "
        f"clients still get {kept:.2f} of the best that any number gets, and each call takes as much longer as there "
        "are more of them.",
        lines=[
            Line(operation, "clients", "gb_per_s", lambda row, operation=operation: row["operation"] == operation)  # type: ignore[misc]
            for operation in OPERATIONS
        ],
        y_title="GB/s of all clients together",
    )


def _latencies(call: Callable[[], object], times: int) -> list[float]:
    seen = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seen.append(time.perf_counter() - start)
    return sorted(seen)


def how_many_connections(quick: bool) -> Answer:
    """1 000 connections to one server: idle beside one busy client, then all active in turns."""
    counts = (0, 200) if quick else (0, 100, 300, 1000)
    times, chunk = (500, 256 << 10) if quick else (2000, 256 << 10)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(None, servers=1))
        busy = stack.enter_context(smb.connect(fleet.coordinator, transport="tcp", timeout=60))
        buffer = busy.create("w", chunk // 4, "float32")
        place = buffer.layout.segments[0]
        host, _, port = place.address.rpartition(":")
        source, sink = np.zeros(chunk // 4, np.float32), np.zeros(chunk // 4, np.float32)
        handles: list[BufferHandle] = []
        links: list[Link] = []
        sessions = itertools.count(1)

        def connect() -> BufferHandle:
            client = EngineClient(next(sessions))
            stack.callback(client.close)
            link, _ = client.connect_tcp(host, int(port), Lane.TCP_DATA, 20_000)
            handle = BufferHandle(client, chunk, buffer.layout.stripe_bytes, buffer.layout.chunk_bytes, 1, 2)
            handle.set_link(0, place.id, buffer.layout.epoch, link)
            links.append(link)  # whoever lets go of it closes it
            return handle

        def check(result: object) -> None:
            if not isinstance(result, int):
                raise RuntimeError(f"a call over one of many connections failed: {result}")

        first, element = np.zeros(2, np.float32), np.zeros(2, np.float32)
        read = Request(Opcode.READ, 0, 8, sink=memory_at(element.ctypes.data))
        add = Request(Opcode.ACCUMULATE, 0, chunk, memory_at(source.ctypes.data), op=1)
        resident = {}
        for count in counts:
            before = fleet.server_resident_bytes("server0")
            fresh = [connect() for _ in range(count - len(handles))]
            for handle in fresh:  # an answer: it is accepted and has its state
                check(handle.transfer(read, 20_000))
            connected = fleet.server_resident_bytes("server0")
            for handle in fresh:  # the memory that a connection takes at its first addition, it keeps
                check(handle.transfer(add, 20_000))
            used = fleet.server_resident_bytes("server0")
            handles += fresh
            if fresh:
                resident = {
                    "connected_kib": (connected - before) / len(fresh) / 1024,
                    "used_kib": (used - before) / len(fresh) / 1024,
                }
            idle_before = fleet.servers_cpu_seconds()
            time.sleep(0.2 if quick else 1.0)
            idle = (fleet.servers_cpu_seconds() - idle_before) / (0.2 if quick else 1.0)
            small = _latencies(lambda: buffer.read(0, 2, out=first), times)
            large = _latencies(lambda: buffer.read(out=sink), times // 4)
            row: dict[str, Any] = {
                "connections": 1 + len(handles),
                "small_p50_us": 1e6 * statistics.median(small),
                "small_p99_us": 1e6 * small[int(0.99 * len(small))],
                "large_p50_us": 1e6 * statistics.median(large),
                "idle_cpu": 100 * idle,
                **resident,
            }
            if handles:
                turns = (handles[i % len(handles)] for i in range(times + len(handles)))
                in_turn = _latencies(
                    lambda turns=turns: check(  # type: ignore[misc]
                        next(turns).transfer(read, 20_000)
                    ),
                    times,
                )
                row["turn_p50_us"] = 1e6 * statistics.median(in_turn)
                row["turn_p99_us"] = 1e6 * in_turn[int(0.99 * len(in_turn))]
            rows.append(row)
    last = rows[-1]
    return Answer(
        name="connections",
        title="Connections to one server",
        setup="One server of one loop on loopback. One client calls; the others are connected and have made one "
        "addition of a chunk (256 KiB) each. Then all connections in turn, one call at a time. Latencies of 8 bytes "
        "and of 256 KiB.",
        columns=(
            Column("connections", "connections"),
            Column("small_p50_us", "8 B beside idle ones, us", "{:.0f}"),
            Column("small_p99_us", "99 %, us", "{:.0f}"),
            Column("large_p50_us", "256 KiB, us", "{:.0f}"),
            Column("turn_p50_us", "8 B, each in turn, us", "{:.0f}"),
            Column("turn_p99_us", "99 %, us", "{:.0f}"),
            Column("connected_kib", "server's memory, connected, KiB each", "{:.1f}"),
            Column("used_kib", "after an addition, KiB each", "{:.0f}"),
            Column("idle_cpu", "server's CPU when all are idle, %", "{:.0f}"),
        ),
        rows=rows,
        limit=f"Memory is the limit: {last['used_kib']:.0f} KiB for a connection that has added once (its staging "
        f"memory in the journal, kept until it closes), {last['connected_kib']:.1f} KiB before. Idle ones do not slow "
        f"a busy one: 8 bytes take {last['small_p50_us'] / rows[0]['small_p50_us']:.2f} times as long beside "
        f"{len(handles)} of them as alone. A daemon takes 4096 connections; a client on its host has two. (Calls "
        "in turn go to the engine without smb.Buffer, so they are to be compared among each other.)",
        lines=[
            Line("8 B beside idle ones", "connections", "small_p50_us"),
            Line("8 B, each connection in turn", "connections", "turn_p50_us"),
            Line("256 KiB beside idle ones", "connections", "large_p50_us"),
        ],
        y_title="median latency, us",
        log_y=True,
    )


def what_each_costs(quick: bool) -> Answer:
    """CPU per GB as servers and clients grow; what a server and a client cost the coordinator while they are there."""
    grid = ((1, 1), (4, 1), (1, 4)) if quick else ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (4, 4))
    seconds, nbytes, watch_s = (0.2, 16 * MIB, 10.2) if quick else (0.8, 16 * MIB, 20.0)
    rows: list[dict[str, Any]] = []
    with Fleet(None, servers=max(servers for servers, _ in grid)) as fleet:
        workers = [fleet.worker() for _ in range(max(clients for _, clients in grid))]
        for servers, clients in grid:
            workers[0].ask(do="create", buffer="w", nbytes=nbytes, servers=fleet.names[:servers])
            ask_all(workers, do="open", buffer="w")
            for operation in OPERATIONS:
                run = run_calls(fleet, workers[:clients], operation, nbytes, seconds)
                rows.append(
                    {
                        "operation": operation,
                        "servers": servers,
                        "clients": clients,
                        "gb_per_s": run.bandwidth / 1e9,
                        "client_cpu": run.client_cpu,
                        "server_cpu": run.server_cpu,
                    }
                )
            workers[0].ask(do="delete", buffer="w")
        start, calls, cpu = time.monotonic(), fleet.coordinator_calls(), fleet.coordinator_cpu_seconds()
        time.sleep(watch_s)
        cpu = fleet.coordinator_cpu_seconds() - cpu
        answered = {method: number - calls.get(method, 0) for method, number in fleet.coordinator_calls().items()}
        minutes = (time.monotonic() - start) / 60
    of_server = answered["RenewServer"] / minutes / len(fleet.names)
    of_client = answered["RenewSession"] / minutes / len(workers)
    others = sum(number for method, number in answered.items() if method not in ("RenewServer", "RenewSession"))
    cpu_of_call = cpu / sum(answered.values())
    rows.sort(key=lambda row: (OPERATIONS.index(row["operation"]), row["clients"], row["servers"]))
    return Answer(
        name="costs",
        title="What a server and a client cost",
        setup=f"Loopback, servers of one loop, one buffer of {nbytes // MIB} MiB moved whole. CPU in seconds per GB "
        f"moved. The coordinator's load was watched for {watch_s:.0f} s with {len(fleet.names)} servers and "
        f"{len(workers)} clients, all idle.",
        columns=(
            Column("operation", "operation"),
            Column("servers", "servers"),
            Column("clients", "clients"),
            Column("gb_per_s", "GB/s together", "{:.2f}"),
            Column("client_cpu", "clients' CPU, s/GB", "{:.2f}"),
            Column("server_cpu", "servers' CPU, s/GB", "{:.2f}"),
        ),
        rows=rows,
        limit=f"A GB costs a client {_span(rows, 'client_cpu')} and the servers {_span(rows, 'server_cpu')} CPU "
        f"seconds, whether 1 or {max(row['servers'] for row in rows)} servers, 1 or "
        f"{max(row['clients'] for row in rows)} clients take part: the processors limit the sum. The coordinator is "
        f"no part of that: a server costs it {of_server:.0f} calls a minute, a client {of_client:.0f}, whatever they "
        f"move ({others:.0f} others were seen), of {1000 * cpu_of_call:.1f} ms of CPU each.",
        also={
            "coordinator": {
                "rpcs_per_minute_and_server": of_server,
                "rpcs_per_minute_and_client": of_client,
                "cpu_seconds_per_rpc": cpu_of_call,
            }
        },
        lines=[
            Line(
                f"{operation}: {what}",
                "servers",
                key,
                lambda row, operation=operation: row["operation"] == operation and row["clients"] == 1,  # type: ignore[misc]
            )
            for operation in OPERATIONS
            for key, what in (("client_cpu", "client"), ("server_cpu", "servers"))
        ],
        y_title="CPU seconds per GB, one client",
    )


def _span(rows: list[dict[str, Any]], key: str) -> str:
    return f"{min(row[key] for row in rows):.2f} to {max(row[key] for row in rows):.2f}"
