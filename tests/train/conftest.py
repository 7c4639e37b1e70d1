"""Trainings leave locks by name behind where their members are killed: a cluster for each file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import smb
from tests.conftest import Connect
from tests.fault.long import LONG
from tests.support.forks import preload
from tests.support.transports import EACH_WAY, way_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    """Three memory servers of 64 MiB."""
    with smb.LocalCluster(servers=3, capacity="64MiB") as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def context() -> Any:
    """Processes that find PyTorch there: ranks of meshes, and what tests.support.clients starts."""
    return preload()


@pytest.fixture(params=EACH_WAY if LONG else None)
def way(request: pytest.FixtureRequest) -> str:
    """One transport, since trainings know none; tests for which there is a difference name theirs."""
    return getattr(request, "param", None) or way_of(request.node.nodeid)


@pytest.fixture
def client(way: str, connect: Connect) -> smb.Client:
    """A client over that transport."""
    return connect(way)
