"""Writes the PrometheusRule of deploy/kubernetes, and the rules of deploy/helm, from deploy/prometheus.

By `make metrics-page`.
"""

from __future__ import annotations

from pathlib import Path

DEPLOY = Path(__file__).parents[1]
PAGE = DEPLOY / "kubernetes" / "monitoring" / "prometheusrule.yaml"
OF_CHART = DEPLOY / "helm" / "files" / "rules.yaml"
_HEAD = """\
# Made from deploy/prometheus/rules.yml and alerts.yml by `make metrics-page`. Change those files, not this one.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: smb
  labels:
    app.kubernetes.io/part-of: soft-memory-box
spec:
  groups:
"""


def groups() -> list[str]:
    """Return the lines of the groups of both files, as they stand."""
    lines = []
    for name in ("rules.yml", "alerts.yml"):
        text = (DEPLOY / "prometheus" / name).read_text()
        found = text.partition("\ngroups:\n")[2] if "\ngroups:\n" in text else text.partition("groups:\n")[2]
        lines += found.splitlines(keepends=True)
    return lines


def page() -> str:
    """Return the whole PrometheusRule."""
    return _HEAD + "".join(f"  {line}" if line.strip() else line for line in groups())


def of_chart() -> str:
    """Return the groups alone: the chart's template has the rest."""
    return "".join(line[2:] if line.strip() else line for line in groups())


if __name__ == "__main__":
    PAGE.write_text(page())
    OF_CHART.write_text(of_chart())
