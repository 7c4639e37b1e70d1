"""The wheel and the source archive, made from this tree as it is compiled: what is in them, and that it works unpacked.

`make wheel-test` does all of it: compiles from the archive, repairs, installs where there is no compiler.
"""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.ops.deploy.wheel import ROOT, USED

pytestmark = pytest.mark.timeout(300)

# The commands of setuptools, with what the engine's build would leave taken from the tree: its gRPC code, too, whose
# generator is in no environment but the build's.
MAKE = """
import sys
from setuptools import setup
from csrc import build_engine
build_engine.make_grpc_code = lambda: None
work, *commands = sys.argv[1:]
places = {"build": {"build_base": work, "build_lib": work + "/lib"}, "egg_info": {"egg_base": work}}
setup(script_args=["-q", *commands], options={**places, "bdist_wheel": {"bdist_dir": work + "/bdist"}})
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the archive."""
    work = tmp_path_factory.mktemp("wheel")
    tree = work / "tree"  # a copy: what the build writes there is not for other tests
    for room in ("smb", "memserver", "csrc"):
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for file in ("pyproject.toml", "setup.cfg", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    (work / "lib" / "smb").mkdir(parents=True)
    for engine in ("_engine.abi3.so", "_direct.abi3.so"):
        shutil.copy(ROOT / "smb" / engine, work / "lib" / "smb")
    out = work / "dist"
    commands = ["build_py", "bdist_wheel", "--skip-build", "--dist-dir", out, "sdist", "--dist-dir", out]
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", MAKE, work, *commands], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_wheel_is_whole_and_works(made: Path, tmp_path: Path) -> None:
    """Every module of the tree and nothing else is in it, its record and metadata are right, and a program that has
    only what was unpacked starts a cluster and trains.
    """
    (path,) = made.glob("*.whl")
    version, tag = path.stem.split("-")[1], path.stem.split("-")[2:4]
    assert tag == ["cp310", "abi3"]
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith("/METADATA"))
        for name, digest, _ in csv.reader(io.StringIO(wheel.read(f"{info}/RECORD").decode())):
            if digest:
                found = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
                assert digest == f"sha256={found}", name
        told = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        entries = wheel.read(f"{info}/entry_points.txt").decode()
        wheel.extractall(tmp_path / "unpacked")
    tree = {
        file.relative_to(ROOT).as_posix()
        for room in ("smb", "memserver")
        for file in (ROOT / room).rglob("*")
        if file.suffix in {".py", ".pyi", ".proto", ".typed"} or file.parent.name == "web"
    }
    assert tree - names == set()
    others = {name for name in names - tree if not name.startswith(info)}
    assert all(name.startswith("smb/_") and name.endswith(".so") for name in others), others
    assert (told["Name"], told["Version"], told["Requires-Python"]) == ("soft-memory-box", version, ">=3.10")
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload().startswith("# Soft Memory Box")
    assert {"torch", "certs", "fuse", "fsspec"} <= set(told.get_all("Provides-Extra"))
    for line in entries.splitlines():
        if " = " in line:
            module = line.partition(" = ")[2].partition(":")[0]
            assert f"{module.replace('.', '/')}.py" in names, line
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SMB_")}
    environment |= {"PYTHONPATH": str(tmp_path / "unpacked"), "SMB_OWNER_PID": str(os.getpid())}
    where = "import smb, smb._engine\nprint(smb.__file__, smb._engine.__file__, smb.__version__)\n"
    used = subprocess.run(
        [sys.executable, "-c", where + USED], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90
    )
    assert used.returncode == 0, used.stderr
    package, engine, said = used.stdout.splitlines()[0].split()
    assert package.startswith(str(tmp_path))
    assert engine.startswith(str(tmp_path))
    assert said == version


def test_the_archive_has_what_is_compiled(made: Path) -> None:
    """All sources and what the build asks for; no tests, no figures, nothing that a build left."""
    (path,) = made.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "csrc").rglob("*")
        if file.suffix in {".c", ".h", ".inc", ".py"}
    }
    wanted = {"pyproject.toml", "README.md", "LICENSE", "smb/rpc/control.proto", "smb/coordinator/etcd/etcd.proto"}
    assert (sources | wanted) - names == set()
    assert not [name for name in names if name.startswith(("tests/", "perf/")) or name.endswith((".so", ".o"))]
