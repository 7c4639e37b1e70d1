"""How many calls of an exchange wait for each other: those that `smb plan` counts on are those that a server counts."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.tools.plan.model import SCHEMES

STEPS = 10


@pytest.fixture(scope="module")
def client() -> Iterator[smb.Client]:
    with (
        smb.LocalCluster(servers=1, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport="tcp") as client,
    ):
        yield client


def operations(client: smb.Client) -> float:
    """All that the server has done for anybody."""
    (server,) = client.servers()
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        text = page.read().decode()
    return sum(float(value) for value in re.findall(r"^smb_server_operations_total\{.*\} (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        *((name, {} if smb.train.SCHEMES[name].TRAITS.each_step else {"every": 1}) for name in SCHEMES),
        ("diloco", {"every": 1, "step_wire": "int8"}),
    ],
    ids=[*SCHEMES, "step"],
)
def test_calls_of_an_exchange(client: smb.Client, scheme: str, settings: dict[str, Any]) -> None:
    """Of one worker alone. R2SP's turn goes in the background, at times of its own. Renewals of leases come in between,
    on a busy machine often: the least of three counts has the fewest.
    """
    values = np.zeros(1000, np.float32)
    name = f"calls-{scheme}-{len(settings)}"
    rule = smb.train.scheme_of(scheme, settings)
    with smb.train.join(client, name, values, rule) as worker:
        for _ in range(25):  # of R2SP's first rotations some are measured
            values += 1e-3
            worker.step(samples=1)
        worker.flush()
        found = []
        for _ in range(3):
            before = operations(client)
            for _ in range(STEPS):
                values += 1e-3
                worker.step(samples=1)
            worker.flush()
            found.append((operations(client) - before) / STEPS)
    assert min(found) == pytest.approx(rule.traits.calls, abs=1.0)
