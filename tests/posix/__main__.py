"""What others' programs find in a mount, beside a directory in memory: CPython's own tests, fio, stress-ng, and fsx's
operations.

    python -m tests.posix [--only cpython fio stress random] [--minutes 1] [--seed N]        or make posix

CPython's tests are those of this interpreter, or of Debian's (libpython3.X-testsuite) where this one has none. A part
whose program is missing is told as not run. Ends with 0 if all that ran held.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import smb
from tests.posix.explained import EXPLAINED
from tests.posix.random_operations import run as run_random
from tests.support.mounts import end_mount, missing_for_mounts, start_mount, unmount

MODULES = ("os", "shutil", "pathlib", "tarfile", "zipfile", "tempfile", "mailbox", "io", "mmap")
MODULE_S = 1800  # at most, for one module's tests
OPERATIONS_PER_MINUTE = 1500
MIB = 1 << 20
# Of stress-ng's class "filesystem", what concerns one file system and neither mounts nor needs pipes or hard links. Not
# chown: it changes a file by its descriptor while another process removes it. libfuse renames such a file, and for that
# moment the change may be told that there is no file.
STRESSORS = (
    "access", "chdir", "chmod", "copy-file", "dentry", "dir", "dirdeep", "fallocate", "fcntl", "filename",
    "flock", "fstat", "getdent", "hdd", "lockf", "mmap", "open", "readahead", "rename", "seek", "symlink", "touch",
    "utime", "xattr",
)  # fmt: skip


class NotRunError(Exception):
    """A part's program is missing."""


def cpython(mounted: Path, memory: Path, options: argparse.Namespace) -> list[str]:
    """Run CPython's tests in both directories; return those that fail in the mount alone, and are not explained."""
    python = _python_with_tests()
    found = list[str]()
    for module in MODULES:
        beside, there = (_failures(python, f"test_{module}", place) for place in (memory, mounted))
        alone = {name: why for name, why in there.items() if name not in beside}
        for name, why in alone.items():
            reason = EXPLAINED.get(".".join(name.split(".")[-2:]))
            print(f"  {name}: {why}{f' ({reason})' if reason else ''}")
            if reason is None:
                found.append(f"{name} fails in the mount alone: {why}")
        print(f"test_{module}: {len(there)} fail in the mount, {len(beside)} in memory", flush=True)
    return found


def _python_with_tests() -> str:
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-c", "import test.test_os, test.test_pathlib"]
        if shutil.which(python) and subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return python
    raise NotRunError("no Python here has its own tests; Debian: apt-get install libpython3.X-testsuite")


def _failures(python: str, module: str, place: Path) -> dict[str, str]:
    """Return the tests of a module that fail, with the last line of what each said."""
    directory = place / f"cpython-{module}"
    directory.mkdir()
    with tempfile.TemporaryDirectory() as kept:
        report = Path(kept) / "report.xml"
        command = [python, "-m", "test", "--tempdir", str(directory), "--junit-xml", str(report), "-u", "cpu", module]
        log = (Path(kept) / "log").open("w+")
        with log:
            try:
                subprocess.run(
                    command, cwd=directory, env=os.environ | {"TMPDIR": str(directory)}, stdout=log, stderr=log,
                    timeout=MODULE_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return {f"{module}.all": f"not done after {MODULE_S} s"}
            log.seek(0)
            said = log.read()
        shutil.rmtree(directory)
        if not report.exists():
            return {f"{module}.all": said.strip()[-300:]}
        found = dict[str, str]()
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            for problem in (*case.findall("failure"), *case.findall("error")):
                text = (problem.text or problem.get("message") or "no message").strip()
                found[str(case.get("name"))] = text.splitlines()[-1][:200]
        return found


def fio(mounted: Path, memory: Path, options: argparse.Namespace) -> list[str]:
    """Write and verify with fio, then measure 1 MiB blocks in sequence, and 4 KiB at random, beside memory."""
    if not shutil.which("fio"):
        raise NotRunError("Debian: apt-get install fio")
    found = list[str]()
    for name, block in (("4k", 4096), ("1m", MIB), ("odd", 7 * 512)):
        command = _fio(mounted, f"verify-{name}", "randwrite", block, 16 * MIB)
        command += ["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", f"--randseed={options.seed}"]
        command += ["--verify_state_save=0"]  # else it leaves a file in the present directory
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            found.append(f"fio verify {name}: {done.stderr.strip()[-300:]}")
    for kind, block in (("write", MIB), ("read", MIB), ("randread", 4096)):
        there, beside = (_rate(place, kind, block) for place in (mounted, memory))
        print(f"fio {kind} of {block} bytes: {there / beside:.2f} of memory ({there / MIB:.0f} MiB/s)", flush=True)
    return found


def _fio(place: Path, name: str, kind: str, block: int, nbytes: int) -> list[str]:
    return [
        "fio", f"--name={name}", f"--directory={place}", f"--rw={kind}", f"--bs={block}", f"--size={nbytes}",
        "--ioengine=psync", "--output-format=json", "--unlink=1",
    ]  # fmt: skip


def _rate(place: Path, kind: str, block: int) -> float:
    command = [*_fio(place, kind, kind, block, 256 * MIB), "--time_based", "--runtime=5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    of = json.loads(done.stdout)["jobs"][0]["write" if kind == "write" else "read"]
    return float(of["bw_bytes"])


def stress(mounted: Path, memory: Path, options: argparse.Namespace) -> list[str]:
    """Run each of stress-ng's stressors for a part of the time, with its verification."""
    if not shutil.which("stress-ng"):
        raise NotRunError("Debian: apt-get install stress-ng")
    found = list[str]()
    each_s = max(1, round(60 * options.minutes / len(STRESSORS)))
    for stressor in STRESSORS:
        command = [
            "stress-ng", "--verify", f"--{stressor}", "2", "--temp-path", str(mounted), "--timeout", f"{each_s}s",
            "--seed", str(options.seed % (1 << 32)), "--hdd-bytes", "8m", "--fallocate-bytes", "16m",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=each_s + 300)
        except subprocess.TimeoutExpired:
            found.append(f"stress-ng {stressor}: not done {300} s after its time")
            continue
        wrong = [line for line in (done.stdout + done.stderr).splitlines() if "fail:" in line or "error:" in line]
        print(f"stress-ng {stressor}: {'failed' if wrong or done.returncode else 'holds'}", flush=True)
        if wrong or done.returncode not in (0, 3):  # 3: what it needs is not there
            found.append(f"stress-ng {stressor}: exit status {done.returncode} {'; '.join(wrong[:3])}")
    return found


def random(mounted: Path, memory: Path, options: argparse.Namespace) -> list[str]:
    """Make fsx's operations in the mount, and before that in memory, so that the comparison itself is tried."""
    operations = round(OPERATIONS_PER_MINUTE * options.minutes)
    for place in (memory, mounted):
        try:
            run_random(place / "random", Random(options.seed), operations)
        except (AssertionError, OSError) as error:
            return [f"random operations in {place}: {str(error)[:500]}"]
    print(f"{operations} random operations: the same bytes as in memory")
    return []


PARTS: dict[str, Callable[[Path, Path, argparse.Namespace], list[str]]] = {
    "cpython": cpython, "fio": fio, "stress": stress, "random": random,
}  # fmt: skip


@contextmanager
def places() -> Iterator[tuple[Path, Path]]:
    """Give a mounted directory, and one in memory."""
    with (
        smb.LocalCluster(servers=1, capacity="1GiB") as cluster,
        tempfile.TemporaryDirectory(prefix="smb-posix-") as base,
        tempfile.TemporaryDirectory(prefix="smb-posix-", dir="/dev/shm") as memory,
    ):
        mounted = Path(base) / "mount"
        process = start_mount(cluster, mounted)
        try:
            yield mounted, Path(memory)
        finally:
            unmount(mounted)
            end_mount(process, mounted)


def main() -> int:
    """Run the parts; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.posix", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=1.0, help="for stress-ng, and for the random operations")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    options = parser.parse_args()
    if missing := missing_for_mounts():
        print(f"not run: this machine has no {', '.join(missing)}")
        return 0
    print(f"seed {options.seed}")
    found = list[str]()
    with places() as (mounted, memory):
        for name in options.only:
            try:
                found += PARTS[name](mounted, memory, options)
            except NotRunError as error:
                print(f"{name}: not run: {error}")
    for each in found:
        print(f"FAILED {each}")
    print(f"{len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
