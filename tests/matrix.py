"""The product on every Python of this machine: an environment each, unit tests, frames, public API, one training.

    python -m tests.matrix [--short | --oldest] [--torch] [PYTHON ...]

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
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.trees import ROOT, copy_sources

OLDEST = (3, 10)  # as requires-python in pyproject.toml
WORK = ROOT / "build" / "matrix"
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
EXTRAS = "certs,dev,fsspec"
# Beside what the extras bring: what tests/unit asks for.
BESIDE = ("setuptools", "PyYAML", "safetensors")
TESTS = ("tests/unit", "tests/wire", "tests/integration/test_api.py")
# These compile, measure or document; the Python that does so makes no difference.
SAME_EVERYWHERE = ("test_builds.py", "test_perf.py", "test_perf_digits.py", "test_perf_peers.py", "test_reference.py")
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
    """What is told of one Python."""

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
    except OSError:
        return None
    if done.returncode != 0:
        return None
    major, minor, patch, free_threaded, base = done.stdout.split(maxsplit=4)
    return Python((int(major), int(minor), int(patch)), free_threaded == "1", base.strip())


def needs_torch(directory: Path) -> list[str]:
    """Return the test files that import PyTorch as they are loaded, relative to directory."""
    imports = re.compile(r"^(import torch|from torch|from smb\.torch)", re.M)
    files = [path for place in TESTS for path in _files(directory / place)]
    return [str(path.relative_to(directory)) for path in files if imports.search(path.read_text())]


def _files(place: Path) -> list[Path]:
    return sorted(place.glob("test_*.py")) if place.is_dir() else [place]


class Trial:
    """One Python's environment, and what runs in it."""

    def __init__(self, python: Python, options: argparse.Namespace) -> None:
        self.python, self.options = python, options
        self.row = Row(python.name + (" oldest" if options.oldest else ""))
        self.directory = WORK / self.row.name.replace(" ", "-")
        self.tree, self.venv = self.directory / "tree", self.directory / "venv"
        self.tool = str(self.venv / "bin" / "python")

    def run(self) -> Row:
        """Install, test and train. Stops at the first step that fails."""
        began = time.monotonic()
        try:
            self._install()
            self.row.versions = self._call("versions", [self.tool, "-c", VERSIONS], 60).strip()
            if not self.options.short:
                self._call("types", [self.tool, "-m", "mypy"], 600)
                self.row.results["types"] = "passed"
            self._test()
            self._train()
        except StepError as error:
            self.row.failed = str(error)
        self.row.seconds = time.monotonic() - began
        return self.row

    def _install(self) -> None:
        copy_sources(self.tree)
        uv = [sys.executable, "-m", "uv", "--quiet"]
        self._call("venv", [*uv, "venv", "--clear", "--seed", "--python", self.python.path, str(self.venv)], 120)
        if self.options.oldest:
            versions = ["--resolution", "lowest-direct"]
        else:
            versions = ["--constraints", str(CONSTRAINTS), "--build-constraints", str(CONSTRAINTS)]
        extras = EXTRAS + (",torch" if self.options.torch and self.options.oldest else "")
        wanted = ["--editable", f".[{extras}]", *BESIDE]
        self._call("install", [*uv, "pip", "install", "--python", self.tool, *versions, *wanted], 1800)
        if self.options.torch and not self.options.oldest:
            pip = [self.tool, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
            demo = ["--constraint", str(CONSTRAINTS), "--requirement", "examples/demo-requirements.txt"]
            self._call("install PyTorch", [*pip, *demo], 3600)

    def _test(self) -> None:
        left_out = [f"tests/unit/{name}" for name in SAME_EVERYWHERE]
        if not self.options.torch:
            left_out += needs_torch(self.tree)
        for place in TESTS:
            command = [self.tool, "-m", "pytest", "--numprocesses", str(os.cpu_count()), "--dist", "loadfile"]
            command += [f"--ignore={path}" for path in left_out]
            told = self._call(place, [*command, place], 1800)
            self.row.results[Path(place).stem.removeprefix("test_")] = _count(told)

    def _train(self) -> None:
        self._call("training", [self.tool, "examples/numpy_only.py"], 300)
        self.row.results["training"] = "passed"
        if self.options.torch:
            self._call("training with PyTorch", [self.tool, "examples/elastic_diloco.py"], 600)
            self.row.results["PyTorch"] = "passed"

    def _call(self, step: str, command: list[str], seconds: int) -> str:
        print(f"{self.row.name}: {step}", flush=True)
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        try:
            done = subprocess.run(
                command, cwd=self.tree, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise StepError(f"{step}: not done after {seconds} s") from None
        if done.returncode != 0:
            print(done.stdout[-6000:], flush=True)
            raise StepError(f"{step}: exit status {done.returncode}")
        return done.stdout


class StepError(Exception):
    """A step of a trial failed."""


def _count(told: str) -> str:
    """Return "1234 passed" or "1234 passed, 5 skipped" of pytest's last line."""
    found = re.findall(r"\d+ (?:passed|skipped)", told.splitlines()[-1])
    return ", ".join(found) or told.splitlines()[-1]


def show(rows: list[Row]) -> None:
    """Print the table."""
    print()
    for row in rows:
        results = "; ".join(f"{name} {result}" for name, result in row.results.items())
        state = "FAILED" if row.failed else "ok"
        print(f"{row.name:12} {state:7} {row.seconds:5.0f} s  numpy, grpc, protobuf {row.versions}")
        print(f"{'':12} {results}" + (f"; failed: {row.failed}" if row.failed else ""))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreters; default: all that are found")
    parser.add_argument("--short", action="store_true", help="the oldest and the newest beside the one that runs this")
    parser.add_argument("--oldest", action="store_true", help="the lowest versions allowed, on the oldest Python")
    parser.add_argument(
        "--torch", action="store_true", help="PyTorch too, and what needs it: gigabytes for each Python"
    )
    options = parser.parse_args()
    found = [python for python in map(ask, options.pythons) if python] if options.pythons else find_pythons()
    if len(found) < len(options.pythons):
        raise SystemExit(f"not all of these are Pythons: {' '.join(options.pythons)}")
    print("found", *(f"{python.name} ({python.path})" for python in found), flush=True)
    for python in found:
        if python.free_threaded:
            print(f"{python.name}: not run, the engine is not built for free-threaded Pythons")
    usable = [python for python in found if not python.free_threaded]
    if options.oldest:
        usable = usable[:1]
    if options.short:
        usable = [python for python in usable if python.version[:2] != sys.version_info[:2]]
        usable = sorted({*usable[:1], *usable[-1:]})
        if not usable:
            print("no other Python is here")
            return 0
    if importlib.util.find_spec("uv") is None:
        raise SystemExit("uv is missing: make test installs it")
    rows = [Trial(python, options).run() for python in usable]
    show(rows)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
