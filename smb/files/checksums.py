"""Checksums of a file's blocks, as a text beside it; and how far a restore has come, which is the same and more."""

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

BLOCK_BYTES = 16 << 20  # read while the one before is written
_KEPT_NOWHERE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ELOOP, errno.ENXIO)
_DIGITS = re.compile(r"[0-9a-f]*")
_HEAD_PARTS_MAX = 16  # of the first line: four names and values
_log = logging.getLogger("smb")


@dataclass
class Sums:
    """Checksums of a file's blocks: their source, their length, the CRC-32C of each."""

    source: str
    nbytes: int
    blocks: list[int] = field(default_factory=list)

    def to_text(self) -> str:
        """Return the text of the file beside it."""
        lines = [json.dumps({"crc32c": 1, "source": self.source, "nbytes": self.nbytes, "block": BLOCK_BYTES})]
        return "\n".join([*lines, *(f"{block:08x}" for block in self.blocks), ""])

    @staticmethod
    def of_file(path: Path) -> Sums:
        """Read the file beside another one. Raises InvalidArgumentError and OSError."""
        try:
            return Sums.of_text(read_text(path, CHECKSUMS_BYTES_MAX))
        except ValueError as error:  # UnicodeDecodeError and InvalidArgumentError are such
            raise InvalidArgumentError(f"the checksums in {path} can't be read: {shortened(error)}") from None

    @staticmethod
    def of_text(text: str) -> Sums:
        """Read it. Raises InvalidArgumentError."""
        try:
            head, _, rest = text.partition("\n")
            fields = parse_json(head, _HEAD_PARTS_MAX)
            if not isinstance(fields, dict) or fields.keys() != {"crc32c", "source", "nbytes", "block"}:
                raise ValueError("the first line is not what a snapshot writes")
            if fields["crc32c"] != 1 or fields["block"] != BLOCK_BYTES:
                raise ValueError("they are of another version")
            if not isinstance(fields["source"], str) or type(fields["nbytes"]) is not int or fields["nbytes"] < 0:
                raise ValueError("the first line is not what a snapshot writes")
            digits = rest.replace("\n", "")
            if rest[8::9] != "\n" * (len(rest) // 9) or len(rest) % 9 or not _DIGITS.fullmatch(digits):
                raise ValueError("a line is not a checksum of 8 hexadecimal digits")
            blocks = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
            return Sums(fields["source"], fields["nbytes"], blocks)
        except ValueError as error:
            raise InvalidArgumentError(f"they are not what a snapshot writes: {shortened(error)}") from None


class RestoreProgress:
    """How far a restore has come, in a file that is this process's alone. If the file takes no more, only the state
    until then is known.
    """

    def __init__(self, path: Path, file: io.FileIO, key: str) -> None:
        """`key` says of which file to which buffer."""
        self.key = key
        self._path = path
        self._file = file
        self._full = False

    def tag(self, buffer: Buffer, spec: FileSpec) -> str:
        """Return what is the same while the same buffer is made of the same file."""
        form = f"{spec.dtype} {spec.shape} {spec.tensors} {spec.metadata} {spec.view.nbytes}"
        return f"{buffer.info.id:x} {hashlib.sha256(form.encode()).hexdigest()[:24]}"

    def sums(self) -> Sums | None:
        """Return what an interrupted one has left; None if there is nothing to go on from."""
        self._file.seek(0)
        try:
            text = read_opened(self._file, self._path, CHECKSUMS_BYTES_MAX).decode(errors="replace")
            text = text[: text.rfind("\n") + 1]  # a kill may have cut the last line
            return Sums.of_text(text) if text else None
        except InvalidArgumentError as error:
            _log.warning("%s: %s; the restore begins anew", self._path, error)
            return None

    def begin(self, sums: Sums) -> None:
        self.clear()
        self._write(sums.to_text())

    def add(self, block: int) -> None:
        """One more block is at the servers."""
        self._write(f"{block:08x}\n")

    def clear(self) -> None:
        """There is nothing to go on from."""
        self._file.truncate(0)

    def end(self) -> None:
        """It is over, one way or the other."""
        self._path.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        if self._full:
            return
        try:
            self._full = self._file.write(text.encode()) != len(text)
        except OSError as error:
            self._full = True
            _log.info("the restore can be taken up again up to here only: %s: %s", self._path, error)


@contextmanager
def state_of(path: Path, target: str) -> Iterator[RestoreProgress | None]:
    """Give the state of restoring a file to a target, beside the file; None if its directory takes none, or something
    else has its name there: a link, or another user's file. Raises Error if another process is at it.
    """
    key = hashlib.sha256(f"{target} {path.absolute()}".encode()).hexdigest()[:24]
    at = path.with_name(f"{path.name}.{key[:8]}.restore")
    while True:
        try:
            file = open_own(at)
        except (OSError, InvalidArgumentError) as error:
            if isinstance(error, OSError) and error.errno not in _KEPT_NOWHERE:
                raise
            _log.info("the restore can't be taken up again where it is interrupted: %s", error)
            break
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Error(f"restore of {path}: another process is at it, with the same target") from None
            if not _is_at(file, at):  # the other one ended between these two steps
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
    """Open a file of this user's under a name that others can guess, in a directory where they may make files, too;
    make it if need be. What is written goes to its end. Raises OSError, and InvalidArgumentError for what is not a
    regular file of this user's with this one name.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    file = io.FileIO(descriptor, "a+")
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and found.st_nlink <= 1:
        return file
    file.close()
    raise InvalidArgumentError(f"{path} belongs to user {found.st_uid}, or has a second name; it is not used")


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
