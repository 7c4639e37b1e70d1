"""The directory of a mount, before and after: removes what a killed mount has left, and ends a live mount."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import time
from pathlib import Path

from smb.config.backoff import Backoff
from smb.errors import Error

_BUSY_S = 5.0
_AGAIN_FIRST_S, _AGAIN_MAX_S = 0.05, 0.2
_log = logging.getLogger("smb.mount")


def make_way(directory: Path) -> None:
    """Prepare a mount point: unmount a mount whose process was killed. Raises Error if the directory is not usable."""
    try:
        inside = [*directory.iterdir()]
    except FileNotFoundError:
        raise Error(f"directory {directory} does not exist; create it first") from None
    except NotADirectoryError:
        raise Error(f"{directory} is not a directory") from None
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise Error(f"{directory}: {error.strerror}") from None
        _log.warning("%s was left by a mount whose process is gone; unmounting it", directory)
        unmount(directory, lazy=True)
        inside = [*directory.iterdir()]
    if os.path.ismount(directory) and _is_ours(directory):
        raise Error(f"a cluster is already mounted on {directory}; unmount it with smb umount {directory}")
    if inside:
        raise Error(f"{directory} is not empty; mount on an empty directory")


def unmount(directory: Path, *, lazy: bool = False) -> None:
    """Unmount; with `lazy`, even if it is in use. Raises Error with fusermount3's message."""
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(directory)]
    end = time.monotonic() + _BUSY_S
    backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S, lambda: end - time.monotonic())
    while True:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
        except FileNotFoundError:
            raise Error("fusermount3 is not installed; install it (Debian: apt-get install fuse3)") from None
        if done.returncode == 0:
            return
        if not _is_ours(directory):
            raise Error(f"no cluster is mounted at {directory}")
        # A file that was just closed is released a moment later.
        busy = "busy" in done.stderr
        if not busy or time.monotonic() >= end:
            hint = "; --lazy unmounts it even while it is in use" if busy else ""
            raise Error(f"unmounting {directory} failed: {done.stderr.strip()}{hint}")
        time.sleep(backoff.next_s())


def _is_ours(directory: Path) -> bool:
    real = str(directory.resolve())
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return any(_unescaped(line.split()[1]) == real and line.split()[2] == "fuse.smb" for line in mounts)


def _unescaped(word: str) -> str:
    r"""Return a path of /proc/self/mounts unescaped: the kernel writes a space as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)
