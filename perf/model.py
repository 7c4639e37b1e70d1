"""The model of cost behind docs/scaling.md: predicts the stored scaling results, then what was never measured.

    python -m perf.model            # predicted beside measured, row by row, into perf/results/scaling-model.md

Constants are of two kinds: limits of the code (tests/unit/perf/test_scaling_model.py holds them against the sources)
and costs, taken from perf/results/scaling-costs.json and scaling-connections.json, never from the rows that they
predict.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

from perf.scaling.report import RESULTS
from smb.config.limits import RENEWALS_PER_LEASE

# Of the code: where, see tests/unit/perf/test_scaling_model.py.
FRAME_BYTES = 64
CHUNK_BYTES = 256 << 10
WINDOW_FRAMES = 64
CONNECTIONS_MAX = 4096
RECORD_BYTES, RECORDS_MIN, RECORDS_MAX = 128, 128, 1024
SLOT_HEADER_BYTES = 8192  # of a journal slot, before the payload
SERVER_LEASE_S, SESSION_LEASE_S = 6.0, 30.0
SESSION_RENEWALS_PER_S = 300.0
# Of TCP over Ethernet with packets of 1500 bytes and timestamps: payload, and bytes that a shaper or a link counts.
SEGMENT_BYTES, PACKET_BYTES = 1448, 1514
MATHIS = math.sqrt(1.5)  # rate <= MATHIS * segment / (round trip * sqrt(loss)): Mathis et al., CCR 27(3), 1997


@dataclass(frozen=True)
class Link:
    """A server's link: bits per second with all headers, one way; seconds of a round trip; packets lost, as a share."""

    bits_per_s: float
    round_trip_s: float = 0.0
    loss: float = 0.0

    @property
    def payload_per_s(self) -> float:
        """Bytes of ours that the link carries in a second."""
        return self.bits_per_s / 8 * SEGMENT_BYTES / PACKET_BYTES * CHUNK_BYTES / (CHUNK_BYTES + FRAME_BYTES)

    def connection_per_s(self, window_bytes: float = WINDOW_FRAMES * CHUNK_BYTES) -> float:
        """The same for one connection: the link, the window in each round trip, or what loss leaves."""
        bounds = [self.payload_per_s]
        if self.round_trip_s:
            bounds.append(window_bytes / self.round_trip_s)
            if self.loss:
                bounds.append(MATHIS * SEGMENT_BYTES / self.round_trip_s / math.sqrt(self.loss))
        return min(bounds)


def busiest_bytes(nbytes: int, stripe_bytes: int, segments: int) -> int:
    """Bytes of a call on [0, nbytes) that the segment with most of them gets."""
    stripes = -(-nbytes // stripe_bytes)
    return min(nbytes, -(-stripes // segments) * stripe_bytes)


def call_seconds(parts: list[tuple[float, Link]], cpu_s_per_byte: float = 0.0, window_bytes: float = 0.0) -> float:
    """A call of one client: the slowest server's part, or the time of the client's one driving thread."""
    window = window_bytes or WINDOW_FRAMES * CHUNK_BYTES
    slowest = max(link.round_trip_s + nbytes / link.connection_per_s(window) for nbytes, link in parts)
    return max(slowest, cpu_s_per_byte * sum(nbytes for nbytes, _ in parts))


def records_of(segment_bytes: int) -> int:
    """Lanes that a segment remembers (csrc/memory/records.c)."""
    return min(max(segment_bytes // (64 * RECORD_BYTES), RECORDS_MIN), RECORDS_MAX)


def coordinator_calls_per_s(servers: int, clients: int) -> float:
    """Renewals of leases; opens, creates and the rest come on top."""
    of_clients = min(RENEWALS_PER_LEASE * clients / SESSION_LEASE_S, SESSION_RENEWALS_PER_S)
    return RENEWALS_PER_LEASE * servers / SERVER_LEASE_S + of_clients


def connection_bytes(connected_bytes: float) -> float:
    """Memory of a connection that has added a chunk: its journal slot with the payload, and what it had before."""
    return connected_bytes + SLOT_HEADER_BYTES + CHUNK_BYTES


# ---- beside the measurements


@dataclass(frozen=True)
class Row:
    """One prediction."""

    result: str
    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def stored(name: str) -> dict[str, Any]:
    """Return a result of perf.scaling. FileNotFoundError: `python -m perf.scaling NAME` makes it."""
    found: dict[str, Any] = json.loads((RESULTS / f"scaling-{name}.json").read_text())
    return found


def cpu_s_per_gb(operation: str, servers: int = 1) -> tuple[float, float]:
    """Client's and servers' CPU seconds for 1e9 bytes on loopback: medians over the numbers of clients."""
    rows = [row for row in stored("costs")["rows"] if (row["operation"], row["servers"]) == (operation, servers)]
    return statistics.median(row["client_cpu"] for row in rows), statistics.median(row["server_cpu"] for row in rows)


def check_servers() -> list[Row]:
    """1 to 8 servers behind links of 300 Mbit/s: every link is full, or the processors are."""
    link, mib, found = Link(300e6), 1 << 20, stored("servers")
    rows = []
    for row in found["rows"]:
        count = row["servers"]
        seconds = call_seconds([(mib, link)] * count)
        most = 1e9 * found["machine"]["cores"] / sum(cpu_s_per_gb(row["operation"]))
        predicted = min(count * mib / seconds, most)
        what = f"{row['operation']}, {row['clients']} clients, {count} servers"
        rows.append(Row("servers", what, "MB/s", predicted / 1e6, row["mb_per_s"]))
    return rows


def check_stripes() -> list[Row]:
    """Calls on 128 and 4 MiB over 8 servers: the server with most stripes of the range decides."""
    rows = []
    for row in stored("stripes")["rows"]:
        for key, nbytes in (("all", 128 << 20), ("part", 4 << 20)):
            share = nbytes / 8 / busiest_bytes(nbytes, row["stripe_kib"] << 10, 8)
            for operation in ("write", "read", "accumulate"):
                what = f"{operation} of {nbytes >> 20} MiB, stripes of {row['stripe_kib']} KiB"
                rows.append(Row("stripes", what, "of the links", share, row[f"{operation}_{key}"]))
    return rows


def check_unequal() -> list[Row]:
    """Links of 100, 200 and 400 Mbit/s, without and with weights: stripes go round the segments."""
    links, stripes, rows = [Link(rate) for rate in (100e6, 200e6, 400e6)], (28 << 20) // CHUNK_BYTES, []
    for row in stored("unequal")["rows"]:
        segments = [int(number) for number in row["segments"].split(",")]
        rounds = -(-stripes // sum(segments))
        seconds = max(
            min(rounds * number, stripes) * CHUNK_BYTES / link.payload_per_s
            for number, link in zip(segments, links, strict=True)
        )
        predicted = stripes * CHUNK_BYTES / seconds / 1e6
        rows.append(Row("unequal", f"{row['operation']}, {row['layout']}", "MB/s", predicted, row["mb_per_s"]))
    return rows


def check_clients() -> list[Row]:
    """1 to 64 clients on loopback: processors over what a byte costs both sides; a call waits for all the others'."""
    found, rows = stored("clients"), []
    for row in found["rows"]:
        predicted = found["machine"]["cores"] / sum(cpu_s_per_gb(row["operation"]))
        what = f"{row['operation']}, {row['clients']} clients"
        rows.append(Row("clients", what, "GB/s", predicted, row["gb_per_s"]))
        call_ms = 1000 * row["clients"] * (4 << 20) / 1e9 / predicted
        rows.append(Row("clients", what, "ms, median call", call_ms, row["p50_ms"]))
    return rows


def check_costs() -> list[Row]:
    """Memory of a connection, and the coordinator's calls, from the sources' constants."""
    told = stored("costs")["coordinator"]
    rows = []
    for row in stored("connections")["rows"]:
        if "used_kib" in row:
            predicted = connection_bytes(1024 * row["connected_kib"]) / 1024
            rows.append(Row("connections", f"{row['connections']} connections", "KiB each", predicted, row["used_kib"]))
    for what in ("server", "client"):
        predicted = 60 * coordinator_calls_per_s(what == "server", what == "client")
        rows.append(Row("costs", f"renewals of a {what}", "a minute", predicted, told[f"rpcs_per_minute_and_{what}"]))
    return rows


def checks() -> list[Row]:
    """Every prediction that there is a measurement for."""
    return [*check_servers(), *check_stripes(), *check_unequal(), *check_clients(), *check_costs()]


def markdown(rows: list[Row]) -> str:
    """Return the errors of each result and unit, then all rows."""
    lines = ["# The model beside the measurements", ""]
    lines += ["Error: predicted / measured - 1. `python -m perf.model`; docs/scaling.md says what the model is.", ""]
    lines += ["| result | unit | rows | median of the errors' size | largest |", "| --- | --- | --- | --- | --- |"]
    for result, unit in dict.fromkeys((row.result, row.unit) for row in rows):
        errors = [row.error for row in rows if (row.result, row.unit) == (result, unit)]
        median, largest = statistics.median(map(abs, errors)), max(errors, key=abs)
        lines.append(f"| scaling-{result} | {unit} | {len(errors)} | {100 * median:.1f} % | {100 * largest:+.1f} % |")
    lines += ["", "| result | what | predicted | measured | unit | error |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        figures = f"{row.predicted:.4g} | {row.measured:.4g} | {row.unit} | {100 * row.error:+.1f} %"
        lines.append(f"| {row.result} | {row.what} | {figures} |")
    return "\n".join(lines) + "\n"


# ---- at a size that nobody measured


def at_scale(servers: int = 1000, clients: int = 10_000, nbytes: int = 100 * 10**9) -> dict[str, float]:
    """Figures of docs/scaling.md: one model of nbytes, 400 Gb/s, 200 ms. Seconds, bytes, counts."""
    link, stripe = Link(400e9, 0.2), 1 << 20
    connected_bytes = 1024 * stored("connections")["rows"][-1]["connected_kib"]
    part = busiest_bytes(nbytes, stripe, servers)
    told = {
        "part_bytes": part,
        "link_payload_per_s": link.payload_per_s,
        "window_per_s": link.connection_per_s(),
        "bandwidth_delay_bytes": 400e9 / 8 * 0.2,
        "part_by_window_s": part / link.connection_per_s(),
        "part_by_4_mib_s": part / link.connection_per_s(4 << 20),
        "part_by_loss_1e-6_s": part / Link(400e9, 0.2, 1e-6).connection_per_s(),
        "part_by_loss_1e-4_s": part / Link(400e9, 0.2, 1e-4).connection_per_s(),
        "client_link_s": nbytes / link.payload_per_s,
        "server_link_all_clients_s": clients * nbytes / servers / link.payload_per_s,
        "records": records_of(part),
        "calls_per_s": coordinator_calls_per_s(servers, clients),
        "connection_memory_bytes": clients * connection_bytes(connected_bytes),
        "first_call_s": 2 * 0.2 * servers,
    }
    for operation in ("write", "read", "accumulate"):
        client, server = cpu_s_per_gb(operation)
        told[f"{operation}_client_cpu_s"] = client * nbytes / 1e9
        told[f"{operation}_server_cpu_all_clients_s"] = server * nbytes * clients / servers / 1e9
    return told


def main() -> None:
    text = markdown(checks())
    (RESULTS / "scaling-model.md").write_text(text)
    print(text)
    for name, value in at_scale().items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()
