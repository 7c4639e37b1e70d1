"""A mount with several coordinators could not be made: libfuse was told their addresses, and took what is behind a
comma for an option."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import smb
from tests.support.mounts import end_mount, needs_fuse, start_mount, unmount


@dataclass(frozen=True)
class Several:
    """A coordinator, and one that is not there."""

    address: str


@needs_fuse
def test_a_mount_has_several_coordinators(cluster: smb.LocalCluster, tmp_path: Path) -> None:
    """It is made, works, and names them all."""
    several, files = Several(f"{cluster.address},127.0.0.1:1"), tmp_path / "files"
    process = start_mount(several, files)
    (files / "a").write_bytes(b"words")
    assert (files / "a").read_bytes() == b"words"
    (line,) = (line for line in Path("/proc/mounts").read_text().splitlines() if f" {files} " in line)
    assert line.startswith(f"softmem:{several.address} {files} ")
    (files / "a").unlink()
    unmount(files)
    end_mount(process, files)
