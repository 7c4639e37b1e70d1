"""deploy/helm, rendered by Helm itself, with the API's schemas."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from smb.config.parse import parse_bytes
from smb.config.settings import SETTINGS
from smb.security.credentials import COORDINATOR_NAME, server_name
from smb.security.roles import NAME_URI, NAMESPACE_URI, ROLE_URI, Role
from tests.ops.deploy import test_manifests
from tests.ops.deploy.test_manifests import API

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

helm = pytest.importorskip(
    "helm_python", reason="not run: it needs helm-python-sdk, Helm as a library, which is there for x86_64"
)

CHART = Path(__file__).parents[3] / "deploy/helm"
OF_OPERATORS = {"Certificate", "ServiceMonitor", "PrometheusRule"}  # no part of the API: without a schema here
ETCD = {"endpoints": ["etcd-0.etcd:2379", "etcd-1.etcd:2379"], "secret": "smb-etcd"}
FULL = {
    "etcd": ETCD,
    "certificates": {
        "issuer": "smb-ca",
        "clients": [{"name": "trainer", "role": "client", "namespaces": ["vision"]}],
    },
    "memserver": {"replicas": 3, "capacityGiB": 64, "preStop": ["true"]},
    "metrics": {"operator": True},
}
SMALL = {
    "coordinator": {"replicas": 1, "state": "disk"},
    "certificates": {"coordinatorSecret": "smb-coordinator", "memserverSecret": "smb-memserver"},
}


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """What Helm makes of the chart, as release "run" of namespace "lab"."""
    with helm.Chart.load(CHART) as chart:
        pages = chart.render(values, name="run", namespace="lab")
    text = "\n---\n".join(page for name, page in pages.items() if not name.endswith(".txt"))
    return [each for each in yaml.safe_load_all(text) if each]


def one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def pod_of(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    spec: dict[str, Any] = one(objects, "StatefulSet", name)["spec"]["template"]["spec"]
    return spec


def settings_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return tomllib.loads(one(objects, "ConfigMap", "run")["data"]["smb.toml"])


@pytest.mark.parametrize("values", [FULL, SMALL], ids=["full", "small"])
def test_helm_makes_what_the_api_takes(values: dict[str, Any]) -> None:
    """Every object passes the API's schema, strictly; every name is of the release; selectors meet their labels; what
    pods mount and ask for is there or was named; every setting and variable is one.
    """
    objects = rendered(values)
    for each in objects:
        if each["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(each, API, strict=True)
        assert each["metadata"]["name"].split("-")[0] == "run"
    for name in ("run-coordinator", "run-memserver"):
        spec = one(objects, "StatefulSet", name)["spec"]
        labels = spec["template"]["metadata"]["labels"]
        for selector in (
            spec["selector"]["matchLabels"],
            one(objects, "Service", name)["spec"]["selector"],
            one(objects, "PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"],
            one(objects, "NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"],
        ):
            assert selector.items() <= labels.items()
        pod, (container,) = pod_of(objects, name), pod_of(objects, name)["containers"]
        assert one(objects, "PriorityClass", pod["priorityClassName"])["preemptionPolicy"] == "Never"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        claims = {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", ())}
        assert mounted == {each["name"] for each in pod["volumes"]} | claims
        variables = {setting.variable for setting in SETTINGS.values()} | {"SMB_CONFIG", "POD_IP"}
        assert {each["name"] for each in container["env"]} <= variables
        ports = {each["containerPort"] for each in container["ports"]}
        allowed = {
            port["port"] for rule in one(objects, "NetworkPolicy", name)["spec"]["ingress"] for port in rule["ports"]
        }
        assert ports == allowed
    known = {tuple(name.split(".", 1)) for name in SETTINGS}
    assert {(section, key) for section, keys in settings_of(objects).items() for key in keys} <= known


def test_coordinators_stand_by_for_each_other_on_etcd() -> None:
    """Three, on three nodes, each named to all others; the policy lets them reach etcd, whose credentials they have."""
    objects = rendered(FULL)
    spec, settings = one(objects, "StatefulSet", "run-coordinator")["spec"], settings_of(objects)
    names = [f"run-coordinator-{number}.{spec['serviceName']}:7070" for number in range(spec["replicas"])]
    assert settings["cluster"]["coordinator"].split(",") == names
    assert len(names) == 3
    assert settings["coordinator"]["state"] == "etcd://etcd-0.etcd:2379,etcd-1.etcd:2379/smb"
    assert "volumeClaimTemplates" not in spec
    pod = spec["template"]["spec"]
    assert pod["topologySpreadConstraints"][0]["whenUnsatisfiable"] == "DoNotSchedule"
    assert {"name": "etcd", "mountPath": settings["coordinator"]["etcd_credentials"], "readOnly": True} in pod[
        "containers"
    ][0]["volumeMounts"]
    egress = one(objects, "NetworkPolicy", "run-coordinator")["spec"]["egress"]
    assert {"ports": [{"port": 2379}]} in egress


@pytest.mark.parametrize("capacity", [1, 4, 64, 1000])
def test_limits_follow_from_the_capacity(capacity: int) -> None:
    """Capacity, volume and the container's memory each have room above the one before, from one value; and not much."""
    objects = rendered(SMALL | {"memserver": {"capacityGiB": capacity}})
    pod = pod_of(objects, "run-memserver")
    (volume,) = (each["emptyDir"] for each in pod["volumes"] if each["name"] == "memory")
    resources = pod["containers"][0]["resources"]
    lent = parse_bytes(settings_of(objects)["memserver"]["capacity"])
    limit, memory = parse_bytes(volume["sizeLimit"] + "B"), parse_bytes(resources["limits"]["memory"] + "B")
    assert lent == capacity << 30
    assert lent + (512 << 20) <= limit
    assert limit + (512 << 20) <= memory <= 1.1 * lent + (1 << 30)
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert one(objects, "StatefulSet", "run-memserver")["spec"]["updateStrategy"]["type"] == "OnDelete"
    assert one(objects, "PodDisruptionBudget", "run-memserver")["spec"]["maxUnavailable"] == 0


def test_certificates_say_what_the_daemons_ask_for() -> None:
    """Roles, names and alternative names are those that the library reads; each pod finds its own files; what a client
    may is as told.
    """
    objects = rendered(FULL)
    certificates = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Certificate"}
    said = {name: (each["uris"], each.get("dnsNames", [])) for name, each in certificates.items()}
    servers = [f"run-memserver-{number}" for number in range(3)]
    assert said == {
        "run-coordinator-tls": ([ROLE_URI + Role.COORDINATOR.value], [COORDINATOR_NAME]),
        "run-client-trainer": (
            [ROLE_URI + Role.CLIENT.value, f"{NAME_URI}trainer", f"{NAMESPACE_URI}vision"],
            [],
        ),
        **{f"{name}-tls": ([ROLE_URI + Role.SERVER.value, NAME_URI + name], [server_name(name)]) for name in servers},
    }
    (credentials,) = (each for each in pod_of(objects, "run-memserver")["volumes"] if each["name"] == "credentials")
    files = {item["path"] for source in credentials["projected"]["sources"] for item in source["secret"]["items"]}
    assert files == {"metrics-token", "ca.pem"} | {f"{name}.{kind}.pem" for name in servers for kind in ("cert", "key")}
    (credentials,) = (each for each in pod_of(objects, "run-coordinator")["volumes"] if each["name"] == "credentials")
    files = {item["path"] for source in credentials["projected"]["sources"] for item in source["secret"]["items"]}
    assert files == {"metrics-token", "ca.pem", "cert.pem", "key.pem"}


def test_a_drain_before_the_stop_has_time() -> None:
    """With an operator's secret the hook is that of the manifests, with an hour; a command of one's own and other
    seconds are taken, too; probes that restart a container give it half a minute; without either there is no hook."""
    (by_hand,) = (
        each["spec"]["template"]["spec"]
        for each in test_manifests.with_drain()
        if each["kind"] == "StatefulSet" and "memserver" in each["metadata"]["name"]
    )
    plain: dict[str, Any] = {"replicas": 3, "capacityGiB": 64, "preStop": []}
    for more, grace_s, command in (
        (
            {"drainSecret": "run-client-admin"},
            3600,
            by_hand["containers"][0]["lifecycle"]["preStop"]["exec"]["command"],
        ),
        ({"preStop": ["true"]}, 3600, ["true"]),
        ({"preStop": ["true"], "gracePeriodSeconds": 60}, 60, ["true"]),
        ({}, 30, None),
    ):
        spec = pod_of(rendered(FULL | {"memserver": plain | more}), "run-memserver")
        (container,) = spec["containers"]
        assert spec["terminationGracePeriodSeconds"] == grace_s
        assert container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command") == command
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe].get("terminationGracePeriodSeconds") == (30 if command else None)
    objects = rendered(FULL | {"memserver": plain | {"drainSecret": "run-client-admin"}})
    kubernetes_validate.validate(one(objects, "StatefulSet", "run-memserver"), API, strict=True)
    (volume,) = (each for each in pod_of(objects, "run-memserver")["volumes"] if each["name"] == "operator")
    assert volume["secret"]["secretName"] == "run-client-admin"
    assert {item["path"] for item in volume["secret"]["items"]} == {"ca.pem", "cert.pem", "key.pem"}


def test_secrets_for_images_and_annotations_are_values() -> None:
    """Each reaches both kinds of pods or services, and only those."""
    more = {"podAnnotations": {"team": "x"}, "serviceAnnotations": {"dns": "y"}}
    objects = rendered(FULL | {"image": {"pullSecrets": ["registry"]}, "memserver": more, "coordinator": more})
    for name in ("run-coordinator", "run-memserver"):
        assert pod_of(objects, name)["imagePullSecrets"] == [{"name": "registry"}]
        assert one(objects, "StatefulSet", name)["spec"]["template"]["metadata"]["annotations"]["team"] == "x"
        assert one(objects, "Service", name)["metadata"]["annotations"] == {"dns": "y"}
        kubernetes_validate.validate(one(objects, "StatefulSet", name), API, strict=True)
        assert "imagePullSecrets" not in pod_of(rendered(FULL), name)


@pytest.mark.parametrize("name", ["coordinator", "memserver"])
def test_the_chart_agrees_with_the_manifests(name: str) -> None:
    """With the state on a disk both make the same pods and budgets, but for names, sizes and what is a value."""
    objects, prefix = rendered(SMALL), {"run": "run-", "smb": "smb-"}
    ours, theirs = (
        one(each, "StatefulSet", f"{prefix[of]}{name}")["spec"]
        for of, each in (("run", objects), ("smb", list(test_manifests.built("base"))))
    )
    for key in ("minReadySeconds", "updateStrategy"):
        assert ours.get(key) == theirs.get(key)
    pods = [each["template"]["spec"] for each in (ours, theirs)]
    for key in (
        "securityContext",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "terminationGracePeriodSeconds",
    ):
        assert pods[0][key] == pods[1][key], key
    containers = [each["containers"][0] for each in pods]
    for key in ("command", "ports", "startupProbe", "livenessProbe", "readinessProbe", "securityContext"):
        assert containers[0][key] == containers[1][key], key
    mounts = [{each["name"]: each["mountPath"] for each in container["volumeMounts"]} for container in containers]
    assert mounts[0] == mounts[1]
    environments = [{each["name"]: each for each in container["env"]} for container in containers]
    # The chart's coordinators listen at their pod's address, because there may be several.
    listens = {f"SMB_COORDINATOR_{each}" for each in ("LISTEN", "SERVERS", "SESSIONS")}
    own = {"POD_IP", *listens} if name == "coordinator" else set()
    assert {key: value for key, value in environments[0].items() if key not in own} == environments[1]
    if name == "memserver":
        keys = [[each["topologyKey"] for each in pod["topologySpreadConstraints"]] for pod in pods]
        assert keys[0] == keys[1]
    budgets = [
        one(each, "PodDisruptionBudget", f"{prefix[of]}{name}")["spec"]["maxUnavailable"]
        for of, each in (("run", objects), ("smb", list(test_manifests.built("base"))))
    ]
    assert budgets[0] == budgets[1]


def test_rules_are_those_of_prometheus() -> None:
    """Braces of theirs are not Helm's. The page that alerts link to, and the cluster's name, are values."""
    deploy = CHART.parent
    written = [yaml.safe_load((deploy / "prometheus" / name).read_text()) for name in ("rules.yml", "alerts.yml")]
    objects = rendered(FULL)
    assert one(objects, "PrometheusRule", "run")["spec"]["groups"] == [
        group for each in written for group in each["groups"]
    ]
    named = rendered(
        FULL | {"metrics": {"operator": True, "cluster": "east", "runbooks": "https://x.example/repair.html"}}
    )
    (rules,) = (each["spec"]["groups"] for each in named if each["kind"] == "PrometheusRule")
    links = [rule["annotations"]["runbook_url"] for rule in rules[1]["rules"]]
    assert links == [f"https://x.example/repair.html#{rule['alert'].lower()}" for rule in rules[1]["rules"]]
    (end,) = one(named, "ServiceMonitor", "run")["spec"]["endpoints"]
    assert {"targetLabel": "smb_cluster", "replacement": "east"} in end["relabelings"]
    monitoring = {each["kind"] for each in rendered(SMALL)} & OF_OPERATORS
    assert monitoring == set()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"certificates": {"issuer": "smb-ca"}}, "etcd.endpoints"),
        ({"etcd": ETCD}, "certificates"),
        ({"etcd": ETCD | {"endpoints": ["https://etcd"]}}, "pattern"),
        (SMALL | {"coordinator": {"state": "disk", "replicas": 2}}, "coordinator.replicas"),
        (SMALL | {"memserver": {"capacityGiB": "4Gi"}}, "capacityGiB"),
    ],
)
def test_what_can_not_be_right_is_refused(values: dict[str, Any], told: str) -> None:
    """It says which value."""
    with pytest.raises(Exception, match=told):
        rendered(values)


def test_helm_finds_nothing_to_say_of_it() -> None:
    """But that it has no icon; and every value is explained."""
    found = helm.lint(CHART, FULL)
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]
    lines = (CHART / "values.yaml").read_text().splitlines()
    plain = {"pullPolicy", "nodeSelector", "tolerations", "cpu", "memory", "issuerKind", "duration", "enabled"}
    for before, line in itertools.pairwise(lines):
        key, _, value = line.strip().partition(":")
        if value and not line.strip().startswith("#") and key not in plain:
            assert before.strip().startswith("# --"), f"values.yaml does not say what {key} is"
