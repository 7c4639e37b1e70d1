"""Reads data that others may have written: files are opened without waiting and read up to a bound, JSON is counted
before it is parsed, and errors quote only the beginning of a value. The bounds are in limits.py.

A bound counts brackets and commas because each of them takes two bytes of text but may become an object of 60 to 250
bytes.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smb.config.limits import (
    DIGITS_MAX,
    ERROR_CHARACTERS_MAX,
    KEY_PARTS_MAX,
    QUOTED_CHARACTERS_MAX,
    TEXT_FILE_BYTES_MAX,
)
from smb.config.parse import format_bytes
from smb.errors import InvalidArgumentError

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH  # with access control lists, the group's bits are their upper limit
_LINKS_MAX = 40  # the kernel's limit of links on a path
_log = logging.getLogger("smb")
_KEY_PART = re.compile(r"""[ \t]*(?:[A-Za-z0-9_-]*|"[^"\n]*"|'[^'\n]*')[ \t]*""")


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Return the descriptor of a regular file. Never waits, as opening a pipe would.

    Raises OSError as os.open does, IsADirectoryError, and InvalidArgumentError for a pipe, a socket or a device.
    """
    if not flags & os.O_NOFOLLOW:
        try:
            _check_kind(path, Path(path).stat().st_mode)  # before the open, which alone may start a device
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(path: str | os.PathLike[str], mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    kind = next((name for matches, name in _KINDS if matches(mode)), "of an unknown kind")
    raise InvalidArgumentError(f"{os.fspath(path)} is {kind}; a regular file is needed here")


def followed(path: Path) -> tuple[Path, Path | None]:
    """Return a path without links, and the first link on the way that another user made and so controls; None without
    one. Raises OSError if the path does not exist.
    """
    whole, links = Path("/"), 0
    foreign: Path | None = None
    rest = list(reversed(path.absolute().parts))
    while rest:
        at = whole / rest.pop()
        if at.name == "..":  # the path before it has no links
            whole = whole.parent
            continue
        found = at.lstat()
        if not stat.S_ISLNK(found.st_mode):
            whole = at
            continue
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if found.st_uid not in (0, os.geteuid()):
            foreign = foreign or at
        rest += reversed(at.readlink().parts)
    return whole, foreign


def open_kept(path: Path, secret: str = "") -> int:
    """Open a file that only this user and root can change or replace: the file, its directory and the links on the way
    must belong to them. With `secret`, its name in an error ("the key "), the file must not be readable for everybody.

    Raises OSError and InvalidArgumentError as open_regular does, and InvalidArgumentError with the fault.
    """
    descriptor = open_regular(path)
    try:
        found = os.fstat(descriptor)
        _check_owner(path, found)
        if others_write(found):
            raise InvalidArgumentError(
                f"{path} may be changed by others than its owner ({stat.filemode(found.st_mode)}); chmod go-w {path}"
            )
        if secret and found.st_mode & stat.S_IRWXO:
            raise InvalidArgumentError(f"anybody may read {secret}{path}; chmod o= {path}")
        step = path.absolute()
        for _ in range(_LINKS_MAX):
            _check_owner(step, step.lstat())
            # with several hard links, another user could put a file of ours there
            check_directory(step.parent, sticky=found.st_nlink == 1, volume=True)
            if not step.is_symlink():
                break
            step = step.parent / step.readlink()
        _, link = followed(path)
        if link is not None:
            raise InvalidArgumentError(
                f"{path} leads through {link}, a link that user {link.lstat().st_uid} made; name the file without it"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def others_write(found: os.stat_result) -> bool:
    """Whether users other than the owner may write to a file, or make files in a directory."""
    return bool(found.st_mode & _OTHERS_WRITE)


def is_open_volume(path: Path, found: os.stat_result) -> bool:
    """Whether a directory is a volume that root has mounted for containers and everybody may write. /tmp is not one:
    in a sticky directory others can keep links to our files.
    """
    return found.st_uid == 0 and not found.st_mode & stat.S_ISVTX and path.resolve().is_mount()


def check_directory(path: Path, *, sticky: bool = False, volume: bool = False) -> None:
    """Raise InvalidArgumentError if users other than this one and root can rename or remove these users' files in a
    directory, and, without `sticky`, also if they can make files there, as in /tmp. A link to the directory must be
    theirs, too. With `volume`, a directory that root has mounted is only reported in the log, because containers get
    volumes that everybody may write.
    """
    _check_owner(path, path.lstat())
    found = path.stat()
    _check_owner(path, found)
    if others_write(found) and not (sticky and found.st_mode & stat.S_ISVTX):
        mode = stat.filemode(found.st_mode)
        if volume and is_open_volume(path, found):
            _log.warning("%s can be written to by others (%s), who can replace the files in it", path, mode)
            return
        raise InvalidArgumentError(
            f"others than its owner may put files into {path} ({stat.filemode(found.st_mode)}); chmod go-w {path}"
        )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise InvalidArgumentError(
            f"{path} belongs to user {found.st_uid}; it must belong to this user, {os.geteuid()}, or to root: run this "
            f"as that user, or give this one a copy"
        )


def read_file(path: Path, bytes_max: int = TEXT_FILE_BYTES_MAX) -> bytes:
    """Return a regular file's bytes. Raises as open_regular, and InvalidArgumentError if it has more than bytes_max."""
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        return read_opened(file, path, bytes_max)


def read_opened(file: Any, path: Path, bytes_max: int = TEXT_FILE_BYTES_MAX) -> bytes:
    """As read_file, for a raw file that is open already."""
    size = os.fstat(file.fileno()).st_size
    found = b""
    if size <= bytes_max:
        blocks = []
        left = bytes_max + 1  # a file of /proc reports 0 bytes, and any file may grow
        while left and (block := file.read(min(left, 1 << 20))):
            blocks.append(block)
            left -= len(block)
        found = b"".join(blocks)
        size = max(size, len(found))
    if size > bytes_max:
        raise InvalidArgumentError(
            f"{path} has {format_bytes(size)} or more, but may have at most {format_bytes(bytes_max)}"
        )
    return found


def read_text(path: Path, bytes_max: int = TEXT_FILE_BYTES_MAX, encoding: str = "utf-8") -> str:
    """As read_file, decoded. Also raises UnicodeDecodeError."""
    return read_file(path, bytes_max).decode(encoding)


def parse_json(text: str | bytes, parts_max: int) -> Any:
    """Return the value of JSON in UTF-8 with at most `parts_max` brackets and commas.

    Raises ValueError, with a sentence, for anything else, including NaN, a name that occurs twice in one object, and
    nesting too deep for the interpreter's stack.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"it is not UTF-8 (byte {error.start})") from None
    if (parts := count_parts(text)) > parts_max:
        raise ValueError(f"it has {parts} commas and opening brackets, but may have at most {parts_max}")
    try:
        return json.loads(text, parse_int=_integer, parse_constant=_constant, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ValueError; the parser's message ends with the place, in brackets."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    run = 0
    for part in text.split("."):
        run = run + 1 if _KEY_PART.fullmatch(part) else 0
        if run >= KEY_PARTS_MAX:
            raise ValueError(f"it has a key of more than {KEY_PARTS_MAX} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def count_parts(text: str | bytes) -> int:
    """Return the number of opening brackets and commas in a text: it has at most one more value than that."""
    marks: tuple[Any, ...] = ("[", "{", ",") if isinstance(text, str) else (b"[", b"{", b",")
    return sum(text.count(mark) for mark in marks)


def _integer(text: str) -> int:
    if len(text) > DIGITS_MAX:  # converting them takes time that grows with the square of their number
        raise ValueError(f"it has a number of {len(text)} digits, but may have at most {DIGITS_MAX}")
    return int(text)


def _constant(text: str) -> None:
    raise ValueError(f"it has {text}, which is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"it has the name {quoted(twice)} twice in one object")
    return made


def quoted(value: object) -> str:
    """Return a value as an error shows it: only the beginning if it is long."""
    if isinstance(value, (str, bytes)) and len(value) > QUOTED_CHARACTERS_MAX:
        return f"{value[:QUOTED_CHARACTERS_MAX]!r}..."
    return shortened(repr(value), QUOTED_CHARACTERS_MAX)


def shortened(text: object, characters_max: int = ERROR_CHARACTERS_MAX) -> str:
    """Return a text, or an error's text, as another error shows it: only the beginning if it is long."""
    text = str(text)
    return text if len(text) <= characters_max else text[:characters_max] + "..."


def is_encodable(*texts: str) -> bool:
    """Whether the texts can be written as UTF-8. Half of a surrogate pair, which JSON can escape, cannot."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        return False
    return True
