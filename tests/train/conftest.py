"""Trainings leave locks by name behind where their members are killed: a cluster for each file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import smb
from tests.support.forks import forks_of
from tests.support.meshes import PRELOADED


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    """Three memory servers of 64 MiB."""
    with smb.LocalCluster(servers=3, capacity="64MiB") as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def context() -> Any:
    """Processes that find PyTorch there: ranks of meshes, and what tests.support.clients starts."""
    return forks_of([*PRELOADED, "torch.distributed.tensor.parallel"])
