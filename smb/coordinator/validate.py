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

# The int64 shapes of kinds whose shape is fixed. A barrier's elements are seats: two rounds of 16 bytes for each party.
SHAPES: dict[Kind, tuple[int, ...]] = {Kind.LOCK: (1,), Kind.BARRIER: (8192,)}
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_SERVER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Creation:
    """A create request, checked as far as possible without the cluster's state. Zero and empty mean: not given."""

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
    joins: bool = False  # its segments join the bundles of `like`
    model_id: int = 0  # the id that the buffer named by `like` or `mirror_of` must have

    @property
    def key(self) -> str:
        """The record's key in the state."""
        return key_of(self.kind, self.name)

    @property
    def asked(self) -> str:
        """The request in words, for messages."""
        if self.mirror_of:  # the command made the mirror's own name, so the user does not know it
            return f'mirror of "{self.mirror_of}" on {", ".join(self.server_names)}'
        doing = "create of" if self.kind is Kind.BUFFER else f"first use of {self.kind.value}"
        return f'{doing} "{self.name}"'

    @property
    def nbytes(self) -> int:
        """Bytes of the data; 0 if the dtype is left to `like`. A buffer without elements takes the place of one
        element, where its locks and versions live.
        """
        return max(math.prod(self.shape), 1) * DTYPES[self.dtype].itemsize if self.dtype else 0


def first_use(kind: Kind, name: str, replicas: int = 1) -> Creation:
    """Return the creation with which a lock or barrier is found or made, with `replicas` copies (0: one). Raises
    InvalidArgumentError."""
    check_name(kind, name)
    if replicas > (2 if kind is Kind.LOCK else 1):
        raise InvalidArgumentError(
            f"{kind.value} {name!r}: a lock can have 1 or 2 replicas and a barrier 1, not {replicas}"
        )
    return Creation(name, SHAPES[kind], "int64", server_count=1, exist_ok=True, kind=kind, replicas=replicas or 1)


def check_creation(creation: Creation, *, replicas: int) -> Creation:
    """Return the creation with `replicas` copies (0: one). Raises InvalidArgumentError, which names what was asked and
    what is allowed.
    """
    asked = creation.asked
    check_name(creation.kind, creation.name)
    _check_array(creation, asked)
    _check_wishes(creation, asked)
    # A buffer that joins a bundle has as many copies as `like`, which is looked up later.
    creation = replace(creation, replicas=replicas or (0 if creation.joins else 1))
    if creation.replicas not in ((0, 1, 2) if creation.joins else (1, 2)):
        raise InvalidArgumentError(f"{asked}: replicas must be 1 or 2, not {replicas}")
    if not 1 <= creation.versions <= VERSIONS_MAX:
        raise InvalidArgumentError(
            f"{asked}: versions must be from 1 to {VERSIONS_MAX}, not {creation.versions}: one is written while the "
            f"others can be read"
        )
    check_wire(creation)
    metadata.check(asked, creation.metadata)
    return creation


def check_wire(creation: Creation) -> None:
    """Raise InvalidArgumentError for an unknown wire format, or for one that the dtype does not have."""
    if creation.wire not in ("", *WIRES):
        raise InvalidArgumentError(f'{creation.asked}: wire must be one of {", ".join(WIRES)}, not "{creation.wire}"')
    if WIRES.get(creation.wire, 0) and creation.dtype not in ("", "float32"):
        raise InvalidArgumentError(
            f'{creation.asked} with wire="{creation.wire}": only float32 can be rounded on the wire, not '
            f"{creation.dtype}; leave wire= out"
        )


def check_server_name(name: str) -> None:
    """Raise InvalidArgumentError unless the name is valid for a memory server, as it becomes part of file names."""
    if not _SERVER_NAME.fullmatch(name):
        raise InvalidArgumentError(f'"{name}" cannot name a memory server: use 1 to 64 characters of A-Z a-z 0-9 . _ -')


def check_zone(name: str) -> None:
    """Raise InvalidArgumentError unless the name is valid for a zone, or empty."""
    if name and not _SERVER_NAME.fullmatch(name):
        raise InvalidArgumentError(f'"{name}" cannot name a zone: use 1 to 64 characters of A-Z a-z 0-9 . _ -')


def check_host_name(name: str) -> None:
    """Raise InvalidArgumentError unless the name is valid for a machine, or empty."""
    if name and not _SERVER_NAME.fullmatch(name):
        raise InvalidArgumentError(f'"{name}" cannot name a host: use 1 to 64 characters of A-Z a-z 0-9 . _ -')


def check_address(what: str, address: str) -> None:
    """Raise InvalidArgumentError unless the address is host:port with a port other than 0."""
    _, port = parse_address(address)
    if port == 0:
        raise InvalidArgumentError(f'{what} "{address}" has port 0, to which no client can connect; give another port')


def check_name(kind: Kind, name: str) -> None:
    """Raise InvalidArgumentError unless the name is valid."""
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidArgumentError(
            f"a {kind.value}'s name may have at most {NAME_CHARACTERS_MAX} characters; this name has {len(name)}"
        )
    if not _NAME.fullmatch(name) or any(part in (".", "..") for part in name.split("/")):
        raise InvalidArgumentError(
            f'"{name}" cannot name a {kind.value}: use parts of A-Z a-z 0-9 . _ - separated by single slashes, '
            f'none of them empty, "." or ".."'
        )


def _check_array(creation: Creation, asked: str) -> None:
    if len(creation.shape) > DIMENSIONS_MAX:
        raise InvalidArgumentError(
            f"{asked}: a shape may have at most {DIMENSIONS_MAX} extents, not {len(creation.shape)}"
        )
    if any(extent < 0 for extent in creation.shape):
        raise InvalidArgumentError(f"{asked}: shape {creation.shape} has a negative extent; every extent is at least 0")
    if creation.dtype not in DTYPES and not ((creation.like or creation.mirror_of) and not creation.dtype):
        raise InvalidArgumentError(f'{asked}: dtype must be one of {", ".join(DTYPES)}, not "{creation.dtype}"')


def _check_wishes(creation: Creation, asked: str) -> None:
    if creation.stripe_bytes % STRIPE_BYTES_MULTIPLE:
        raise InvalidArgumentError(
            f"{asked}: stripe must be a multiple of {STRIPE_BYTES_MULTIPLE} bytes, not {creation.stripe_bytes}"
        )
    names = creation.server_names
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"{asked}: each server may be named once, not {', '.join(names)}")
    if names and creation.server_count not in (0, len(names)):
        raise InvalidArgumentError(
            f"{asked}: the request asks for {creation.server_count} servers, but names {len(names)}"
        )
    if creation.mirror_of and (
        len(names) != 1
        or creation.shape
        or creation.dtype
        or creation.like
        or creation.stripe_bytes
        or creation.metadata
        or creation.wire
    ):
        raise InvalidArgumentError(f'{asked}, named "{creation.name}": a mirror takes one server and no other option')
    if creation.model_id and not (creation.like or creation.mirror_of):
        raise InvalidArgumentError(
            f"{asked}: the request has an id of the other buffer, but not its name; give the name in like or mirror_of"
        )
    if creation.joins and not creation.like:
        raise InvalidArgumentError(f"{asked}: to move together with another buffer, it must name that buffer in like")
    if creation.joins and creation.versions > 1:
        raise InvalidArgumentError(
            f'{asked} with state_of="{creation.like}": a state has one version, not {creation.versions}; leave '
            f"versions= out"
        )
    if creation.like and (names or creation.server_count or creation.stripe_bytes):
        raise InvalidArgumentError(
            f'{asked} like "{creation.like}": the other buffer decides servers and stripe; leave both out'
        )
