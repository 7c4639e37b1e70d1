"""Installs Debian packages that tests need."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class PackagesError(Exception):
    """Packages are missing, and could not be installed."""


def install(wanted: Sequence[str]) -> None:
    """Install those of the packages that are missing, as root or with sudo. Blocks.

    Ctrl-C ends a download, but is put off while packages are unpacked and configured: one that is half installed makes
    every later installation fail. Raises PackagesError with the packages that are missing, and with apt's own reason.
    """
    if not shutil.which("dpkg-query"):
        raise PackagesError(f"this is no Debian: what Debian has as {', '.join(wanted)} has to be there by other ways")
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted]
    shown = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout
    installed = {line.split()[0] for line in shown.splitlines() if line.endswith(" installed")}
    missing = [package for package in wanted if package not in installed]
    if not missing:
        return
    words = ["install", "-y", "--no-install-recommends", *missing]
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if root and not shutil.which("sudo"):
        raise PackagesError(f"neither root nor sudo; as root: {shlex.join(['apt-get', *words])}")
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    for step in (["update"], words):
        with _signals_put_off():  # else subprocess.run would kill apt-get, with dpkg at work
            run = subprocess.run([*apt, *step], capture_output=True, text=True, errors="replace", check=False)
        if run.returncode:
            raise PackagesError(f"'{shlex.join([*apt, *step])}' failed: {_reason(run)}")


def _reason(run: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E: ")] or lines[-1:]
    return " ".join(errors) or f"exit status {run.returncode}"


@contextmanager
def _signals_put_off() -> Iterator[None]:
    """Put off what would end this process until the block has ended. Programs that run meanwhile get their signals."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)
