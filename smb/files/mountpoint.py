"""The directory of a mount, before and after: what a killed mount has left is taken away, a live one is ended."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import time
from pathlib import Path

from smb.errors import Error

_BUSY_S = 5.0
_log = logging.getLogger("smb.mount")


def make_way(directory: Path) -> None:
    """Prepare a mount point: a mount whose process was killed is taken away. Raises Error if it is none."""
    try:
        inside = [*directory.iterdir()]
    except FileNotFoundError:
        raise Error(f"there is no directory {directory}; make it first") from None
    except NotADirectoryError:
        raise Error(f"{directory} is no directory") from None
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise Error(f"{directory}: {error.strerror}") from None
        _log.warning("%s was left by a mount whose process is gone; unmounting it", directory)
        unmount(directory, lazy=True)
        inside = [*directory.iterdir()]
    if os.path.ismount(directory) and _is_ours(directory):
        raise Error(f"{directory} is mounted already; smb umount {directory} takes it away")
    if inside:
        raise Error(f"{directory} is not empty; mount on an empty directory")


def unmount(directory: Path, *, lazy: bool = False) -> None:
    """Unmount. `lazy` also if somebody uses it. Raises Error with what fusermount3 says."""
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(directory)]
    end = time.monotonic() + _BUSY_S
    while True:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
        except FileNotFoundError:
            raise Error("there is no fusermount3 here; install it (Debian: apt-get install fuse3)") from None
        if done.returncode == 0:
            return
        if not _is_ours(directory):
            raise Error(f"no cluster is mounted at {directory}")
        # A file that was just closed is released a moment later.
        busy = "busy" in done.stderr
        if not busy or time.monotonic() > end:
            hint = "; --lazy does it also while it is in use" if busy else ""
            raise Error(f"{directory} can't be unmounted: {done.stderr.strip()}{hint}")
        time.sleep(0.05)


def _is_ours(directory: Path) -> bool:
    real = str(directory.resolve())
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return any(_unescaped(line.split()[1]) == real and line.split()[2] == "fuse.smb" for line in mounts)


def _unescaped(word: str) -> str:
    """Return a path of /proc/self/mounts as it is: the kernel writes a space as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)
