"""`smb mount DIR` and `smb umount DIR`: a cluster's buffers as files of this host."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from smb.daemon.launch import python_m
from smb.errors import Error
from smb.tools.cli.options import Coordinator
from smb.tools.cli.output import console

_WAIT_S = 30.0  # enough for a Python process that starts on a loaded machine
_READY = b"mounted\n"


def mount(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An empty directory.")],
    foreground: Annotated[
        bool, typer.Option("--foreground", "-f", help="Serve in this process, until Ctrl-C.")
    ] = False,
    allow_other: Annotated[
        bool, typer.Option("--allow-other", help="Let other users of this host use the mount, with its credentials.")
    ] = False,
    umask: Annotated[
        str, typer.Option("--umask", metavar="MASK", help="Octal: permissions that files and directories do not get.")
    ] = "022",
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=1, help="Seconds that a call waits for a server that is away."
        ),
    ] = 120.0,
    replicas: Annotated[
        int, typer.Option("--replicas", metavar="N", min=1, max=2, help="Copies of new files, on different servers.")
    ] = 1,
    staged_files: Annotated[
        Path | None, typer.Option("--drafts", metavar="DIR", help="Directory for new files until they are closed.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="File for errors of the background process.")
    ] = None,
    coordinator: Coordinator = None,
    ready_fd: Annotated[int, typer.Option("--ready-fd", hidden=True)] = -1,
) -> None:
    """Show the cluster's buffers as files in DIR.

    Returns once the mount works; `smb umount DIR` ends it. A killed mount's remains in DIR are removed first.

    Example: smb mount /mnt/smb
    """
    try:
        rights = int(umask, 8)
    except ValueError:
        raise typer.BadParameter(f"--umask must be an octal number such as 022, not {umask!r}") from None
    directory = directory.absolute()
    if not foreground:
        _in_background(directory)
        console().print(f"mounted at {directory}")
        return
    try:
        from smb.files.mount import serve
    except (ImportError, OSError) as error:
        raise Error(
            f"smb mount needs mfusepy and libfuse: pip install 'soft-memory-box[fuse]' and, on Debian, apt-get install "
            f"fuse3 ({error})"
        ) from None
    import smb
    from smb.files.mountpoint import make_way

    make_way(directory)
    with smb.connect(coordinator, timeout=timeout) as client:
        serve(
            client,
            directory,
            on_ready=lambda: _say_ready(directory, ready_fd, log),
            allow_other=allow_other,
            umask=rights,
            staged_files=str(staged_files) if staged_files is not None else None,
            replicas=replicas,
        )


def umount(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the buffers are mounted.")],
    lazy: Annotated[bool, typer.Option("--lazy", help="Also while somebody uses it: it ends when they do.")] = False,
) -> None:
    """End a mount. Files that are being made must be closed before, or are lost.

    Example: smb umount /mnt/smb
    """
    from smb.files.mountpoint import unmount

    unmount(directory.absolute(), lazy=lazy)


def _in_background(directory: Path) -> None:
    """Run this command again in a process of its own, and wait until that process reports the mount."""
    read_end, write_end = os.pipe()
    command = python_m("smb.tools.cli.main", *sys.argv[1:], "--foreground", "--ready-fd", str(write_end))
    # Until the mount is ready, its errors are this command's; later ones go into the log (_say_ready).
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603 - the project's own module
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=(write_end,),
            start_new_session=True,
        )  # fmt: skip
        os.close(write_end)
        ready = select.select([read_end], [], [], _WAIT_S)[0] and os.read(read_end, len(_READY))
        os.close(read_end)
        if ready == _READY:
            return
        if ready != b"":
            process.kill()
        process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().removeprefix("smb: ")
    raise Error(said or f"{directory} was not mounted within {_WAIT_S:g} s; try --foreground")


def _say_ready(directory: Path, ready_fd: int, log: Path | None) -> None:
    if ready_fd < 0:
        console().print(f"mounted at {directory}; Ctrl-C or smb umount ends it")
        sys.stdout.flush()
        return
    later = os.open(log if log is not None else os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(later, sys.stderr.fileno())
    os.close(later)
    os.write(ready_fd, _READY)
    os.close(ready_fd)
