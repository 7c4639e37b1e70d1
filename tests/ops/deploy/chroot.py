"""The container file's steps without a container engine: each stage is a chroot, and the last one runs a cluster.

    python -m tests.ops.deploy.chroot        as root, with mmdebstrap and the wheels of `make wheel` in dist/;
                                             about five minutes, 1 GB below /var/tmp or TMPDIR

It knows the instructions that the file uses, and refuses others. Debian's packages and Python's come from where this
machine gets them.
"""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILE = ROOT / "deploy/container/Containerfile"
MEMORY = Path("/dev/shm")


def instructions(text: str) -> list[tuple[str, str]]:
    """The file's instructions: lines joined, comments gone."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in joined.splitlines()) if word
    ]


class Chroot:
    """A root directory, and what its processes are started with."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts: list[tuple[Path, str]] = []  # of this machine, at the same place there; options of mount
        self.variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        self.directory, self.user = "/", "0:0"
        for mount in ("proc", "dev"):
            (root / mount).mkdir(exist_ok=True)

    def mount(self, source: Path, options: str = "ro") -> None:
        """Let processes there see a file or folder of this machine, by its name here."""
        target = self.root / str(source).lstrip("/")
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        self.mounts.append((source, options))

    def command(self, words: list[str]) -> list[str]:
        """How to run it there, as its user, with its own view of processes, devices and mounts, which end with it."""
        binds = (
            f"mount --bind -o {options} {shlex.quote(str(source))} {{0}}{shlex.quote(str(source))} && "
            for source, options in self.mounts
        )
        inside = "mount --rbind /dev {0}/dev && mount -t proc proc {0}/proc && " + "".join(binds)
        inside += "exec chroot --userspec={1} {0} "
        inside += "/usr/bin/env -i {2} /bin/sh -c {3}"
        variables = " ".join(shlex.quote(f"{key}={value}") for key, value in self.variables.items())
        shell = shlex.quote(f"cd {self.directory} && exec {shlex.join(words)}")
        return ["unshare", "--mount", "sh", "-c", inside.format(self.root, self.user, variables, shell)]

    def run(self, text: str) -> None:
        """RUN, or any other text of the shell."""
        subprocess.run(self.command(["/bin/sh", "-c", text]), check=True, timeout=900)


def _copy(source: str, target: str) -> None:
    if not Path(source).is_symlink() and not (Path(source).is_file() or Path(source).is_dir()):
        return  # a device
    shutil.copy2(source, target, follow_symlinks=False)


class Stage(Chroot):
    """One FROM: a chroot that begins as a copy of the base."""

    def __init__(self, base: Path, root: Path) -> None:
        shutil.copytree(base, root, symlinks=True, copy_function=_copy)
        super().__init__(root)


def _sources(distribution: str, suite: str) -> list[str]:
    """This machine's sources of packages for another suite of its distribution; [] (mmdebstrap knows one) on others."""
    release = platform.freedesktop_os_release()
    ours = release.get("VERSION_CODENAME", "")
    if release["ID"] != distribution or not ours:
        return []
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
    targets = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    suites = {ours: suite}
    if suite != "sid":  # has neither of them
        suites |= {f"{ours}-{part}": f"{suite}-{part}" for part in ("updates", "security")}
    found = (line.split() for line in targets)
    return [f"deb {uri} {suites[name]} {component}" for uri, name, component in found if name in suites]


def _apt_options() -> list[str]:
    """How this machine's apt fetches: its proxy, how often it tries again, whether an old list will do."""
    options = subprocess.run(["apt-config", "dump"], check=True, capture_output=True, text=True).stdout.splitlines()
    wanted = ("Acquire::http", "Acquire::https", "Acquire::Retries", "Acquire::Check-")
    return [f"--aptopt={line}" for line in options if line.startswith(wanted) and not line.endswith('"";')]


def base_system(root: Path, packages: Sequence[str], suite: str = "bookworm", distribution: str = "debian") -> None:
    """What the distribution's slim image is, and these packages, from where this machine gets its own."""
    include = "--include=" + ",".join(packages)
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", include, *_apt_options(), suite, str(root)]
    subprocess.run([*command, *_sources(distribution, suite)], check=True, timeout=900)
    for path in ("etc/apt/auth.conf.d", "etc/resolv.conf", "etc/hosts", "etc/ssl/certs/ca-certificates.crt"):
        if (Path("/") / path).exists():
            copy = ["cp", "-rL", "--remove-destination", f"/{path}", str((root / path).parent)]
            subprocess.run(copy, check=True)


def _copied(rest: str) -> tuple[list[Path], str]:
    """Return the files and the target of a COPY from the build context, of what the ignore file lets through."""
    *patterns, target = rest.split()
    allowed = [line[1:] for line in Path(f"{FILE}.dockerignore").read_text().splitlines() if line.startswith("!")]
    files = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert len(files) >= len(patterns), f"COPY {rest}: make wheel"
    for path in files:
        name = str(path.relative_to(ROOT))
        assert any(fnmatch.fnmatch(name, line) for line in allowed), f"COPY {name}: the ignore file keeps it out"
    return files, target


def build(work: Path) -> Stage:
    """Do what the file says; return the last stage."""
    base = work / "base"
    base_system(base, ["ca-certificates"])
    if Path("/etc/pip.conf").exists():
        shutil.copy("/etc/pip.conf", base / "etc")
    stages: list[Stage] = []
    names: dict[str, Stage] = {}
    pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_") and key != "PIP_FIND_LINKS"}
    for word, rest in instructions(FILE.read_text()):
        print(word, rest[:100], flush=True)
        if word == "ARG" and not stages:
            assert rest == "BASE=debian:bookworm-slim", rest
            continue
        if word == "FROM":
            assert rest.split()[0] == "${BASE}", rest
            stages.append(Stage(base, work / f"stage-{len(stages)}"))
            if " AS " in rest:
                names[rest.rpartition(" ")[2]] = stages[-1]
            continue
        stage = stages[-1]
        if word == "RUN":
            kept = stage.variables
            stage.variables = kept | pip
            stage.run(rest)
            stage.variables = kept
        elif word == "COPY" and not rest.startswith("--from="):
            files, target = _copied(rest)
            (stage.root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copy2(file, stage.root / target.lstrip("/"))
        elif word == "COPY":
            origin, source, target = rest.removeprefix("--from=").split()
            where = stage.root / target.lstrip("/")
            shutil.copytree(names[origin].root / source.lstrip("/"), where, symlinks=True, dirs_exist_ok=True)
        elif word == "ENV":
            stage.variables |= dict(pair.partition("=")[::2] for pair in shlex.split(rest))
        elif word == "WORKDIR":
            stage.directory = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = rest
        elif word not in ("ARG", "LABEL", "HEALTHCHECK", "STOPSIGNAL", "CMD"):
            raise SystemExit(f"{FILE}: {word} is not known here")
    return stages[-1]


def try_out(stage: Stage, work: Path) -> None:
    """A cluster of the image's programs, as its user, on loopback: a buffer is filled and summed; both end with 0."""
    size = sum(path.lstat().st_size for path in stage.root.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"the image has {size / 2**20:.0f} MiB", flush=True)
    for missing in ("usr/bin/gcc", "opt/smb/bin/pip"):
        assert not (stage.root / missing).exists(), missing
    coordinator = subprocess.Popen(
        stage.command(
            ["smb", "coordinator", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--ready-file", "ready"]
        )
    )
    daemons = [coordinator]
    try:
        ready = stage.root / "var/lib/smb/ready"
        end = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < end, "no coordinator"
            assert coordinator.poll() is None, "the coordinator ended"
            time.sleep(0.1)
        address = json.loads(ready.read_text())["address"]
        stage.variables["SMB_COORDINATOR"] = address
        daemons.append(subprocess.Popen(stage.command(["smb-memserver", "--capacity", "16MiB", "--name", "image"])))
        program = (
            "import os, smb, time\n"
            "assert os.getuid() == 10001\n"
            "with smb.connect() as client:\n"
            "    while not any(server.alive for server in client.servers()): time.sleep(0.1)\n"
            "    buffer = client.create('w', 1000)\n"
            "    buffer.fill(2)\n"
            "    assert buffer.read().sum() == 2000\n"
            "    client.delete('w')\n"
        )
        subprocess.run(stage.command(["/opt/smb/bin/python3", "-c", program]), check=True, timeout=60)
        for daemon in reversed(daemons):
            daemon.terminate()
            assert daemon.wait(30) == 0
    finally:
        for daemon in daemons:
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
    print("the image serves")


def main() -> None:
    """Build in a new directory, try it out, and remove it."""
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        sys.exit("needs root and Debian's mmdebstrap")
    work = Path(tempfile.mkdtemp(prefix="smb-container-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    work.chmod(0o755)
    try:
        try_out(build(work), work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
