"""Checksums of a file's blocks in a text file beside it, and the progress of a restore, whose file has the same format
and more.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from smb.buffer import Buffer
from smb.config.limits import CHECKSUMS_BYTES_MAX
from smb.config.untrusted import open_regular, parse_json, read_opened, read_text, shortened
from smb.errors import Error, InvalidArgumentError
from smb.files.formats import FileSpec

BLOCK_BYTES = 16 << 20  # a block is read while the previous one is written
_KEPT_NOWHERE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ELOOP, errno.ENXIO)
_DIGITS = re.compile(r"[0-9a-f]*")
_HEAD_PARTS_MAX = 16  # limit of the first line: four names and values
_log = logging.getLogger("smb")


@dataclass
class Sums:
    """Checksums of a file's blocks: their source, its length, and the CRC-32C of each block."""

    source: str
    nbytes: int
    blocks: list[int] = field(default_factory=list)

    def to_text(self) -> str:
        """Return the text of the checksum file."""
        lines = [json.dumps({"crc32c": 1, "source": self.source, "nbytes": self.nbytes, "block": BLOCK_BYTES})]
        return "\n".join([*lines, *(f"{block:08x}" for block in self.blocks), ""])

    @staticmethod
    def of_file(path: Path) -> Sums:
        """Read a checksum file. Raises InvalidArgumentError and OSError."""
        try:
            return Sums.of_text(read_text(path, CHECKSUMS_BYTES_MAX))
        except ValueError as error:  # UnicodeDecodeError and InvalidArgumentError are subclasses
            raise InvalidArgumentError(f"the checksums in {path} cannot be read: {shortened(error)}") from None

    @staticmethod
    def of_text(text: str) -> Sums:
        """Parse the text of a checksum file. Raises InvalidArgumentError."""
        try:
            head, _, rest = text.partition("\n")
            fields = parse_json(head, _HEAD_PARTS_MAX)
            if not isinstance(fields, dict) or fields.keys() != {"crc32c", "source", "nbytes", "block"}:
                raise ValueError("the first line is not one that a snapshot writes")
            if fields["crc32c"] != 1 or fields["block"] != BLOCK_BYTES:
                raise ValueError("they have another format version or block size")
            if not isinstance(fields["source"], str) or type(fields["nbytes"]) is not int or fields["nbytes"] < 0:
                raise ValueError("the first line is not one that a snapshot writes")
            digits = rest.replace("\n", "")
            if rest[8::9] != "\n" * (len(rest) // 9) or len(rest) % 9 or not _DIGITS.fullmatch(digits):
                raise ValueError("a line is not a checksum of 8 hexadecimal digits")
            blocks = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
            return Sums(fields["source"], fields["nbytes"], blocks)
        except ValueError as error:
            raise InvalidArgumentError(f"not written by a snapshot: {shortened(error)}") from None


class RestoreProgress:
    """The progress of a restore, in a file of this process alone.

    If the file cannot be written any more, only the progress until then is known.
    """

    def __init__(self, path: Path, file: io.FileIO, key: str) -> None:
        """`key` identifies the file and the target buffer."""
        self.key = key
        self._path = path
        self._file = file
        self._full = False

    def tag(self, buffer: Buffer, spec: FileSpec) -> str:
        """Return a value that stays the same while the same buffer is made from the same file."""
        form = f"{spec.dtype} {spec.shape} {spec.tensors} {spec.metadata} {spec.view.nbytes}"
        return f"{buffer.info.id:x} {hashlib.sha256(form.encode()).hexdigest()[:24]}"

    def sums(self) -> Sums | None:
        """Return the progress of an interrupted restore; None if there is none to continue."""
        self._file.seek(0)
        try:
            text = read_opened(self._file, self._path, CHECKSUMS_BYTES_MAX).decode(errors="replace")
            text = text[: text.rfind("\n") + 1]  # a kill may have cut the last line
            return Sums.of_text(text) if text else None
        except InvalidArgumentError as error:
            _log.warning("%s: %s; the restore starts again from the beginning", self._path, error)
            return None

    def begin(self, sums: Sums) -> None:
        self.clear()
        self._write(sums.to_text())

    def add(self, block: int) -> None:
        """Note that one more block has reached the servers."""
        self._write(f"{block:08x}\n")

    def clear(self) -> None:
        """Drop the progress: there is nothing to continue."""
        self._file.truncate(0)

    def end(self) -> None:
        """Remove the file: the restore is over, successful or not."""
        self._path.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        if self._full:
            return
        try:
            self._full = self._file.write(text.encode()) != len(text)
        except OSError as error:
            self._full = True
            _log.info("a later restore can only continue from this point: %s: %s", self._path, error)


@contextmanager
def state_of(path: Path, target: str) -> Iterator[RestoreProgress | None]:
    """Yield the progress of restoring a file to a target, kept beside the file.

    Yields None if the directory cannot be written to, or the name belongs to another object: a link, or another user's
    file. Raises Error if another process is restoring the file.
    """
    key = hashlib.sha256(f"{target} {path.absolute()}".encode()).hexdigest()[:24]
    at = path.with_name(f"{path.name}.{key[:8]}.restore")
    while True:
        try:
            file = open_own(at)
        except (OSError, InvalidArgumentError) as error:
            if isinstance(error, OSError) and error.errno not in _KEPT_NOWHERE:
                raise
            _log.info("an interrupted restore cannot be continued: %s", error)
            break
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Error(f"restore of {path}: another process is restoring it to the same target") from None
            if not _is_at(file, at):  # the other process ended between these two steps
                continue
            state = RestoreProgress(at, file, key)
            try:
                yield state
            finally:
                if os.fstat(file.fileno()).st_size == 0 and _is_at(file, at):
                    state.end()  # refused before it began
            return
    yield None


def open_own(path: Path) -> io.FileIO:
    """Open a file of this user's for appending, made if it is missing, under a name that other users can guess.

    Other users may be able to create files in its directory. Raises OSError, and InvalidArgumentError unless it is a
    regular file of this user's with one name.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    file = io.FileIO(descriptor, "a+")
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and found.st_nlink <= 1:
        return file
    file.close()
    raise InvalidArgumentError(f"{path} is not used, since it belongs to user {found.st_uid} or has a second name")


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
