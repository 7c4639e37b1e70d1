"""A daemon that holds keys leaves none in a core dump."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import smb
from tests.support.other_users import AS_ROOT, DAEMON, output_as

LIMITS = re.compile(r"^Max core file size +(\S+) +(\S+)", re.MULTILINE)
KEEP = """
import ctypes, os, resource
from smb.daemon.process import keep_secrets
{become}
resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
keep_secrets()
get_dumpable = 3
print(ctypes.CDLL(None).prctl(get_dumpable, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE))
# What a daemon reads of itself it still can.
print(os.stat("/proc/self/ns/pid").st_ino > 0, os.listdir("/proc/self/fd") > [], bool(open("/proc/self/cgroup").read()))
"""


def test_there_is_none() -> None:
    """Whatever collects them: the limit is for files, the other for programs."""
    told = subprocess.run([sys.executable, "-c", KEEP.format(become="")], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["0 (0, 0)", "True True True"]


@AS_ROOT
def test_a_user_without_rights_still_reads_what_is_its_own() -> None:
    """As a service's user: files in /proc are root's then."""
    assert output_as(DAEMON, KEEP.format(become="become()")).splitlines() == ["0 (0, 0)", "True True True"]


@pytest.mark.parametrize("secured", [True, False])
def test_daemons_with_credentials(secured: bool, certificates: Path) -> None:
    """A coordinator and a memory server; without keys they dump as they are told to."""
    with smb.LocalCluster(servers=1, capacity="8MiB", credentials=certificates if secured else None) as cluster:
        pids = [cluster.coordinator.pid, *(server.pid for server in cluster.servers)]
        found = [LIMITS.search(Path(f"/proc/{pid}/limits").read_text()) for pid in pids]
    own = LIMITS.search(Path("/proc/self/limits").read_text())
    assert own is not None
    for limits in found:
        assert limits is not None
        assert limits.groups() == (("0", "0") if secured else own.groups())
