"""TCP: each server has a link for data (several if its round trip is long) and a link for waiting requests. All buffers
and threads of a client share these links.
"""

from __future__ import annotations

from smb.engine import EngineError, Lane, Link
from smb.transport.base import Deadline, SegmentLocation, SegmentPath
from smb.transport.reconnect import Links, refused


class Tcp:
    name = "tcp"

    def __init__(self, links: Links) -> None:
        self._links = links

    def reach(self, location: SegmentLocation, epoch: int, deadline: Deadline) -> SegmentPath:  # noqa: ARG002 - in frames
        links = self.gated(location, deadline)
        many = f", {len(links)} connections for {1000 * links[0].round_trip_s():.0f} ms" if len(links) > 1 else ""
        return SegmentPath(self.name, location.address + many, links)

    def gated(self, location: SegmentLocation, deadline: Deadline) -> tuple[Link, ...]:
        try:
            return self._links.reach_data(location, deadline)
        except EngineError as error:
            raise refused(location, error) from error

    def waits(self, location: SegmentLocation, deadline: Deadline) -> Link:
        try:
            return self._links.reach(location, Lane.TCP_WAITS, deadline)
        except EngineError as error:
            raise refused(location, error) from error

    def close(self) -> None: ...
