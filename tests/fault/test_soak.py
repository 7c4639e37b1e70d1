"""A short soak (tests/soak): everything at once on one cluster, under faults from one seed. For hours: make soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.long import seed, times
from tests.soak.soak import soak

SECONDS = times(45, 180)


@pytest.mark.timeout(600)
def test_a_short_soak(tmp_path: Path) -> None:
    """Sums, histories, versions, copies, files and models are what they must be; nothing is lost hold of."""
    soak(tmp_path, SECONDS, seed())
