"""Installs Debian packages that tests need."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
