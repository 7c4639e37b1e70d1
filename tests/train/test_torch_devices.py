"""smb.torch.join on a device, without one: tests/support/fake_device.py, which changes PyTorch for a whole process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parents[1] / "support/device_cases.py"


def test_on_a_device_whose_copies_come_late() -> None:
    """All of device_cases.py, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", str(CASES)]
    done = subprocess.run(command, cwd=CASES.parents[2], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
