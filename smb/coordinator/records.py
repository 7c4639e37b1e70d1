"""What the coordinator remembers: plain immutable records, and their text in the store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One segment of one buffer. Sizes are bytes; file_bytes is what it takes of its server's capacity."""

    id: int
    server: str
    nbytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """A named array and where it lies. Until `ready`, its segments are being made and nobody sees it."""

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

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> BufferRecord:
        """Read what `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        fields: dict[str, Any] = json.loads(text)
        fields["shape"] = tuple(fields["shape"])
        fields["segments"] = tuple(SegmentRecord(**segment) for segment in fields["segments"])
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

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ServerRecord:
        """Read what `to_json` wrote. Raises TypeError or ValueError for anything else."""
        return ServerRecord(**json.loads(text))
