"""The real Prometheus on a running cluster: its configuration, rules and alerts, and every expression of every panel.

Without `prometheus` and `promtool` (make prometheus installs Debian's) these tests are reported as not run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import smb
import smb.metrics
import smb.train
from tests.support.daemons import keep_port, running_daemons, wait_for

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
SCRAPES_S = 1

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool are not here: run `make prometheus`",
)


def promtool(*arguments: object) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> list[dict[str, Any]]:
    return list(yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"])


def panels(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["panels"])


# ---- the files by themselves


@needs_prometheus
def test_configuration_is_sound(tmp_path: Path) -> None:
    """promtool takes both configurations and their rules. Debian's is built without the discovery in Kubernetes: there
    that one part is left out."""
    promtool("check", "config", DEPLOY / "prometheus.yml")
    for rules in ("rules.yml", "alerts.yml"):
        shutil.copy(DEPLOY / rules, tmp_path)
    kubernetes = yaml.safe_load((DEPLOY / "prometheus-kubernetes.yml").read_text())
    assert kubernetes["scrape_configs"][0].pop("kubernetes_sd_configs") == [{"role": "pod"}]
    token = tmp_path / "token"  # promtool wants it to be there
    token.write_text("secret")
    assert kubernetes["scrape_configs"][0]["authorization"].pop("credentials_file").startswith("/etc/prometheus/")
    kubernetes["scrape_configs"][0]["authorization"]["credentials_file"] = str(token)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(kubernetes))
    promtool("check", "config", tmp_path / "prometheus.yml")


@needs_prometheus
def test_alerts_fire_and_keep_quiet(tmp_path: Path) -> None:
    """promtool's own tests of the rules: each alert with the series that it is about, and with healthy ones."""
    for path in DEPLOY.glob("*.yml"):
        shutil.copy(path, tmp_path)
    promtool("test", "rules", tmp_path / "alerts-test.yml")


def test_every_alert_has_a_test_and_a_runbook() -> None:
    """Each alert is in alerts-test.yml, and its link leads to the one section of its name in docs/repair.md, where
    there is none of an alert that is not there."""
    tested = (DEPLOY / "alerts-test.yml").read_text()
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "repair.md").read_text(), re.M)
    assert sorted(h for h in headings if h.startswith("Smb")) == sorted(alert["alert"] for alert in alerts())
    for alert in alerts():
        assert f"alertname: {alert['alert']}" in tested
        place, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert anchor == alert["alert"].lower()
        assert place == "{{ with $externalLabels.smb_runbooks }}{{ . }}{{ else }}docs/repair.md{{ end }}"
        by = re.findall(r"\b(?:by|on) \((.*?)\)", alert["expr"])  # what is put together keeps the cluster's name
        assert all("smb_cluster" in labels.split(", ") for labels in by), alert["alert"]


def test_dashboards_are_whole() -> None:
    """Each has its own uid, a variable for the datasource that every panel uses, and panels with expressions, a unit,
    numbers of their own and no overlap."""
    assert [path.stem for path in DASHBOARDS] == ["buffer", "cluster", "server", "training"]
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards)
    for board in boards:
        variables = {variable["name"]: variable for variable in board["templating"]["list"]}
        assert variables["datasource"]["type"] == "datasource"
        used = {name for panel in board["panels"] for name in re.findall(r"\$\{?(\w+)", json.dumps(panel))}
        assert used <= variables.keys()
        expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
        series = [name for each in expressions for name in re.findall(r"(?:\w+:)?\bsmb_(?!cluster\b)[\w:]+\{?", each)]
        assert series
        assert all(name.endswith("{") for name in series)
        assert all(each.count('{smb_cluster=~"$smb_cluster"') == each.count("{") for each in expressions)
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            assert panel["title"]
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["targets"]
            assert all(target["expr"] for target in panel["targets"])
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert max(x for x, _ in cells) < 24
            assert not cells & taken
            taken |= cells


# ---- on a running cluster


class Prometheus:
    """The real one, on the files that users get; scrapes each second, and alerts wait for one."""

    def __init__(
        self,
        directory: Path,
        *coordinators: str,
        client: str = "",
        token_file: Path | None = None,
        runbooks: str = "",
        sooner: float | None = None,
    ) -> None:
        """`runbooks`: the address of the page that alerts link to. `sooner`: what their times are divided by;
        without it each waits for one scrape."""
        entry = re.compile(r"^ {6}- url: http://COORDINATOR.*?(?=^ {4}\w)", re.MULTILINE | re.DOTALL)
        config = (DEPLOY / "prometheus.yml").read_text()
        (written,) = entry.findall(config)
        config = entry.sub("".join(written.replace("COORDINATOR:9470", each) for each in coordinators), config)
        if runbooks:
            config, marks = re.subn(r'# (external_labels:.*)"https.*"', rf'\1"{runbooks}"', config)
            assert marks == 1
        if token_file is not None:  # as the file's head says
            config, marks = re.subn(r"# (authorization: .*)FILE", rf"\1{token_file}", config)
            assert marks == 2 + len(coordinators)
        config = re.sub(r"(scrape|evaluation)_interval: 10s", rf"\1_interval: {SCRAPES_S}s", config)
        config = config.replace("refresh_interval: 15s", "refresh_interval: 1s")
        (directory / "prometheus.yml").write_text(config)
        shutil.copy(DEPLOY / "rules.yml", directory)
        short = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
        for rule in short["groups"][0]["rules"]:
            for_s = int(rule["for"][:-1]) * {"s": 1, "m": 60}[rule["for"][-1]]
            rule["for"] = f"{round(for_s / sooner) if sooner else SCRAPES_S}s"
        (directory / "alerts.yml").write_text(yaml.safe_dump(short))
        (directory / "targets").mkdir()
        found = [{"targets": [client], "labels": {"smb_role": "client"}}] if client else []
        (directory / "targets" / "clients.json").write_text(json.dumps(found))
        self._kept = keep_port()
        self.address = f"127.0.0.1:{self._kept.getsockname()[1]}"
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
                 f"--web.listen-address={self.address}"],
                stdout=log, stderr=log,
            )  # fmt: skip
        wait_for(self._ready, "Prometheus")

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[Any]:
        return list(self.ask("query", query=expression)["result"])

    def firing(self) -> dict[str, str]:
        """Alerts that fire, and the server that each is of."""
        found = self.ask("alerts")["alerts"]
        return {a["labels"]["alertname"]: a["labels"].get("server", "") for a in found if a["state"] == "firing"}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self._kept.close()


class Load:
    """Reads, additions, locks and a training, over both ways, until told to stop."""

    def __init__(self, cluster: smb.LocalCluster) -> None:
        self.tcp = smb.connect(cluster.address, transport="tcp", timeout=60)
        self.shm = smb.connect(cluster.address, transport="shm", timeout=60)
        self.pages = smb.metrics.serve(self.tcp, "127.0.0.1:0", smb.train.Collector(self.tcp, "run"))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        buffer = self.tcp.create("weights", (100_000,), "float32")
        mapped, ones = self.shm.open("weights"), np.ones(100_000, dtype=np.float32)
        worker = smb.train.join(self.shm, "run", np.zeros(8, dtype=np.float32), smb.train.AsyncDiLoCo(every=1))
        while not self._stop.wait(0.02):
            buffer.accumulate(ones)
            buffer.read()
            mapped.read()
            with self.tcp.lock("turn"):
                worker.step(samples=4)
        worker.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self.pages.close()
        self.tcp.close()
        self.shm.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[smb.LocalCluster, Prometheus]]:
    with smb.LocalCluster(servers=2, capacity="32MiB") as cluster:
        load = Load(cluster)
        place = tmp_path_factory.mktemp("prometheus")
        prometheus = Prometheus(place, cluster.coordinator.metrics, client=load.pages.address)
        try:
            yield cluster, prometheus
        finally:
            prometheus.close()
            load.close()


@needs_prometheus
def test_every_expression_gives_data(watched: tuple[smb.LocalCluster, Prometheus]) -> None:
    """Prometheus finds coordinator and servers by the coordinator's word alone; every panel's expressions evaluate to
    data under load, every rule and alert without an error; and nothing fires on a healthy cluster."""
    _, prometheus = watched
    wait_for(lambda: len(prometheus.query("up == 1")) == 4, "its targets")
    queries = {
        re.sub(r"\$\{?(server|buffer|group|smb_cluster)\}?", ".*", target["expr"]): path.stem
        for path in DASHBOARDS
        for panel in panels(path)
        for target in panel["targets"]
    }
    missing = dict(queries)

    def all_there() -> bool:
        for expression in list(missing):
            if prometheus.query(expression):
                del missing[expression]
        return not missing

    end = time.monotonic() + 40
    while not all_there():
        assert time.monotonic() < end, f"no data for {missing}"
        time.sleep(0.5)
    for alert in alerts():
        prometheus.query(alert["expr"])
    groups = prometheus.ask("rules")["groups"]
    assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"] == []
    assert prometheus.firing() == {}


@needs_prometheus
def test_a_killed_server_raises_an_alert(watched: tuple[smb.LocalCluster, Prometheus]) -> None:
    """A killed server fires SmbServerDown, and SmbServerGone once its lease is over; both end when it is back."""
    cluster, prometheus = watched
    cluster.servers[1].kill()
    wait_for(lambda: prometheus.firing().get("SmbServerDown") == "server-1", "SmbServerDown")
    wait_for(lambda: prometheus.firing().get("SmbServerGone") == "server-1", "SmbServerGone")
    cluster.servers[1].start()
    wait_for(lambda: not {"SmbServerDown", "SmbServerGone"} & prometheus.firing().keys(), "the end of both")


@needs_prometheus
def test_a_token_is_shown_to_the_discovery_and_to_every_daemon(tmp_path: Path) -> None:
    """With the lines that the configuration has for it, Prometheus finds the servers and scrapes all; without them it
    finds nothing."""
    token_file = tmp_path / "token"
    token_file.write_text("a-word-of-24-characters!\n")
    token_file.chmod(0o600)
    shown = ("--metrics-token-file", str(token_file))
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator("127.0.0.1:0", None, *shown)
        assert daemons.memory_server(coordinator.address, "server-0", *shown).address
        for given, targets in ((token_file, 2), (None, 0)):
            place = tmp_path / f"prometheus-{targets}"
            place.mkdir()
            prometheus = Prometheus(place, coordinator.metrics, token_file=given)
            try:
                if given:
                    wait_for(lambda: len(prometheus.query("up == 1")) == targets, "its targets")  # noqa: B023
                    roles = {found["metric"]["smb_role"] for found in prometheus.query("up == 1")}
                    assert roles == {"coordinator", "server"}
                else:
                    failed = "prometheus_sd_http_failures_total"
                    wait_for(lambda: failed in self_metrics(prometheus), "a refusal")  # noqa: B023
                    assert prometheus.query("up") == []
            finally:
                prometheus.close()


def self_metrics(prometheus: Prometheus) -> str:
    """What it says of its own failures, of which there are some."""
    with urllib.request.urlopen(f"http://{prometheus.address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#") and not line.endswith(" 0"))
