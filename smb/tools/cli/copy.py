"""`smb snapshot`, `smb restore` and `smb cp`: buffers into files, files into buffers, buffers into buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smb.errors import Error, NotFoundError
from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator
from smb.tools.cli.output import console

if TYPE_CHECKING:
    from smb import Client

Replace = Annotated[bool, typer.Option("--replace", help="A buffer of that name is replaced, in one step.")]
Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas", metavar="N", min=1, max=2,
        help="Copies, on different servers. [default: as of what is copied, or replaced]",
    ),
]  # fmt: skip
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


def snapshot(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The buffer.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="FILE.npy, FILE.safetensors, or any other: bytes.")],
    lock: Annotated[bool, typer.Option("--lock", help="Take the copy under the buffer's lock.")] = False,
    quiet: Quiet = False,
    coordinator: Coordinator = None,
) -> None:
    """Write a buffer into a file, while others go on.

    FILE appears when it is whole, with its checksums in FILE.crc32c. Called again after it was interrupted, it goes on.

    Example: smb snapshot weights weights.npy
    """
    from smb.files import copying

    with connect(coordinator) as client, _progress(f"{name} -> {file}", quiet) as progress:
        if "smb.train" in client.open(name).metadata:
            raise Error(
                f"snapshot of {name!r}: the buffer has the weights of a training, and would lose the rest: use `smb "
                f"train save {name} {file}`, whose files safetensors can open, too"
            )
        copying.snapshot(client, name, file, lock=lock, progress=progress)


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that snapshot wrote, or any other.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The buffer to be made.")],
    replace: Replace = False,
    replicas: Replicas = None,
    quiet: Quiet = False,
    coordinator: Coordinator = None,
) -> None:
    """Make a buffer of a file.

    A .npy becomes an array, a .safetensors named tensors. The file is checked against FILE.crc32c where there is one.
    The buffer appears when it is whole. Called again after it was interrupted, it goes on.

    Example: smb restore weights.npy weights
    """
    from smb.files import copying

    _check_file(file)
    with connect(coordinator) as client, _progress(f"{file} -> {name}", quiet) as progress:
        copying.restore(client, file, name, replace=replace, replicas=replicas, progress=progress)


def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="NAME, softmem://HOST:PORT/NAME, or a file: ./FILE.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="NAME, softmem://HOST:PORT/NAME, or a file: ./FILE.")],
    replace: Replace = False,
    replicas: Replicas = None,
    quiet: Quiet = False,
    coordinator: Coordinator = None,
) -> None:
    """Copy between buffers, files and clusters.

    A path that begins with /, ./ or ../ is a file of this host. Within a cluster the servers copy:
    no bytes travel here.

    Example: smb cp weights softmem://storage-2:7070/weights
    """
    from smb.files import copying

    from_file, to_file = _is_file(source), _is_file(target)
    if from_file and to_file:
        raise typer.BadParameter("both are files of this host; use cp for them")
    with ExitStack() as stack:
        progress = stack.enter_context(_progress(f"{source} -> {target}", quiet))
        if from_file:
            _check_file(Path(source))
            client, name = _at(stack, target, coordinator)
            copying.restore(client, Path(source), name, replace=replace, replicas=replicas, progress=progress)
            return
        client, name = _at(stack, source, coordinator)
        if to_file:
            if Path(target).exists() and not replace:
                raise Error(f"{target} exists; pass --replace to overwrite it")
            copying.snapshot(client, name, Path(target), progress=progress)
            return
        there, new_name = _at(stack, target, coordinator, client)
        try:
            copying.copy_buffer(client, name, there, new_name, replace=replace, replicas=replicas, progress=progress)
        except NotFoundError as error:
            if not Path(source).is_file():
                raise
            raise NotFoundError(f"{error}; for the file of that name write ./{source}") from None


def _is_file(word: str) -> bool:
    return word.startswith(("/", "./", "../"))


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise Error(f"file {file} does not exist")


def _at(stack: ExitStack, word: str, coordinator: str | None, known: Client | None = None) -> tuple[Client, str]:
    """Return the client of the cluster that a word names, and the name there."""
    from smb.files.open_file import split_url

    address, name = split_url(word)
    address = address or coordinator
    if known is not None and known.address == address:
        return known, name
    return stack.enter_context(connect(address)), name


@contextmanager
def _progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), disable=quiet)
    task = bar.add_task(what, total=None)

    def show(done: int, total: int) -> None:
        bar.start()  # started late, so that nothing is shown for a call that is refused, or copied by the servers
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
