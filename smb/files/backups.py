"""Backups of all buffers of a cluster in a directory, and what is made of one again.

A backup is a directory that appears as a whole: the data of each buffer with its checksums (copying.py), and
`backup.json`, which says what each of them is. The states of buffers that change together can be of one moment
(`together`). A published state is of one generation; made again, it is published once, and counts from 1.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smb.buffer import Buffer
from smb.buffer_info import BufferInfo
from smb.client import Client
from smb.config.untrusted import open_regular, parse_json
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError
from smb.files import copying
from smb.files.names import PRIVATE
from smb.files.temporary_names import private_name, sweep
from smb.published import ABOUT, LOG, has_deltas, state_of

MANIFEST = "backup.json"
FORMAT = 1
_PARTS_MAX = 20_000_000  # commas and brackets of a manifest: of 100 000 buffers with some metadata
_DATA = re.compile(r"data-\d{6}\.(bytes|training)")
Say = Callable[[str], None]  # gets one line about each buffer
Owned = Callable[[Collection[str]], Collection[str]]  # which of these names of buffers are parts of trainings


@dataclass(frozen=True, slots=True)
class Entry:
    """One buffer of a backup, or (`kind` training) one training. An empty `file`: it was never published. `state_of`:
    the buffer with which it moves together, which is an earlier entry.
    """

    name: str
    file: str
    kind: str = "buffer"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    versions: int = 1
    generation: int = 0
    replicas: int = 1
    wire: str = "exact"
    stripe_bytes: int = 0
    state_of: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


def kept(client: Client) -> list[BufferInfo]:
    """Return the buffers that a backup has, by name: without mirrors, private buffers and logs of published states,
    which are made anew.
    """
    infos = client.list()
    several = {info.name for info in infos if info.versions > 1}

    def is_log(name: str) -> bool:
        of = state_of(name)
        if of not in several:
            return False
        try:
            return has_deltas(client.open(of))
        except NotFoundError:  # deleted meanwhile, and its log with it
            return True

    return [
        info
        for info in sorted(infos, key=lambda each: each.name)
        if not info.mirror_of and PRIVATE not in info.name.split("/") and not is_log(info.name)
    ]


class Backup:
    """A backup in the making. Use it in `with`: at the end of the block the directory appears, unless it fails."""

    def __init__(self, client: Client, directory: Path) -> None:
        """Raises AlreadyExistsError if there is something at the path."""
        self._client = client
        self._directory = directory
        self._part = directory.with_name(f"{directory.name}.part")
        self.entries: list[Entry] = []

    def __enter__(self) -> Backup:
        if self._directory.exists():
            raise AlreadyExistsError(f"{self._directory} exists; give each backup a directory of its own")
        self._part.mkdir(mode=0o700, exist_ok=True)
        for left in self._part.iterdir():  # of an interrupted one
            if not _DATA.match(left.name) and left.name != MANIFEST:
                raise AlreadyExistsError(f"{left} is not of a backup; remove {self._part}, or use another directory")
            left.unlink()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            text = {"format": FORMAT, "buffers": [asdict(entry) for entry in self.entries]}
            with (self._part / MANIFEST).open("w") as file:
                file.write(json.dumps(text, indent=1))
                file.flush()
                os.fsync(file.fileno())
            self._part.rename(self._directory)

    def path(self, kind: str) -> Path:
        """Return the path for the data of the next entry."""
        return self._part / f"data-{len(self.entries) + 1:06d}.{'bytes' if kind == 'buffer' else kind}"

    def add_training(self, name: str, file: Path) -> None:
        """Add a training that was saved in that file."""
        self.entries.append(Entry(name, file.name, "training"))

    def add(self, infos: Sequence[BufferInfo], *, together: Sequence[Sequence[str]] = (), say: Say = print) -> None:
        """Write these buffers. `together`: names of buffers whose states are of one moment for clients that change them
        under their locks: the locks are all held while the servers copy the buffers, at the memory's speed.

        Raises NotFoundError for a name that is not there, InvalidArgumentError for a published one, which has a
        generation of its own, and as copying.snapshot does.
        """
        known = {info.name for info in infos}
        for name in (each for names in together for each in names):
            if name not in known:
                raise NotFoundError(f"together with others: there is no buffer {name!r}")
        joint = {name for names in together for name in names}
        for names in together:
            self._add_together(sorted(set(names)), infos, say)
        for info in infos:
            if info.name not in joint:
                self._add(self._client.open(info.name), infos, say)

    def _add(self, buffer: Buffer, infos: Sequence[BufferInfo], say: Say, still: Buffer | None = None) -> None:
        file, generation, stored = self.path("buffer"), 0, True
        try:
            if still is not None:
                copying.write_still(still, file)
            else:
                generation = copying.snapshot(self._client, buffer.name, file)
        except NotFoundError:
            if buffer.versions == 1 or buffer.version:
                raise
            stored = False  # it was never published
        info = buffer.info
        first = next(
            (each for each in infos if each.id != info.id and info.replicas > 1 and each.moves_with(info)), None
        )
        done = {entry.name for entry in self.entries}
        self.entries.append(
            Entry(
                buffer.name, file.name if stored else "", "buffer", buffer.shape, buffer.dtype.name, buffer.versions,
                generation, info.replicas, info.wire, info.layout.stripe_bytes,
                first.name if first is not None and first.name in done else "", buffer.metadata,
            )
        )  # fmt: skip
        say(f"{buffer.name}: generation {generation}" if generation else buffer.name)

    def _add_together(self, names: Sequence[str], infos: Sequence[BufferInfo], say: Say) -> None:
        buffers = [self._client.open(name) for name in names]
        for buffer in buffers:
            if buffer.versions > 1:
                raise InvalidArgumentError(f"together with others: {buffer.name!r} is published by generations")
        copies: list[Buffer] = []
        try:
            with ExitStack() as locks:
                for buffer in buffers:  # in the order of their names, so that two backups do not wait for each other
                    locks.enter_context(buffer.lock())
                for buffer in buffers:
                    copies.append(copying.beside(self._client, buffer, private_name(buffer.name), 1))
            for buffer, copy in zip(buffers, copies, strict=True):
                self._add(buffer, infos, say, copy)
        finally:
            for copy in copies:
                sweep(self._client, copy)


def read_manifest(directory: Path) -> list[Entry]:
    """Return what a backup has. Raises InvalidArgumentError for anything that is not a backup, OSError."""
    path = directory / MANIFEST
    with os.fdopen(open_regular(path), "rb") as file:
        text = file.read()
    try:
        found = parse_json(text, _PARTS_MAX)
        if found["format"] != FORMAT:
            raise ValueError(f"it has format {found['format']}, and this version reads {FORMAT}")
        entries = [Entry(**{**each, "shape": tuple(each["shape"])}) for each in found["buffers"]]
        for entry in entries:
            if not isinstance(entry.name, str) or (entry.file and not _DATA.fullmatch(entry.file)):
                raise ValueError(f"an entry has the name {entry.name!r} and the file {entry.file!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"{path} is not of a backup: {error}") from None
    return entries


def check_free(client: Client, entries: Sequence[Entry], *, replace: bool, owned: Owned) -> None:
    """Raise AlreadyExistsError if something that the cluster has is in the way of these entries, before anything is
    made. With `replace` buffers are not, except those that cannot be replaced in one step: parts of trainings, mirrored
    buffers, and states with deltas=, which have a log beside them.
    """
    infos = client.list()
    there = {info.name for info in infos}
    taken = [entry for entry in entries if entry.name in there]
    parts = owned(there)
    mirrored = {name for info in infos if info.mirror_of for name in (info.name, info.mirror_of)}
    for names, advice in (
        ([each.name for each in taken if not replace], "replace buffers with --replace"),
        (
            [each.name for each in taken if each.kind == "training" or each.name in parts],
            "delete these trainings first: smb train rm",
        ),
        ([each.name for each in taken if each.name in mirrored], "stop their relays first: smb relay NAME --stop"),
        (
            [each.name + LOG for each in entries if each.name + LOG in there and _has_log(client, each)],
            "these are logs of states with deltas=; delete them, and the states, first: smb rm",
        ),
    ):
        if names:
            shown = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise AlreadyExistsError(f"these exist: {shown}; nothing was restored; {advice}")


def _has_log(client: Client, entry: Entry) -> bool:
    """Return True if the log beside the entry's name would belong to the state, or belongs to one that is there."""
    metadata = [entry.metadata]
    with suppress(NotFoundError):
        metadata.append(client.open(entry.name).metadata)
    about = (each.get(ABOUT) for each in metadata)
    return any(isinstance(each, dict) and each.get("deltas") for each in about)


def restore(
    client: Client, directory: Path, entries: Sequence[Entry], *, owned: Owned, replace: bool = False, say: Say = print
) -> None:
    """Make the buffers of a backup again (not its trainings). They get their names, one after the other, when the data
    of all is there, and if nothing is in the way then: after a failure before that, nothing is left behind. Raises as
    check_free and copying.restore do.
    """
    made: dict[str, Buffer] = {}
    try:
        for entry in entries:
            made[entry.name] = buffer = _create(client, entry, made)
            if entry.file:
                _fill(buffer, directory / entry.file)
            say(entry.name)
        check_free(client, entries, replace=replace, owned=owned)  # others may have made buffers meanwhile
        for name in list(made):
            client.rename(made[name], name, replace=replace)
            del made[name]
    finally:
        for left in made.values():
            sweep(client, left)


def _create(client: Client, entry: Entry, made: dict[str, Buffer]) -> Buffer:
    private, metadata = private_name(entry.name), entry.metadata or None
    if entry.state_of in made:
        return client.create(private, state_of=made[entry.state_of], wire=entry.wire, metadata=metadata)
    return client.create(
        private, entry.shape, entry.dtype, versions=entry.versions, replicas=entry.replicas, wire=entry.wire,
        stripe=entry.stripe_bytes or None, metadata=metadata,
    )  # fmt: skip


def _fill(buffer: Buffer, path: Path) -> None:
    """Check a file against its checksums, and write it into the buffer."""
    for _ in copying.checked_blocks(path):
        pass
    # An array of no elements has one in memory.
    data = np.memmap(path, np.uint8, "r")[: buffer.nbytes] if buffer.size else np.empty(0, np.uint8)
    if data.size != buffer.nbytes:
        raise Error(f"{path} has {data.size} bytes, and buffer {buffer.name!r} {buffer.nbytes}")
    values = data.view(buffer.dtype).reshape(buffer.shape)
    if buffer.versions > 1:
        buffer.publish(values)
    elif values.size:
        buffer.write(values, wire=None if buffer.wire == "exact" else "exact")
