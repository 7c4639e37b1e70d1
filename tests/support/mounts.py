"""smb mount in a test: a real mount by a process of its own, where this machine has FUSE."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.support import stem
from tests.support.commands import COMMAND
from tests.support.daemons import wait_for
from tests.support.rights import may_mount

Mount = subprocess.Popen[bytes] | stem.Forked  # the process of one

_MISSING = [
    what
    for what, there in (
        ("/dev/fuse", os.access("/dev/fuse", os.R_OK | os.W_OK)),
        ("libfuse3", ctypes.util.find_library("fuse3") is not None),
        ("fusermount3", shutil.which("fusermount3") is not None),
        ("right to mount", os.geteuid() != 0 or may_mount()),  # for others fusermount3 has it
    )
    if not there
]


def missing_for_mounts() -> list[str]:
    """The missing tool of this machine."""
    return _MISSING


needs_fuse = pytest.mark.skipif(
    bool(_MISSING), reason=f"this machine has no {', '.join(_MISSING)}: nothing is mounted here"
)


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def shown(path: Path) -> Path:
    """Another client's new files show within a second."""
    wait_for(path.exists, f"{path} in the mount")
    return path


@contextlib.contextmanager
def two_mounts(cluster: HasAddress, factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Two mounts of one cluster, which end with the block."""
    directories = [factory.mktemp("mount") / "files" for _ in range(2)]
    processes = [start_mount(cluster, directory) for directory in directories]
    yield directories
    for process, directory in zip(processes, directories, strict=True):
        unmount(directory)
        end_mount(process, directory)


def is_mounted(directory: Path) -> bool:
    return f" {directory} fuse.smb " in Path("/proc/self/mounts").read_text()


class HasAddress(Protocol):
    """A cluster."""

    @property
    def address(self) -> str: ...


def start_mount(cluster: HasAddress, directory: Path, *options: str, **variables: str) -> Mount:
    """Mount in a foreground process, whose errors go into DIR.log."""
    directory.mkdir()
    command = [*COMMAND, "mount", str(directory), "--foreground", "-c", cluster.address, *options]
    with directory.with_suffix(".log").open("wb") as log:
        process = stem.launch(command, os.environ | variables, log, new_session=False)
    try:
        wait_for(lambda: is_mounted(directory) or process.poll() is not None, f"mount at {directory}")
        assert process.poll() is None, directory.with_suffix(".log").read_text()
    except BaseException:
        process.kill()
        process.wait()
        run("fusermount3", "-u", "-z", directory)
        raise
    return process


def unmount(directory: Path) -> None:
    """Once nobody has a file open there: detached earlier (-z) it would go on until then, and nobody would say why."""
    tried: list[subprocess.CompletedProcess[str]] = []

    def is_done() -> bool:
        tried.append(run("fusermount3", "-u", directory))
        return tried[-1].returncode == 0

    try:
        wait_for(is_done, f"end of the mount at {directory}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {tried[-1].stderr}; open: {_open_below(directory)}") from None


def _open_below(directory: Path) -> list[str]:
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(directory):
                found.append(f"{link} -> {link.readlink()}")
    return found


def end_mount(process: Mount, directory: Path) -> None:
    """Wait for the process of a mount that was unmounted. It may have to wait for a processor, and for a server."""
    try:
        assert process.wait(60) == 0, directory.with_suffix(".log").read_text()
    except subprocess.TimeoutExpired as error:
        stacks = "".join(path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/wchan"))
        process.kill()
        process.wait()
        raise AssertionError(f"{error}; it waits in {stacks}; {directory.with_suffix('.log').read_text()}") from None
