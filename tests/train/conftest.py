"""Trainings leave locks by name behind where their members are killed: a cluster for each file."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

import smb
from tests.support.meshes import PRELOADED


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    """Three memory servers of 64 MiB."""
    with smb.LocalCluster(servers=3, capacity="64MiB") as running:
        yield running


@pytest.fixture(scope="module")
def context() -> Any:
    """Processes that find PyTorch there: ranks of meshes."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*PRELOADED, "torch.distributed.tensor.parallel"])
    return found
