"""Writes docs/metrics.md from smb/daemon/metric_names.py: `make metrics-page`."""

from __future__ import annotations

from pathlib import Path

from smb.daemon.metric_names import CLIENT, COORDINATOR, NAMED_MAX, ON_ETCD, SECURED, SERVER, TRAINING, Description

PAGE = Path(__file__).parent / "metrics.md"
_HEAD = f"""# Metrics

<!-- Made from smb/daemon/metric_names.py by `make metrics-page`. Change that file, not this page. -->

Every daemon serves `GET /metrics` at its `--metrics` address. Prometheus learns the addresses from the coordinator, at
`http://COORDINATOR:9470/targets`; `smb targets COORDINATOR:9470 --output FILE` writes the same into a file. Of several
coordinators give Prometheus all: each lists all daemons, whether it leads or stands by.
[deploy/prometheus](../deploy/prometheus/prometheus.yml) has a configuration, recording rules and
[alerts](#alerts). [deploy/grafana](../deploy/grafana/make_dashboards.py) has four dashboards: import the JSON
files and choose the Prometheus. To try it:

    smb up                                             # its page is at http://127.0.0.1:9470/
    sed 's/COORDINATOR/127.0.0.1/' deploy/prometheus/prometheus.yml > deploy/prometheus/mine.yml
    prometheus --config.file=deploy/prometheus/mine.yml --storage.tsdb.path=prometheus-data

http://127.0.0.1:9090/targets then shows each daemon as UP. `make prometheus` installs Debian's Prometheus, as root.

A training process serves its own metrics with `SMB_CLIENT_METRICS=HOST:PORT`, `smb.metrics.serve(client, "HOST:PORT")`,
or `smb.metrics.Collector(client)` in its own registry. A whole training is served from any process by
`smb.metrics.serve(client, "127.0.0.1:9480", smb.train.Collector(client, "group"))`. Tell Prometheus of such addresses
with the label `smb_role: client`; the training dashboard needs it:

    echo '[{{"targets": ["127.0.0.1:9480"], "labels": {{"smb_role": "client"}}}}]' \\
        > deploy/prometheus/targets/training.json

These pages show names of buffers, clients and servers of all namespaces: see
[who sees the pages](run.md#who-sees-the-pages).

Names that end in `_total` are counters, those in `_duration_seconds` histograms, all others gauges. Labels: `kind`
is an operation (read, write, accumulate, ...), `transport` is shm, tcp, unix or verbs, `class` a status of the
engine, `method` and `code` are gRPC's. They are bounded: a memory server names the first {NAMED_MAX} buffers and
{NAMED_MAX} clients that it sees until one of them is gone, the coordinator the {NAMED_MAX} largest buffers; the
rest is `other`. A new buffer shows within 2 s, with all that was done before. Changes in mapped memory are counted
by buffer, not by client.

Counting costs the engine no lock and no atomic operation ([measured](../perf/results/instruments.md)). A client counts
its calls only if it serves metrics.

## Alerts

Each alert has a [runbook](repair.md#alerts), the label `severity` (critical or warning), and the label `smb_cluster`,
by which one Prometheus tells several clusters apart. The configuration sets `smb_cluster` for each job (in Kubernetes
it is the namespace, in the chart `metrics.cluster`). For links to the runbooks, serve the page docs/repair.md where
your people can open it (`make docs` makes the site), and name it in Prometheus's configuration; the chart has
`metrics.runbooks`:

    global:
      external_labels: {{smb_runbooks: "https://docs.example.com/smb/repair.html"}}

Without Prometheus, [`smb status --check`](commands.md#exit-codes) in a cron job says what is wrong.
"""


def _table(title: str, text: str, metrics: tuple[Description, ...]) -> str:
    rows = [f"| `{m.name}` | {', '.join(m.labels)} | {m.text} |" for m in metrics]
    return "\n".join([f"\n## {title}\n", f"{text}\n", "| name | labels | meaning |", "| --- | --- | --- |", *rows, ""])


def page() -> str:
    """Return the page's text."""
    return _HEAD + "".join(
        (
            _table("Memory server", "Of each `smb-memserver`.", SERVER),
            _table("Coordinator", "Of `smb coordinator`.", COORDINATOR),
            _table("On etcd", "Of each coordinator with its records in etcd.", ON_ETCD),
            _table("With credentials", "Of each daemon with credentials.", SECURED),
            _table("Client", "Of each process that serves them.", CLIENT),
            _table("Training", "Of `smb.train.Collector`.", TRAINING),
        )
    )


if __name__ == "__main__":
    PAGE.write_text(page())
