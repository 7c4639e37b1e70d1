"""deploy/kubernetes and deploy/container, with the real kustomize, the API's schemas, and hadolint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import smb
from smb.config.parse import parse_bytes
from smb.config.settings import SETTINGS
from smb.daemon import health_check
from tests.support.commands import COMMAND, run_smb
from tests.support.daemons import running_daemons, wait_for

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


def test_a_cron_job_makes_backups() -> None:
    """Its objects pass the API's schemas. Its pod may call the cluster, and writes to its volume alone."""
    for each in built("backup"):
        kubernetes_validate.validate(each, API, strict=True)
        assert each["metadata"]["namespace"] == "smb"
    template = one("CronJob", "smb-backup", "backup")["spec"]["jobTemplate"]["spec"]["template"]
    assert template["metadata"]["labels"]["smb.access/client"] == "true"
    (container,) = template["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["image"].startswith("registry.example/")
    assert 'smb snapshot --quiet --all "/backups/' in container["command"][-1]
    assert {each["name"] for each in container["env"]} <= {setting.variable for setting in SETTINGS.values()}
    (claim,) = (each for each in template["spec"]["volumes"] if each["name"] == "backups")
    assert one("PersistentVolumeClaim", claim["persistentVolumeClaim"]["claimName"], "backup")


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


@cache
def with_drain() -> tuple[dict[str, Any], ...]:
    """What kustomize makes of an overlay with the base and the component `drain`."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(KUBERNETES, Path(place, "kubernetes"))
        overlay = Path(place, "kubernetes/mine")
        overlay.mkdir()
        (overlay / "kustomization.yaml").write_text("resources: [../base]\ncomponents: [../drain]\n")
        command = [str(BIN / "kubectl"), "kustomize", str(overlay)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return tuple(yaml.safe_load_all(run.stdout))


def test_a_drain_before_the_stop_has_time(tmp_path: Path) -> None:
    """With the component a pod that is deleted drains its server for up to an hour, and then stops; a container that a
    probe restarts has half a minute. Without it there is no hook. Nothing else differs.
    """
    drained = {(each["kind"], each["metadata"]["name"]): each for each in with_drain()}
    (stateful,) = (
        each for each in with_drain() if each["kind"] == "StatefulSet" and "memserver" in str(each["metadata"])
    )
    kubernetes_validate.validate(stateful, API, strict=True)
    spec, (container,) = stateful["spec"]["template"]["spec"], stateful["spec"]["template"]["spec"]["containers"]
    assert spec["terminationGracePeriodSeconds"] == 3600
    shell, flag, script = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "operator")
    assert f"--credentials {mount['mountPath']} drain" in script
    assert [container[probe]["terminationGracePeriodSeconds"] for probe in ("startupProbe", "livenessProbe")] == [
        30,
        30,
    ]
    plain = pod("smb-memserver")
    assert "lifecycle" not in plain["containers"][0]
    assert plain["terminationGracePeriodSeconds"] == 30
    other = {name: each for name, each in drained.items() if name != ("StatefulSet", "smb-memserver")}
    assert other == {
        (each["kind"], each["metadata"]["name"]): each
        for each in built("base")
        if each is not one("StatefulSet", "smb-memserver")
    }
    assert {each["name"] for each in spec["volumes"]} - {each["name"] for each in plain["volumes"]} == {"operator"}


def test_the_secrets_are_those_that_the_page_creates() -> None:
    """The base, the drain and the backup use no secret that docs/install.md does not create; one has one name."""
    page = (ROOT / "docs/install.md").read_text().partition("## Kubernetes")[2].partition("### Helm")[0]
    created = set(re.findall(r"create secret generic (\S+)", page))
    used = set(re.findall(r"secretName: (\S+)", yaml.safe_dump_all([*with_drain(), *built("backup")])))
    assert {"smb-operator-credentials", "smb-memserver-credentials"} <= used <= created


def test_the_drain_before_the_stop_empties_a_server(tmp_path: Path) -> None:
    """The hook's command, with the pod's variables, on a real cluster with certificates: the server that it names is
    empty, with the operator's certificate and not with the server's. While no other server has room it tries again.
    The pod's first process has credentials, so that nobody may open its output.
    """
    (stateful,) = (
        each for each in with_drain() if each["kind"] == "StatefulSet" and "memserver" in str(each["metadata"])
    )
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    script = container["lifecycle"]["preStop"]["exec"]["command"][2]
    lab, log = tmp_path / "lab", tmp_path / "log"
    subprocess.run([*COMMAND, "certs", str(lab), "--server", "server-0", "--server", "server-1"], check=True)
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator("127.0.0.1:0", None, "--credentials", str(lab / "coordinator"))
        first = daemons.memory_server(coordinator.address, "server-0", "--credentials", str(lab / "server-0"))
        assert first.address
        assert (
            run_smb(
                "create",
                "kept",
                "--shape",
                "1000",
                coordinator=coordinator.address,
                variables={"SMB_CREDENTIALS": str(lab / "client")},
            ).returncode
            == 0
        )
        own = {
            f"SMB_TLS_{name}": str(lab / "server-0" / file)
            for name, file in (("CA", "ca.pem"), ("CERT", "cert.pem"), ("KEY", "key.pem"))
        }
        variables = {name: value for name, value in os.environ.items() if not name.startswith("SMB_")} | own
        variables |= {
            "SMB_MEMSERVER_NAME": "server-0",
            "SMB_COORDINATOR": coordinator.address,
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        for there, here in (("/etc/smb/operator", f"{lab}/operator"), ("sleep 10", "sleep 0.1")):
            assert there in script
            script = script.replace(there, here)
        script = script.replace("/proc/1/", f"/proc/{first.pid}/")
        # As in the pod, the hook has no right to what belongs to a process with credentials.
        bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
        with log.open("w") as out:
            hook = subprocess.Popen([*bare, "/bin/sh", "-c", script], env=variables, stdout=out, stderr=out)
        try:
            wait_for(lambda: "no other live memory server" in log.read_text(), "its complaint")
            assert hook.poll() is None
            assert daemons.memory_server(
                coordinator.address, "server-1", "--credentials", str(lab / "server-1")
            ).address
            assert hook.wait(60) == 0
        finally:
            hook.kill()
            hook.wait()
        assert "server-0 is empty" in log.read_text()
        assert first.stop() == 0


def test_pods_are_spread_over_nodes_and_zones() -> None:
    """Memory servers are spread over both; the pod's zone becomes the server's, where Kubernetes knows it."""
    spec = pod("smb-memserver")
    assert [each["topologyKey"] for each in spec["topologySpreadConstraints"]] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    labels = one("StatefulSet", "smb-memserver")["spec"]["template"]["metadata"]["labels"]
    for constraint in spec["topologySpreadConstraints"]:
        assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
    (zone,) = (each for each in spec["containers"][0]["env"] if each["name"] == "SMB_MEMSERVER_ZONE")
    assert zone["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['topology.kubernetes.io/zone']"
    assert all(one("StatefulSet", name)["spec"]["minReadySeconds"] == 10 for name in WORKLOADS)


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


def instructions(text: str) -> list[tuple[str, str]]:
    """The file's instructions: lines joined, comments gone."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in joined.splitlines()) if word
    ]


def test_the_image_is_of_wheels_with_a_health_check_and_labels() -> None:
    """The build context has nothing but wheels and versions, and the base is an argument, which `make image` wants with
    its digest.
    """
    lines = (ROOT / "deploy/container/Containerfile.dockerignore").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["*", "!dist/*.whl", "!tests/constraints.txt"]
    steps = instructions((ROOT / "deploy/container/Containerfile").read_text())
    assert [rest for word, rest in steps if word == "FROM"] == ["${BASE} AS build", "${BASE}"]
    assert next(rest for word, rest in steps if word == "COPY") == "dist/*.whl tests/constraints.txt /dist/"
    assert sum(word == "HEALTHCHECK" and "smb.daemon.health_check" in rest for word, rest in steps) == 1
    assert any(word == "LABEL" and 'image.version="${VERSION}"' in rest for word, rest in steps)
    made = subprocess.run(
        ["make", "--dry-run", "image", "BASE=debian:bookworm-slim"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode != 0
    assert "by its digest" in made.stderr
    digest = f"debian:bookworm-slim@sha256:{64 * '0'}"
    made = subprocess.run(["make", "--dry-run", "image", f"BASE={digest}"], cwd=ROOT, capture_output=True, text=True)
    assert f"--build-arg BASE={digest} --build-arg VERSION={smb.__version__} " in made.stdout, made.stderr
    assert made.stdout.startswith("BUILDAH_FORMAT=docker "), "podman leaves the health check out of other formats"


@pytest.mark.parametrize(
    ("command", "variables", "expected"),
    [
        ("python3\0/opt/smb/bin/smb-memserver", {"SMB_MEMSERVER_METRICS": "0.0.0.0:1"}, ["0.0.0.0:1"]),
        ("python3\0/opt/smb/bin/smb\0coordinator", {"SMB_MEMSERVER_METRICS": "0.0.0.0:1"}, ["127.0.0.1:9470"]),
        ("tini\0--", {"SMB_MEMSERVER_METRICS": "0.0.0.0:1"}, ["0.0.0.0:1", "127.0.0.1:9470"]),
        ("python3\0/opt/smb/bin/smb-memserver", {}, []),  # a free port
    ],
)
def test_the_health_check_asks_the_daemon_of_the_container(
    command: str, variables: dict[str, str], expected: list[str]
) -> None:
    assert health_check.pages(command, variables) == expected


def test_the_health_check_sees_whether_a_daemon_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a container that has a proxy: there every daemon counted as dead."""
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster:
        page = cluster.servers[0].metrics
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setattr(urllib.request, "_opener", None)  # which remembers the proxies of before
        assert health_check.lives(page)
    assert not health_check.lives(page)
