"""Experiment on the coordinator: what a call costs it as sessions and servers grow. No data moves."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perf.scaling.fleet import Fleet
from perf.scaling.report import Answer, Column, Line
from smb.coordinator.placement import Pool, place
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from smb.security.credentials import COORDINATOR_NAME, channel

AT_ONCE = 16  # calls in flight: the coordinator always has the next one at hand


def how_many_sessions(quick: bool) -> Answer:
    """Renewals beside 100 to 10 000 sessions; and placing a buffer on 8 to 1 000 servers, as a function call."""
    counts, seconds = ((100, 300), 0.5) if quick else ((100, 1000, 3000, 10_000), 2.0)
    rows: list[dict[str, Any]] = []
    with (
        Fleet(None, servers=1) as fleet,
        channel(fleet.coordinator, COORDINATOR_NAME, None) as way,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        stub = CoordinatorStub(way)  # type: ignore[no-untyped-call]
        sessions: list[int] = []

        def open_session(_: int) -> int:
            return int(stub.OpenSession(pb.OpenSessionRequest(client_name="one of many"), timeout=30).session_id)

        def renew(session_id: int) -> None:
            stub.RenewSession(pb.RenewSessionRequest(session_id=session_id, client_name="one of many"), timeout=30)

        for count in counts:
            opened = count - len(sessions)
            cpu, start = fleet.coordinator_cpu_seconds(), time.monotonic()
            sessions += threads.map(open_session, range(opened))
            open_cpu, open_s = fleet.coordinator_cpu_seconds() - cpu, time.monotonic() - start
            asked = 0
            cpu, start = fleet.coordinator_cpu_seconds(), time.monotonic()
            while time.monotonic() < start + seconds:
                list(threads.map(renew, sessions[-200:]))  # the newest: their leases run for all of the experiment
                asked += len(sessions[-200:])
            renew_s = time.monotonic() - start
            rows.append(
                {
                    "sessions": count,
                    "open_cpu_us": 1e6 * open_cpu / opened,
                    "opens_per_s": opened / open_s,
                    "renew_cpu_us": 1e6 * (fleet.coordinator_cpu_seconds() - cpu) / asked,
                    "renewals_per_s": asked / renew_s,
                }
            )
    placements = [_placing(servers) for servers in ((8, 64) if quick else (8, 64, 1000))]
    first, last = rows[0], rows[-1]
    return Answer(
        name="coordinator",
        title="The coordinator with many sessions",
        setup=f"One coordinator on loopback, a caller with {AT_ONCE} calls in flight in a process beside it. CPU of "
        "the coordinator alone; sessions are stored (SQLite), renewals are not.",
        columns=(
            Column("sessions", "sessions"),
            Column("open_cpu_us", "open a session, CPU us", "{:.0f}"),
            Column("opens_per_s", "opened a second", "{:.0f}"),
            Column("renew_cpu_us", "renew one, CPU us", "{:.0f}"),
            Column("renewals_per_s", "renewed a second", "{:.0f}"),
        ),
        rows=rows,
        limit=f"One thread of Python answers: a renewal takes {first['renew_cpu_us']:.0f} us of CPU beside "
        f"{first['sessions']} sessions and {last['renew_cpu_us']:.0f} beside {last['sessions']}, for a renewal copies "
        "the table of leases. Placing a buffer takes "
        + ", ".join(f"{1000 * one['seconds']:.2f} ms on {one['servers']} servers" for one in placements)
        + ".",
        lines=[Line("renew", "sessions", "renew_cpu_us"), Line("open", "sessions", "open_cpu_us")],
        y_title="CPU of a call, us",
        also={"placing": placements},
    )


def _placing(servers: int) -> dict[str, Any]:
    pool = Pool({f"server{i}": (64 << 30) + (i << 20) for i in range(servers)})
    times = []
    for _ in range(5):
        start = time.perf_counter()
        place(pool, 100 * 10**9)
        times.append(time.perf_counter() - start)
    return {"servers": servers, "seconds": min(times)}
