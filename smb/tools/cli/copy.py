"""`smb snapshot`, `smb restore` and `smb cp`: buffers into files, files into buffers, buffers into buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smb.errors import Error, NotFoundError
from smb.tools.cli.connection import connect
from smb.tools.cli.options import Coordinator
from smb.tools.cli.output import console, print_error

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
_INCOMPLETE = 3  # exit code of a backup that lacks buffers which could not be read


def snapshot(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The buffer.")] = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="FILE.npy, FILE.safetensors, or any other: bytes.")
    ] = None,
    everything: Annotated[
        Path | None, typer.Option("--all", metavar="DIR", help="All buffers and trainings, into a new directory.")
    ] = None,
    together: Annotated[
        list[str] | None,
        typer.Option(
            "--together", metavar="NAME,NAME", help="With --all: buffers of one moment, under their locks. Repeatable."
        ),
    ] = None,
    lock: Annotated[bool, typer.Option("--lock", help="Take the copy under the buffer's lock.")] = False,
    quiet: Quiet = False,
    coordinator: Coordinator = None,
) -> None:
    """Write a buffer into a file, while others go on.

    FILE appears when it is whole, with its checksums in FILE.crc32c. Called again after it was interrupted, it goes on.
    With --all, DIR has the whole cluster: smb restore --all DIR makes it again. The exit code is 3 if it lacks buffers
    that could not be read.

    Example: smb snapshot weights weights.npy
    """
    from smb.files import copying

    if everything is not None:
        if name is not None or lock:
            raise typer.BadParameter("--all takes DIR alone, and --together for locks")
        _snapshot_all(everything, [words.split(",") for words in together or ()], quiet, coordinator)
        return
    if name is None or file is None or together:
        raise typer.BadParameter("give NAME and FILE, or --all DIR")
    with connect(coordinator) as client, _progress(f"{name} -> {file}", quiet) as progress:
        if "smb.train" in client.open(name).metadata:
            raise Error(
                f"snapshot of {name!r}: the buffer has the weights of a training, and would lose the rest: use `smb "
                f"train save {name} {file}`, whose files safetensors can open, too"
            )
        copying.snapshot(client, name, file, lock=lock, progress=progress)


def _snapshot_all(directory: Path, together: list[list[str]], quiet: bool, coordinator: str | None) -> None:
    import smb.train
    from smb.files import backups
    from smb.train.training_buffers import trainings_in

    def say(line: str) -> None:
        _say(quiet, line)

    with connect(coordinator) as client, backups.Backup(client, directory, say) as backup:
        infos = backups.kept(client)
        trainings, owned = trainings_in(client, {info.name for info in infos})
        for info in infos:
            if info.name in trainings:
                backup.add_training(info, functools.partial(smb.train.save, client, info.name))
        backup.add([info for info in infos if info.name not in owned], together=together)
    console().print(f"{len(backup.entries)} buffers and trainings: {directory}")
    if backup.missing:
        for name, reason in backup.missing.items():
            print_error(f"not in the backup: {name}: {reason}")
        raise typer.Exit(_INCOMPLETE)


def _restore_all(directory: Path, replace: bool, quiet: bool, coordinator: str | None) -> None:
    import smb.train
    from smb.files import backups
    from smb.train.training_buffers import trainings_in

    entries, missing = backups.read_manifest(directory)
    for name, reason in missing.items():
        print_error(f"not in the backup: {name}: {reason}")
    trainings = [entry for entry in entries if entry.kind == "training"]
    with connect(coordinator) as client:

        def owned(names: Collection[str]) -> Collection[str]:
            return trainings_in(client, names)[1]

        backups.check_free(client, entries, replace=replace, owned=owned)
        buffers = [entry for entry in entries if entry.kind == "buffer"]
        backups.restore(client, directory, buffers, owned=owned, replace=replace, say=lambda line: _say(quiet, line))
        for entry in trainings:
            number = smb.train.load(client, entry.name, directory / entry.file)
            _say(quiet, f"training {entry.name}: round {number}")
    console().print(f"{len(entries)} buffers and trainings, from {directory}")


def _say(quiet: bool, line: str) -> None:
    if not quiet:
        console(stderr=True).print(line)


def restore(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A file that snapshot wrote, or any other.")
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The buffer to be made.")] = None,
    everything: Annotated[
        Path | None, typer.Option("--all", metavar="DIR", help="All that smb snapshot --all wrote there.")
    ] = None,
    replace: Replace = False,
    replicas: Replicas = None,
    quiet: Quiet = False,
    coordinator: Coordinator = None,
) -> None:
    """Make a buffer of a file.

    A .npy becomes an array, a .safetensors named tensors. The file is checked against FILE.crc32c where there is one.
    The buffer appears when it is whole. Called again after it was interrupted, it goes on.
    With --all, buffers that exist are replaced only with --replace; delete a training first.

    Example: smb restore weights.npy weights
    """
    from smb.files import copying

    if everything is not None:
        if file is not None or replicas is not None:
            raise typer.BadParameter("--all takes DIR, and --replace")
        _restore_all(everything, replace, quiet, coordinator)
        return
    if file is None or name is None:
        raise typer.BadParameter("give FILE and NAME, or --all DIR")
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
