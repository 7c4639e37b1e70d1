"""Finds leftovers of a command: processes, network namespaces, mounts, shared memory.

Other programs of the machine make such things, too. A process is ours that descends from us (we adopt orphans, so that
none escapes by outliving its parent); a name is ours that such a process had open or mapped, or whose number is that
process's.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
NAMESPACES = Path("/run/netns")  # where `ip netns` keeps the names
MADE_BY_TESTS = ("smb-", "pytest-of-")  # how directories begin that tests make for their files
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From here on, a descendant of this process whose parent dies becomes its child."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(waited_for: int = 0) -> list[int]:
    """Return the living processes below this one. Orphans that are dead are reaped; `waited_for` is somebody else's."""
    children: dict[int, list[int]] = {}
    dead = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(path.parent.name))
            if state in "ZX":
                dead.add(int(path.parent.name))
    for pid in dead.intersection(children.get(os.getpid(), [])) - {waited_for}:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return [pid for pid in found if pid not in dead]


def number_of(name: str) -> int | None:
    """Return the process that a name carries: 17 of "smb-cluster-17-ab12" and of "smblab-17.4-switch"."""
    match = re.search(r"(?<![0-9a-zA-Z])\d+(?![0-9a-zA-Z])", name)
    return int(match[0]) if match else None


def split(new: set[str], pids: set[int], held: set[str]) -> tuple[list[str], list[str]]:
    """Return which of the new names are ours, and which are of nobody that we know."""
    ours = {name for name in new if name in held or number_of(name) in pids}
    return sorted(ours), sorted(new - ours)


def mount_points() -> set[str]:
    """Return where this machine has mounts."""
    return {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


def split_mounts(new: set[str], tree: Path) -> tuple[list[str], list[str]]:
    """Return which of the new mount points are ours, below a form's tree, the innermost first; and which are where any
    tests have their files, those of another run, too."""
    places = tuple(f"{place}/{name}" for place in (tempfile.gettempdir(), "/var/tmp") for name in MADE_BY_TESTS)
    ours = sorted((point for point in new if point.startswith(f"{tree}/")), reverse=True)
    return ours, sorted(point for point in new if point.startswith(places) and point not in ours)


class Watch:
    """Watches what descends from this process, from now on. Call look() once a second."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pids: set[int] = set()
        self.held: set[str] = set()
        self.before = {place: _names(place) for place in (SHARED_MEMORY, NAMESPACES)}
        self.mounts_before = mount_points()

    def look(self, waited_for: int = 0) -> list[int]:
        """Remember who lives, and what shared memory they hold. Returns the processes."""
        found = descendants(waited_for)
        self.pids.update(found)
        for pid in found:
            self.held |= _held_by(pid)
        return found

    def wait_for_all(self, deadline_s: float) -> list[int]:
        """Wait until nothing descends from this process; return what still does."""
        end = time.monotonic() + deadline_s
        while (found := self.look()) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def clean(self) -> tuple[list[str], list[str]]:
        """End and remove what is left. Returns what it was, and new names of nobody who lives: ours or somebody's."""
        left = [f"process {pid}: {_command(pid)}" for pid in self.look()]
        for _ in range(5):  # one that is another user's, or hangs in the kernel, stays
            for pid in self.look():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not self.wait_for_all(1):
                break
        mounts, unknown_mounts = split_mounts(mount_points() - self.mounts_before, self.directory)
        for point in mounts:
            left.append(f"mount {point}")
            subprocess.run(["umount", "--lazy", point], check=False)
        used: set[str] = set()
        for path in Path("/proc").glob("[0-9]*"):
            used |= _held_by(int(path.name))
        used |= {name for name in _names(SHARED_MEMORY) if _is_locked(SHARED_MEMORY / name)}
        unknown = [f"mount {point}" for point in unknown_mounts]
        for place, before in self.before.items():
            # Ours have ended. A name still in use is somebody else's, though its number may have been one of ours.
            ours, others = split(_names(place) - before - used, self.pids, self.held)
            left += [str(place / name) for name in ours]
            unknown += [str(place / name) for name in others if not _lives(number_of(name))]
            for name in ours:
                _remove(place / name)
        return left, unknown


def _names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


def _held_by(pid: int) -> set[str]:
    """Return the names in shared memory that a process has open or mapped."""
    found: set[str] = set()
    pattern = re.compile(f"{SHARED_MEMORY}/([^/\n]+)")
    with suppress(OSError):
        found.update(pattern.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.update(pattern.findall(str(link.readlink())))
    return found


def _is_locked(directory: Path) -> bool:
    """Whether somebody holds a lock in it: a cluster or a memory server, perhaps in another PID namespace."""
    with suppress(OSError):
        for path in directory.iterdir():
            with suppress(OSError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
                finally:
                    os.close(fd)
    return False


def _lives(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    return "ended meanwhile"


def _remove(path: Path) -> None:
    if path.parent == NAMESPACES:
        subprocess.run(["ip", "netns", "delete", path.name], check=False)
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
