"""The host's memory: which file systems are in memory, and the memory limit of this process.

The limit is the lowest of those of its control group and of the control groups around it, in cgroup v1 and v2.

Pages of tmpfs count as memory of the control group whose process touched them first. One page beyond the limit, and the
kernel kills a process of that control group: usually the memory server, because it is the largest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from smb.config.parse import format_bytes
from smb.errors import InvalidArgumentError

# The part of the memory limit that is left for connections, requests and the process itself, which grow beside
# segments.
HEADROOM_BYTES = 32 << 20
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 for "no limit"; it depends on the page size
# For each hierarchy: the file with the limit, the file with the use, and the lines of memory.stat about memory that the
# kernel reclaims before it kills. Files in tmpfs are not among these.
_FILES = {
    "cgroup2": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One control group with a limit."""

    directory: Path
    hierarchy: str  # cgroup or cgroup2
    limit_bytes: int

    def room_bytes(self) -> int:
        """Return how much more memory the control group's processes may take; 0 if unknown."""
        _, current, freed = _FILES[self.hierarchy]
        try:
            used = int((self.directory / current).read_text())
            lines = (self.directory / "memory.stat").read_text().split("\n")
        except (OSError, ValueError):
            return 0
        statistics = dict(line.split(" ", 1) for line in lines if " " in line)
        return max(0, self.limit_bytes - used + sum(int(statistics.get(name, 0)) for name in freed))


class MemoryLimit:
    """The control groups with a limit to which this process belongs, found when the object is made."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` is the directory of proc and sys; tests give another one."""
        self._control_groups = _control_groups(root)

    @property
    def nbytes(self) -> int | None:
        """The lowest limit; None if there is none."""
        return min((control_group.limit_bytes for control_group in self._control_groups), default=None)

    def room_bytes(self) -> int | None:
        """Return how much more memory this process may take; None if there is no limit."""
        return min((control_group.room_bytes() for control_group in self._control_groups), default=None)

    def check_capacity(self, capacity_bytes: int) -> None:
        """Raise InvalidArgumentError for a capacity that the limit can never allow."""
        control_group = min(self._control_groups, key=lambda control_group: control_group.limit_bytes, default=None)
        if control_group is not None and capacity_bytes > control_group.limit_bytes:
            raise InvalidArgumentError(
                f"--capacity {format_bytes(capacity_bytes)} is more than the memory limit of this process, "
                f"{format_bytes(control_group.limit_bytes)} ({control_group.directory}); offer less, or raise "
                f"that limit"
            )


def _control_groups(root: Path) -> tuple[ControlGroup, ...]:
    """Return the control groups with a limit, in the hierarchy that has the memory controller."""
    found: list[ControlGroup] = []
    for hierarchy, mounted_root, mounted_at in _mounts(root):
        path = _own_path(root, hierarchy)
        if path is None:
            continue
        # A container sees its own control group at the mount point, but may read the host's path of the group.
        below = Path(path).relative_to(mounted_root) if Path(path).is_relative_to(mounted_root) else Path()
        top = root / mounted_at.lstrip("/")
        at = top / below
        if not at.is_dir():
            at = top
        while True:
            limit = _limit(at, hierarchy)
            if limit is not None:
                found.append(ControlGroup(at, hierarchy, limit))
            if at == top:
                break
            at = at.parent
    return tuple(found)


def _mounts(root: Path) -> list[tuple[str, str, str]]:
    """Return (hierarchy, root of the mount, mount point) of each hierarchy that may have the memory controller."""
    mounts = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2" or (kinds[0] == "cgroup" and "memory" in kinds[2].split(",")):
            mounts.append((kinds[0], fields[3], fields[4].encode().decode("unicode_escape")))
    return mounts


def _own_path(root: Path, hierarchy: str) -> str | None:
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (hierarchy == "cgroup2" and number == "0") or (hierarchy == "cgroup" and "memory" in controllers.split(",")):
            return path
    return None


def _limit(directory: Path, hierarchy: str) -> int | None:
    text = _text(directory / _FILES[hierarchy][0]).strip()
    return int(text) if re.fullmatch(r"\d+", text) and int(text) < _NO_LIMIT else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def file_system_of(directory: Path) -> str:
    """Return the type of the directory's file system, e.g. tmpfs."""
    best, kind = -1, "an unknown file system"
    where = directory.resolve()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mounted_on, mounted_kind, *_ = line.split(" ")
        at = Path(mounted_on.encode().decode("unicode_escape"))  # a space in a path is \040 here
        # A later mount at the same place hides the earlier one.
        if len(at.parts) >= best and where.is_relative_to(at):
            best, kind = len(at.parts), mounted_kind
    return kind
