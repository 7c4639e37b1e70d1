"""What a create asks for, checked. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from smb.config import parse_address
from smb.dtypes import DTYPES
from smb.errors import InvalidArgumentError

NAME_CHARACTERS_MAX = 255
DIMENSIONS_MAX = 32  # numpy 1's limit; a client could not show more
STRIPE_BYTES_MULTIPLE = 4096  # a page: stripes are mapped side by side
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_SERVER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Creation:
    """One create, checked as far as it can be without looking at the cluster. Zero and empty mean: not given."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    server_count: int = 0
    server_names: tuple[str, ...] = ()
    stripe_bytes: int = 0
    like: str = ""
    exist_ok: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the data, 0 where the dtype is left to `like`."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize if self.dtype else 0


def check_creation(creation: Creation, *, replicas: int, versions: int) -> Creation:
    """Return the creation as it came, or raise InvalidArgumentError that names what was asked and what would do."""
    asked = f'create of "{creation.name}"'
    _check_name(creation.name)
    _check_array(creation, asked)
    _check_wishes(creation, asked)
    if replicas not in (0, 1):
        raise InvalidArgumentError(f"{asked} with replicas={replicas}: replication is not there yet; use replicas=1")
    if versions not in (0, 1):
        raise InvalidArgumentError(f"{asked} with versions={versions}: versions are not there yet; use versions=1")
    return creation


def check_server_name(name: str) -> None:
    """Raise InvalidArgumentError for what cannot name a memory server (it becomes part of file names)."""
    if not _SERVER_NAME.fullmatch(name):
        raise InvalidArgumentError(f'"{name}" cannot name a memory server: use 1 to 64 characters of A-Z a-z 0-9 . _ -')


def check_address(what: str, address: str) -> None:
    """Raise InvalidArgumentError for what is no host:port with a port one can connect to."""
    _, port = parse_address(address)
    if port == 0:
        raise InvalidArgumentError(f'{what} "{address}" has port 0: nobody could connect to it')


def _check_name(name: str) -> None:
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidArgumentError(
            f"a buffer's name has at most {NAME_CHARACTERS_MAX} characters, this has {len(name)}"
        )
    if not _NAME.fullmatch(name) or any(part in (".", "..") for part in name.split("/")):
        raise InvalidArgumentError(
            f'"{name}" cannot name a buffer: use parts of A-Z a-z 0-9 . _ - separated by single slashes, '
            f'none of them empty, "." or ".."'
        )


def _check_array(creation: Creation, asked: str) -> None:
    if len(creation.shape) > DIMENSIONS_MAX:
        raise InvalidArgumentError(f"{asked}: a shape has at most {DIMENSIONS_MAX} extents, got {len(creation.shape)}")
    if any(extent < 1 for extent in creation.shape):
        raise InvalidArgumentError(f"{asked}: shape {creation.shape} has an extent of 0; every extent is at least 1")
    if creation.dtype not in DTYPES and not (creation.like and not creation.dtype):
        raise InvalidArgumentError(f'{asked}: no dtype "{creation.dtype}"; there are {", ".join(DTYPES)}')


def _check_wishes(creation: Creation, asked: str) -> None:
    if creation.stripe_bytes % STRIPE_BYTES_MULTIPLE:
        raise InvalidArgumentError(
            f"{asked}: a stripe is a multiple of {STRIPE_BYTES_MULTIPLE} bytes, which {creation.stripe_bytes} is not"
        )
    names = creation.server_names
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"{asked}: servers {', '.join(names)}: each may be named once")
    if names and creation.server_count not in (0, len(names)):
        raise InvalidArgumentError(f"{asked}: {creation.server_count} servers asked, but {len(names)} named")
    if creation.like and (names or creation.server_count or creation.stripe_bytes):
        raise InvalidArgumentError(f'{asked} like "{creation.like}": that fixes servers and stripe; leave both out')
