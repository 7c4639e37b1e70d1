"""Rights, owner, times and extended attributes of a file, as the coordinator stores them with its buffer. Pure.

The text is a JSON object with the keys mode, owner, modified, accessed, changed, link and extended. Any may be missing.
Another program may have stored anything: what has another form counts as missing.
"""

from __future__ import annotations

import errno
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from smb.config.limits import FILE_ATTRIBUTES_BYTES_MAX
from smb.files.error_codes import refuse

_NAME_BYTES_MAX = 255 - len("user.")  # linux/limits.h, XATTR_NAME_MAX
_TIME_MAX = 1 << 63
_ID_MAX = (1 << 32) - 2  # the number after it stands for "no change" in chown(2)


class FileKind(Enum):
    """The kind of a directory's entry."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of one file that were set explicitly; None stands for the usual ones.

    `mode` has the permission bits, `owner` user and group. `modified` and `accessed` are ns since 1970, and
    `changed` is the time at which any of these was set. A symbolic link has `link`: its buffer's bytes are its target.
    `extended` has the attributes user.NAME by NAME.
    """

    mode: int | None = None
    owner: tuple[int, int] | None = None
    modified: int | None = None
    accessed: int | None = None
    changed: int | None = None
    link: bool = False
    extended: Mapping[str, bytes] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the text that `decode` reads, b"" if nothing was set. OSError ENOSPC if it is too long."""
        fields: dict[str, Any] = {
            "mode": self.mode, "owner": self.owner, "modified": self.modified, "accessed": self.accessed,
            "changed": self.changed, "link": self.link or None,
            "extended": {name: b64encode(value).decode() for name, value in self.extended.items()} or None,
        }  # fmt: skip
        given = {name: value for name, value in fields.items() if value is not None}
        text = json.dumps(given, separators=(",", ":")).encode() if given else b""
        if len(text) > FILE_ATTRIBUTES_BYTES_MAX:
            raise refuse(
                errno.ENOSPC,
                f"a file may have {FILE_ATTRIBUTES_BYTES_MAX} bytes of attributes as text at most, with all times, not "
                f"{len(text)}",
            )
        return text

    def check(self) -> None:
        """Raise OSError ENOSPC unless the text has room, also for any rights, owner and times that follow."""
        longest = -_TIME_MAX
        replace(
            self, mode=0o7777, owner=(_ID_MAX, _ID_MAX), modified=longest, accessed=longest, changed=longest
        ).encode()


NONE = Attributes()


def merged(stored: Attributes, before: Attributes, wanted: Attributes) -> Attributes:
    """Return what is stored now with what `wanted` changes in `before`, but not its times of change."""
    changes: dict[str, Any] = {
        name: getattr(wanted, name)
        for name in ("mode", "owner", "accessed")
        if getattr(wanted, name) != getattr(before, name)
    }
    extended = {
        name: value for name, value in stored.extended.items() if name not in before.extended or name in wanted.extended
    }
    extended |= {name: value for name, value in wanted.extended.items() if before.extended.get(name) != value}
    return replace(stored, **changes, extended=extended)


@lru_cache(maxsize=4096)
def decode(text: bytes) -> Attributes:
    """Return the attributes that a text has."""
    try:
        fields = json.loads(text) if 0 < len(text) <= FILE_ATTRIBUTES_BYTES_MAX else {}
    except (ValueError, RecursionError):
        return NONE
    if not isinstance(fields, dict):
        return NONE
    owner = fields.get("owner")
    owner = [_number(each, _ID_MAX) for each in owner] if isinstance(owner, list) and len(owner) == 2 else [None]
    return Attributes(
        _number(fields.get("mode"), 0o7777),
        None if None in owner else (owner[0], owner[1]),
        _number(fields.get("modified"), _TIME_MAX, -_TIME_MAX),
        _number(fields.get("accessed"), _TIME_MAX, -_TIME_MAX),
        _number(fields.get("changed"), _TIME_MAX, -_TIME_MAX),
        fields.get("link") is True,
        _extended(fields.get("extended")),
    )


def _number(value: object, most: int, least: int = 0) -> int | None:
    return value if type(value) is int and least <= value <= most else None


def _extended(found: object) -> dict[str, bytes]:
    if not isinstance(found, dict):
        return {}
    try:
        return {
            name: b64decode(value, validate=True)
            for name, value in found.items()
            if isinstance(value, str) and _is_name(name)
        }
    except ValueError:
        return {}


def _is_name(name: str) -> bool:
    """Return True for the NAME of an attribute user.NAME that a mount can list; those of smb. tell of the buffer."""
    try:
        nbytes = len(os.fsencode(name))
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        return False
    return 0 < nbytes <= _NAME_BYTES_MAX and "\0" not in name and not name.startswith("smb.")
