"""The wheel of `make wheel` as a user installs it: a fresh environment of every Python that this machine has, no
compiler, none of the system's OpenSSL.

    python -m tests.ops.deploy.wheel [--chroot] [FOLDER]

FOLDER has the wheel, `dist` by default. With --chroot it is installed in a bare Debian, too, that has nothing but
Python (as root, with mmdebstrap, about 2 minutes).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.matrix import find_pythons

ROOT = Path(__file__).resolve().parents[3]
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
DEBIAN = "bookworm"
USED = """
import numpy as np, smb, smb.train
with smb.LocalCluster(servers=2, capacity="16MiB") as cluster, smb.connect(cluster.address, transport="tcp") as client:
    weights = client.create("weights", 1000)
    weights.accumulate(np.ones(1000, np.float32), scale=2)
    assert weights.read().sum() == 2000
    values = np.zeros(10, np.float32)
    with smb.train.join(client, "run", values, smb.train.BSP()) as worker:
        values += 1
        worker.step(samples=1)
    assert (smb.train.shared(client, "run") == 1).all()
"""
TRIED = (
    USED
    + """
libraries = open("/proc/self/maps").read()
assert "soft_memory_box.libs/libssl" in libraries, "the wheel does not carry OpenSSL"
print("the wheel works on Python", ".".join(map(str, __import__("sys").version_info[:3])))
"""
)


def wheel_in(folder: Path) -> Path:
    """Return the one wheel there that any Linux of its age can install."""
    found = sorted(folder.glob("soft_memory_box-*manylinux*.whl"))
    if len(found) != 1:
        raise SystemExit(f"{folder} has {len(found)} manylinux wheels, not one: make wheel")
    return found[0]


def without_compiler(work: Path) -> dict[str, str]:
    """Return an environment in which whoever calls a compiler fails."""
    tools = work / "no-compiler"
    tools.mkdir()
    for name in ("cc", "gcc", "clang", "c99"):
        (tools / name).write_text("#!/bin/sh\necho no compiler here >&2\nexit 1\n")
        (tools / name).chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SMB_", "VIRTUAL_ENV"))}
    return kept | {"PATH": f"{tools}:{os.environ['PATH']}", "CC": str(tools / "cc")}


def try_wheel(wheel: Path, work: Path, python: str, environment: dict[str, str]) -> str:
    """Install it into a fresh environment, and use it there, outside of the sources. Returns what it printed."""
    venv = work / "venv"
    subprocess.run([python, "-m", "venv", "--clear", venv], check=True, env=environment)
    pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    versions = ["--only-binary", ":all:", "--constraint", CONSTRAINTS]
    subprocess.run([*pip, *versions, wheel], check=True, env=environment, cwd=work)
    told = subprocess.run(
        [venv / "bin" / "smb", "--version"], check=True, env=environment, cwd=work, capture_output=True, text=True
    )
    tried = subprocess.run(
        [venv / "bin" / "python", "-c", TRIED], check=True, env=environment, cwd=work, capture_output=True, text=True
    )
    return told.stdout + tried.stdout


def try_in_chroot(wheel: Path, work: Path) -> None:
    """The same in a Debian that has Python, venv and certificates, and neither OpenSSL's headers nor a compiler."""
    from tests.ops.deploy.chroot import Stage, base_system

    base = work / "base"
    base_system(base, ["python3", "python3-venv", "ca-certificates"])
    if Path("/etc/pip.conf").exists():
        shutil.copy("/etc/pip.conf", base / "etc")
    stage = Stage(base, work / "stage")
    stage.variables |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    (stage.root / "try").mkdir()
    for file in (wheel, CONSTRAINTS):
        shutil.copy(file, stage.root / "try")
    (stage.root / "try" / "tried.py").write_text(TRIED)
    stage.run(
        f"! command -v cc && python3 -m venv /try/venv && /try/venv/bin/pip install --quiet --only-binary :all: "
        f"--constraint /try/{CONSTRAINTS.name} /try/{wheel.name} && /try/venv/bin/smb --version && "
        f"/try/venv/bin/python /try/tried.py"
    )


def main() -> None:
    """Try it in an environment of each Python, and with --chroot in a bare system."""
    parser = argparse.ArgumentParser(prog="python -m tests.ops.deploy.wheel", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--chroot", action="store_true", help="in a bare Debian, too")
    options = parser.parse_args()
    wheel = wheel_in(options.folder)
    work = Path(tempfile.mkdtemp(prefix="smb-wheel-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    work.chmod(0o755)
    try:
        print(wheel.name)
        environment = without_compiler(work)
        for python in find_pythons():
            if not python.free_threaded:
                print(try_wheel(wheel, work, python.path, environment), end="", flush=True)
        if options.chroot:
            try_in_chroot(wheel, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
