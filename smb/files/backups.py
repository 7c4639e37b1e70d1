"""Backups of all buffers of a cluster in a directory, and what is made of one again.

A backup is a directory that appears as a whole: the data of each buffer with its checksums (copying.py), and
`backup.json`, which says what each of them is. The states of buffers that change together can be of one moment
(`together`). A published state is of one generation, and keeps its number; one with deltas= counts from 1 again.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from smb.buffer import Buffer
from smb.buffer_info import BufferInfo
from smb.client import Client
from smb.config.limits import (
    BACKUP_MANIFEST_BYTES_MAX,
    BACKUP_MANIFEST_PARTS_MAX,
    FILE_ATTRIBUTES_BYTES_MAX,
    NAME_CHARACTERS_MAX,
)
from smb.config.untrusted import count_parts, parse_json, quoted, read_file, shortened
from smb.errors import (
    AlreadyExistsError,
    DeadlineError,
    Error,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from smb.files import copying
from smb.files.names import PRIVATE
from smb.files.temporary_names import private_name, sweep
from smb.published import ABOUT, LOG, has_deltas, state_of

MANIFEST = "backup.json"
FORMAT = 1
_TRIES = 3  # attempts at a buffer that others replace meanwhile
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")  # of a buffer, as the coordinator takes it
_DATA = re.compile(r"data-\d{6}\.(bytes|training)")
Say = Callable[[str], None]  # gets one line about each buffer
Owned = Callable[[Collection[str]], Collection[str]]  # which of these names of buffers are parts of trainings


@dataclass(frozen=True, slots=True)
class Entry:
    """One buffer of a backup, or (`kind` training) one training. An empty `file`: it was never published. `state_of`:
    the buffer with which it moves together, which is an earlier entry. `file_attributes`: those of its file, in base64.
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
    file_attributes: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return its fields as the manifest has them: an empty one that earlier releases do not know is left out."""
        fields = asdict(self)
        if not self.file_attributes:
            del fields["file_attributes"]
        return fields


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
    """A backup in the making. Use it in `with`: at the end of the block the directory appears. If the block fails,
    nothing is left.

    entries: what was saved. missing: what could not be saved, by name, each with the reason.
    """

    def __init__(self, client: Client, directory: Path, say: Say = print) -> None:
        """`say` is called for each buffer that is saved or skipped. Raises AlreadyExistsError if there is something at
        the path.
        """
        self._client = client
        self._directory = directory
        self._part = directory.with_name(f"{directory.name}.part")
        self._say = say
        self._text = [0, 0]  # bytes, and brackets and commas, of the entries in the manifest
        self._away: set[str] = set()  # servers that were away when a buffer could not be saved
        self._saved: set[str] = set()  # names of the entries
        self._bundled: dict[tuple[int, ...], list[str]] = {}  # by their bundles: buffers with two copies, in order
        self.entries: list[Entry] = []
        self.missing: dict[str, str] = {}

    def __enter__(self) -> Backup:
        if self._directory.exists() or self._directory.is_symlink():
            raise AlreadyExistsError(f"{self._directory} exists; give each backup a directory of its own")
        self._part.mkdir(mode=0o700, exist_ok=True)
        _make_private(self._part)
        for left in self._part.iterdir():  # of one that was killed
            if not _DATA.match(left.name) and left.name != MANIFEST:
                raise AlreadyExistsError(f"{left} is not of a backup; remove {self._part}, or use another directory")
            left.unlink()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:
            for left in self._part.iterdir():
                left.unlink()
            self._part.rmdir()
            return
        text = {"format": FORMAT, "buffers": [entry.to_json() for entry in self.entries], "missing": self.missing}
        with copying.own_file(self._part / MANIFEST, anew=True) as file:
            file.write(json.dumps(text, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        self._part.rename(self._directory)

    def add_training(self, info: BufferInfo, save: Callable[[Path], int]) -> None:
        """Add a training, by the description of its weights. `save` saves it in a file, and returns its round."""

        def saved() -> None:
            file = self._path("training")
            number = save(file)
            self._append(Entry(info.name, file.name, "training"))
            self._say(f"training {info.name}: round {number}")

        self._attempt([info], saved)

    def add(self, infos: Sequence[BufferInfo], *, together: Sequence[Sequence[str]] = ()) -> None:
        """Write these buffers. `together`: names of buffers whose states are of one moment for clients that change them
        under their locks: the locks are all held while the servers copy the buffers, at the memory's speed.

        A buffer that was deleted meanwhile is skipped. One that cannot be read is `missing`, with all that it should be
        together with. Raises NotFoundError for a name that is not there, InvalidArgumentError for a published one,
        which has a generation of its own, and for one that is named in two of them; Error if no coordinator answers;
        OSError.
        """
        known = {info.name: info for info in infos}
        for info in infos:
            self._bundled.setdefault(info.bundles, []).append(info.name)
        joint: set[str] = set()
        for names in together:
            for name in sorted(set(names)):
                if name not in known:
                    raise NotFoundError(f"together with others: there is no buffer {name!r}")
                if known[name].versions > 1:
                    raise InvalidArgumentError(f"together with others: {name!r} is published by generations")
                if name in joint:
                    raise InvalidArgumentError(f"together with others: {name!r} is in two lists; make them one")
                joint.add(name)
        for names in together:
            joined = [known[name] for name in sorted(set(names))]
            self._attempt(joined, partial(self._add_together, joined))
        for info in infos:
            if info.name not in joint:
                self._attempt([info], partial(self._add_named, info.name))

    def _attempt(self, infos: Sequence[BufferInfo], save: Callable[[], None]) -> None:
        """Save these buffers, or note why they are missing. Raises Error if no coordinator answers."""
        saved = len(self.entries)
        for tries in range(_TRIES):
            try:
                if away := self._servers_away(infos):
                    raise UnavailableError(f"memory server {', '.join(away)} is away, and has the only copy")
                save()
                return
            except BaseException as error:
                self._discard(saved, infos)
                if not isinstance(error, Error):
                    raise
                failure = error
            if isinstance(failure, (UnavailableError, DeadlineError)):
                self._away = _servers_away(self._client)
            there = self._client.list()  # ends the backup if no coordinator answers
            named, ids = {each.name: each for each in there}, {each.id: each.name for each in there}
            if tries + 1 == _TRIES or all(named.get(info.name, info).id == info.id for info in infos):
                break
            infos = [named.get(info.name, info) for info in infos]  # one was replaced meanwhile
        for info in infos:
            if info.id not in ids:
                self._say(f"{info.name}: was deleted meanwhile")
                continue
            renamed = ids[info.id] != info.name
            reason = f"it was renamed to {ids[info.id]!r} meanwhile" if renamed else shortened(failure)
            self.missing[info.name] = reason

    def _discard(self, saved: int, infos: Sequence[BufferInfo]) -> None:
        """Remove what was written of entries after the first `saved` ones."""
        self._saved -= {entry.name for entry in self.entries[saved:]}
        del self.entries[saved:]
        for left in self._part.iterdir():
            if int(left.name[len("data-") :][:6]) > saved:
                left.unlink()
        for info in infos:
            copying.forget(self._client, info, self._path("buffer"))

    def _servers_away(self, infos: Sequence[BufferInfo]) -> list[str]:
        """Return the servers without which these buffers cannot be read, of those that were away before: the calls for
        one buffer have waited for them.
        """
        only = {segment.server for info in infos for segment in info.layout.segments if not segment.backup}
        if only & self._away:
            self._away = _servers_away(self._client)
        return sorted(only & self._away)

    def _append(self, entry: Entry) -> None:
        """Raises Error if no restore could read the manifest then. Half of its bounds is for what is missing."""
        text = json.dumps(entry.to_json(), indent=1)
        size = [self._text[0] + len(text) + 8 * text.count("\n"), self._text[1] + count_parts(text)]
        if size[0] > BACKUP_MANIFEST_BYTES_MAX // 2 or size[1] > BACKUP_MANIFEST_PARTS_MAX // 2:
            raise Error(f"the metadata of all buffers together is too large for one {MANIFEST}")
        self._text = size
        self.entries.append(entry)
        self._saved.add(entry.name)

    def _path(self, kind: str) -> Path:
        """Return the path for the data of the next entry."""
        return self._part / f"data-{len(self.entries) + 1:06d}.{'bytes' if kind == 'buffer' else kind}"

    def _add_named(self, name: str) -> None:
        buffer = self._client.open(name)
        self._add(buffer)
        if self._client.open(name).info.id != buffer.info.id:
            raise NotFoundError(f"{name!r} was replaced meanwhile")  # the file may have the other one's bytes

    def _add(self, buffer: Buffer, still: Buffer | None = None) -> None:
        file, generation, stored = self._path("buffer"), 0, True
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
        others = (each for each in self._bundled.get(info.bundles, ()) if each != info.name and info.replicas > 1)
        first = next(others, "")
        self._append(
            Entry(
                buffer.name, file.name if stored else "", "buffer", buffer.shape, buffer.dtype.name, buffer.versions,
                generation, info.replicas, info.wire, info.layout.stripe_bytes,
                first if first in self._saved else "", buffer.metadata, b64encode(info.file_attributes).decode(),
            )
        )  # fmt: skip
        self._say(f"{buffer.name}: generation {generation}" if generation else buffer.name)

    def _add_together(self, infos: Sequence[BufferInfo]) -> None:
        buffers = [self._client.open(info.name) for info in infos]
        copies: list[Buffer] = []
        try:
            with ExitStack() as locks:
                for buffer in buffers:  # in the order of their names, so that two backups do not wait for each other
                    locks.enter_context(buffer.lock())
                for buffer in buffers:
                    copies.append(copying.beside(self._client, buffer, private_name(buffer.name), 1))
            for buffer, copy in zip(buffers, copies, strict=True):
                self._add(buffer, copy)
        finally:
            for copy in copies:
                sweep(self._client, copy)


def _make_private(directory: Path) -> None:
    """Let nobody else use a directory of this user's. Raises InvalidArgumentError for anything else: other users can
    guess the name, and may have put a link or a directory of theirs there.
    """
    refused = InvalidArgumentError(f"{directory} is no directory of this user's; remove it, or use another directory")
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise refused from error
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise refused
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _servers_away(client: Client) -> set[str]:
    return {server.name for server in client.servers() if not server.alive}


def read_manifest(directory: Path) -> tuple[list[Entry], dict[str, str]]:
    """Return what a backup has, and what it lacks, by name, with the reasons. Raises InvalidArgumentError for anything
    that is not a backup, OSError.
    """
    path = directory / MANIFEST
    try:
        found = parse_json(read_file(path, BACKUP_MANIFEST_BYTES_MAX), BACKUP_MANIFEST_PARTS_MAX)
        if found["format"] != FORMAT:
            raise ValueError(f"it has format {found['format']}, and this release reads {FORMAT}")
        entries: dict[str, Entry] = {}
        for each in found["buffers"]:
            entry = Entry(**{**each, "shape": tuple(each["shape"])})
            _check_entry(entry, entries)
            entries[entry.name] = entry
        missing = {str(name): str(reason) for name, reason in found.get("missing", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(f"{path} is not of a backup: {shortened(error)}") from None
    return list(entries.values()), missing


def _check_entry(entry: Entry, before: Mapping[str, Entry]) -> None:
    """Raise ValueError for an entry that no backup has after those before."""
    texts = (entry.name, entry.file, entry.kind, entry.dtype, entry.wire, entry.state_of, entry.file_attributes)
    numbers = (*entry.shape, entry.versions, entry.generation, entry.replicas, entry.stripe_bytes)
    if not all(isinstance(each, str) for each in texts) or not isinstance(entry.metadata, dict):
        raise ValueError(f"the entry {quoted(entry.name)} has something else where a text or metadata belong")
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError(f"the entry {quoted(entry.name)} has something else where whole numbers belong")
    if entry.kind not in ("buffer", "training"):
        raise ValueError(f"the entry {quoted(entry.name)} is of an unknown kind, {quoted(entry.kind)}")
    if not entry.file and (entry.kind == "training" or entry.versions < 2):  # a state may never have been published
        raise ValueError(f"the entry {quoted(entry.name)} has no file")
    if entry.file and not _DATA.fullmatch(entry.file):
        raise ValueError(f"the entry {quoted(entry.name)} has the file {quoted(entry.file)}")
    if (
        not _NAME.fullmatch(entry.name)
        or len(entry.name) > NAME_CHARACTERS_MAX
        or {".", ".."} & set(entry.name.split("/"))
    ):
        raise ValueError(f"{quoted(entry.name)} cannot name a buffer")
    if len(b64decode(entry.file_attributes, validate=True)) > FILE_ATTRIBUTES_BYTES_MAX:
        raise ValueError(f"the entry {quoted(entry.name)} has more attributes than a file may have")
    if entry.name in before:
        raise ValueError(f"the name {quoted(entry.name)} occurs twice")
    if entry.state_of and (entry.state_of not in before or before[entry.state_of].kind != "buffer"):
        raise ValueError(f"the entry {quoted(entry.name)} moves with {quoted(entry.state_of)}, which is none before it")


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
                copying.write_from(directory / entry.file, buffer, entry.generation)
            say(entry.name)
        check_free(client, entries, replace=replace, owned=owned)  # others may have made buffers meanwhile
        for entry in entries:
            attributes = b64decode(entry.file_attributes)
            copying.give_name(client, made[entry.name], entry.name, replace=replace, attributes=attributes)
            del made[entry.name]
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
