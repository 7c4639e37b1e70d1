"""The coordinator's description of a buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smb.arrays.dtypes import DTYPES
from smb.config.printable import printable
from smb.errors import Error, InvalidArgumentError
from smb.layout import Layout
from smb.rpc import control_pb2 as pb
from smb.rpc.metadata import unpack
from smb.transport.base import SegmentLocation


@dataclass(frozen=True, slots=True)
class Mirror:
    """A mirror of a published buffer: the buffer `name`, on one server.

    `alive`: the coordinator heard of its relay within the server's lease. As of then, `version` is the mirror's
    version, `arrived_bytes` the bytes of the next one, and `published` the source's latest version. `feeds` has the
    bytes per second that came from each buffer.
    """

    name: str
    server: str
    zone: str
    alive: bool
    version: int
    arrived_bytes: int
    published: int
    feeds: Mapping[str, float]
    id: int = 0


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """The coordinator's description of a buffer. `created` is seconds since 1970, `nbytes` bytes."""

    name: str
    id: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    layout: Layout
    created: float
    versions: int
    copy_stride_bytes: int  # from one version's slot to the next one's; 0 for a single slot
    replicas: int = 1  # copies on different servers; SegmentLocation.backup tells which segments have lost one
    wire: str = "exact"  # how elements travel unless a call says otherwise
    mirror_of: str = ""  # the published buffer, if this one is a mirror
    mirrors: tuple[Mirror, ...] = ()  # mirrors of a published buffer; () in an item of list()
    metadata_json: str = field(default="", repr=False)  # the text of Buffer.metadata; "" in an item of list()
    # The name of an element type that only a newer release knows, in an item of list(); dtype is raw bytes then
    unknown_dtype: str = ""

    @property
    def dtype_name(self) -> str:
        """The element type's name; "NAME (unknown to this release)" if only a newer release can open the buffer."""
        return f"{self.unknown_dtype} (unknown to this release)" if self.unknown_dtype else self.dtype.name

    file_attributes: bytes = field(default=b"", repr=False)  # of the file that shows it (smb/files/attributes.py)

    @property
    def movable(self) -> bool:
        """True if the segments may move (two copies, or moved before), so all accesses go through the servers."""
        return self.replicas > 1 or any(segment.epoch for segment in self.layout.segments)

    @property
    def degraded(self) -> bool:
        """True if a buffer with two copies has lost one copy of some segment, and has no new one yet."""
        return self.replicas > 1 and any(not segment.backup for segment in self.layout.segments)

    @property
    def lost(self) -> bool:
        """True if a server came back without the memory of some segment."""
        return any(segment.lost for segment in self.layout.segments)

    def moves_with(self, other: BufferInfo) -> bool:
        """True if each segment is in one bundle with the other buffer's, so that they always move together.

        `other` may have been described before there was a bundle: its segments are then the first of the bundles.
        """
        return self.bundles == other.bundles

    @property
    def bundles(self) -> tuple[int, ...]:
        """The bundle of each segment: its own id if it moves alone."""
        return tuple(segment.group or segment.id for segment in self.layout.segments)

    @classmethod
    def of(cls, buffer: pb.Buffer) -> BufferInfo:
        """Build the description of a buffer that is opened, from the coordinator's message. Raises Error for an element
        type that this release does not know.
        """
        info = cls.listed(buffer)
        if info.unknown_dtype:
            raise Error(
                f"buffer {printable(buffer.name)}: this release of smb does not know its dtype "
                f"{info.unknown_dtype}; install the release that the cluster's servers run"
            )
        return info

    @classmethod
    def listed(cls, buffer: pb.Buffer) -> BufferInfo:
        """Build the description of a buffer in a list, also of one that this release cannot open."""
        known, count = DTYPES.get(buffer.dtype), math.prod(buffer.shape)
        itemsize = known.itemsize if known else max(1, buffer.nbytes // max(1, count))
        locations = tuple(_location(buffer, segment) for segment in buffer.layout.segments)
        layout = Layout(
            buffer.layout.epoch,
            (buffer.versions or 1) * buffer.copy_stride_bytes or buffer.nbytes,
            itemsize,
            buffer.layout.stripe_bytes,
            buffer.layout.chunk_bytes,
            locations,
        )
        return cls(
            buffer.name,
            buffer.id,
            tuple(buffer.shape),
            known.numpy if known else np.dtype((np.void, itemsize)),
            # buffer.nbytes is the stored size: at least one element
            count * itemsize if known else min(count * itemsize, buffer.nbytes),
            layout,
            buffer.created_at,
            buffer.versions or 1,
            buffer.copy_stride_bytes,
            buffer.replicas or 1,
            buffer.wire or "exact",
            buffer.mirror_of,
            tuple(
                Mirror(
                    m.name,
                    m.server,
                    m.zone,
                    m.alive,
                    m.version,
                    m.arrived_bytes,
                    m.published,
                    {feed.name: feed.bytes_per_s for feed in m.feeds},
                    m.id,
                )
                for m in buffer.mirrors
            ),
            unpack(buffer.packed_metadata),
            "" if known else printable(buffer.dtype),
            buffer.file_attributes,
        )


def check_replicas(asked: str, replicas: object) -> None:
    """Raise InvalidArgumentError unless `replicas` is a valid number of copies, or None for the callee's default."""
    if replicas is not None and (type(replicas) is not int or replicas not in (1, 2)):
        raise InvalidArgumentError(f"{asked}: replicas must be 1 or 2, not {replicas!r}")


def _location(buffer: pb.Buffer, segment: pb.Segment) -> SegmentLocation:
    return SegmentLocation(
        segment.id,
        segment.server,
        segment.nbytes,
        segment.data_address,
        segment.unix_path,
        segment.instance_id,
        segment.control_address,
        segment.data_tls,
        segment.epoch,
        segment.backup,
        (buffer.name, buffer.id),
        segment.copying_to,
        segment.copied,
        segment.copy_left_s,
        segment.lost,
        buffer.kind,
        segment.group_id,
    )
