"""The Spin models in their quick bounds: clean, and the planted faults found. `make model` runs the full ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("spin") is None, reason="not run: the models need Debian's package spin (make model)")
def test_models_are_clean_and_find_what_is_planted() -> None:
    """Exactly-once, locks, barriers, mirrors, logs of deltas, two copies and moves of one."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_models.py")), "--quick"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all planted faults found" in run.stdout
