"""Writes deploy/kubernetes/monitoring/prometheusrule.yaml from deploy/prometheus: `make metrics-page`."""

from __future__ import annotations

from pathlib import Path

DEPLOY = Path(__file__).parents[1]
PAGE = DEPLOY / "kubernetes" / "monitoring" / "prometheusrule.yaml"
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


def page() -> str:
    """Return the whole text: the groups of both files, as they stand."""
    lines = [_HEAD]
    for name in ("rules.yml", "alerts.yml"):
        text = (DEPLOY / "prometheus" / name).read_text()
        groups = text.partition("\ngroups:\n")[2] if "\ngroups:\n" in text else text.partition("groups:\n")[2]
        lines += [f"  {line}" if line.strip() else line for line in groups.splitlines(keepends=True)]
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
