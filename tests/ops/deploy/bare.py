"""`make demo` on bare distributions: a chroot of each, with no more than the packages that README names.

    python -m tests.ops.deploy.bare [--matrix] [SUITE...]    as root, with mmdebstrap; 3 to 5 minutes, 6 GB for each

With --matrix each system's Python is then tested as `make matrix` does it: for those that this machine has not itself.
Each first has `make` alone, then Python and gcc alone too, where `make demo` must name all that is missing and leave
nothing behind. Packages of Debian and of Python come from where this machine gets them; the tree is HEAD's.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.ops.deploy.chroot import ROOT, Chroot, base_system

# The oldest that README's Python allows, the stable one, and the one to come, whose Python is newer.
SUITES = {"bookworm": "debian", "trixie": "debian", "forky": "debian", "jammy": "ubuntu", "noble": "ubuntu"}
MAKE_SECONDS_MAX = 1800  # PyTorch brings 3 GB where there is no build without CUDA
LINES_SHOWN = 12
TREE = "src"


class BareError(Exception):
    """What the table says of a system that is not as it should be."""


def packages() -> list[str]:
    """What README tells a user to install."""
    (names,) = re.findall(r"`apt-get install ([^`]*)`", (ROOT / "README.md").read_text())
    return str(names).split()


def lend_pip_sources(chroot: Chroot) -> None:
    """Let pip find there what it finds here: its settings as variables, with the files and folders that they name."""
    pip = [sys.executable, "-m", "pip"]
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, timeout=60).stdout
    settings = [line.partition("=")[::2] for line in listed.splitlines()]
    for name, value in sorted(settings, key=lambda setting: setting[0].startswith(":env:")):  # variables win
        key, text = name.rpartition(".")[2], str(ast.literal_eval(value))
        chroot.variables["PIP_" + key.upper().replace("-", "_")] = text
        for word in text.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                chroot.mount(path.parent if "index-url" in key else path)  # an index's files lie beside its pages
    cache = subprocess.run([*pip, "cache", "dir"], capture_output=True, text=True, timeout=60).stdout.strip()
    if cache and Path(cache).is_dir():
        chroot.variables["PIP_CACHE_DIR"] = cache
        chroot.mount(Path(cache), "rw")


def make(chroot: Chroot, log: Path, *targets: str) -> int:
    """`make` in the tree there; both its outputs go into the log."""
    command = chroot.command(["timeout", "--kill-after=30", str(MAKE_SECONDS_MAX), "make", *targets])
    with log.open("w") as output:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode


def install(chroot: Chroot, names: list[str]) -> None:
    """These packages and what they need, without what they recommend."""
    chroot.run("apt-get install -y -qq --no-install-recommends " + " ".join(names) + " >/dev/null")


def check_refusal(chroot: Chroot, log: Path, there: set[str]) -> None:
    """Just the lines of csrc/check-build-needs.sh, in them README's packages that are not there; the tree as it was."""
    tree, temporary = chroot.root / TREE, chroot.root / "tmp"
    before = sorted(tree.rglob("*"))
    status = make(chroot, log, "demo")
    print(log.read_text(), flush=True)
    lines = log.read_text().splitlines()
    starts = ("Soft Memory Box cannot be built", "  missing: ", "on Debian and Ubuntu: ", "on Fedora: ", "make: ***")
    named = {word for line in lines if line.startswith(starts[2]) for word in line.rpartition("install ")[2].split()}
    if status == 0 or not all(line.startswith(starts) for line in lines):
        raise BareError("where packages are missing: other lines than those of the check")
    missing = {*packages(), "python3"} - there
    if named != missing:
        raise BareError(f"the check names {' '.join(sorted(named))}; missing are {' '.join(sorted(missing))}")
    if sorted(tree.rglob("*")) != before or any(temporary.iterdir()):
        raise BareError("the check left something behind")


def run(suite: str, work: Path, matrix: bool) -> str:
    """Set up the system, see it refused, then see the demo train, and test; returns what to tell of it."""
    root, log = work / suite, work / f"{suite}.log"
    base_system(root, ["make", "ca-certificates"], suite, SUITES[suite])
    chroot = Chroot(root)
    (root / TREE).mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(root / TREE)], input=archive, check=True)
    chroot.directory = f"/{TREE}"
    check_refusal(chroot, log, {"make"})
    chroot.variables["DEBIAN_FRONTEND"] = "noninteractive"
    chroot.run("apt-get update -qq")
    install(chroot, ["python3", "gcc"])
    check_refusal(chroot, log, {"make", "python3", "gcc"})
    install(chroot, packages())
    if (root / "usr/bin/git").exists():
        raise BareError("git is there, which a bare system lacks")
    lend_pip_sources(chroot)
    version = subprocess.run(chroot.command(["python3", "-V"]), capture_output=True, text=True, check=True).stdout
    for targets in (["demo"], ["matrix", "MATRIX=python3"])[: 1 + matrix]:
        status = make(chroot, log, *targets)
        shown = LINES_SHOWN if status == 0 else 5 * LINES_SHOWN
        print("".join(f"  {line}\n" for line in log.read_text().splitlines()[-shown:]), flush=True)
        if status != 0:
            raise BareError(f"{version.strip()}: make {targets[0]} ended with {status}")
    return f"{version.strip()}: the demo reached its target" + (", the tests passed" if matrix else "")


def main() -> None:
    """Each suite in turn, its directory removed before the next; then a table. 1 if one failed, or none was tried."""
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        sys.exit("needs root and Debian's mmdebstrap")
    parser = argparse.ArgumentParser(prog="python -m tests.ops.deploy.bare", description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {' '.join(SUITES)}; default: all")
    parser.add_argument("--matrix", action="store_true", help="then make matrix there, on the system's Python")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"no such suite: {' '.join(sorted(unknown))}; there are {' '.join(SUITES)}")
    rows, failed, tried = [], False, 0
    work = Path(tempfile.mkdtemp(prefix="smb-bare-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    work.chmod(0o755)
    try:
        for suite in options.suites or SUITES:
            keys = Path(f"/usr/share/keyrings/{SUITES[suite]}-archive-keyring.gpg")
            if not keys.exists():
                rows.append((suite, f"not tried: this machine's apt does not know {SUITES[suite].title()}'s keys", "-"))
                continue
            print(f"--- {suite}", flush=True)
            tried += 1
            start = time.monotonic()
            try:
                result = run(suite, work, options.matrix)
            except (BareError, subprocess.SubprocessError) as error:
                failed, result = True, f"FAILED: {error}"
            rows.append((suite, result, f"{time.monotonic() - start:.0f} s"))
            shutil.rmtree(work / suite, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for suite, result, seconds in rows:
        print(f"{suite:10} {seconds:>7}  {result}")
    sys.exit(failed or not tried)


if __name__ == "__main__":
    main()
