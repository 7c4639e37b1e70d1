"""The coordinator's records, plain and immutable, and their text in the store."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from smb.rpc.metadata import pack


class Kind(str, Enum):
    """The kind of thing a name stands for. Each kind has a name space of its own."""

    BUFFER = "buffer"
    LOCK = "lock"
    BARRIER = "barrier"


def key_of(kind: Kind, name: str) -> str:
    """Return the key of a record. A buffer's name cannot contain a colon, so keys of different kinds never collide."""
    return name if kind is Kind.BUFFER else f"{kind.value}:{name}"


def copy_stride_bytes(nbytes: int, stripe_bytes: int, segments: int) -> int:
    """Return the distance of two copies of `nbytes`, in bytes: a whole number of stripes on each segment, so that both
    copies are cut alike."""
    turn = stripe_bytes * segments
    return -(-nbytes // turn) * turn


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One segment of one buffer. Sizes are in bytes; file_bytes is what each copy takes of its server's capacity.

    For a buffer with two copies, `server` has the primary and `backup` has the other copy. `backup` is empty while that
    copy is lost or being made anew. `epoch` counts the changes of these roles. A segment of a buffer with one copy gets
    roles once it may move: from then on clients reach it through its server alone. While it moves, it has a backup.
    """

    id: int
    server: str
    nbytes: int
    file_bytes: int
    backup: str = ""
    epoch: int = 0  # 0: the segment has no roles, and the buffer's epoch applies
    copying_to: str = ""  # the server that will be the backup, while `server` copies the segment to it
    group: int = 0  # the bundle: the id of its first segment; 0: the segment moves alone
    made: int = 0  # the epoch in which the copy on `server` was made: a file with an earlier role is not that copy
    backup_made: int = 0  # the same for the backup; 0: made with the segment, or by a release that did not store it
    switched: int = 0  # the epoch in which the backup ceased to be the primary; 0: it was not the primary before


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """A named array and where it lies. Until `ready`, its segments are being made and clients do not see it.

    Locks and barriers are records too; they stay on their server. With several versions, the segments hold the version
    slots side by side, and nbytes is the size of one version.
    """

    name: str
    id: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    epoch: int
    stripe_bytes: int
    chunk_bytes: int
    segments: tuple[SegmentRecord, ...]
    created_at: float  # seconds since 1970
    ready: bool
    kind: Kind = Kind.BUFFER  # fields from here on were added later: the defaults are for records stored without them
    versions: int = 1
    wire: str = "exact"
    metadata: bytes = b""  # a checked JSON object, packed; empty means {}
    attempt_id: int = 0  # identifies a creation that a client may repeat; 0: it is not repeated
    replicas: int = 1
    mirror_of: int = 0  # the id of the published buffer that this one mirrors; 0: not a mirror
    file_attributes: bytes = b""  # rights, times and the like of the file that shows the buffer (smb/files)

    @property
    def key(self) -> str:
        """The record's key: its name, with its kind unless it is a buffer."""
        return key_of(self.kind, self.name)

    @property
    def title(self) -> str:
        """The record's kind and name, for messages."""
        return f'{self.kind.value} "{self.name}"'

    @property
    def copy_stride_bytes(self) -> int:
        """Bytes from the start of one version slot to the start of the next; 0 if the buffer has one version."""
        return copy_stride_bytes(self.nbytes, self.stripe_bytes, len(self.segments)) if self.versions > 1 else 0

    @property
    def copies(self) -> tuple[SegmentRecord, ...]:
        """Each copy of each segment, each as a record whose `server` is the server of that copy."""
        others = (
            replace(segment, server=other)
            for segment in self.segments
            for other in (segment.backup, segment.copying_to)
            if other
        )
        return (*self.segments, *others)

    @property
    def servers(self) -> tuple[str, ...]:
        """The servers of all copies, also of one that is being made, each once."""
        named = (name for each in self.segments for name in (each.server, each.backup, each.copying_to) if name)
        return tuple(dict.fromkeys(named))

    @property
    def movable(self) -> bool:
        """Whether some segment may move from server to server."""
        return self.replicas > 1 or any(segment.epoch for segment in self.segments)

    @property
    def moves_alone(self) -> bool:
        """Whether the buffer has one copy and can leave a server. Locks and barriers are freed when idle instead, and
        mirrors are ended."""
        return self.replicas == 1 and self.kind is Kind.BUFFER and self.ready and not self.mirror_of

    @property
    def degraded(self) -> bool:
        """Whether some segment has fewer copies than the buffer was created with."""
        return self.replicas > 1 and not all(segment.backup for segment in self.segments)

    @property
    def copies_wrong(self) -> bool:
        """Whether some segment has a copy too few or too many."""
        return self.degraded or (self.replicas == 1 and any(segment.backup for segment in self.segments))

    def to_json(self) -> str:
        """Return the text that `from_json` reads. Fast, since a folder's renaming stores all of its records."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in BufferRecord.__slots__}
        fields["segments"] = [{name: getattr(each, name) for name in SegmentRecord.__slots__} for each in self.segments]
        if not self.attempt_id:  # leave out new fields at their defaults, so that the text stays as before they existed
            del fields["attempt_id"]
        for segment in fields["segments"]:
            if not segment["copying_to"]:
                del segment["copying_to"]
            for name in ("group", "made", "backup_made", "switched"):
                if not segment[name]:
                    del segment[name]
        if self.replicas == 1:
            del fields["replicas"]
            for segment in fields["segments"]:
                if not segment["epoch"]:
                    del segment["backup"], segment["epoch"]
        if not self.mirror_of:
            del fields["mirror_of"]
        fields["metadata"] = b64encode(self.metadata).decode()
        fields["file_attributes"] = b64encode(self.file_attributes).decode()
        if not self.file_attributes:
            del fields["file_attributes"]
        return json.dumps(fields, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> BufferRecord:
        """Read what `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        fields: dict[str, Any] = json.loads(text)
        fields["shape"] = tuple(fields["shape"])
        fields["segments"] = tuple(SegmentRecord(**segment) for segment in fields["segments"])
        fields["kind"] = Kind(fields.get("kind", Kind.BUFFER))
        stored = fields.get("metadata", "")  # earlier releases stored the text without packing it
        fields["metadata"] = pack(stored) if stored.startswith("{") else b64decode(stored)
        fields["file_attributes"] = b64decode(fields.get("file_attributes", ""))
        return BufferRecord(**fields)


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A memory server as it last registered. It is recognized by its name, also on another port or host."""

    name: str
    instance_id: int
    data_address: str
    control_address: str
    unix_path: str
    metrics_address: str
    capacity_bytes: int
    used_bytes: int
    last_seen_at: float  # seconds since 1970
    weight: float = 1.0  # its share of the traffic relative to other servers; older records have none
    data_tls: bool = False  # its data address speaks TLS
    zone: str = ""
    draining: bool = False  # the server gets no new segments, and its copies move to others
    host_name: str = ""  # the machine: what goes when it is lost; empty: a server of an older release

    @property
    def address_host(self) -> str:
        """The host of its data address."""
        return self.data_address.rpartition(":")[0]

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        fields = asdict(self)
        if not self.zone:  # leave out the default, as versions without zones wrote it
            del fields["zone"]
        if not self.draining:
            del fields["draining"]
        if not self.host_name:
            del fields["host_name"]
        return json.dumps(fields, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> ServerRecord:
        """Read what `to_json` wrote. Raises TypeError or ValueError for anything else."""
        return ServerRecord(**json.loads(text))


UNKNOWN_EPOCH = -1


@dataclass(frozen=True, slots=True)
class Held:
    """A segment as its server reports it. `nbytes`: the part of the server's capacity beyond what the records count."""

    epoch: int  # of its last role, or the epoch in which it was made; UNKNOWN_EPOCH from servers of older releases
    whole: bool = True  # the copy is known to be complete
    begun: bool = False  # the copy is known to be incomplete: it is being made, or was about to be
    primary: bool = False  # this run of the server is the segment's primary
    backup: bool = False
    quarantined: bool = False
    untouched: bool = False  # nothing was ever written to it
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ShownCertificate:
    """The contents of a client's certificate: `key` is equal for equal contents. All empty without a certificate."""

    key: str = ""
    role: str = ""
    name: str = ""
    namespaces: tuple[str, ...] = ()


NOBODY = ShownCertificate()


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A client's session. `ended` is its number among the ended sessions, and 0 while it lives; only the number is kept
    of an ended session, and who ended it if that was an operator. `holder` is of the certificate that its client showed
    last; `since` is in seconds since 1970, 0 if unknown.
    """

    id: int
    client_name: str
    ended: int = 0
    holder: ShownCertificate = NOBODY
    since: float = 0.0
    kicked_by: str = ""

    def is_called(self, name: str) -> bool:
        """Whether the name is in the certificate, or is the client's own, with its process or without."""
        shown = self.holder.name or self.holder.role
        own = self.client_name.removesuffix(f" ({shown})") if shown else self.client_name
        process = own.rpartition(" (")[2].removesuffix(")")
        program = own.removesuffix(f" ({process})")
        return bool(name) and name in (self.holder.name, self.client_name, own, program, process)

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> SessionRecord:
        """Read what `to_json` wrote. Raises TypeError or ValueError for anything else."""
        fields = json.loads(text)
        owner = fields.pop("owner", "")  # of a release that stored nothing else of the certificate
        holder = fields.pop("holder", {"key": owner})
        return SessionRecord(
            **fields, holder=ShownCertificate(**{**holder, "namespaces": tuple(holder.get("namespaces", ()))})
        )
