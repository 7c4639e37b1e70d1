"""Checks a request to create. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from smb.arrays.dtypes import DTYPES, WIRES
from smb.config.limits import DIMENSIONS_MAX, NAME_CHARACTERS_MAX, STRIPE_BYTES_MULTIPLE, VERSIONS_MAX
from smb.config.parse import parse_address
from smb.coordinator.records import Kind, key_of
from smb.errors import InvalidArgumentError
from smb.rpc import metadata

# Shapes, of int64, of what has no form of its own. A barrier's are seats: 16 bytes for each party, two rounds of them.
SHAPES: dict[Kind, tuple[int, ...]] = {Kind.LOCK: (1,), Kind.BARRIER: (8192,)}
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
    versions: int = 1
    kind: Kind = Kind.BUFFER
    wire: str = ""
    metadata: bytes = b""  # packed
    attempt_id: int = 0
    replicas: int = 1
    mirror_of: str = ""
    joins: bool = False  # its segments move together with those of `like`
    model_id: int = 0  # of the buffer that `like`, or `mirror_of`, is to be the name of

    @property
    def key(self) -> str:
        """The record's key in the state."""
        return key_of(self.kind, self.name)

    @property
    def asked(self) -> str:
        """The request's name in messages."""
        if self.mirror_of:  # its own name is the command's, and nobody typed it
            return f'mirror of "{self.mirror_of}" on {", ".join(self.server_names)}'
        doing = "create of" if self.kind is Kind.BUFFER else f"first use of {self.kind.value}"
        return f'{doing} "{self.name}"'

    @property
    def nbytes(self) -> int:
        """Bytes of the data, 0 if the dtype is left to `like`. No elements have the place of one: its locks and
        versions live there.
        """
        return max(math.prod(self.shape), 1) * DTYPES[self.dtype].itemsize if self.dtype else 0


def first_use(kind: Kind, name: str, replicas: int = 1) -> Creation:
    """Return what makes a lock or barrier, with that many copies (0: one), or finds it. Raises InvalidArgumentError."""
    check_name(kind, name)
    if replicas > (2 if kind is Kind.LOCK else 1):
        raise InvalidArgumentError(
            f"{kind.value} {name!r} with replicas={replicas}: a lock has 1 copy, or 2; a barrier 1"
        )
    return Creation(name, SHAPES[kind], "int64", server_count=1, exist_ok=True, kind=kind, replicas=replicas or 1)


def check_creation(creation: Creation, *, replicas: int) -> Creation:
    """Return the creation, with that many copies (0: one). Raises InvalidArgumentError, which names what was asked and
    what would do.
    """
    asked = creation.asked
    check_name(creation.kind, creation.name)
    _check_array(creation, asked)
    _check_wishes(creation, asked)
    # One that joins has as many as the other buffer, which is looked up later.
    creation = replace(creation, replicas=replicas or (0 if creation.joins else 1))
    if creation.replicas not in ((0, 1, 2) if creation.joins else (1, 2)):
        raise InvalidArgumentError(f"{asked} with replicas={replicas}: a buffer has 1 copy, or 2")
    if not 1 <= creation.versions <= VERSIONS_MAX:
        raise InvalidArgumentError(
            f"{asked} with versions={creation.versions}: a buffer has 1 to {VERSIONS_MAX}: one is being written, the "
            f"others can be read"
        )
    check_wire(creation)
    metadata.check(asked, creation.metadata)
    return creation


def check_wire(creation: Creation) -> None:
    """Raise InvalidArgumentError for a way to travel that there is not, or not for that dtype."""
    if creation.wire not in ("", *WIRES):
        raise InvalidArgumentError(f'{creation.asked}: no wire "{creation.wire}"; there are {", ".join(WIRES)}')
    if WIRES.get(creation.wire, 0) and creation.dtype not in ("", "float32"):
        raise InvalidArgumentError(
            f'{creation.asked} with wire="{creation.wire}": only float32 is rounded on the way, {creation.dtype} is not'
        )


def check_server_name(name: str) -> None:
    """Raise InvalidArgumentError for what cannot name a memory server (it becomes part of file names)."""
    if not _SERVER_NAME.fullmatch(name):
        raise InvalidArgumentError(f'"{name}" cannot name a memory server: use 1 to 64 characters of A-Z a-z 0-9 . _ -')


def check_zone(name: str) -> None:
    """Raise InvalidArgumentError for what cannot name a zone."""
    if name and not _SERVER_NAME.fullmatch(name):
        raise InvalidArgumentError(f'"{name}" cannot name a zone: use 1 to 64 characters of A-Z a-z 0-9 . _ -')


def check_address(what: str, address: str) -> None:
    """Raise InvalidArgumentError for what is no host:port with a port one can connect to."""
    _, port = parse_address(address)
    if port == 0:
        raise InvalidArgumentError(f'{what} "{address}" has port 0: nobody could connect to it')


def check_name(kind: Kind, name: str) -> None:
    """Raise InvalidArgumentError for what cannot name anything."""
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidArgumentError(
            f"a {kind.value}'s name has at most {NAME_CHARACTERS_MAX} characters, this has {len(name)}"
        )
    if not _NAME.fullmatch(name) or any(part in (".", "..") for part in name.split("/")):
        raise InvalidArgumentError(
            f'"{name}" cannot name a {kind.value}: use parts of A-Z a-z 0-9 . _ - separated by single slashes, '
            f'none of them empty, "." or ".."'
        )


def _check_array(creation: Creation, asked: str) -> None:
    if len(creation.shape) > DIMENSIONS_MAX:
        raise InvalidArgumentError(f"{asked}: a shape has at most {DIMENSIONS_MAX} extents, got {len(creation.shape)}")
    if any(extent < 0 for extent in creation.shape):
        raise InvalidArgumentError(f"{asked}: shape {creation.shape} has a negative extent; every extent is at least 0")
    if creation.dtype not in DTYPES and not ((creation.like or creation.mirror_of) and not creation.dtype):
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
    if creation.mirror_of and (
        len(names) != 1
        or creation.shape
        or creation.dtype
        or creation.like
        or creation.stripe_bytes
        or creation.metadata
        or creation.wire
    ):
        raise InvalidArgumentError(f'{asked}, named "{creation.name}": give one server, and nothing else')
    if creation.model_id and not (creation.like or creation.mirror_of):
        raise InvalidArgumentError(f"{asked}: an id of the buffer that it is like, or a mirror of, and no name of that")
    if creation.joins and not creation.like:
        raise InvalidArgumentError(f"{asked}: it is to move together with another buffer; name that one, with like")
    if creation.joins and creation.versions > 1:
        raise InvalidArgumentError(
            f'{asked} with state_of="{creation.like}" and versions={creation.versions}: a state has one; leave '
            f"versions out"
        )
    if creation.like and (names or creation.server_count or creation.stripe_bytes):
        raise InvalidArgumentError(f'{asked} like "{creation.like}": that fixes servers and stripe; leave both out')
