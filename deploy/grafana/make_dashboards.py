"""Writes the dashboards beside it: `python deploy/grafana/make_dashboards.py`. They share look and variables, so
they are made and not edited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8
Panel = tuple[str, str, str, Sequence[tuple[str, str]], str]  # title, what it says, unit, (expression, legend), type

SERVER, BUFFER, GROUP = 'server=~"$server"', 'buffer=~"$buffer"', 'group=~"$group"'

CLUSTER: list[Panel] = [
    (
        "Memory servers alive",
        "Live servers, and all servers in the coordinator's records.",
        "short",
        [("smb_coordinator_servers_alive", "alive"), ("smb_coordinator_servers_known", "known")],
        "stat",
    ),
    (
        "Memory free",
        "Free part of the live servers' capacity.",
        "percentunit",
        [("cluster:smb_free:ratio", "free")],
        "stat",
    ),
    (
        "Coordinators",
        "Coordinators that answer, and those that lead.",
        "short",
        [("count(smb_coordinator_leads)", "answer"), ("sum(smb_coordinator_leads)", "lead")],
        "stat",
    ),
    ("Clients", "Sessions whose lease runs.", "short", [("smb_coordinator_sessions", "clients")], "stat"),
    ("Buffers", "Buffers that can be opened.", "short", [("smb_coordinator_buffers", "buffers")], "stat"),
    (
        "Alerts",
        "Alerts firing now.",
        "short",
        [('count(ALERTS{alertname=~"Smb.*", alertstate="firing"}) or vector(0)', "firing")],
        "stat",
    ),
    (
        "Throughput by server",
        "Bytes read, written and accumulated.",
        "Bps",
        [("sum by (server) (server_kind:smb_transferred_bytes:rate1m)", "{{server}}")],
        "timeseries",
    ),
    (
        "Throughput by transport",
        "shm is local clients in mapped memory.",
        "Bps",
        [("sum by (transport) (server_kind:smb_transferred_bytes:rate1m)", "{{transport}}")],
        "timeseries",
    ),
    (
        "Operations by kind",
        "All servers together.",
        "ops",
        [("sum by (kind) (server_kind:smb_operations:rate1m) > 0", "{{kind}}")],
        "timeseries",
    ),
    (
        "Memory by server",
        "Part of the capacity that segments take.",
        "percentunit",
        [("server:smb_used:ratio", "{{server}}")],
        "timeseries",
    ),
    (
        "Largest buffers",
        "Capacity that the ten largest buffers take.",
        "bytes",
        [("topk(10, smb_coordinator_buffer_allocated_bytes)", "{{buffer}}")],
        "timeseries",
    ),
    (
        "Busiest clients",
        "Without shm, where servers do not see the client.",
        "Bps",
        [("topk(10, client:smb_transferred_bytes:rate1m)", "{{client}}")],
        "timeseries",
    ),
    (
        "Errors",
        "Requests refused and connections closed.",
        "ops",
        [("sum by (class) (rate(smb_server_errors_total[5m])) > 0 or vector(0)", "{{class}}")],
        "timeseries",
    ),
    (
        "Leases lost",
        "Leases of servers and clients that ran out in 10 minutes.",
        "short",
        [("increase(smb_coordinator_leases_lost_total[10m])", "{{of}}")],
        "timeseries",
    ),
    (
        "Control plane, slowest hundredth",
        "Time of calls to the coordinator, by method.",
        "s",
        [
            (
                "histogram_quantile(0.99, sum by (method, le) (rate(smb_coordinator_rpc_duration_seconds_bucket[5m])))",
                "{{method}}",
            )
        ],
        "timeseries",
    ),
]
ONE_SERVER: list[Panel] = [
    (
        "Uptime",
        "Since the server's last start.",
        "s",
        [(f"time() - smb_server_start_time_seconds{{{SERVER}}}", "{{server}}")],
        "stat",
    ),
    (
        "Memory taken",
        "Part of its capacity that segments take.",
        "percentunit",
        [(f"server:smb_used:ratio{{{SERVER}}}", "{{server}}")],
        "stat",
    ),
    (
        "Coordinator",
        "1 while the coordinator answers this server.",
        "short",
        [(f"smb_server_coordinator_connected{{{SERVER}}}", "{{server}}")],
        "stat",
    ),
    (
        "Connections",
        "Open connections.",
        "short",
        [(f"smb_server_connections{{{SERVER}}}", "{{server}} {{transport}}")],
        "stat",
    ),
    (
        "Throughput",
        "By kind of operation and transport.",
        "Bps",
        [(f"server_kind:smb_transferred_bytes:rate1m{{{SERVER}}} > 0", "{{server}} {{kind}} {{transport}}")],
        "timeseries",
    ),
    (
        "Operations",
        "By kind of operation and transport.",
        "ops",
        [(f"server_kind:smb_operations:rate1m{{{SERVER}}} > 0", "{{server}} {{kind}} {{transport}}")],
        "timeseries",
    ),
    (
        "Latency, median",
        "Time in the server of requests over sockets.",
        "s",
        [(f"server_kind:smb_request_duration_seconds:p50{{{SERVER}}} >= 0", "{{server}} {{kind}}")],
        "timeseries",
    ),
    (
        "Latency, slowest hundredth",
        "Time in the server of requests over sockets.",
        "s",
        [(f"server_kind:smb_request_duration_seconds:p99{{{SERVER}}} >= 0", "{{server}} {{kind}}")],
        "timeseries",
    ),
    (
        "Waiting",
        "Requests that wait for a chunk's lock, a lock, a turn to publish, a barrier or a version.",
        "short",
        [
            (f"smb_server_deferred_requests{{{SERVER}}}", "{{server}} chunk"),
            (f"smb_server_waiting_requests{{{SERVER}}}", "{{server}} {{kind}}"),
        ],
        "timeseries",
    ),
    (
        "Locks",
        "Locks held; locks granted, waited for, timed out and lost per second.",
        "short",
        [
            (f"smb_server_held_locks{{{SERVER}}}", "{{server}} held {{kind}}"),
            (f"rate(smb_server_locks_granted_total{{{SERVER}}}[1m])", "{{server}} granted/s"),
            (f"rate(smb_server_lock_waits_total{{{SERVER}}}[1m])", "{{server}} waits/s"),
            (f"rate(smb_server_lock_timeouts_total{{{SERVER}}}[1m])", "{{server}} timeouts/s"),
            (f"rate(smb_server_locks_lost_total{{{SERVER}}}[1m])", "{{server}} lost/s {{reason}}"),
        ],
        "timeseries",
    ),
    (
        "Repeated and recognised",
        "Requests sent again after a lost connection, and those that had been applied before.",
        "ops",
        [
            (f"rate(smb_server_repeated_requests_total{{{SERVER}}}[1m])", "{{server}} repeated"),
            (f"rate(smb_server_replayed_requests_total{{{SERVER}}}[1m])", "{{server}} recognised"),
        ],
        "timeseries",
    ),
    (
        "Barriers broken",
        "Broken rounds of barriers in 10 minutes.",
        "short",
        [(f"increase(smb_server_broken_barriers_total{{{SERVER}}}[10m])", "{{server}}")],
        "timeseries",
    ),
    (
        "Send backlog",
        "Bytes of answers that clients have not read yet.",
        "bytes",
        [(f"smb_server_send_backlog_bytes{{{SERVER}}}", "{{server}}")],
        "timeseries",
    ),
    (
        "Times that a client did not read",
        "Answers per second that had to wait for their client.",
        "ops",
        [(f"rate(smb_server_send_backlogs_total{{{SERVER}}}[1m])", "{{server}}")],
        "timeseries",
    ),
    (
        "Journal slots",
        "Part of the journal slots that is taken.",
        "percentunit",
        [(f"smb_server_journal_slots{{{SERVER}}} / smb_server_journal_slots_max", "{{server}}")],
        "timeseries",
    ),
    (
        "Errors",
        "Refused requests and closed connections, by reason.",
        "ops",
        [(f"rate(smb_server_errors_total{{{SERVER}}}[5m])", "{{server}} {{class}}")],
        "timeseries",
    ),
    (
        "Recovery",
        "Seconds that the last start took to recover segments.",
        "s",
        [(f"smb_server_recovery_seconds{{{SERVER}}}", "{{server}}")],
        "timeseries",
    ),
    (
        "Found after a kill",
        "Chunk locks taken over from dead processes; changes finished at the start; chunks with half-made changes.",
        "short",
        [
            (f"smb_server_recovered_locks_total{{{SERVER}}}", "{{server}} locks"),
            (f"smb_server_recovered_changes{{{SERVER}}}", "{{server}} changes"),
            (f"smb_server_torn_chunks{{{SERVER}}}", "{{server}} torn"),
        ],
        "timeseries",
    ),
]
ONE_BUFFER: list[Panel] = [
    (
        "Capacity",
        "Capacity that the buffer's segments take.",
        "bytes",
        [(f"sum by (buffer) (smb_server_buffer_capacity_bytes{{{BUFFER}}})", "{{buffer}}")],
        "stat",
    ),
    (
        "Throughput",
        "By kind of operation.",
        "Bps",
        [(f"sum by (buffer, kind) (buffer_kind:smb_transferred_bytes:rate1m{{{BUFFER}}})", "{{buffer}} {{kind}}")],
        "timeseries",
    ),
    (
        "Operations",
        "By kind of operation.",
        "ops",
        [(f"sum by (buffer, kind) (buffer_kind:smb_operations:rate1m{{{BUFFER}}})", "{{buffer}} {{kind}}")],
        "timeseries",
    ),
    (
        "By transport",
        "Transports by which clients reach the buffer.",
        "Bps",
        [
            (
                f"sum by (buffer, transport) (buffer_kind:smb_transferred_bytes:rate1m{{{BUFFER}}})",
                "{{buffer}} {{transport}}",
            )
        ],
        "timeseries",
    ),
    (
        "By server",
        "Shows whether the stripes spread the load.",
        "Bps",
        [
            (
                f"sum by (server, buffer) (rate(smb_server_buffer_transferred_bytes_total{{{BUFFER}}}[1m]))",
                "{{server}} {{buffer}}",
            )
        ],
        "timeseries",
    ),
    (
        "Where it lies",
        "Capacity that the buffer takes on each server.",
        "bytes",
        [(f"smb_server_buffer_capacity_bytes{{{BUFFER}}}", "{{server}} {{buffer}}")],
        "timeseries",
    ),
]
TRAINING: list[Panel] = [
    (
        "Workers alive",
        "Workers that are members now.",
        "short",
        [(f"sum by (group) (smb_training_alive{{{GROUP}}})", "{{group}}")],
        "stat",
    ),
    (
        "Round",
        "Number of the open round.",
        "short",
        [(f"smb_training_round_count{{{GROUP}}}", "{{group}} {{scheme}}")],
        "stat",
    ),
    (
        "Samples",
        "Samples trained on per second.",
        "ops",
        [(f"sum by (group) (rate(smb_training_samples_total{{{GROUP}}}[1m]))", "{{group}}")],
        "timeseries",
    ),
    (
        "Contributions",
        "Contributions per second: counted, dropped as too late, refused by a guard.",
        "ops",
        [
            (f"sum by (group) (rate(smb_training_contributions_total{{{GROUP}}}[1m]))", "{{group}} counted"),
            (f"sum by (group) (rate(smb_training_dropped_contributions_total{{{GROUP}}}[1m]))", "{{group}} dropped"),
            (f"sum by (group) (rate(smb_training_refused_contributions_total{{{GROUP}}}[1m]))", "{{group}} refused"),
        ],
        "timeseries",
    ),
    (
        "Staleness",
        "Staleness of the last contribution of each worker.",
        "short",
        [(f"smb_training_staleness_count{{{GROUP}}}", "{{group}} {{worker}}")],
        "timeseries",
    ),
    (
        "Largest staleness",
        "Largest staleness since the training began.",
        "short",
        [(f"max by (group) (smb_training_staleness_max_count{{{GROUP}}})", "{{group}}")],
        "timeseries",
    ),
    (
        "Clocks",
        "Progress of each worker.",
        "short",
        [(f"smb_training_clock_count{{{GROUP}}}", "{{group}} {{worker}}")],
        "timeseries",
    ),
    (
        "Norm",
        "Euclidean norm of the last contribution of each worker.",
        "short",
        [(f"smb_training_norm{{{GROUP}}}", "{{group}} {{worker}}")],
        "timeseries",
    ),
    (
        "Network",
        "Bytes of contributions and models per second.",
        "Bps",
        [(f"sum by (group, worker) (rate(smb_training_bytes_total{{{GROUP}}}[1m]))", "{{group}} {{worker}}")],
        "timeseries",
    ),
    (
        "Rejoins",
        "Workers that lost their lease and joined again, in 10 minutes.",
        "short",
        [(f"increase(smb_training_rejoins_total{{{GROUP}}}[10m])", "{{group}} {{worker}}")],
        "timeseries",
    ),
    (
        "Time in calls, slowest hundredth",
        "Time of calls in processes that serve their metrics.",
        "s",
        [
            (
                "histogram_quantile(0.99, sum by (client, le) (rate(smb_client_call_duration_seconds_bucket[1m])))",
                "{{client}}",
            )
        ],
        "timeseries",
    ),
    (
        "Outages",
        "Connections that broke while in use, and locks lost, in 10 minutes.",
        "short",
        [
            ("increase(smb_client_outages_total[10m])", "{{client}}"),
            ("increase(smb_client_locks_lost_total[10m])", "{{client}} locks"),
        ],
        "timeseries",
    ),
]


# Each name of a series, with the brace behind it if there is one.
_SERIES = re.compile(r"(?<![\w:])((?:\w+:)?smb_\w+(?::\w+)?|ALERTS)(\{)?")


def _of_cluster(expression: str) -> str:
    """Return the expression with all its series limited to the chosen clusters."""
    return _SERIES.sub(
        lambda found: f'{found[1]}{{smb_cluster=~"$smb_cluster"' + (", " if found[2] else "}"), expression
    )


def _panel(number: int, panel: Panel, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    title, text, unit, expressions, kind = panel
    return {
        "id": number,
        "title": title,
        "description": text,
        "type": kind,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": _of_cluster(expression), "legendFormat": legend}
            for i, (expression, legend) in enumerate(expressions)
        ],
    }


def _laid_out(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Numbers in a row above, charts two in a row below."""
    numbers = [panel for panel in panels if panel[4] == "stat"]
    charts = [panel for panel in panels if panel[4] != "stat"]
    width = COLUMNS // len(numbers)
    made = [_panel(1 + i, panel, i * width, 0, width, HEIGHT // 2) for i, panel in enumerate(numbers)]
    half = COLUMNS // 2
    for i, panel in enumerate(charts):
        made.append(_panel(100 + i, panel, i % 2 * half, HEIGHT // 2 + i // 2 * HEIGHT, half, HEIGHT))
    return made


def _variable(name: str, metric: str) -> dict[str, Any]:
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(name: str, panels: Sequence[Panel], variables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    return {
        "uid": f"smb-{name}",
        "title": f"Soft Memory Box: {name}",
        "tags": ["soft-memory-box"],
        "schemaVersion": 39,
        "timezone": "browser",
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, _variable("smb_cluster", "up"), *variables]},
        "links": [
            {
                "type": "dashboards",
                "tags": ["soft-memory-box"],
                "title": "Soft Memory Box",
                "asDropdown": True,
                "keepTime": True,
            }
        ],
        "panels": _laid_out(panels),
    }


def all_dashboards() -> dict[str, str]:
    """Return the text of each file."""
    made = {
        "cluster": dashboard("cluster", CLUSTER, []),
        "server": dashboard("server", ONE_SERVER, [_variable("server", "smb_server_start_time_seconds")]),
        "buffer": dashboard("buffer", ONE_BUFFER, [_variable("buffer", "smb_server_buffer_capacity_bytes")]),
        "training": dashboard("training", TRAINING, [_variable("group", "smb_training_round_count")]),
    }
    return {f"{name}.json": json.dumps(content, indent=1) + "\n" for name, content in made.items()}


if __name__ == "__main__":
    for name, text in all_dashboards().items():
        (HERE / name).write_text(text)
