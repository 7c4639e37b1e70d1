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
    """Return what a record is known by. No name of a buffer has a colon in it."""
    return name if kind is Kind.BUFFER else f"{kind.value}:{name}"


def copy_stride_bytes(nbytes: int, stripe_bytes: int, segments: int) -> int:
    """Return how far apart two copies of so many bytes lie: by whole stripes on each segment, so as to be cut alike."""
    turn = stripe_bytes * segments
    return -(-nbytes // turn) * turn


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One segment of one buffer. Sizes are bytes; file_bytes is what each copy takes of its server's capacity.

    Of a buffer with two copies `server` has the primary, and `backup` the other one; empty: that was lost, and
    is perhaps being made anew. `epoch` counts the changes of these roles. A segment of a buffer with one copy has roles
    once it may move: then it is reached through its server alone, and has a backup on the way to another one.
    """

    id: int
    server: str
    nbytes: int
    file_bytes: int
    backup: str = ""
    epoch: int = 0  # 0: the buffer's, and it has no roles
    copying_to: str = ""  # the server that is to be the backup, while `server` copies the segment to it
    group: int = 0  # of the segments that move together: the first one's id; 0: it moves alone
    made: int = 0  # the epoch in which the copy on `server` was made: a file with an earlier role is not that copy
    backup_made: int = 0  # likewise; 0: with the segment, or by a version that did not keep it


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """A named array and where it lies. Until `ready`, its segments are being made and nobody sees it.

    A lock or a barrier is one too, and stays where it is. With several versions the segments hold copies side by
    side; nbytes is one's.
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
    kind: Kind = Kind.BUFFER  # from here on the defaults are those of records that were stored without it
    versions: int = 1
    wire: str = "exact"
    metadata: bytes = b""  # a JSON object, checked, and packed; empty: {}
    attempt_id: int = 0  # of the creation, where it may be asked for again
    replicas: int = 1
    mirror_of: int = 0  # the id of the published buffer; 0: it is no mirror

    @property
    def key(self) -> str:
        """Its name with its kind."""
        return key_of(self.kind, self.name)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f'{self.kind.value} "{self.name}"'

    @property
    def copy_stride_bytes(self) -> int:
        """From the start of one copy to the start of the next; 0 if there is one copy."""
        return copy_stride_bytes(self.nbytes, self.stripe_bytes, len(self.segments)) if self.versions > 1 else 0

    @property
    def copies(self) -> tuple[SegmentRecord, ...]:
        """Every copy of every segment, each with the server that has it."""
        others = (
            replace(segment, server=other)
            for segment in self.segments
            for other in (segment.backup, segment.copying_to)
            if other
        )
        return (*self.segments, *others)

    @property
    def movable(self) -> bool:
        """Whether some segment of it may move from server to server."""
        return self.replicas > 1 or any(segment.epoch for segment in self.segments)

    @property
    def moves_alone(self) -> bool:
        """Whether it has one copy, and can leave a server. Locks and barriers go once nobody uses them; mirrors end."""
        return self.replicas == 1 and self.kind is Kind.BUFFER and self.ready and not self.mirror_of

    @property
    def degraded(self) -> bool:
        """Whether some segment of it has fewer copies than were asked for."""
        return self.replicas > 1 and not all(segment.backup for segment in self.segments)

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        fields = asdict(self)
        if not self.attempt_id:  # as coordinators wrote it that know of none
            del fields["attempt_id"]
        for segment in fields["segments"]:
            if not segment["copying_to"]:
                del segment["copying_to"]
            for name in ("group", "made", "backup_made"):
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
        return json.dumps(fields, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> BufferRecord:
        """Read what `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        fields: dict[str, Any] = json.loads(text)
        fields["shape"] = tuple(fields["shape"])
        fields["segments"] = tuple(SegmentRecord(**segment) for segment in fields["segments"])
        fields["kind"] = Kind(fields.get("kind", Kind.BUFFER))
        stored = fields.get("metadata", "")  # a text as it stands, from a coordinator that did not pack them
        fields["metadata"] = pack(stored) if stored.startswith("{") else b64decode(stored)
        return BufferRecord(**fields)


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A memory server as it last registered. It is found again, on another port or host, by its name."""

    name: str
    instance_id: int
    data_address: str
    control_address: str
    unix_path: str
    metrics_address: str
    capacity_bytes: int
    used_bytes: int
    last_seen_at: float  # seconds since 1970
    weight: float = 1.0  # how much of the traffic it should take, beside others'; records of before have none
    data_tls: bool = False  # its data address speaks TLS
    zone: str = ""
    draining: bool = False  # it gets no new segments, and its copies go elsewhere

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        fields = asdict(self)
        if not self.zone:  # as coordinators wrote it that know of none
            del fields["zone"]
        if not self.draining:
            del fields["draining"]
        return json.dumps(fields, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> ServerRecord:
        """Read what `to_json` wrote. Raises TypeError or ValueError for anything else."""
        return ServerRecord(**json.loads(text))


UNKNOWN_EPOCH = -1


@dataclass(frozen=True, slots=True)
class Held:
    """A segment as a server says that it holds it. `nbytes`: of its capacity, beside what records account for."""

    epoch: int  # of its last role; of one without a role, in which it was made; UNKNOWN_EPOCH by a server of before
    whole: bool = True  # known to be
    begun: bool = False  # known not to be: a copy that is being made, or was to be
    primary: bool = False  # this run is its primary
    backup: bool = False
    quarantined: bool = False
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A client's session. `ended` is its number among those that have ended, 0 while it lives; of those no more
    is kept. `owner` is the key of the certificate that it was opened with, empty if there is none.
    """

    id: int
    client_name: str
    ended: int = 0
    owner: str = ""

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> SessionRecord:
        """Read what `to_json` wrote. Raises TypeError or ValueError for anything else."""
        return SessionRecord(**json.loads(text))
