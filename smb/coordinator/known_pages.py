"""Where the cluster's daemons serve their pages, as a coordinator knows it, and as Prometheus asks for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from smb.coordinator.state import State

Servers = Mapping[str, str]  # the address of each memory server's pages, by the server's name


@dataclass(slots=True)
class KnownPages:
    """What a coordinator with its records in etcd has read there. The loop's thread replaces a whole value, the pages'
    threads read it once."""

    coordinators: Mapping[str, str] = field(default_factory=dict)  # the address of each one's pages, by its address
    servers: Servers | None = None  # None: not read yet


def pages_of(state: State) -> Servers:
    """Return the pages of all memory servers that the records name and that serve pages."""
    return {name: server.metrics_address for name, server in state.servers.items() if server.metrics_address}


def targets(own: str, known: KnownPages, servers: Servers) -> bytes:
    """Return Prometheus's targets, as its HTTP and file service discovery take them: the coordinator with its pages at
    `own`, the other coordinators, and the memory servers. Dead daemons stay in the list, so that an alert can fire
    when they do not answer.
    """
    coordinators = sorted({own, *known.coordinators.values()})
    found = [{"targets": [pages], "labels": {"smb_role": "coordinator"}} for pages in coordinators]
    found += [
        {"targets": [pages], "labels": {"smb_role": "server", "server": name}}
        for name, pages in sorted(servers.items())
    ]
    return json.dumps(found, indent=1).encode() + b"\n"
