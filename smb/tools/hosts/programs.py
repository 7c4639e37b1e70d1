"""One program on several hosts, in processes that train together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from smb.tools.hosts.names import bare
from smb.tools.hosts.remote import START_S, Remote, Ssh, credentials_files, stop_all

_LOOK_S = 0.2


def run_on(
    ssh: Ssh,
    hosts: Sequence[str],
    words: Sequence[str],
    *,
    processes: int,
    mesh: int,
    environment: dict[str, str],
    credentials: Path | None,
    show: Callable[[str], None],
) -> int:
    """Run a Python program in `processes` processes, spread over the hosts in turn; block until all have ended.

    No hosts: this machine, without ssh. With a mesh each of them is `mesh` ranks under torchrun. Returns 0, or the
    status of one that ended otherwise. One that fails does not end the others, which train on. Raises UnavailableError
    for a host that cannot be reached or is lost, after everything else has ended.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={mesh}"] if mesh else []
    files = credentials_files(credentials) if credentials else {}
    places = list(hosts)[:processes] or [""]
    remotes: list[Remote] = []
    try:
        for index, host in enumerate(places):
            count = len(range(index, processes, len(places)))
            spec = {
                "what": "programs",
                "command": [*torchrun, *words],
                "count": count,
                "environment": environment,
                "credentials": files,
                "directory": str(Path.cwd()),
            }
            prefix = f"{bare(host)}: " if host else ""
            remotes.append(Remote(ssh, host, Path(words[0]).name, spec, _with(prefix, show)))
        deadline = time.monotonic() + START_S
        for remote in remotes:
            remote.wait_event(deadline)
        return _wait(remotes, show)
    finally:
        stop_all(remotes)


def _with(prefix: str, show: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: show(prefix + line)


def _wait(remotes: Sequence[Remote], show: Callable[[str], None]) -> int:
    """Wait until all hosts are done, and return 0, or the first other status that one of them told."""
    left, status = list(remotes), 0
    while left:
        for remote in [each for each in left if not each.running]:
            left.remove(remote)
            ended = int(remote.wait_event(time.monotonic())["status"])
            if ended:
                show(f"{remote.where()} ended with {ended}")
                status = status or ended
        time.sleep(_LOOK_S if left else 0)
    return status
