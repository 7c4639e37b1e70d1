"""Special builds of the package beside the installed one: with failpoints, or under the sanitizers.

    python -m tests.support.builds KIND [PYTEST ARGUMENT ...]

makes the build under build/KIND, where sources are newer than it. With arguments it runs pytest on it: daemons, clients
and the tests' own process. Any sanitizer's report on them is a failure.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The entries of the repository that a build has no copy of. Every other one is where tests look for it.
NOT_COPIED = ("build", "dist", ".venv", ".git", ".hypothesis", "*_cache", "*.egg-info", "__pycache__", "demo-*.png")
VARIABLE = "SMB_TEST_DAEMON_BUILD"  # a kind: daemons of tests/support/daemons.py run on that build

# Low levels, since who compiles waits for it; every result is that of the others (see build_engine.py). The checks of
# the sanitizers make the kernels' compilation at -O1 six times as long as at -O0. The long form kills what users run.
FLAGS = {
    "failpoints": f"{'' if os.environ.get('SMB_LONG') else '-O0 -g0 '}-Werror -DSMB_FAILPOINTS",
    "sanitized": "-O0 -g -Werror -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all",
}

# In a process of its own: setuptools warns, and changes the process that it runs in.
COMPILE = """
import sys
from setuptools import Distribution, Extension
from csrc.build_engine import BuildEngine
direct = Extension("smb._direct", ["csrc/python/direct.c"], py_limited_api=True)
distribution = Distribution({"ext_modules": [Extension("smb._engine", [], py_limited_api=True), direct]})
command = BuildEngine(distribution)
command.build_lib, command.build_temp = sys.argv[1:]
command.ensure_finalized()
command.run()
"""


# The code that every Python of the sanitized build runs first. The sanitizers' library must be there when a process
# starts, but only in ours: tools that tests call are not to be judged, and some (dd) do not run under it. So nobody
# inherits LD_PRELOAD: a Python that was started without it starts itself again with it, as the same process, and
# forgets it.
SITECUSTOMIZE = """\
import os
import sys

if sys.prefix == {prefix!r}:  # not one of the system's, which a tool may be written in
    if os.environ.pop("LD_PRELOAD", None) != {libraries!r}:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {{"LD_PRELOAD": {libraries!r}}})
"""


@dataclass(frozen=True, slots=True)
class Build:
    """Where a build is. `environment` is what a Python process needs to run on it."""

    directory: Path
    environment: dict[str, str]

    @property
    def packages(self) -> Path:
        """The directory to import from."""
        return self.directory / "packages"

    def reports(self) -> list[Path]:
        """The sanitizers' reports since forget_reports, a file for each process."""
        return sorted((self.directory / "reports").iterdir())

    def forget_reports(self) -> None:
        """From here on only new ones count."""
        for path in self.reports():
            path.unlink()

    def check_reports(self) -> None:
        """Fail where there is one."""
        found = [path.read_text(errors="replace") for path in self.reports()]
        assert not found, "\n".join(found)


def build(kind: str) -> Build:
    """Make the build of that kind, unless it is there and up to date."""
    directory = ROOT / "build" / kind
    (directory / "reports").mkdir(parents=True, exist_ok=True)
    made = Build(directory, {})
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may want it at once
        for path in ROOT.iterdir():
            copy = made.packages / path.name
            if copy.is_symlink():  # an earlier form of these builds, through which the tree itself would be written
                copy.unlink()
            if not any(fnmatch(path.name, pattern) for pattern in NOT_COPIED):
                _mirror(path, copy)
        if kind == "sanitized":
            text = SITECUSTOMIZE.format(prefix=sys.prefix, libraries=_libraries())
            _write(made.packages / "sitecustomize.py", text.encode())
        _compile(kind, made)
    # Safe path: -m and -c would look into the working directory first, where the other build may lie. Python 3.10 does
    # not know that variable: start it in `packages`.
    made.environment.update(PYTHONPATH=str(made.packages), PYTHONSAFEPATH="1")
    if kind == "sanitized":
        common = f"log_path={directory}/reports/report:halt_on_error=1"
        # No leaks are reported: Python itself never frees some memory.
        made.environment.update(ASAN_OPTIONS=f"{common}:detect_leaks=0", UBSAN_OPTIONS=f"{common}:print_stacktrace=1")
    return made


def daemons_build() -> Build | None:
    """Return the build that daemons are to run on, if not the installed one."""
    kind = os.environ.get(VARIABLE)
    return build(kind) if kind else None


def run_tests(kind: str, arguments: list[str]) -> int:
    """Run pytest on a build and return its exit code. A sanitizer's report is a failure, too."""
    made = build(kind)
    made.forget_reports()
    # The working directory is this build's, and examples import what lies beside them.
    environment = os.environ | made.environment | {"PYTHONSAFEPATH": ""}
    done = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=made.packages, env=environment)
    made.check_reports()
    return done.returncode


def _compile(kind: str, made: Build) -> None:
    """Compile the engine where it is not of these sources."""
    sources = sorted(path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in {".c", ".h", ".inc", ".py"})
    digest = hashlib.sha256(FLAGS[kind].encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = made.directory / "engine.sha256"
    if stamp.exists() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)
    objects = made.directory / "objects"
    shutil.rmtree(objects, ignore_errors=True)  # setuptools compares times, not flags
    command = [sys.executable, "-c", COMPILE, str(made.packages), str(objects)]
    environment = os.environ | {"SMB_ENGINE_FLAGS": FLAGS[kind], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    stamp.write_text(digest)


def _mirror(source: Path, target: Path) -> None:
    """Make target hold source's files, bytecode and engines aside; files that are equal are not touched."""
    if source.is_file():
        _write(target, source.read_bytes(), source.stat().st_mode)
        return
    wanted = {path.relative_to(source) for path in _files(source)}
    for path in wanted:
        _write(target / path, (source / path).read_bytes(), (source / path).stat().st_mode)
    for path in list(_files(target)):
        if path.relative_to(target) not in wanted:
            path.unlink()


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Make path hold content; it is not touched if it does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)
        path.chmod(mode & 0o777)


def _files(directory: Path) -> Iterator[Path]:
    """Every file that a build has from its source."""
    for path in directory.rglob("*"):
        if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts:
            yield path


def _libraries() -> str:
    """Return what LD_PRELOAD is for a Python that was not compiled with the sanitizers, and loads what was.

    Their library must come first; the C++ library with it, or the exceptions of others' extensions are not understood.
    """
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    libraries = []
    for name in ("libasan.so", "libstdc++.so"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        libraries.append(str(Path(found.stdout.strip()).resolve()))
    return " ".join(libraries)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(build(sys.argv[1]).packages)
    else:
        sys.exit(run_tests(sys.argv[1], sys.argv[2:]))
