"""A release of HEAD, into dist/: the source archive, a wheel for x86-64 and one for aarch64, each for every Python from
3.10 on and with OpenSSL inside, the list of what is installed with them (SBOM), checksums, and a note.

    python -m tests.ops.deploy.release [--only-this-machine] [--untagged]

The wheel of the other machine is cross-built with Debian's compiler, and a cluster of it runs in a Python of that
machine under qemu. Refused: a tree with changes that are not committed, and a version that CHANGELOG.md does not have
or calls unreleased (--untagged: made nevertheless, as a trial). Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import smb
from tests.engine.c.aarch64 import CACHE, PACKAGES, MissingError, fetch
from tests.ops.deploy.wheel import USED, try_wheel, without_compiler
from tests.support.packages import PackagesError, install

ROOT = Path(__file__).resolve().parents[3]
WORK, OUT = ROOT / "build" / "release", ROOT / "dist"
REQUIREMENTS = Path(__file__).with_name("release-requirements.txt")
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
FOREIGN = "aarch64"
# csrc/python/direct.c says why these may be used: Python 3.10 has them, and they are of the stable ABI since.
LATER = {"PyBuffer_Release", "PyObject_GetBuffer", "PyVectorcall_Call"}
# In the other machine's Python. qemu takes a minute for what a processor does in seconds.
EMULATED = (
    """
import platform, sys
import smb.cluster
sys.executable, smb.cluster._START_S = sys.argv[1], 900.0
"""
    + USED
    + """
print("the wheel works on Python", ".".join(map(str, sys.version_info[:3])), "of", platform.machine())
"""
)


class ReleaseError(Exception):
    """Why there is no release."""


def run(*words: str | Path, cwd: Path = ROOT, add: Mapping[str, str] | None = None) -> str:
    """Run a step and return what it printed. Raises ReleaseError with the end of its output."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SMB_"))}
    tools = f"{WORK / 'venv' / 'bin'}:{environment['PATH']}"
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment | {"PATH": tools} | dict(add or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def note_of(changelog: str, version: str, *, trial: bool) -> str:
    """Return the changelog's section of a version. Raises ReleaseError if it has none or is unreleased."""
    match = re.search(rf"^## {re.escape(version)}(, [^\n]*)?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if not match:
        raise ReleaseError(f"CHANGELOG.md has no section '## {version}', which smb/__init__.py has as the version")
    if "unreleased" in (match[1] or "") and not trial:
        raise ReleaseError(
            f"CHANGELOG.md says '## {version}{match[1]}': put the day there and commit it, or try with --untagged"
        )
    return match[2].strip()


def build_requirements(text: str) -> list[str]:
    """Return what a pyproject.toml asks for to build its package."""
    match = re.search(r"^requires = (\[.*\])$", text, re.M)
    if not match:
        raise ReleaseError("pyproject.toml has no line 'requires = [...]'")
    found: list[str] = ast.literal_eval(match[1])
    return found


def tools() -> Path:
    """Make the environment of the tools, unless it is there; return its programs' folder."""
    bin_, mark = WORK / "venv" / "bin", WORK / "venv" / "made"
    wanted = REQUIREMENTS.read_text() + (ROOT / "pyproject.toml").read_text()
    if not mark.exists() or mark.read_text() != wanted:
        run(sys.executable, "-m", "venv", "--clear", WORK / "venv")
        needs = build_requirements((ROOT / "pyproject.toml").read_text())
        pip = [bin_ / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        run(*pip, "--constraint", CONSTRAINTS, "--requirement", REQUIREMENTS, *needs)
        mark.write_text(wanted)
    return bin_


def cross(system: Path) -> dict[str, str]:
    """Return what setuptools needs to compile for the other machine with Debian's headers and libraries in `system`."""
    triple = f"{FOREIGN}-linux-gnu"
    return {
        "CC": f"{triple}-gcc",
        "LDSHARED": f"{triple}-gcc -shared -L{system / 'lib' / triple}",
        "CFLAGS": f"-I{system / 'include' / triple} -I{system / 'include'}",
        "_PYTHON_HOST_PLATFORM": f"linux-{FOREIGN}",
    }


def build_wheel(bin_: Path, sources: Path, machine: str, add: Mapping[str, str], libraries: Sequence[Path]) -> Path:
    """Build a wheel from unpacked sources, put its libraries into it, check its modules, and return it."""
    plain, repaired = WORK / f"plain-{machine}", WORK / f"repaired-{machine}"
    for folder in (plain, repaired, sources / "build"):
        shutil.rmtree(folder, ignore_errors=True)
    run(bin_ / "python", "-m", "build", "--no-isolation", "--wheel", "--outdir", plain, cwd=sources, add=add)
    (made,) = plain.glob("*.whl")
    paths = ["--ldpaths", ":".join(map(str, libraries))] if libraries else []
    run(bin_ / "auditwheel", "repair", *paths, "--wheel-dir", repaired, made)
    (wheel,) = repaired.glob("*.whl")
    if not re.search(rf"-cp310-abi3-manylinux_\d+_\d+_{machine}\.whl$", wheel.name):
        raise ReleaseError(f"{wheel.name} is not of every Python from 3.10 on, or not of {machine}")
    return wheel


def check_symbols(bin_: Path, wheel: Path) -> None:
    """Refuse modules that ask for something of CPython that 3.10 lacks, or that a later one may drop."""
    report = WORK / "abi3.json"
    # It ends with 1 for what LATER names.
    subprocess.run([bin_ / "abi3audit", "--report", "--output", report, wheel], capture_output=True, check=False)
    specs = json.loads(report.read_text())["specs"]
    asked: set[str] = set()
    for spec in specs.values():
        for module in spec["wheel"]:
            result = module["result"]
            asked |= set(result["non_abi3_symbols"]) | set(result["future_abi3_objects"])
    if asked != LATER:
        raise ReleaseError(f"{wheel.name} asks CPython for {sorted(asked)}, and {sorted(LATER)} were expected")


def try_foreign(wheel: Path) -> str:
    """Install the other machine's wheel beside its Python, and use it under qemu; return what it said."""
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not qemu:
        raise MissingError("qemu-aarch64-static is missing")
    root, installed = CACHE / "python3.11", WORK / "foreign"
    root.mkdir(parents=True, exist_ok=True)
    fetch(
        {root / "usr": "usr", root / "lib": "lib"},
        *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libgcc-s1", "libstdc++6"),
        *("zlib1g", "libexpat1", "libffi8", "libssl3", "libsqlite3-0", "libbz2-1.0", "liblzma5", "libuuid1"),
    )
    shutil.rmtree(installed, ignore_errors=True)
    of_it = ["--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp"]
    of_it += [f"--abi={abi}" for abi in ("cp311", "abi3", "none")]
    # 2.36 is the C library of that Python.
    of_it += [f"--platform=manylinux_2_{minor}_{FOREIGN}" for minor in range(17, 37)]
    of_it += [f"--platform=manylinux2014_{FOREIGN}"]
    pip = [WORK / "venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    run(*pip, "--constraint", CONSTRAINTS, *of_it, "--target", installed, wheel)
    python = WORK / "foreign-python"  # what the daemons are started with
    python.write_text(f'#!/bin/sh\nexec {qemu} -L {root} {root}/usr/bin/python3.11 "$@"\n')
    python.chmod(0o755)
    where = {"PYTHONPATH": str(installed), "PYTHONHOME": str(root / "usr"), "SMB_LOG": "warning"}
    return run(python, "-c", EMULATED, python, cwd=WORK, add=where)


def release(*, only_this_machine: bool, trial: bool) -> list[str]:
    """Make everything, and return what was and what was not tried."""
    if run("git", "status", "--porcelain").strip() and not trial:
        raise ReleaseError("the tree has changes that are not committed: a release is made of HEAD")
    version = smb.__version__
    note = note_of((ROOT / "CHANGELOG.md").read_text(), version, trial=trial)
    bin_ = tools()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    tree = WORK / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    run("git", "archive", "--output", WORK / "tree.tar", "HEAD")
    run("tar", "-x", "-f", WORK / "tree.tar", "-C", tree)
    run(bin_ / "python", "-m", "build", "--no-isolation", "--sdist", "--outdir", OUT, cwd=tree)
    (archive,) = OUT.glob("*.tar.gz")
    shutil.rmtree(WORK / "sources", ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(WORK / "sources", filter="data")
    sources = WORK / "sources" / f"soft_memory_box-{version}"
    wheels = [build_wheel(bin_, sources, platform.machine(), {}, [])]
    if not only_this_machine and platform.machine() != FOREIGN:
        install(PACKAGES)
        fetch({CACHE / "build": "usr"}, "libssl-dev", "libssl3", "libpython3.11-dev")
        system, triple = CACHE / "build", f"{FOREIGN}-linux-gnu"
        where = [system / "lib" / triple, Path("/usr") / triple / "lib"]
        wheels.append(build_wheel(bin_, sources, FOREIGN, cross(system), where))
    tried = []
    for wheel in wheels:
        check_symbols(bin_, wheel)
        shutil.copy(wheel, OUT)
    tried.append(try_wheel(wheels[0], WORK / "try", sys.executable, environment_of(WORK / "try")).splitlines()[-1])
    run(
        bin_ / "cyclonedx-py", "environment", "--output-reproducible", "--pyproject", ROOT / "pyproject.toml",
        "--output-file", OUT / f"soft_memory_box-{version}.cdx.json", WORK / "try" / "venv",
    )  # fmt: skip
    for wheel in wheels[1:]:
        try:
            tried.append(try_foreign(wheel).splitlines()[-1] + ", under qemu")
        except (MissingError, ReleaseError) as error:
            tried.append(f"{wheel.name} was not tried: {error}")
    run(bin_ / "twine", "check", "--strict", *sorted([*OUT.glob("*.whl"), archive]))
    finish(version, note, tried)
    return tried


def environment_of(work: Path) -> dict[str, str]:
    """Return an environment without a compiler, below an empty folder."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return without_compiler(work)


def finish(version: str, note: str, tried: Sequence[str]) -> None:
    """Write the checksums and the note."""
    commit = run("git", "rev-parse", "HEAD").strip()
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in sorted(OUT.iterdir())]
    (OUT / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    lines = [f"# Soft Memory Box {version}", "", f"Made of commit {commit}.", "", note, "", "## Files", "", "```"]
    lines += [
        *sums,
        "```",
        "",
        "The wheels carry the build system's OpenSSL; this machine's names it in `.dist-info/sboms`.",
    ]
    lines += [
        "The `.cdx.json` lists the packages of an environment that has the wheel.",
        "",
        *(f"- {line}" for line in tried),
    ]
    (OUT / "RELEASE.md").write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.deploy.release", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only-this-machine", action="store_true", help="no wheel for the other one")
    parser.add_argument("--untagged", action="store_true", help="a trial: of HEAD, whether or not it is ready")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        tried = release(only_this_machine=options.only_this_machine, trial=options.untagged)
    except (ReleaseError, MissingError, PackagesError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print("\n".join(sorted(file.name for file in OUT.iterdir())))
    print("\n".join(tried))
    return 0


if __name__ == "__main__":
    sys.exit(main())
