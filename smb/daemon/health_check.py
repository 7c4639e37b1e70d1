"""The container image's health check: `python -m smb.daemon.health_check` ends with 0 if the container's daemon lives.
It belongs to the room of metrics, and no module imports it.

It asks /livez of the daemon that is process 1, at its `metrics` by variable or settings file (not by flag); of both, if
process 1 is another program. A page on a free port cannot be found: then it says so, and ends with 0.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from smb.config.parse import parse_address
from smb.config.settings import CONFIG_VARIABLE, SETTINGS, use_file

_TIMEOUT_S = 4.0
_DAEMONS = ("memserver", "coordinator")
# The proxy that a container may have for its calls does not reach the container itself.
_without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def pages(command: str, environment: Mapping[str, str]) -> list[str]:
    """Return the addresses at which the daemon with this command line, or one of both, has its pages, if its port is
    known.
    """
    named = [daemon for daemon in _DAEMONS if daemon in command][:1] or _DAEMONS
    settings = [SETTINGS[f"{daemon}.metrics"] for daemon in named]
    found = [environment.get(setting.variable or "") or str(setting.default) for setting in settings]
    return [address for address in found if parse_address(address)[1] != 0]


def lives(address: str) -> bool:
    """Whether /livez there answers with 200."""
    try:
        with _without_proxy.open(f"http://{address}/livez", timeout=_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def main() -> int:
    """Return 0 if the daemon lives, else 1."""
    if os.environ.get(CONFIG_VARIABLE):
        use_file(Path(os.environ[CONFIG_VARIABLE]))
    found = pages(Path("/proc/1/cmdline").read_text(), os.environ)
    if not found:
        sys.stdout.write("the daemon's pages have a free port: set SMB_MEMSERVER_METRICS to have them asked\n")
    return int(bool(found) and not any(lives(address) for address in found))


if __name__ == "__main__":
    sys.exit(main())
