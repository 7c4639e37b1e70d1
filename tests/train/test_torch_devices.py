"""smb.torch.join on a device, without one: tests/support/fake_device.py, which changes PyTorch for a whole process."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import smb
from tests.support import forks

CASES = Path(__file__).parents[1] / "support/device_cases.py"
LIMIT_S = 110


def test_on_a_device_whose_copies_come_late(context: Any, cluster: smb.LocalCluster) -> None:
    """All of device_cases.py, in a process of its own, by this file's cluster."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", str(CASES)]
    command += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # what the fork has already
    with Path("/dev/null").open() as nothing, tempfile.TemporaryFile() as told:
        streams = [nothing.fileno(), told.fileno(), told.fileno()]
        program = forks.launch(context, command, streams, os.environ | {"SMB_TEST_CLUSTER": cluster.address})
        try:
            code = program.wait(LIMIT_S)
        finally:
            program.kill()
            program.wait()
            told.seek(0)
            print(told.read().decode()[-8000:])
    assert code == 0
