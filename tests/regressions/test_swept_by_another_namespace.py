"""A cluster that began in another PID namespace took a running one for dead, as it could not see its process, and
deleted its memory: two containers with one /dev/shm, and one host's name, are enough. A mount and a night's cleaning
judged by a bare number, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smb.config.boot import boot_id
from smb.files import temporary_names
from smb.files.temporary_names import left_by_dead, private_name
from tests.support.trees import ROOT

# Everything happens in a mount namespace with a /dev/shm of its own: no other cluster of this machine is touched.
_PRIVATE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"', "sh"]
_INSIDE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

_FIRST = """
import os, subprocess, sys, numpy, smb
with smb.LocalCluster(servers=1, capacity="16MiB") as cluster, smb.connect(cluster.address, timeout=60) as client:
    weights = client.create("weights", 1000)
    weights.write(numpy.ones(1000, numpy.float32))
    mine = [cluster.memory_directory, cluster.state_directory.parent]
    subprocess.run([*sys.argv[2:], sys.executable, "-c", sys.argv[1], str(os.getpid())], check=True, timeout=60)
    assert all(directory.exists() for directory in mine), mine
    cluster.servers[0].kill()
    cluster.servers[0].start()
    print(weights.read().sum())
"""
_SECOND = """
import pathlib, sys, smb
from tests.support.leftovers import SHARED_MEMORY, Watch
with smb.LocalCluster(servers=1, capacity="16MiB"):
    pass
# A night's form had a process of the number that the first cluster has in its name.
watch = Watch(pathlib.Path("/nowhere"))
watch.pids.add(int(sys.argv[1]))
watch.before[SHARED_MEMORY] = set()
assert watch.clean()[0] == []
"""


def _may_be_made() -> bool:
    words = [*_PRIVATE, *_INSIDE, "true"]
    return shutil.which("unshare") is not None and subprocess.run(words, capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_be_made(), reason="it takes the right to make namespaces and to mount")
def test_a_running_cluster_keeps_its_memory(tmp_path: Path) -> None:
    """A cluster begins and ends in another PID namespace, with the same /dev/shm and temporary directory: the first
    one's server is killed, started again, and has its data."""
    environment = {name: value for name, value in os.environ.items() if name != "SMB_OWNER_PID"}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*_PRIVATE, sys.executable, "-c", _FIRST, _SECOND, *_INSIDE],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1000.0\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_on_its_way_is_of_a_boot_and_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of one name, or two containers, have one number for a process: a mount leaves the other's files."""
    with subprocess.Popen(["true"]) as process:
        pass
    name = private_name("team/w")
    dead = name.replace(f"-{os.getpid()}-", f"-{process.pid}-")
    assert dead != name
    assert not left_by_dead(name)
    assert left_by_dead(dead)
    assert not left_by_dead(dead.rpartition("/")[2])
    assert not left_by_dead(dead.replace(f"-{process.pid}-", "-99999999999999999999-"))
    for other in ("", boot_id()[::-1]):
        with monkeypatch.context() as patched:
            patched.setattr(temporary_names, "boot_id", lambda other=other: other)
            assert not left_by_dead(dead)


def test_an_environment_that_is_being_installed_stays(tmp_path: Path) -> None:
    """Another make, in another container say, finds the mark of an installation: it is cut short only if nobody holds
    its lock."""
    words = ["make", "--dry-run", f"VENV={tmp_path}", "clean"]
    for name in ("made", "unfinished"):
        (tmp_path / name).touch()
    lock = subprocess.Popen(
        ["flock", str(tmp_path / "installing"), "sh", "-c", "echo; read -r _"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with lock:
        assert lock.stdout is not None
        lock.stdout.readline()
        subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
        assert (tmp_path / "made").exists()
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    assert not (tmp_path / "made").exists()
