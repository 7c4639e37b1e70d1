"""The hosts of `--hosts`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from smb.errors import InvalidArgumentError
from smb.security.roles import Role

HOSTS_MAX = 256
# Of user@host. No host begins with "-", which ssh would take for an option.
_HOST = re.compile(r"(?:[A-Za-z0-9._][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*")
_SCONTROL_S = 30.0
_TAKEN = {"ca", *(role.value for role in Role if role is not Role.SERVER)}  # beside the servers' directories


def hosts_of(text: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the hosts of "a,b,user@c"; of "@FILE", with a host on each line; or of "slurm", the nodes of this job.

    Raises InvalidArgumentError for a text without hosts, and for a host that is named twice or has no usable name.
    """
    if text == "slurm":
        words = _nodes(environment)
    elif text.startswith("@"):
        try:
            lines = Path(text[1:]).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"--hosts {text}: cannot read the file: {error}") from None
        words = [word for line in lines if (word := line.partition("#")[0].strip())]
    else:
        words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InvalidArgumentError(f'--hosts {text}: there is no host in it; write "a,b", "@FILE" or "slurm"')
    for word in words:
        if not _HOST.fullmatch(word):
            raise InvalidArgumentError(
                f'--hosts: "{word}" is not HOST or USER@HOST; a port or key of ssh belongs into ~/.ssh/config'
            )
    names = [bare(word) for word in words]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(f"--hosts: {', '.join(twice)} stands there twice; a host has one memory server")
    if len(words) > HOSTS_MAX:
        raise InvalidArgumentError(f"--hosts: {len(words)} hosts, and one command starts at most {HOSTS_MAX}")
    return words


def check_servers(hosts: Sequence[str]) -> None:
    """Raise InvalidArgumentError if one of the hosts can't have a memory server under its name."""
    for name in map(bare, hosts):
        if name in _TAKEN:
            raise InvalidArgumentError(
                f'--hosts: "{name}" is the name of a directory beside the certificates of the memory servers; name the '
                f"host by its address or with its domain"
            )
        if len(hosts) > 1 and (name == "localhost" or name.startswith("127.")):
            raise InvalidArgumentError(
                f"--hosts: each host would take {name} for itself; name this machine as the others know it"
            )


def bare(host: str) -> str:
    """Return a host's name without the user."""
    return host.rpartition("@")[2]


def _nodes(environment: Mapping[str, str]) -> list[str]:
    """Return the nodes of this Slurm job; `scontrol` knows what node[1-3,7] stands for."""
    listed = environment.get("SLURM_JOB_NODELIST")
    if not listed:
        raise InvalidArgumentError("--hosts slurm: SLURM_JOB_NODELIST is not set; use it within a job of Slurm")
    scontrol = shutil.which("scontrol", path=environment.get("PATH"))
    if scontrol is None:
        raise InvalidArgumentError("--hosts slurm: there is no scontrol, which lists the job's nodes")
    command = [scontrol, "show", "hostnames", listed]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_S)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidArgumentError(f"--hosts slurm: scontrol failed: {error}") from None
    if done.returncode != 0:
        raise InvalidArgumentError(f"--hosts slurm: scontrol failed: {done.stderr.strip()[:500]}")
    return done.stdout.split()
