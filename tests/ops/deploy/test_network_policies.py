"""The network policies of deploy/kubernetes and deploy/helm, evaluated for each connection that daemons make.

There is no cluster here. The evaluation follows the API's description of a NetworkPolicy, and what daemons connect to
is read from the sockets of real ones.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from tests.ops.deploy import test_helm as chart
from tests.ops.deploy import test_manifests as manifests
from tests.support.daemons import Daemon, keep_port, running_daemons, wait_for

Policy = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod, by its labels and its namespace's."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = "smb"

    @property
    def namespace_labels(self) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace}


End = Pod | ipaddress.IPv4Address


def selects(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    """Whether a selector matches; an empty one matches all."""
    assert selector is None or selector.keys() <= {"matchLabels"}
    return (selector or {}).get("matchLabels", {}).items() <= labels.items()


def is_peer(peer: dict[str, Any], end: End, namespace: str) -> bool:
    """Whether a peer of a policy in this namespace is that end."""
    if "ipBlock" in peer:
        assert peer["ipBlock"].keys() == {"cidr"}
        return isinstance(end, ipaddress.IPv4Address) and end in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if not isinstance(end, Pod) or not selects(peer.get("podSelector"), end.labels):
        return False
    if "namespaceSelector" in peer:
        return selects(peer["namespaceSelector"], end.namespace_labels)
    return end.namespace == namespace


def lets(policies: Sequence[Policy], direction: str, pod: End, other: End, port: int, protocol: str) -> bool:
    """Whether the policies of this pod allow the connection in this direction; without policies all is allowed."""
    if not isinstance(pod, Pod):
        return True
    found = [
        each
        for each in policies
        if each["metadata"].get("namespace", "smb") == pod.namespace
        and direction in each["spec"]["policyTypes"]
        and selects(each["spec"]["podSelector"], pod.labels)
    ]
    rules = [rule for each in found for rule in each["spec"].get(direction.lower(), ())]
    way = "from" if direction == "Ingress" else "to"
    return not found or any(
        (not rule.get(way) or any(is_peer(peer, other, pod.namespace) for peer in rule[way]))
        and (
            not rule.get("ports")
            or any(each["port"] == port and each.get("protocol", "TCP") == protocol for each in rule["ports"])
        )
        for rule in rules
    )


def is_open(policies: Sequence[Policy], source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    return lets(policies, "Egress", source, target, port, protocol) and lets(
        policies, "Ingress", target, source, port, protocol
    )


CLIENT = {"smb.access/client": "true"}
DNS = Pod({"k8s-app": "kube-dns"}, "kube-system")
NODE_DNS = ipaddress.IPv4Address("169.254.20.10")
ETCD = ipaddress.IPv4Address("10.9.8.7")
CLIENTS = (Pod(CLIENT), Pod(CLIENT, "research"))
STRANGERS = (Pod(), Pod({}, "research"), ipaddress.IPv4Address("10.1.2.3"))
PROMETHEUS = Pod({}, "monitoring")
PORTS = (7070, 7071, 7072, 7073, 7074, 9470, 9471)
# What daemons connect to, by their role: the role, and the name of the port there. As daemons do (the test below).
CONNECTIONS = {
    ("memserver", "coordinator", "control"),  # registers, and fills mirrors as a client
    ("memserver", "coordinator", "servers"),  # renews its lease
    ("memserver", "memserver", "data"),  # second copies, mirrors
    ("coordinator", "memserver", "control"),  # creates and drops segments, changes roles
}
NUMBERS = {
    ("coordinator", "control"): 7070,
    ("coordinator", "servers"): 7073,
    ("coordinator", "sessions"): 7074,
    ("coordinator", "metrics"): 9470,
    ("memserver", "data"): 7071,
    ("memserver", "control"): 7072,
    ("memserver", "metrics"): 9471,
}


def from_manifests() -> tuple[list[dict[str, Any]], str]:
    return list(manifests.built("base")), "smb-"


def from_chart() -> tuple[list[dict[str, Any]], str]:
    return chart.rendered(chart.FULL), "run-"


@pytest.mark.parametrize("objects", [from_manifests, from_chart], ids=["manifests", "chart"])
def test_policies_let_through_what_is_needed_and_nothing_else(objects: Any) -> None:
    """Every pair of pods and every port: what daemons, clients and scrapes need is open in both directions, and
    everything else is closed. In the manifests servers did not reach each other: buffers with two copies stayed
    degraded, and no daemon could say why.
    """
    found, prefix = objects()
    policies = [each for each in found if each["kind"] == "NetworkPolicy"]
    daemons = {
        role: Pod(chart.one(found, "StatefulSet", f"{prefix}{role}")["spec"]["template"]["metadata"]["labels"])
        for role in ("coordinator", "memserver")
    }
    for role in daemons:
        (container,) = chart.pod_of(found, f"{prefix}{role}")["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports == {name: number for (of, name), number in NUMBERS.items() if of == role}
    needed: set[tuple[int, int, int]] = set()
    ends: list[End] = [*daemons.values(), *CLIENTS, *STRANGERS, PROMETHEUS]
    places = dict(zip(daemons, range(2), strict=True))
    for source, target, name in CONNECTIONS:
        needed.add((places[source], places[target], NUMBERS[target, name]))
    # The test below has no credentials, and so no such port. Relays of mirrors are clients.
    needed.add((places["memserver"], places["coordinator"], 7074))
    for client in CLIENTS:
        needed.add((ends.index(client), places["coordinator"], 7070))
        needed.add((ends.index(client), places["coordinator"], 7074))
        needed.add((ends.index(client), places["memserver"], 7071))
    needed.add((ends.index(PROMETHEUS), places["coordinator"], 9470))
    needed.add((ends.index(PROMETHEUS), places["memserver"], 9471))
    opened = {
        (number, place, port)
        for number, source in enumerate(ends)
        for place in places.values()
        for port in PORTS
        if is_open(policies, source, ends[place], port)
    }
    assert opened == needed
    for daemon in daemons.values():
        for protocol in ("UDP", "TCP"):
            assert is_open(policies, daemon, DNS, 53, protocol)
            assert is_open(policies, daemon, NODE_DNS, 53, protocol)
        assert not is_open(policies, daemon, DNS, 9153)
        assert not is_open(policies, daemon, ipaddress.IPv4Address("1.1.1.1"), 443)
    etcd = [is_open(policies, daemons[role], ETCD, 2379) for role in ("coordinator", "memserver")]
    assert etcd == [objects is from_chart, False]


def test_one_release_does_not_reach_another() -> None:
    """A memory server of another release of the chart, in the same namespace, is a stranger."""
    policies = [each for each in chart.rendered(chart.FULL) if each["kind"] == "NetworkPolicy"]
    own = Pod(
        chart.one(chart.rendered(chart.FULL), "StatefulSet", "run-memserver")["spec"]["template"]["metadata"]["labels"]
    )
    other = Pod(own.labels | {"app.kubernetes.io/instance": "other"})
    assert is_open(policies, own, own, 7071)
    assert not is_open(policies, other, own, 7071)


def connected(daemon: Daemon) -> set[int]:
    """The ports that a daemon has TCP connections to."""
    own = set()
    for file in Path(f"/proc/{daemon.pid}/fd").iterdir():
        try:
            own |= set(re.findall(r"^socket:\[(\d+)\]$", str(file.readlink())))
        except OSError:  # closed meanwhile
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{daemon.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in own:
                found.add(int(fields[2].rpartition(":")[2], 16))
    return found


def test_daemons_connect_to_nothing_else(tmp_path: Path) -> None:
    """Real daemons, with a buffer of two copies of which one is lost and made anew, connect to each other as the
    policies are tested for, in each of these ways and in no other.
    """
    with running_daemons(tmp_path) as daemons, ExitStack() as kept:
        names: dict[int, tuple[str, str]] = {}

        def port(role: str, name: str) -> str:
            number = kept.enter_context(keep_port()).getsockname()[1]
            names[number] = (role, name)
            return f"127.0.0.1:{number}"

        options = ("--servers", port("coordinator", "servers"), "--metrics", port("coordinator", "metrics"))
        coordinator = daemons.coordinator(port("coordinator", "control"), None, *options)
        servers = [
            daemons.memory_server(
                coordinator.address,
                f"server-{number}",
                *("--listen", port("memserver", "data"), "--control", port("memserver", "control")),
                *("--metrics", port("memserver", "metrics")),
            )
            for number in range(3)
        ]
        assert all(server.address for server in servers)
        seen: set[tuple[str, str, str]] = set()

        def look() -> None:
            for role, running in (("coordinator", [coordinator]), ("memserver", servers)):
                for daemon in running:
                    seen.update((role, *names[number]) for number in connected(daemon) if number in names)

        with smb.connect(coordinator.address) as client:
            buffer = client.create("twice", (1_000_000,), replicas=2)

            def is_whole() -> bool:
                buffer.accumulate(np.ones(1_000_000, np.float32))
                look()
                return not client.list()[0].degraded

            wait_for(is_whole, "both copies")
            lost = servers.pop()
            lost.kill()
            # Then rather than of the copy: that may be made anew before anybody looks.
            wait_for(lambda: not all(server.alive for server in client.servers()), "the loss to be seen")
            wait_for(is_whole, "the copy that is made anew")
        assert seen == CONNECTIONS
