"""Experiments over servers behind links of their own: how many, how cut, how unequal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import smb
from perf.netlab import parse_rate
from perf.scaling.fleet import Fleet, Process, ask_all, links_per_second
from perf.scaling.report import Answer, Column, Line
from perf.scaling.runs import OPERATIONS, run_calls

RATE = "300mbit"  # eight of them are within what two cores move
SERVERS = 8
MIB = 1 << 20
SERVER_BYTES = MIB  # of a call, on each server: calls take as long over one server as over eight
_LINKS = (
    "every server behind a link of its own (tc tbf, {rate}, both directions, headers counted), clients without a "
    "limit, "
    "all on this one machine"
)


def _link_bytes(rate: str, seconds: float) -> int:
    """The rate of a link, measured for about so many seconds."""
    return int(0.95 * parse_rate(rate) / 8 * seconds)


def how_many(quick: bool, rate: str = RATE) -> Answer:
    """1 to 8 servers: what one client and four clients reach together, beside bare sockets on the same links."""
    counts, clients, rounds, seconds = ((1, 8), (1,), 1, 0.5) if quick else ((1, 2, 4, 8), (1, 4), 3, 0.6)
    seen: dict[tuple[int, int, str], list[float]] = {}
    links: dict[tuple[int, str], list[float]] = {}
    with Fleet([rate] * SERVERS) as fleet:
        workers = [fleet.worker() for _ in range(max(clients))]
        bare = fleet.bare()
        for count in counts:
            workers[0].ask(do="create", buffer=f"over{count}", nbytes=count * SERVER_BYTES, servers=fleet.names[:count])
        for turn in range(rounds):
            for count in counts if turn % 2 == 0 else counts[::-1]:
                ask_all(workers, do="open", buffer=f"over{count}")
                for operation in OPERATIONS:
                    names = fleet.names[:count]
                    carried = links_per_second(bare, fleet, names, operation, _link_bytes(rate, seconds))
                    links.setdefault((count, operation), []).append(sum(carried))
                    for number in clients:
                        run = run_calls(fleet, workers[:number], operation, count * SERVER_BYTES, seconds)
                        seen.setdefault((count, number, operation), []).append(run.bandwidth)
    rows = []
    for (count, number, operation), found in sorted(seen.items(), key=lambda item: (item[0][2], *item[0][:2])):
        reached = statistics.median(found)
        rows.append(
            {
                "operation": operation,
                "clients": number,
                "servers": count,
                "mb_per_s": reached / 1e6,
                "times_one": reached / statistics.median(seen[counts[0], number, operation]),
                "links_mb_per_s": statistics.median(links[count, operation]) / 1e6,
                "share": reached / statistics.median(links[count, operation]),
            }
        )
    most: list[dict[str, Any]] = [row for row in rows if row["servers"] == SERVERS]
    worst = min(most, key=lambda row: row["share"])
    lowest = min(row["times_one"] for row in most)
    limit = f"{SERVERS} servers carry {lowest:.2f} to {max(row['times_one'] for row in most):.2f} times what one does. "
    if worst["share"] >= 0.95:
        limit += (
            f"The links are the limit: of what bare sockets carry over them at the same time, at least "
            f"{worst['share']:.3f} is payload of ours."
        )
    else:
        limit += (
            f"The worst, {worst['operation']} of {worst['clients']} clients, reaches {worst['share']:.3f} of the "
            "links: the rest is connections that get less than their part of a link, and this machine's processors, "
            "which carry both ends of all links."
        )
    return Answer(
        name="servers",
        title="Servers behind links of their own",
        setup=f"One buffer of {SERVER_BYTES // MIB} MiB for each server, moved whole by each call; "
        f"{_LINKS.format(rate=rate)}. Links' sum: bare sockets, one connection a link, all at once. Median of {rounds} "
        f"rounds.",
        columns=(
            Column("operation", "operation"),
            Column("clients", "clients"),
            Column("servers", "servers"),
            Column("mb_per_s", "MB/s", "{:.1f}"),
            Column("times_one", "times one server", "{:.2f}"),
            Column("links_mb_per_s", "links' sum, MB/s", "{:.1f}"),
            Column("share", "share of it", "{:.3f}"),
        ),
        rows=rows,
        limit=limit,
        lines=[
            *(
                Line(
                    f"{operation}, {number} client{'s'[: number > 1]}",
                    "servers",
                    "times_one",
                    lambda row, key=(operation, number): (row["operation"], row["clients"]) == key,  # type: ignore[misc]
                )
                for operation in OPERATIONS
                for number in clients
            ),
            Line("one each", "servers", "servers", lambda row: row["operation"] == "read" and row["clients"] == 1),
        ],
        y_title="bandwidth, times one server",
    )


STRIPES = tuple(64 << 10 << shift for shift in range(9))


def how_cut(quick: bool) -> Answer:
    """Stripes of 64 KiB to 16 MiB over 8 servers: calls on all of a large buffer, and on a range of 4 MiB."""
    stripes = STRIPES[:5:4] if quick else STRIPES
    seconds, large, part, loopback = (0.2 if quick else 0.5), 128 * MIB, 4 * MIB, 32 * MIB
    if quick:
        large = 32 * MIB
    rows: list[dict[str, Any]] = []
    with Fleet([RATE] * SERVERS) as fleet:
        worker, bare = fleet.worker(), fleet.bare()
        links = sum(links_per_second(bare, fleet, fleet.names, "write", _link_bytes(RATE, seconds)))
        for stripe in stripes:
            worker.ask(do="create", buffer="w", nbytes=large, servers=fleet.names, stripe=stripe)
            worker.ask(do="open", buffer="w")
            row: dict[str, Any] = {"stripe_kib": stripe >> 10}
            for operation in OPERATIONS:
                row[f"{operation}_all"] = run_calls(fleet, [worker], operation, large, seconds).bandwidth / links
                row[f"{operation}_part"] = run_calls(fleet, [worker], operation, part, seconds).bandwidth / links
            worker.ask(do="delete", buffer="w")
            rows.append(row)
    with Fleet(None, servers=2) as fleet:
        worker = fleet.worker()
        for row in rows:
            worker.ask(do="create", buffer="w", nbytes=loopback, servers=fleet.names, stripe=row["stripe_kib"] << 10)
            worker.ask(do="open", buffer="w")
            for operation in OPERATIONS:
                row[f"{operation}_loopback"] = run_calls(fleet, [worker], operation, loopback, seconds).bandwidth / 1e9
            worker.ask(do="delete", buffer="w")
    parts = {row["stripe_kib"]: min(row[f"{operation}_part"] for operation in OPERATIONS) for row in rows}
    good = [kib for kib, share in parts.items() if share >= 0.9 * max(parts.values())]
    return Answer(
        name="stripes",
        title="The size of a stripe",
        setup=f"8 servers, {_LINKS.format(rate=RATE)}: share of the links' sum ({links / 1e6:.0f} MB/s by bare "
        f"sockets) that one client reaches with calls on all {large // MIB} MiB of a buffer, and on its first "
        f"{part // MIB} MiB. Beside it 2 servers on loopback without limits, {loopback // MIB} MiB, GB/s.",
        columns=(
            Column("stripe_kib", "stripe, KiB"),
            *(Column(f"{operation}_all", f"{operation} all", "{:.2f}") for operation in OPERATIONS),
            *(Column(f"{operation}_part", f"{operation} {part // MIB} MiB", "{:.2f}") for operation in OPERATIONS),
            *(Column(f"{operation}_loopback", f"{operation}, loopback GB/s", "{:.2f}") for operation in OPERATIONS),
        ),
        rows=rows,
        limit="A call uses as many links as its range has stripes, so small stripes serve calls on a part: those of "
        f"up to {max(good)} KiB are within a tenth of the best. Below a chunk (256 KiB) frames are smaller, which "
        "costs processor time, not links. Large stripes are the fewer mappings of a view, and large calls don't mind "
        "them until a buffer has few for each server.",
        lines=[
            Line(f"{operation} of {what}", "stripe_kib", f"{operation}_{key}")
            for operation in OPERATIONS
            for key, what in (("all", f"all {large // MIB} MiB"), ("part", f"{part // MIB} MiB of it"))
        ],
        y_title="share of the links' sum",
    )


UNEQUAL = ("100mbit", "200mbit", "400mbit")


def how_unequal(quick: bool) -> Answer:
    """Servers of 1, 2 and 4 times the bandwidth: measured, then used without and with weights."""
    seconds, nbytes = (0.5, 7 * MIB) if quick else (1.2, 28 * MIB)
    rows: list[dict[str, Any]] = []
    with Fleet(UNEQUAL) as fleet:
        worker, bare = fleet.worker(), fleet.bare()
        carried = {
            operation: sum(links_per_second(bare, fleet, fleet.names, operation, _link_bytes(UNEQUAL[0], seconds)))
            for operation in OPERATIONS
        }
        measured = _measure(fleet, worker, fleet.names, seconds)
        rows += _cut_by_weights(fleet, worker, "equal parts", nbytes, seconds, carried)
    weights = [measured[name] for name in fleet.names]
    with Fleet(UNEQUAL, weights=weights) as fleet:
        worker = fleet.worker()
        rows += _cut_by_weights(fleet, worker, "weights", nbytes, seconds, carried)
    gained = [rows[i + len(OPERATIONS)]["mb_per_s"] / rows[i]["mb_per_s"] for i in range(len(OPERATIONS))]
    lowest = min(row["share"] for row in rows[len(OPERATIONS) :])
    return Answer(
        name="unequal",
        title="Servers of unequal links",
        setup=f"3 servers, {_LINKS.format(rate=', '.join(UNEQUAL))}; one client, one buffer of {nbytes // MIB} MiB "
        f"moved whole. Measured one by one: {_weights_text(measured)}.",
        columns=(
            Column("layout", "layout"),
            Column("segments", "segments of each server"),
            Column("operation", "operation"),
            Column("mb_per_s", "MB/s", "{:.1f}"),
            Column("share", "share of the links' sum", "{:.3f}"),
        ),
        rows=rows,
        limit="With equal parts the slowest link is the limit and the others wait for it; with weights all end "
        f"together: {min(gained):.2f} to {max(gained):.2f} times as fast, at least {lowest:.3f} of what the links "
        "carry.",
        also={"measured_bytes_per_second": measured},
    )


def _cut_by_weights(
    fleet: Fleet, worker: Process, layout: str, nbytes: int, seconds: float, carried: dict[str, float]
) -> list[dict[str, Any]]:
    made = worker.ask(do="create", buffer="w", nbytes=nbytes, servers=fleet.names)
    worker.ask(do="open", buffer="w")
    segments = ", ".join(str(made["servers"].count(name)) for name in fleet.names)
    rows = []
    for operation in OPERATIONS:
        reached = run_calls(fleet, [worker], operation, nbytes, seconds).bandwidth
        share = reached / carried[operation]
        rows.append(
            {"layout": layout, "segments": segments, "operation": operation, "mb_per_s": reached / 1e6, "share": share}
        )
    return rows


def _measure(fleet: Fleet, worker: Process, names: Sequence[str], seconds: float) -> dict[str, float]:
    """Return each server's bandwidth, bytes per second: the lower one of writes and reads of a buffer on it alone."""
    measured = {}
    for name in names:
        worker.ask(do="create", buffer="alone", nbytes=4 * MIB, servers=[name])
        worker.ask(do="open", buffer="alone")
        runs = (run_calls(fleet, [worker], operation, 4 * MIB, seconds / 2) for operation in ("write", "read"))
        measured[name] = min(run.bandwidth for run in runs)
        worker.ask(do="delete", buffer="alone")
    return measured


def weights_of(coordinator: str, seconds: float = 1.0, nbytes: int = 16 * MIB) -> dict[str, float]:
    """Return the bandwidth of each live server of a running cluster from here, as `_measure` does. Blocks about
    2 `seconds` for each; makes and deletes one buffer of `nbytes` at a time.
    """
    import time

    import numpy as np

    measured = {}
    with smb.connect(coordinator, transport="tcp", timeout=120) as client:
        for server in client.servers():
            if not server.alive:
                continue
            name = f"perf-scaling/{server.name}"
            buffer = client.create(name, nbytes // 4, "float32", servers=[server.name])
            array = np.ones(nbytes // 4, np.float32)
            rates = []
            for call in (buffer.write, lambda array, buffer=buffer: buffer.read(out=array)):
                call(array)
                calls, start = 0, time.monotonic()
                while time.monotonic() < start + seconds:
                    call(array)
                    calls += 1
                rates.append(calls * nbytes / (time.monotonic() - start))
            client.delete(name)
            measured[server.name] = min(rates)
    return measured


def _weights_text(measured: dict[str, float]) -> str:
    return ", ".join(f"{name} --weight {rate / 1e6:.1f}" for name, rate in measured.items())
