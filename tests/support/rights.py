"""Rights of this process, as seen by trying: root in a container often may neither mount nor cut a network."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile


@functools.cache
def may_mount() -> bool:
    """Whether a small disk can be mounted."""
    with tempfile.TemporaryDirectory(prefix="smb-rights-") as place:
        done = _does("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place)
        return done and _does("umount", "--lazy", place)


@functools.cache
def may_filter() -> bool:
    """Whether nftables can be asked, and so changed."""
    return _does("nft", "list", "tables")


def _does(*command: str) -> bool:
    return shutil.which(command[0]) is not None and not subprocess.run(command, capture_output=True).returncode
