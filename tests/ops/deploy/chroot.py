"""A root directory of a distribution's packages, and processes in it: for `make bare`, `make wheel-test` and the base
of an image. As root, with mmdebstrap.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]


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
