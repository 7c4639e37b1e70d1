"""Writes docs/metrics.md from smb/daemon/metric_names.py: `make metrics-page`."""

from __future__ import annotations

from pathlib import Path

from smb.daemon.metric_names import CLIENT, COORDINATOR, NAMED_MAX, SECURED, SERVER, TRAINING, Description

PAGE = Path(__file__).parent / "metrics.md"
_HEAD = f"""# Metrics

<!-- Made from smb/daemon/metric_names.py by `make metrics-page`. Change that file, not this page. -->

Every daemon serves `GET /metrics` at its `--metrics` address. Prometheus learns the addresses from the coordinator:
`http://COORDINATOR:9470/targets` is an HTTP service discovery, and `smb targets COORDINATOR:9470 --output FILE` writes
the same as a file. [deploy/prometheus](../deploy/prometheus/prometheus.yml) has a configuration, recording rules and
alerts, [deploy/grafana](../deploy/grafana/make_dashboards.py) four dashboards: import the JSON files, choose the
Prometheus, done. Each alert has its runbook in [repair](repair.md#alerts).

    smb up                                             # says "its page at http://127.0.0.1:9470/"
    sed 's/COORDINATOR/127.0.0.1/' deploy/prometheus/prometheus.yml > deploy/prometheus/mine.yml
    prometheus --config.file=deploy/prometheus/mine.yml --storage.tsdb.path=prometheus-data

`make prometheus` installs Debian's Prometheus, as root, where there is none; http://127.0.0.1:9090/targets then shows
each daemon as UP. Of real daemons `smb coordinator --metrics` says the port, 9470 by default.

A training process serves its own metrics if it is asked to: `SMB_CLIENT_METRICS=HOST:PORT` in its environment,
`smb.metrics.serve(client, "HOST:PORT")`, or `smb.metrics.Collector(client)` in a registry of its own.
`smb.train.Collector(client, "group")` tells of a whole training, from any process:
`smb.metrics.serve(client, "127.0.0.1:9480", smb.train.Collector(client, "group"))` serves it for as long as that
process runs. Give Prometheus these addresses in a file of `deploy/prometheus/targets/`, with the label
`smb_role: client`; the training dashboard needs one:

    echo '[{{"targets": ["127.0.0.1:9480"], "labels": {{"smb_role": "client"}}}}]' \\
        > deploy/prometheus/targets/training.json

**Names are on these pages**: of buffers, of clients (by default host and process id) and of servers, of all namespaces,
for everybody who may scrape. See [run](run.md#who-sees-the-pages).

## Labels are bounded

`kind` is an operation (read, write, accumulate, ...), `transport` one of shm, tcp, unix, verbs, `class` a status of the
engine, `method` and `code` gRPC's. A memory server tells {NAMED_MAX} buffers and {NAMED_MAX} clients apart by name,
those that it sees first; all later ones are `other`, until one that is gone makes room for a new one. So no counter
falls. The coordinator names the {NAMED_MAX} largest buffers; the rest are `other`. Changes by local clients in mapped
memory are counted by buffer, not by client: no server sees which client it was. Names reach a server with its renewals,
within 2 s; until then a new buffer is not shown, and then with all that was done before.

## What it costs

The engine counts where a request is done, in memory of that event loop alone: no lock, no atomic addition, no cache
line that another core writes. A client counts its own calls only if it is asked to. Measured:
[perf/results/instruments.md](../perf/results/instruments.md).
"""


def _table(title: str, text: str, metrics: tuple[Description, ...]) -> str:
    rows = [f"| `{m.name}` | {m.type} | {', '.join(m.labels)} | {m.text} |" for m in metrics]
    return "\n".join(
        [f"\n## {title}\n", f"{text}\n", "| name | type | labels | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    )


def page() -> str:
    """Return the page's text."""
    return _HEAD + "".join(
        (
            _table("Memory server", "Of every `smb-memserver`.", SERVER),
            _table("Coordinator", "Of `smb coordinator`.", COORDINATOR),
            _table("With credentials", "Of every daemon that has some. `certificate` is own or authority.", SECURED),
            _table("Client", "Of a process that serves them.", CLIENT),
            _table("Training", "Of `smb.train.Collector`: one group, from any process.", TRAINING),
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
