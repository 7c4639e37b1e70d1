"""A process of another user, and a directory in which everybody may write. Only root can have either."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DAEMON, STRANGER = 65_531, 65_533  # users of nobody's
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes processes and files of other users")
# Modules are imported first: the other user may not be able to read them.
_BECOME = """
import os, sys
user = int(sys.argv[1])
def become():
    os.setgroups([]); os.setgid(user); os.setuid(user)
"""


@contextmanager
def sticky() -> Iterator[Path]:
    """A directory as /dev/shm is, on tmpfs."""
    place = Path(tempfile.mkdtemp(prefix="smb-test-", dir="/dev/shm"))
    place.chmod(0o1777)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def start_as(user: int, code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start Python on `code`, which calls `become()` when it has imported all; sys.argv[2:] are the arguments."""
    command = [sys.executable, "-c", _BECOME + code, str(user), *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def output_as(user: int, code: str, *arguments: object) -> str:
    """Return all that it prints. It must end well, within a minute."""
    with start_as(user, code, *arguments) as process:
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, told
    return told
