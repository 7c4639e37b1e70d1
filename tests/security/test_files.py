"""Files with credentials: what a certificate may not, its mount may not either, and says so by the right errno."""

from __future__ import annotations

import ctypes.util
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.files import copying
from tests.support.daemons import wait_for

ConnectAs = Callable[..., smb.Client]
needs_fuse = pytest.mark.skipif(
    not (
        os.access("/dev/fuse", os.R_OK | os.W_OK) and ctypes.util.find_library("fuse3") and shutil.which("fusermount3")
    ),
    reason="this machine has no FUSE: nothing is mounted here",
)
NOBODY = 65534


@contextmanager
def mounted(cluster: smb.LocalCluster, credentials: Path, *options: str) -> Iterator[Path]:
    """A mount with these credentials, in a directory that all users of the host reach."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        files = Path(place) / "files"
        files.mkdir()
        command = [
            sys.executable,
            "-m",
            "smb.tools.cli.main",
            "mount",
            str(files),
            "-f",
            "-c",
            cluster.address,
            *options,
        ]
        process = subprocess.Popen(command, env=os.environ | {"SMB_CREDENTIALS": str(credentials)})
        try:
            wait_for(lambda: files.is_mount() or process.poll() is not None, f"mount at {files}")
            assert process.poll() is None
            yield files
        finally:
            subprocess.run(["fusermount3", "-u", "-z", files], check=False)
            assert process.wait(20) == 0


def refused(call: Callable[[], object]) -> int | None:
    """Return the errno."""
    with pytest.raises(OSError) as error:  # noqa: PT011 - its number is what this is about
        call()
    return error.value.errno


@needs_fuse
def test_a_readers_mount_only_reads(guarded: smb.LocalCluster, certificates: Path, connect_as: ConnectAs) -> None:
    """With a reader's certificate all files are read, a published version too; each change is EACCES and changes
    nothing, also what somebody who was killed left is left to others."""
    client = connect_as("client")
    values = np.arange(5000, dtype=np.float32)
    client.create("run/w", 5000).write(values)
    versions = client.create("versions", 10, versions=2)
    versions.publish(np.ones(10, np.float32))
    client.create(".smb-files/x", 10)
    with mounted(guarded, certificates / "reader") as files:
        assert np.array_equal(np.load(files / "run/w.npy"), values)
        assert (files / "versions").read_bytes() == np.ones(10, np.float32).tobytes()
        for change in (
            lambda: (files / "run/w").write_bytes(bytes(20_000)),
            lambda: (files / "run/w").write_bytes(b"short"),
            lambda: (files / "new").write_bytes(b"x"),
            lambda: (files / "run/w").unlink(),
            lambda: (files / "run/w").rename(files / "v"),
            lambda: os.truncate(files / "run/w", 3),
        ):
            assert refused(change) == errno.EACCES
        with (files / "run/w").open("r+b", buffering=0) as file:
            assert refused(lambda: file.write(b"x")) == errno.EACCES
        assert sorted(path.name for path in files.iterdir()) == ["run", "versions.npy"]
    assert np.array_equal(client.open("run/w").read(), values)
    assert [info.name for info in client.list()] == [".smb-files/x", "run/w", "versions"]


@needs_fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_another_user_of_the_host(guarded: smb.LocalCluster, certificates: Path, connect_as: ConnectAs) -> None:
    """With --allow-other another user has the mount's credentials, and the rights of files; without it nothing."""
    client = connect_as("client")
    client.create("w", 3, "uint8").write(np.frombuffer(b"abc", np.uint8))

    def as_nobody(command: str) -> subprocess.CompletedProcess[str]:
        words = ["sh", "-c", command]
        return subprocess.run(
            words, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, check=False
        )

    with mounted(guarded, certificates / "client", "--allow-other") as files:
        assert as_nobody(f"cat {files}/w").stdout == "abc"
        assert "Permission denied" in as_nobody(f"echo x > {files}/w").stderr, "the mounting user's file, 0644"
    with mounted(guarded, certificates / "client", "--allow-other", "--umask", "000") as files:
        assert as_nobody(f"printf xyz > {files}/w").returncode == 0
        assert client.open("w").read().tobytes() == b"xyz"
    with mounted(guarded, certificates / "client") as files:
        assert "Permission denied" in as_nobody(f"cat {files}/w").stderr


def test_a_namespace_has_its_files(connect_as: ConnectAs, tmp_path: Path) -> None:
    """A client that is limited to a namespace makes, replaces, copies and restores files there, EACCES outside; what is
    on its way is not seen in the folder."""
    client = connect_as("of-team")
    for data in (b"one", b"another"):
        with smb.open_file("team/w", "wb", client=client) as file:
            file.write(data)
    copying.snapshot(client, "team/w", tmp_path / "w")
    copying.restore(client, tmp_path / "w", "team/v")
    copying.copy_buffer(client, "team/v", client, "team/u")
    assert [info.name for info in client.list()] == ["team/u", "team/v", "team/w"]
    assert client.open("team/u").read().tobytes() == b"another"

    def outside() -> None:
        with smb.open_file("other/w", "wb", client=client) as file:
            file.write(b"x")

    assert refused(outside) == errno.EACCES
