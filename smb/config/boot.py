"""The current boot of this machine: process ids, namespaces and file locks are meaningful only within one boot."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Return the kernel's random id of this boot, the same in all containers of a machine; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
