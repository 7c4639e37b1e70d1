"""deploy/kubernetes and deploy/container, with the real kustomize, the API's schemas, and hadolint."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from smb.config.parse import parse_bytes
from smb.config.settings import SETTINGS

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy/kubernetes"
BIN = Path(sys.executable).parent
API = "1.37"
OPERATORS = {
    "ServiceMonitor",
    "PrometheusRule",
}  # of the Prometheus operator: no part of the API, so without a schema here


@cache
def built(folder: str) -> tuple[dict[str, Any], ...]:
    """What kustomize makes of a folder."""
    command = [str(BIN / "kubectl"), "kustomize", str(KUBERNETES / folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return tuple(yaml.safe_load_all(run.stdout))


def one(kind: str, name: str, folder: str = "base") -> dict[str, Any]:
    """The object of that kind and name."""
    (found,) = (each for each in built(folder) if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = one("StatefulSet", name)["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("folder", ["base", "monitoring"])
def test_kustomize_builds_what_the_api_takes(folder: str) -> None:
    """Every object of the build passes the API's schema, strictly; all are of one namespace."""
    for each in built(folder):
        if each["kind"] not in OPERATORS:
            kubernetes_validate.validate(each, API, strict=True)
        if each["kind"] not in ("Namespace", "PriorityClass"):  # which are of no namespace
            assert each["metadata"]["namespace"] == "smb"
    kinds = {each["kind"] for each in built(folder)} - OPERATORS
    of_the_cluster = {"Namespace", "PriorityClass"}
    assert kinds == of_the_cluster | {"ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet"}


def test_what_the_api_refuses_is_seen() -> None:
    """The schemas know a misspelt field and a wrong type."""
    wrong = yaml.safe_load(yaml.safe_dump(one("StatefulSet", "smb-memserver")))
    wrong["spec"]["replicas"] = "two"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, API, strict=True)
    wrong["spec"]["replicas"] = 2
    wrong["spec"]["template"]["spec"]["volums"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, API, strict=True)


def test_selectors_meet_their_labels() -> None:
    """Services, budgets, policies and the service monitor select pods and services that there are; policies' peers are
    as they were written: a label more would cut off clients and DNS.
    """
    pods = {name: one("StatefulSet", name)["spec"]["template"]["metadata"]["labels"] for name in WORKLOADS}
    for each in built("base"):
        spec = each.get("spec", {})
        selected = {"Service": spec.get("selector"), "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels")}
        selector = selected.get(each["kind"])
        if each["kind"] in ("PodDisruptionBudget", "StatefulSet"):
            selector = spec["selector"]["matchLabels"]
        if selector is not None:
            assert selector.items() <= pods[each["metadata"]["name"]].items(), each["metadata"]
    for name in WORKLOADS:
        policy = one("NetworkPolicy", name)["spec"]
        peers = [peer for rule in policy["ingress"] for peer in rule["from"]]
        assert {"smb.access/client": "true"} in [peer.get("podSelector", {}).get("matchLabels") for peer in peers]
        assert "k8s-app" in str(policy["egress"])
        ports = {port["name"] for port in one("Service", name)["spec"]["ports"]}
        assert ports == {port["name"] for port in pod(name)["containers"][0]["ports"]}
    monitor = one("ServiceMonitor", "smb", "monitoring")["spec"]
    for name in WORKLOADS:
        service = one("Service", name, "monitoring")
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


WORKLOADS = ("smb-coordinator", "smb-memserver")


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_are_as_little_as_they_need(name: str) -> None:
    """Not root, nothing gained, nothing written but volumes, alive and ready probed apart, time to stop in order,
    limited memory; every SMB_ variable is a setting.
    """
    spec, (container,) = pod(name), pod(name)["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert one("PriorityClass", spec["priorityClassName"])["preemptionPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] >= 30
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for probe, path in (("startupProbe", "/livez"), ("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
        assert container[probe]["httpGet"] == {"path": path, "port": "metrics"}
    assert one("Service", name)["spec"]["publishNotReadyAddresses"] is True
    assert container["resources"]["limits"]["memory"]
    variables = {setting.variable for setting in SETTINGS.values()} | {"SMB_CONFIG"}
    assert {each["name"] for each in container["env"]} <= variables
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    volumes = {each["name"] for each in spec["volumes"]}
    claims = {each["metadata"]["name"] for each in one("StatefulSet", name)["spec"].get("volumeClaimTemplates", ())}
    assert mounted == volumes | claims
    (config,) = (each for each in spec["volumes"] if each["name"] == "config")
    assert one("ConfigMap", config["configMap"]["name"])["data"].keys() == {"smb.toml"}


def relabelled(rules: list[dict[str, Any]], found: dict[str, str]) -> dict[str, str]:
    """What Prometheus makes of a target's labels; of its actions, `replace` and `keep`."""
    labels = dict(found)
    for rule in rules:
        given = {re.sub(r"([A-Z])", lambda upper: f"_{upper[1].lower()}", key): value for key, value in rule.items()}
        value = ";".join(labels.get(source, "") for source in given["source_labels"])
        match = re.fullmatch(given.get("regex", "(.*)"), value)
        if given.get("action") == "keep":
            assert match, found
        elif match:
            labels[given["target_label"]] = match.expand(re.sub(r"\$(\d)", r"\\\1", given.get("replacement", "$1")))
    return {name: value for name, value in labels.items() if not name.startswith("__")}


@pytest.mark.parametrize("by", ["operator", "prometheus"])
@pytest.mark.parametrize("role", ["coordinator", "server"])
def test_targets_have_the_labels_that_alerts_and_dashboards_ask_for(by: str, role: str) -> None:
    """As the coordinator's /targets tells: every daemon its role, a memory server its name, the coordinator none; and
    all of them the cluster's name; by the ServiceMonitor and by Prometheus' own discovery.
    """
    stateful = "smb-memserver" if role == "server" else "smb-coordinator"
    own = one("StatefulSet", stateful)["spec"]["template"]["metadata"]["labels"]
    found = {f"__meta_kubernetes_pod_label_{re.sub('[^a-z]', '_', name)}": str(value) for name, value in own.items()}
    found["__meta_kubernetes_namespace"] = "smb"
    found |= {"__meta_kubernetes_pod_name": f"{stateful}-0", "__meta_kubernetes_pod_container_port_name": "metrics"}
    if by == "operator":
        (end,) = one("ServiceMonitor", "smb", "monitoring")["spec"]["endpoints"]
        rules = end["relabelings"]
    else:
        written = yaml.safe_load((ROOT / "deploy/prometheus/prometheus-kubernetes.yml").read_text())
        rules = written["scrape_configs"][0]["relabel_configs"]
    labels = relabelled(rules, found)
    labels.pop("namespace", None)
    assert labels.pop("smb_cluster") == "smb"
    assert labels == {"smb_role": role} | ({"server": "smb-memserver-0"} if role == "server" else {})


def test_the_operators_rules_are_those_of_prometheus() -> None:
    """The PrometheusRule has the groups of rules.yml and alerts.yml; the scrapes that it is for show the token as a
    bearer."""
    written = [yaml.safe_load((ROOT / "deploy/prometheus" / name).read_text()) for name in ("rules.yml", "alerts.yml")]
    rule = one("PrometheusRule", "smb", "monitoring")
    assert rule["spec"]["groups"] == [group for each in written for group in each["groups"]]
    assert rule["metadata"]["labels"]["app.kubernetes.io/part-of"] == "soft-memory-box"
    (end,) = one("ServiceMonitor", "smb", "monitoring")["spec"]["endpoints"]
    assert end["authorization"]["type"] == "Bearer"
    kubernetes = yaml.safe_load((ROOT / "deploy/prometheus/prometheus-kubernetes.yml").read_text())
    assert kubernetes["scrape_configs"][0]["authorization"]["type"] == "Bearer"


def test_a_servers_memory_outlives_its_container() -> None:
    """Segments lie in a volume of memory of the pod, which no update and no drain takes away; capacity, volume and
    the container's memory each have room above the one before.
    """
    stateful = one("StatefulSet", "smb-memserver")["spec"]
    assert stateful["updateStrategy"]["type"] == "OnDelete"
    assert one("PodDisruptionBudget", "smb-memserver")["spec"]["maxUnavailable"] == 0
    spec, (container,) = pod("smb-memserver"), pod("smb-memserver")["containers"]
    (volume,) = (each for each in spec["volumes"] if each["name"] == "memory")
    assert volume["emptyDir"]["medium"] == "Memory"
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "memory")
    settings = (KUBERNETES / "base/smb.toml").read_text()
    assert f'memory_dir = "{mount["mountPath"]}/smb-{spec["securityContext"]["runAsUser"]}"' in settings
    capacity = parse_bytes(settings.partition('capacity = "')[2].partition('"')[0])
    limit = parse_bytes(volume["emptyDir"]["sizeLimit"] + "B")
    assert capacity < limit < parse_bytes(container["resources"]["limits"]["memory"] + "B")
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert requests["memory"] == limits["memory"]


def test_the_container_file_is_clean(tmp_path: Path) -> None:
    """hadolint has nothing to say of it, and sees what is wrong in another."""

    def lint(file: Path) -> str:
        command = [str(BIN / "hadolint"), "--no-color", str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

    file = ROOT / "deploy/container/Containerfile"
    assert lint(file) == ""
    assert [line for line in file.read_text().splitlines() if line.startswith("USER")] == ["USER 10001:10001"]
    bad = tmp_path / "Containerfile"
    bad.write_text("FROM debian\nRUN apt-get install gcc\n")
    assert "DL3006" in lint(bad)


def test_the_build_context_is_what_the_build_needs() -> None:
    """What the container file's ignore file lets through exists, and covers what setuptools reads."""
    lines = (ROOT / "deploy/container/Containerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert [name for name in allowed if not (ROOT / name).exists()] == []
    assert {"pyproject.toml", "setup.cfg", "README.md", "LICENSE", "csrc", "smb", "memserver"} <= allowed
    assert shutil.which("kubectl", path=str(BIN))
