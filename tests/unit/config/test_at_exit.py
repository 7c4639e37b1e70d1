from __future__ import annotations

import subprocess
import sys

ENDS = """
from smb.config.at_exit import AtExit, at_exit

@at_exit(AtExit.CLUSTERS)
def clusters():
    print("clusters")

@at_exit(AtExit.TRAININGS)
def trainings():
    print("trainings")
    raise ValueError("cannot leave")

@at_exit(AtExit.SESSIONS)
def sessions():
    print("sessions")
    raise OSError("cannot close")
"""


def test_what_fails_at_exit_keeps_nothing_else_from_its_end() -> None:
    """Trainings, sessions and clusters are ended in this order, whatever one of them raises; Python prints it."""
    found = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["trainings", "sessions", "clusters"]
    assert "cannot leave" in found.stderr
    assert "cannot close" in found.stderr
