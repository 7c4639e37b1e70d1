"""A copy of the sources, as a clean clone has them: for builds that must not meet the one in use."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


# Files that building and testing leave in a tree, for trees without git.
_MADE = re.compile(r"(^|/)(build|dist|\.[^/]*|__pycache__|[^/]*\.egg-info)/|\.so$|_pb2(_grpc)?\.pyi?$")


def sources() -> list[Path]:
    """Return every file that git knows or would take, relative to ROOT, in order; what was deleted is left out."""
    if not (ROOT / ".git").exists():
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        return sorted(path for path in found if not _MADE.search(str(path)) or str(path).startswith(".ci/"))
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(path for path in map(Path, filter(None, listed.split("\0"))) if (ROOT / path).is_file())


def copy_sources(target: Path) -> None:
    """Make target hold the sources. Files that are equal are not touched; files that left the sources go."""
    wanted = sources()
    for path in wanted:
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.read_bytes() != (ROOT / path).read_bytes():
            shutil.copy2(ROOT / path, copy)
    for path in set(_copied(target)) - set(wanted):
        (target / path).unlink()
    (target / ".copied").write_text("\n".join(map(str, wanted)))


def _copied(target: Path) -> list[Path]:
    """Return what an earlier copy_sources put there and is still there; a build's own files are none of it."""
    record = target / ".copied"
    lines = record.read_text().splitlines() if record.exists() else []
    return [Path(line) for line in lines if (target / line).is_file()]
