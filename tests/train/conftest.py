"""Trainings leave locks by name behind where their members are killed: a cluster for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import smb


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    """Three memory servers of 64 MiB."""
    with smb.LocalCluster(servers=3, capacity="64MiB") as running:
        yield running
