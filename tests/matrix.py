"""The product on every Python of this machine, and with every instruction set of its processor.

Each Python gets an environment: unit tests, frames, public API, one training. Each instruction set gets the tests of
the kernels and of the public API.

    python -m tests.matrix [--oldest] [--torch] [PYTHON ...]

Sources are copied, so that no build meets another. tests/constraints.txt has the versions; with --oldest they are the
lowest that pyproject.toml allows, on the oldest Python. Ends with a table, and with 0 only if everything passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from smb.engine import isa_names
from tests.support.trees import ROOT, copy_sources

OLDEST = (3, 10)  # as requires-python in pyproject.toml
WORK = ROOT / "build" / "matrix"
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
EXTRAS = "certs,dev,fsspec"
# Beside what the extras bring: what tests/unit asks for.
BESIDE = ("setuptools", "PyYAML", "safetensors")
LAX_WITHOUT_TORCH = ("allow-subclassing-any", "no-warn-return-any", "no-warn-unused-ignores")  # mypy's
# These compile, measure or document; the Python that does so makes no difference.
SAME_EVERYWHERE = (
    "support/test_builds.py",
    "support/test_nightly.py",
    "perf/test_measurements.py",
    "perf/test_digits.py",
    "perf/test_peers.py",
)
TESTS = ("tests/unit", "tests/engine/wire", "tests/api/test_calls.py")
COMPUTING = ("tests/unit/engine", "tests/unit/call/test_optimizer_rules.py", TESTS[-1])
WORKERS = str(min(8, len(os.sched_getaffinity(0))))
ASK = """
import sys, sysconfig
print(*sys.version_info[:3], int(bool(sysconfig.get_config_var("Py_GIL_DISABLED"))), sys._base_executable)
"""
VERSIONS = """
from importlib.metadata import version
print(" ".join(version(name) for name in ("numpy", "grpcio", "protobuf")))
"""


@dataclass(frozen=True, order=True)
class Python:
    """An interpreter."""

    version: tuple[int, int, int]
    free_threaded: bool
    path: str

    @property
    def name(self) -> str:
        """As in "3.13" or "3.14t"."""
        return f"{self.version[0]}.{self.version[1]}{'t' if self.free_threaded else ''}"


@dataclass
class Row:
    """The report on one Python."""

    name: str
    versions: str = ""
    seconds: float = 0.0
    results: dict[str, str] = field(default_factory=dict)
    failed: str = ""


def find_pythons() -> list[Python]:
    """Return one interpreter of each version from 3.10 on: the newest of PATH, pyenv and uv."""
    places = [Path(place) for place in os.environ.get("PATH", "").split(os.pathsep)]
    for variable, default in (("PYENV_ROOT", "~/.pyenv"), ("UV_PYTHON_INSTALL_DIR", "~/.local/share/uv/python")):
        home = Path(os.environ.get(variable, default)).expanduser()
        places += [*home.glob("versions/*/bin"), *home.glob("cpython-*/bin")]
    found: dict[str, Python] = {}
    for place in dict.fromkeys(places):
        for path in sorted(place.glob("python3*")):
            python = ask(str(path)) if re.fullmatch(r"python3(\.\d+t?)?", path.name) else None
            if python and python.version >= OLDEST:
                found[python.name] = max(python, found.get(python.name, python))
    return sorted(found.values())


def ask(path: str) -> Python | None:
    """Return what an interpreter says of itself, or None where it is none (pyenv's name for one that is not chosen)."""
    try:
        done = subprocess.run([path, "-c", ASK], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    major, minor, patch, free_threaded, base = done.stdout.split(maxsplit=4)
    return Python((int(major), int(minor), int(patch)), free_threaded == "1", base.strip())


def refusal(python: Python) -> str:
    """Return why the package cannot be built for a Python, or nothing."""
    done = subprocess.run(
        [str(ROOT / "csrc" / "check-build-needs.sh"), python.path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    missing = [line.strip() for line in done.stderr.splitlines() if line.startswith("  missing: ")]
    return "; ".join(missing) if done.returncode != 0 else ""


def needs_torch(directory: Path) -> list[str]:
    """Return the test files that import PyTorch as they are loaded, relative to directory."""
    imports = re.compile(r"^(import torch|from torch|from smb\.torch)", re.M)
    files = [path for place in TESTS for path in _files(directory / place)]
    return [str(path.relative_to(directory)) for path in files if imports.search(path.read_text())]


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("test_*.py")) if place.is_dir() else [place]


class StepError(Exception):
    """A step of a trial failed."""


class Trial:
    """Some steps on one Python, in one tree, and what came of them."""

    def __init__(self, name: str, tree: Path, python: str, **variables: str) -> None:
        self.row, self.tree, self.python = Row(name), tree, python
        # Variables of this process's own Python must not reach the other.
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self.variables = kept | variables

    def run(self, steps: Callable[[Trial], None]) -> Row:
        """Do the steps up to the first that fails."""
        began = time.monotonic()
        try:
            steps(self)
        except StepError as error:
            self.row.failed = str(error)
        self.row.seconds = time.monotonic() - began
        return self.row

    def call(self, step: str, command: list[str], limit_s: int) -> str:
        """Run a command in the tree and return what it printed."""
        print(f"{self.row.name}: {step}", flush=True)
        try:
            done = subprocess.run(
                command, cwd=self.tree, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise StepError(f"{step}: not done after {limit_s} s") from None
        if done.returncode != 0:
            print(done.stdout[-6000:], flush=True)
            raise StepError(f"{step}: exit status {done.returncode}")
        return done.stdout

    def test(self, place: str, *options: str) -> None:
        """Run pytest on a file or a folder."""
        command = [self.python, "-m", "pytest", "--numprocesses", WORKERS, "--dist", "loadfile", *options]
        told = self.call(place, [*command, place], 1800)
        self.row.results[Path(place).stem.removeprefix("test_")] = _count(told)


def try_python(python: Python, options: argparse.Namespace) -> Row:
    """Install into an environment of its own, test, train."""
    name = python.name + (" oldest" if options.oldest else "")
    directory = WORK / name.replace(" ", "-")
    tree, venv = directory / "tree", directory / "venv"
    tool = str(venv / "bin" / "python")

    def install(trial: Trial) -> None:
        copy_sources(tree)
        uv = [sys.executable, "-m", "uv", "--quiet", "--system-certs"]  # as pip: a company's own authority counts
        trial.call("venv", [*uv, "venv", "--clear", "--seed", "--python", python.path, str(venv)], 120)
        versions = ["--constraints", str(CONSTRAINTS), "--build-constraints", str(CONSTRAINTS)]
        if options.oldest:
            versions = ["--resolution", "lowest-direct"]
        extras = EXTRAS + (",torch" if options.torch and options.oldest else "")
        into = [*uv, "pip", "install", "--python", tool]
        trial.call("install", [*into, *versions, "--editable", f".[{extras}]"], 1800)
        trial.call("install what tests need", [*into, "--constraints", str(CONSTRAINTS), *BESIDE], 600)
        if options.torch and not options.oldest:
            pip = [tool, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
            demo = ["--constraint", str(CONSTRAINTS), "--requirement", "examples/demo-requirements.txt"]
            trial.call("install PyTorch", [*pip, *demo], 3600)

    def steps(trial: Trial) -> None:
        install(trial)
        trial.row.versions = trial.call("versions", [tool, "-c", VERSIONS], 60).strip()
        if not options.oldest:
            # Without PyTorch its classes are Any, which everything else is strict about.
            lax = [] if options.torch else [f"--{flag}" for flag in LAX_WITHOUT_TORCH]
            trial.call("types", [tool, "-m", "mypy", *lax], 600)
            trial.row.results["types"] = "passed"
        left_out = [f"tests/unit/{file}" for file in SAME_EVERYWHERE]
        left_out += [] if options.torch else needs_torch(tree)
        for place in TESTS:
            trial.test(place, *(f"--ignore={path}" for path in left_out))
        trial.call("training", [tool, "examples/numpy_only.py"], 300)
        trial.row.results["training"] = "passed"
        if options.torch:
            trial.call("training with PyTorch", [tool, "examples/elastic_diloco.py", "1"], 600)
            trial.row.results["PyTorch"] = "passed"

    return Trial(name, tree, tool).run(steps)


def try_isa(isa: str) -> Row:
    """Test what computes, and the public API, with one instruction set, on the Python that runs this."""

    def steps(trial: Trial) -> None:
        for place in COMPUTING:
            trial.test(place)

    return Trial(isa, ROOT, sys.executable, SMB_ISA=isa).run(steps)


def _count(told: str) -> str:
    """Return "1234 passed" or "1234 passed, 5 skipped" of pytest's last line."""
    found = re.findall(r"\d+ (?:passed|skipped)", told.splitlines()[-1])
    return ", ".join(found) or told.splitlines()[-1]


def show(rows: list[Row]) -> None:
    """Print the table."""
    print()
    for row in rows:
        results = "; ".join(f"{name} {result}" for name, result in row.results.items())
        state, versions = "FAILED" if row.failed else "ok", row.versions and f"  numpy, grpc, protobuf {row.versions}"
        print(f"{row.name:12} {state:7} {row.seconds:5.0f} s{versions}")
        print(f"{'':12} {results}" + (f"; failed: {row.failed}" if row.failed else ""))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreters; default: all that are found")
    parser.add_argument("--oldest", action="store_true", help="the lowest versions allowed, on the oldest Python")
    parser.add_argument(
        "--torch", action="store_true", help="PyTorch too, and what needs it: gigabytes for each Python"
    )
    options = parser.parse_args()
    found = [python for python in map(ask, options.pythons) if python] if options.pythons else find_pythons()
    if len(found) < len(options.pythons):
        raise SystemExit(f"not all of these are Pythons: {' '.join(options.pythons)}")
    usable = []
    for python in found:
        why = refusal(python)
        print(f"{python.name} ({python.path})" + (f": not run, {why}" if why else ""), flush=True)
        if not why:
            usable.append(python)
    if options.pythons and len(usable) < len(found):
        return 1
    if options.oldest:
        usable = usable[:1]
    if importlib.util.find_spec("uv") is None:
        raise SystemExit("uv is missing: make test installs it")
    # Installing takes one processor; more than two at once would want their memory.
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda python: try_python(python, options), usable))
    if not options.oldest and not options.pythons:
        rows += [try_isa(isa) for isa in isa_names()]
    show(rows)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
