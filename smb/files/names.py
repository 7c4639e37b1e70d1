"""What a path shows (NAME, NAME.npy, NAME.safetensors, NAME@VERSION), and which buffer name a path has. Pure.

A buffer's name is already a path: its slashes make the directories. A part of a path that a name cannot contain is
escaped: "_." and its bytes, each except A-Z a-z 0-9 . - as "_" and two hexadecimal digits. All other parts stay as they
are. A name that would be too long is replaced by a digest, and the buffer's metadata has the name.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import Enum

from smb.config.limits import NAME_CHARACTERS_MAX
from smb.files.error_codes import refuse

PART_BYTES_MAX = 255  # between two slashes of a path; Linux's limits
PATH_BYTES_MAX = 4096
PRIVATE = ".smb-files"  # in each namespace the folder of buffers with private names; not shown
_LONG = "long-"  # prefix in that folder: buffers whose paths make too long a name
_NAMESPACE_CHARACTERS_MAX = 128  # in a longer namespace, a folder PRIVATE would leave no room for names
_PATH = re.compile(r"(?P<name>.+?)(?:@(?P<version>[0-9]{1,19}|raw))?(?P<suffix>\.npy|\.safetensors)?", re.DOTALL)
_ESCAPED = "_."
_PLAIN = re.compile(r"[A-Za-z0-9._-]*")
_QUOTED = re.compile(r"_([0-9a-f]{2})")
_UNQUOTED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-")


class Form(str, Enum):
    """The form in which a file shows a buffer; the value is the suffix of its name."""

    RAW = ""
    NPY = ".npy"
    SAFETENSORS = ".safetensors"


@dataclass(frozen=True, slots=True)
class ShownBuffer:
    """The meaning of a path: a buffer, given by its own path. `version` is None for the buffer itself."""

    name: str
    form: Form = Form.RAW
    version: int | None = None

    @property
    def path(self) -> str:
        """The shortest path with this meaning."""
        return f"{self.name}{'' if self.version is None else f'@{self.version}'}{self.form.value}"


def meanings(path: str) -> tuple[ShownBuffer, ...]:
    """Return what a path (without a leading slash) may mean; the first meaning that exists counts.

    A buffer of exactly that path comes before a form of another buffer.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        return ()
    name, version, suffix = match["name"], match["version"], match["suffix"] or ""
    if name.endswith("/"):
        return (ShownBuffer(path),)
    whole = (ShownBuffer(path), ShownBuffer(path[: -len(suffix)], Form(suffix))) if suffix else (ShownBuffer(path),)
    if version == "raw":  # used if a directory has the plain name
        return whole if suffix else (*whole, ShownBuffer(name))
    return whole if version is None else (*whole, ShownBuffer(name, Form(suffix), int(version)))


def listed_as(path: str, forms: Iterable[Form], buffers: Container[str], folders: Container[str]) -> str:
    """Return the one path under which a directory lists a buffer: with the suffix of its last form.

    The suffix is left out if another buffer or a directory has that path, or if the buffer's own name ends with .npy or
    .safetensors, because it was created as such a file.
    """
    suffix = "" if path.endswith((Form.NPY.value, Form.SAFETENSORS.value)) else list(forms)[-1].value
    if suffix and path + suffix not in buffers and path + suffix not in folders:
        return path + suffix
    return path + "@raw" if path in folders else path


# ---- names for paths


def name_of(path: str) -> str:
    """Return the buffer name for a path. OSError ENAMETOOLONG, or EINVAL for an impossible path."""
    name = escaped(path)
    if len(name) <= NAME_CHARACTERS_MAX:
        return name
    return f"{private_of(name)}/{_LONG}{hashlib.sha256(name.encode()).hexdigest()[:40]}"


def is_long(name: str) -> bool:
    """Return True if a buffer's name is a digest, so that its metadata has its path."""
    return name.rpartition(f"{PRIVATE}/")[2].startswith(_LONG) and is_private(name)


def escaped(path: str) -> str:
    """Return a path as a name, however long. OSError as name_of."""
    if _PLAIN.fullmatch(path.replace("/", "")) and _ESCAPED not in path and len(path) <= PART_BYTES_MAX:
        return path
    try:
        data = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise refuse(errno.EINVAL, f"{path!r} is not a valid path: {error}") from None
    if b"\0" in data:
        raise refuse(errno.EINVAL, f"{path!r} is not a valid path: it contains a NUL")
    if len(data) > PATH_BYTES_MAX or any(len(part) > PART_BYTES_MAX for part in data.split(b"/")):
        raise refuse(
            errno.ENAMETOOLONG,
            f"the path has {len(data)} bytes; a path may have at most {PATH_BYTES_MAX}, and each part {PART_BYTES_MAX}",
        )
    return "/".join(map(_escaped_part, path.split("/")))


def path_of(name: str) -> str:
    """Return the path that escaped() turned into this name."""
    if _ESCAPED not in name:
        return name
    return "/".join(part if (path := _unescaped_part(part)) is None else path for part in name.split("/"))


def _escaped_part(part: str) -> str:
    return part if _PLAIN.fullmatch(part) and _unescaped_part(part) is None else _quoted(part)


def _quoted(part: str) -> str:
    data = part.encode("utf-8", "surrogateescape")
    return _ESCAPED + "".join(chr(byte) if byte in _UNQUOTED else f"_{byte:02x}" for byte in data)


def _unescaped_part(part: str) -> str | None:
    """Return the part that _escaped_part turned into this one; None if it was not escaped."""
    if not part.startswith(_ESCAPED):
        return None
    data = _QUOTED.sub(lambda match: chr(int(match[1], 16)), part[len(_ESCAPED) :]).encode("latin-1")
    path = data.decode("utf-8", "surrogateescape")
    if b"\0" in data or b"/" in data or _quoted(path) != part:
        return None
    return None if _PLAIN.fullmatch(path) and _unescaped_part(path) is None else path


# ---- directories


def private_of(name: str) -> str:
    """Return the folder for private buffers that will get, or had, this name. The rights of both are the same."""
    namespace, slash, _ = name.partition("/")
    if not slash or namespace == PRIVATE or len(namespace) > _NAMESPACE_CHARACTERS_MAX:
        return PRIVATE
    return f"{namespace}/{PRIVATE}"


def is_private(path: str) -> bool:
    """Return True if the path is in a private folder."""
    return PRIVATE in path.split("/")[:2]


def parent_of(path: str) -> str:
    """Return the directory of a path; "" is the root."""
    return path.rpartition("/")[0]


def entries(directory: str, paths: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return (directories, buffers) directly in a directory ("" is the root), by their last part."""
    start = directory + "/" if directory else ""
    directories: set[str] = set()
    buffers: set[str] = set()
    for path in paths:
        if path.startswith(start):
            first, slash, _ = path[len(start) :].partition("/")
            if not is_private(path):
                (directories if slash else buffers).add(first)
    return directories, buffers
