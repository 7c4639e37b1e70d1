"""Installs Debian packages that tests need.

`python3 -m tests.support.packages TOOL...` installs those of the tools in TOOLS that are missing, as root, in one run
of the package manager, since each update of its lists takes seconds. Tests whose tool is missing are reported as not
run, so the exit code is 0 also if a tool could not be installed; a line says so.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Tool(NamedTuple):
    """A program or a file of Debian packages, and what happens without it."""

    sign: str
    packages: tuple[str, ...]
    without: str

    def missing(self) -> bool:
        """Whether it is not on this machine."""
        return not (shutil.which(self.sign) or Path(self.sign).is_file())


_PYTHON = Path("/usr/bin/python3").resolve().name  # Debian's own: python3.11, for example

TOOLS = {
    "chromium": Tool("chromium", ("chromium",), "the page is not tested"),
    "etcd-server": Tool("etcd", ("etcd-server", "etcd-client"), "what needs etcd is not run"),
    "fuse3": Tool("fusermount3", ("fuse3",), "nothing is mounted"),
    "fio": Tool("fio", ("fio",), "it does not write to a mount"),
    "iproute2": Tool("ip", ("iproute2",), "no network namespaces are made"),
    "libssl": Tool("/usr/include/openssl/ssl.h", ("libssl-dev",), "the engine does not compile"),
    "mmdebstrap": Tool("mmdebstrap", ("mmdebstrap",), "no bare system is made"),
    "nftables": Tool("nft", ("nftables",), "no network is cut"),
    "openssh-server": Tool("/usr/sbin/sshd", ("openssh-server", "openssh-client"), "smb up --hosts is not tried"),
    "openssl": Tool("openssl", ("openssl",), "no certificates are made by it"),
    "podman": Tool("podman", ("podman",), "no image is built"),
    "prometheus": Tool("promtool", ("prometheus",), "what needs Prometheus is not run"),
    "python3-tests": Tool(
        f"/usr/lib/{_PYTHON}/test/test_os.py", (f"lib{_PYTHON}-testsuite",), "CPython's tests may be missing"
    ),
    "runc": Tool("runc", ("runc",), "no container runs"),
    "spin": Tool("spin", ("spin",), "the models are not run"),
    "stress-ng": Tool("stress-ng", ("stress-ng",), "it does not use a mount"),
    "systemd": Tool("systemd-analyze", ("systemd",), "units are not checked"),
    "tmux": Tool("tmux", ("tmux",), "smb top is not tried in a terminal"),
}


class PackagesError(Exception):
    """Packages are missing, and could not be installed."""


def install(wanted: Sequence[str]) -> None:
    """Install those of the packages that are missing, as root or with sudo. Blocks.

    A signal ends a download, but is put off while packages are unpacked and configured: if one is half installed, every
    later installation fails. Raises PackagesError with the packages that are missing, and with apt's own reason.
    """
    if not shutil.which("dpkg-query"):
        raise PackagesError(f"this is no Debian: what Debian has as {', '.join(wanted)} has to be there by other ways")
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted]
    shown = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout
    installed = {line.split()[0] for line in shown.splitlines() if line.endswith(" installed")}
    missing = [package for package in wanted if package not in installed]
    if not missing:
        return
    by_hand = f"as root: apt-get install --no-install-recommends {' '.join(missing)}"
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if root and not shutil.which("sudo"):
        raise PackagesError(f"neither root nor sudo; {by_hand}")
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    words = ["install", "-y", "--no-install-recommends", *missing]
    for step, whole in ((["update"], False), ([*words, "--download-only"], False), (words, True)):
        with tempfile.TemporaryFile() as told, _signals_put_off() if whole else nullcontext():
            # In a session of its own it has no signal of the terminal's or of a group's.
            status = subprocess.run(
                [*apt, *step], stdout=subprocess.DEVNULL, stderr=told, start_new_session=whole, check=False
            ).returncode
            told.seek(0)
            reason = _reason(told.read().decode(errors="replace")) or f"exit status {status}"
        if status:
            raise PackagesError(f"apt-get {step[0]} failed: {reason}; {by_hand}")


def _reason(told: str) -> str:
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return " ".join([line for line in lines if line.startswith("E: ")] or lines[-1:])


@contextmanager
def _signals_put_off() -> Iterator[None]:
    """Put off what would end this process until the block has ended."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def install_tools(names: Sequence[str]) -> list[str]:
    """Install the tools that are missing, all at once, or one by one if that fails, since a tool may have no package.
    Return a line for each that is still missing.
    """
    missing = [name for name in names if TOOLS[name].missing()]
    if missing and os.geteuid() == 0:
        with _no_services():
            try:
                install([package for name in missing for package in TOOLS[name].packages])
            except PackagesError:
                for name in missing:
                    try:
                        install(TOOLS[name].packages)
                    except PackagesError:
                        continue
    return [
        f"{name} is not here and could not be installed ({', '.join(TOOLS[name].packages)}): {TOOLS[name].without}"
        for name in missing
        if TOOLS[name].missing()
    ]


@contextmanager
def _no_services(policy: Path = Path("/usr/sbin/policy-rc.d")) -> Iterator[None]:
    """Let packages start no services, which would take ports and stay."""
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            policy.unlink()


def main() -> None:
    """Install the tools that the arguments name."""
    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    for line in install_tools(sys.argv[1:]):
        print(line)


if __name__ == "__main__":
    main()
