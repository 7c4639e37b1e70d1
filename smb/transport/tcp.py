"""TCP: one link to each server for data, shared by all buffers and threads of the client, and one for what waits."""

from __future__ import annotations

from smb.engine import EngineError, Lane, Link
from smb.transport.base import Deadline, SegmentPath, SegmentPlace
from smb.transport.reconnect import Links, refused


class Tcp:
    """Transport `tcp`."""

    name = "tcp"

    def __init__(self, links: Links) -> None:
        self._links = links

    def reach(self, place: SegmentPlace, epoch: int, deadline: Deadline) -> SegmentPath:  # noqa: ARG002 - frames carry it
        """See Transport."""
        return SegmentPath(self.name, place.address, link=self._link(place, Lane.TCP_DATA, deadline))

    def gated(self, place: SegmentPlace, deadline: Deadline) -> Link:
        """See Transport."""
        return self._link(place, Lane.TCP_DATA, deadline)

    def waits(self, place: SegmentPlace, deadline: Deadline) -> Link:
        """See Transport."""
        return self._link(place, Lane.TCP_WAITS, deadline)

    def close(self) -> None:
        """See Transport."""

    def _link(self, place: SegmentPlace, lane: Lane, deadline: Deadline) -> Link:
        try:
            return self._links.reach(place, lane, deadline)
        except EngineError as error:
            raise refused(place, error) from error
