"""Snapshots, and copying between buffers, files and clusters, streamed from all servers at once.

A snapshot reads data that does not change: a pinned version, or a second buffer that the servers fill among themselves
(without a transfer to this process) and that is deleted at the end. If they cannot make it (no room, a drained server,
a reader's certificate), the snapshot reads the buffer itself, and starts again after an interruption. Beside FILE lies
FILE.crc32c with the CRC-32C of each block: an interrupted snapshot continues from it, and restore checks what it reads
against it. A restore in progress has a progress file of its own (checksums.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from smb.buffer import Buffer
from smb.buffer_info import BufferInfo
from smb.client import Client
from smb.config.untrusted import open_regular
from smb.errors import (
    NOT_APPLIED,
    AlreadyExistsError,
    DeadlineError,
    Error,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    PermissionDeniedError,
    UnavailableError,
)
from smb.files.attributes import decode
from smb.files.checksums import BLOCK_BYTES, RestoreProgress, Sums, state_of
from smb.files.contents import Live, Octets, Reads
from smb.files.formats import FileSpec, FileView, header_bytes, spec_of, view_of
from smb.files.names import Form
from smb.files.temporary_names import create, private_name, sweep
from smb.spi import LOST, crc32c, memory_of, note_name, rename_file, versions_of

_PIN_S = 30.0
_TURN_S = 10.0  # a publisher's turn, which is renewed
# The servers cannot copy a buffer. Another server may have room; a reader's certificate cannot create buffers.
_NO_COPY = (InvalidArgumentError, OutOfMemoryError, PermissionDeniedError, UnavailableError)

_log = logging.getLogger("smb")

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def sums_path(path: Path) -> Path:
    """Return the path of a file's checksums."""
    return path.with_name(path.name + ".crc32c")


def snapshot(client: Client, name: str, path: Path, *, lock: bool = False, progress: Progress = lambda *_: None) -> int:
    """Write a buffer into a file, as .npy, .safetensors or bytes by the file's name; return its version, 0 if it has
    none.

    A buffer with versions=2 is written as its latest version, whole. Publishers may have to wait for the snapshot, up
    to 30 s; Error if it takes longer and the version is overwritten.

    Any other buffer is copied by the servers first, while other clients continue. Each chunk is whole, and has its
    state of some time while they copied, which runs at the memory's speed. With `lock`, under the buffer's lock, the
    snapshot is one moment for clients that change the buffer under that lock. The second buffer needs as much memory as
    the first. If it cannot be made, the buffer itself is read, with a warning: chunks then have their states of some
    time while the file was written, and the lock is held for so long.

    FILE appears as a whole at the end. A call after an interruption continues where the first one stopped, if that
    buffer or the version still exists; otherwise it starts again. Raises Error and OSError.
    """
    buffer = client.open(name)
    form = next((form for form in (Form.NPY, Form.SAFETENSORS) if path.name.endswith(form.value)), Form.RAW)
    view = view_of(form, buffer.dtype, buffer.shape, buffer.table or None, buffer.metadata)
    if view is None:
        raise InvalidArgumentError(
            f"snapshot of {name!r} into {path.name}: the buffer has no named tensors; write a .npy file, or plain bytes"
        )
    part = _part(path)
    if buffer.versions > 1:
        with buffer.pin(ttl=_PIN_S) as pin:
            _into_file(
                _Pinned(pin, buffer, view), f"{buffer.info.id:x}@{pin.version}{form.value}", part, path, progress
            )
            return pin.version
    try:
        copy = _still(client, buffer, part, lock=lock)
    except _NO_COPY as error:
        if error.outcome != NOT_APPLIED:
            raise
        _log.warning("snapshot of %r: the servers cannot copy it, so it is read while it may change (%s)", name, error)
        _read_into_file(buffer, view, part, path, progress, lock=lock)
        return 0
    # The key is that buffer's id: one that was deleted and made again has the same name, but another moment's data.
    _into_file(Live(copy, view), f"{copy.info.id:x}{form.value}", part, path, progress)
    sweep(client, copy)
    return 0


def restore(
    client: Client, path: Path, name: str, *, replace: bool = False, replicas: int | None = None,
    progress: Progress = lambda *_: None,
) -> Buffer:  # fmt: skip
    """Make a buffer from a file: an array from .npy, named tensors from .safetensors, else bytes; return the buffer.

    The buffer gets its name when all data is in it. With `replace` it takes the place of an existing buffer in the same
    step. It keeps the rights of that one's file, and has as many copies, unless `replicas` is given (default 1). If
    there is a FILE.crc32c, the data is checked against it. Raises AlreadyExistsError, OutOfMemoryError, Error for a
    wrong checksum; nothing is left behind then. A call after an interruption (a signal, servers away) continues where
    the first one stopped, if the file is unchanged. It starts again if FILE's directory cannot be written to.
    """
    with LocalFile(path) as source:
        sums = _sums_beside(path)
        if sums is not None and (sums.nbytes, len(sums.blocks)) != (source.nbytes, _count(source)):
            raise Error(
                f"restore of {path}: the file has {source.nbytes} bytes, but {sums_path(path).name} is for "
                f"{sums.nbytes}, with {len(sums.blocks)} checksums"
            )
        spec = _spec(path.name, name, source)
        checked = source if sums is None else _CheckedSource(source, sums.blocks, str(path))
        # With the host: the same path on another host is another file, whose restore may be in progress.
        with state_of(path, f"{socket.gethostname()} {client.address} {name}") as state:
            if state is None:
                rights = _rights_there(client, name, replace)
                return _into_buffer(client, checked, spec, name, replace, replicas, progress, attributes=rights)
            return _restored(client, checked, spec, name, replace, replicas, progress, state)


def copy_buffer(
    source: Client, name: str, target: Client, new_name: str, *, replace: bool = False, replicas: int | None = None,
    progress: Progress = lambda *_: None,
) -> Buffer:  # fmt: skip
    """Copy a buffer under another name, with its dtype, shape, tensors, metadata and its file's attributes; return the
    new buffer.

    The new buffer has `replicas` copies; by default as many as the buffer, or as the buffer that it replaces if that
    has more. Within a cluster the servers do the copying if they can; otherwise the bytes pass through this process.
    Each chunk is whole; a buffer with versions=2 is copied as its latest version. Raises as restore does.
    """
    buffer = source.open(name)
    view = _raw(buffer)
    least, attributes = buffer.info.replicas, buffer.info.file_attributes
    copies = _copies(target, new_name, replace, replicas, least)
    if source is target and buffer.versions == 1:
        try:
            made = beside(source, buffer, private_name(new_name), copies)
        except _NO_COPY as error:
            if error.outcome != NOT_APPLIED:
                raise
            _log.info(
                "copy of %r: the servers cannot copy it, so its bytes pass through this process (%s)", name, error
            )
        else:
            return _named(target, made, new_name, replace, attributes)
    spec = FileSpec(new_name, view, buffer.dtype.name, buffer.shape, metadata=buffer.metadata)
    if buffer.versions == 1:
        live = Live(buffer, view)
        return _into_buffer(target, live, spec, new_name, replace, replicas, progress, least, attributes)
    with buffer.pin(ttl=_PIN_S) as pin:
        pinned = _Pinned(pin, buffer, view)
        return _into_buffer(target, pinned, spec, new_name, replace, replicas, progress, least, attributes)


# ---- sources


class LocalFile:
    """A file of this host, open for reading."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and InvalidArgumentError for a pipe, a socket or a device."""
        self._file = os.fdopen(open_regular(path), "rb", buffering=0)
        # size of the open file: another file may be at the path by now
        self.nbytes = os.fstat(self._file.fileno()).st_size

    def read_into(self, offset: int, out: Octets) -> int:
        return os.preadv(self._file.fileno(), [out.data], offset)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _Pinned:
    """One version of a buffer, while it is pinned."""

    def __init__(self, pin: Any, buffer: Buffer, view: FileView) -> None:
        self.nbytes = view.nbytes
        self._pin, self._buffer, self._view = pin, buffer, view

    def read_into(self, offset: int, out: Octets) -> int:
        itemsize = self._buffer.dtype.itemsize
        for first, last, extent, inside in self._view.parts(offset, out.size):
            if extent.header:
                out[first:last] = np.frombuffer(extent.header, np.uint8)[inside : inside + last - first]
                continue
            start = extent.start + inside
            begin, end = start // itemsize, -(-(start + last - first) // itemsize)
            values = self._pin.read(begin, end - begin, wire="exact").view(np.uint8)
            out[first:last] = values[start - begin * itemsize :][: last - first]
        return out.size


class _CheckedSource:
    """A file whose blocks have known checksums."""

    def __init__(self, source: Reads, blocks: list[int], what: str) -> None:
        self.nbytes = source.nbytes
        self._source, self._blocks, self._what = source, blocks, what

    def read_into(self, offset: int, out: Octets) -> int:
        count = self._source.read_into(offset, out)
        if crc32c(out.data) != self._blocks[offset // BLOCK_BYTES]:
            raise Error(f"{self._what}: the bytes from {offset} on differ from those that were written (wrong CRC-32C)")
        return count


# ---- steps


def _sums_beside(path: Path) -> Sums | None:
    try:
        return Sums.of_file(sums_path(path))
    except FileNotFoundError:
        return None


def _count(source: Reads) -> int:
    return -(-source.nbytes // BLOCK_BYTES)


def write_from(path: Path, buffer: Buffer, version: int = 0) -> None:
    """Write a file into a buffer that nobody uses yet, each block once it agrees with FILE.crc32c; into a published one
    as one version, of that number (0: the next one). Raises Error and OSError.
    """
    blocks = checked_blocks(path, buffer.nbytes)
    if buffer.versions == 1:
        live = Live(buffer, _raw(buffer))
        for offset, data in blocks:
            live.write(offset, data)
        return
    turn = versions_of(buffer).begin(_TURN_S, _TURN_S, _TURN_S)
    with turn.kept():
        try:
            for offset, data in blocks:
                turn.write(offset, data.nbytes, memory_of(data))
        except BaseException:
            turn.give_up()
            raise
        turn.commit(version)


def _raw(buffer: Buffer) -> FileView:
    view = view_of(Form.RAW, buffer.dtype, buffer.shape, None, {})
    assert view is not None
    return view


def write_still(still: Buffer, path: Path) -> None:
    """Write the bytes of a buffer that nobody changes into a file, with its checksums."""
    _into_file(Live(still, _raw(still)), secrets.token_hex(), _part(path), path, lambda *_: None)


def checked_blocks(path: Path, nbytes: int) -> Iterator[tuple[int, Octets]]:
    """Yield (offset, bytes) of each block of a file that must have `nbytes` bytes, once each agrees with FILE.crc32c.
    The bytes are valid until the next block. Raises Error and OSError.
    """
    with LocalFile(path) as source:
        sums = Sums.of_file(sums_path(path))
        if source.nbytes != nbytes:
            raise Error(f"{path} has {source.nbytes} bytes, and its buffer takes {nbytes}")
        if (sums.nbytes, len(sums.blocks)) != (source.nbytes, _count(source)):
            raise Error(f"{path} has {source.nbytes} bytes, but {sums_path(path).name} is for {sums.nbytes}")
        yield from _blocks(_CheckedSource(source, sums.blocks, str(path)))


def _blocks(source: Reads, first: int = 0) -> Iterator[tuple[int, Octets]]:
    """Yield (offset, bytes) of each block from block `first` on; the next block is read while one is used."""
    memory = [np.empty(min(BLOCK_BYTES, source.nbytes), np.uint8) for _ in range(2)]

    def read(offset: int) -> tuple[int, Octets]:
        out = memory[offset // BLOCK_BYTES % 2][: min(BLOCK_BYTES, source.nbytes - offset)]
        if source.read_into(offset, out) != out.size:
            raise Error(f"the source ended at byte {offset}, before its {source.nbytes} bytes")
        return offset, out

    offsets = range(first * BLOCK_BYTES, source.nbytes, BLOCK_BYTES)
    with ThreadPoolExecutor(1, "smb-copy") as ahead:
        waiting = None
        for offset in offsets:
            this, waiting = waiting, ahead.submit(read, offset)
            if this is not None:
                yield this.result()
        if waiting is not None:
            yield waiting.result()


def _read_into_file(buffer: Buffer, view: FileView, part: Path, path: Path, progress: Progress, *, lock: bool) -> None:
    """Write a buffer that keeps changing into a file; with `lock`, under the buffer's lock."""
    # unique, so that no other snapshot continues this one: blocks of different times are not a state of the buffer
    what = secrets.token_hex()
    if not lock:
        _into_file(Live(buffer, view), what, part, path, progress)
        return
    try:
        with buffer.lock() as held:
            _into_file(Live(buffer, view), what, part, path, progress, check=held.check)
    except PermissionDeniedError as error:
        raise PermissionDeniedError(
            f"snapshot of {buffer.name!r}: only clients that may change a buffer can take its lock; use a certificate "
            f"of role client, or do not use the lock ({error})"
        ) from error


def _into_file(
    source: Reads, what: str, part: Path, path: Path, progress: Progress, *, check: Callable[[], None] = lambda: None
) -> None:
    """Write a source into `part`, continuing after the valid blocks there; then rename it to `path`, unless `check`
    raises.
    """
    sums = Sums(what, source.nbytes, _blocks_there(part, what, source.nbytes))
    with own_file(part, anew=not sums.blocks) as file, own_file(sums_path(part), anew=True) as checksums:
        checksums.write(sums.to_text().encode())
        progress(min(len(sums.blocks) * BLOCK_BYTES, source.nbytes), source.nbytes)
        for offset, data in _blocks(source, len(sums.blocks)):
            done = 0
            while done < data.size:
                done += os.pwrite(file.fileno(), data.data[done:], offset + done)
            sums.blocks.append(crc32c(data.data))
            checksums.write(f"{sums.blocks[-1]:08x}\n".encode())
            checksums.flush()
            progress(offset + data.size, source.nbytes)
        file.truncate(source.nbytes)
        os.fsync(file.fileno())
    check()
    sums_path(part).replace(sums_path(path))
    part.replace(path)


def own_file(path: Path, *, anew: bool) -> IO[bytes]:
    """Open a file of this user's for writing.

    With `anew`, an existing file of that name is removed first: other users can guess the name, and may have put a link
    or a file of theirs there. Raises OSError.
    """
    if not anew:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b")
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "r+b")


def _is_own(path: Path) -> bool:
    """Return True for a regular file of this user's with one name."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1


def _blocks_there(part: Path, what: str, nbytes: int) -> list[int]:
    """Return the checksums of the valid blocks that an interrupted snapshot of the same source has left."""
    try:
        if not _is_own(part) or not _is_own(sums_path(part)):
            return []
        sums = Sums.of_file(sums_path(part))
        if (sums.source, sums.nbytes) != (what, nbytes) or len(sums.blocks) > -(-nbytes // BLOCK_BYTES):
            return []
        with LocalFile(part) as file:
            for index, block in enumerate(sums.blocks):
                data = np.empty(min(BLOCK_BYTES, nbytes - index * BLOCK_BYTES), np.uint8)
                if file.read_into(index * BLOCK_BYTES, data) != data.size or crc32c(data.data) != block:
                    return sums.blocks[:index]
            return sums.blocks
    except (FileNotFoundError, InvalidArgumentError):
        return []


def _still(client: Client, buffer: Buffer, part: Path, *, lock: bool) -> Buffer:
    """Return a buffer with the same data that nobody changes: that of an interrupted snapshot, or a new one."""
    name = _still_name(buffer.info, part)
    if part.exists():
        try:
            return client.open(name)
        except NotFoundError:
            pass
    client.delete(name, missing_ok=True)
    if not lock:
        return beside(client, buffer, name, 1)
    with buffer.lock():
        return beside(client, buffer, name, 1)


def _still_name(info: BufferInfo, part: Path) -> str:
    # With the host: the same path on another host is another file, whose snapshot may be in progress.
    asked = f"{socket.gethostname()} {info.id:x} {part.absolute()}"
    return private_name(info.name, f"snapshot-{hashlib.sha256(asked.encode()).hexdigest()[:24]}")


def forget(client: Client, info: BufferInfo, path: Path) -> None:
    """Delete the servers' copy with which an interrupted snapshot of a buffer into that file could be continued."""
    if info.versions == 1:
        sweep(client, _still_name(info, _part(path)))


def beside(client: Client, buffer: Buffer, name: str, replicas: int) -> Buffer:
    """Let the servers copy a buffer."""
    making = f"{name}-making"
    client.delete(making, missing_ok=True)
    copy = client.create(making, like=buffer, replicas=replicas, metadata=buffer.metadata or None)
    try:
        copy.accumulate_from(buffer, op="replace")
        client.rename(copy, name)
    except BaseException:
        sweep(client, making)
        raise
    return copy


def _spec(file_name: str, name: str, source: Reads) -> FileSpec:
    suffix = next((form.value for form in (Form.NPY, Form.SAFETENSORS) if file_name.endswith(form.value)), "")
    head = np.empty(min(16, source.nbytes), np.uint8)
    source.read_into(0, head)
    head = np.empty(min(header_bytes(head.tobytes()), source.nbytes), np.uint8)
    source.read_into(0, head)
    return spec_of(name.removesuffix(suffix) + suffix, head.tobytes(), source.nbytes)


@contextmanager
def _made(client: Client, spec: FileSpec, wanted: str, copies: int, asked: int | None) -> Iterator[Buffer]:
    """Yield a new buffer under a private name; delete it if the block fails."""
    private = private_name(wanted)
    with _explains_replicas(copies, asked):
        buffer = create(client, private, spec, copies)
    try:
        yield buffer
    except BaseException:
        sweep(client, private)
        raise


def _into_buffer(
    client: Client, source: Reads, spec: FileSpec, name: str, replace: bool, replicas: int | None, progress: Progress,
    least: int = 1, attributes: bytes = b"",
) -> Buffer:  # fmt: skip
    with _made(client, spec, name, _copies(client, name, replace, replicas, least), replicas) as buffer:
        live = Live(buffer, spec.view)
        for offset, data in _blocks(source):
            live.write(offset, data)
            progress(offset + data.size, source.nbytes)
        give_name(client, buffer, name, replace=replace, attributes=attributes)
    return buffer


def _restored(
    client: Client, source: Reads, spec: FileSpec, name: str, replace: bool, replicas: int | None, progress: Progress,
    state: RestoreProgress,
) -> Buffer:  # fmt: skip
    private = private_name(name, f"restore-{state.key}")
    sums, buffer = state.sums(), _open(client, private)
    if buffer is None and sums is not None:
        # A kill between the last two steps: the buffer has its name already. It may have changed since then, so with
        # `replace` it is made again.
        named = _open(client, name) if not replace and len(sums.blocks) == _count(source) else None
        if named is not None and sums.source == state.tag(named, spec) and _still_matches(source, sums):
            state.end()
            return named
        state.clear()
    copies = _copies(client, name, replace, replicas)
    try:
        if (
            buffer is None or sums is None or buffer.info.replicas != copies
            or sums.source != state.tag(buffer, spec) or not _still_matches(source, sums)
        ):  # fmt: skip
            client.delete(private, missing_ok=True)
            with _explains_replicas(copies, replicas):
                buffer = create(client, private, spec, copies)
            sums = Sums(state.tag(buffer, spec), source.nbytes)
        state.begin(sums)
        live = Live(buffer, spec.view)
        progress(min(len(sums.blocks) * BLOCK_BYTES, source.nbytes), source.nbytes)
        for offset, data in _blocks(source, len(sums.blocks)):
            live.write(offset, data)
            state.add(crc32c(data.data))
            progress(offset + data.size, source.nbytes)
        give_name(client, buffer, name, replace=replace, attributes=_rights_there(client, name, replace))
    except BaseException as error:
        # A later call continues from here; but memory that a server has lost stays lost.
        if not isinstance(error, (KeyboardInterrupt, UnavailableError, DeadlineError)) or LOST in str(error):
            left = _open(client, private)
            # the buffer is not another host's
            if left is not None and (buffer is None or left.info.id == buffer.info.id):
                sweep(client, left)
            state.end()
        raise
    state.end()
    return buffer


def _still_matches(source: Reads, sums: Sums) -> bool:
    """Return True if the file still begins with the blocks that were restored from it."""
    data = np.empty(min(BLOCK_BYTES, source.nbytes), np.uint8)
    for index, block in enumerate(sums.blocks):
        part = data[: max(0, source.nbytes - index * BLOCK_BYTES)]
        if source.read_into(index * BLOCK_BYTES, part) != part.size or crc32c(part.data) != block:
            return False
    return sums.nbytes == source.nbytes


def _open(client: Client, name: str) -> Buffer | None:
    try:
        return client.open(name)
    except NotFoundError:
        return None


def give_name(client: Client, made: Buffer, name: str, *, replace: bool, attributes: bytes) -> None:
    """Give a buffer its final name, and its file's attributes in the same step. Raises as Client.rename."""
    if not attributes:
        client.rename(made, name, replace=replace)
        return
    rename_file(client, (made.name, made.info.id), name, replace=replace, attributes=attributes)
    note_name(made, name)


def _rights_there(client: Client, name: str, replaced: bool) -> bytes:
    """Return the attributes, but not the times, that a file keeps when a restored one takes its place."""
    there = _open(client, name) if replaced else None
    if there is None:
        return b""
    kept = decode(there.info.file_attributes)
    return dataclasses.replace(kept, modified=None, accessed=None, changed=None, link=False).encode()


def _named(client: Client, made: Buffer, name: str, replace: bool, attributes: bytes) -> Buffer:
    private = made.name
    try:
        give_name(client, made, name, replace=replace, attributes=attributes)
    except BaseException:
        sweep(client, private)
        raise
    return made


@contextmanager
def _explains_replicas(copies: int, asked: int | None) -> Iterator[None]:
    """Explain an error about a second copy that the caller did not ask for."""
    try:
        yield
    except (UnavailableError, OutOfMemoryError) as error:
        if copies == 1 or asked is not None:
            raise
        hint = (
            "the new buffer has two copies, as its source or predecessor; for one copy pass --replicas 1 (replicas=1)"
        )
        raise type(error)(f"{error}; {hint}", outcome=error.outcome) from error


def _copies(client: Client, name: str, replace: bool, replicas: int | None, least: int = 1) -> int:
    """Return how many copies a new buffer has: `replicas`, else `least`, or as many as the buffer that it replaces.

    Raises AlreadyExistsError before anything is copied; the rename at the end decides in any case.
    """
    there = _open(client, name)
    if there is None or replace:
        return replicas or max(least, 1 if there is None else there.info.replicas)
    raise AlreadyExistsError(
        f"a buffer {name!r} exists; choose another name, delete it, or replace it (--replace, replace=True)"
    )
