"""What must be there, as clients were told: kept beside the cluster, and never shown to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tests.simulator.engine import Host, Memory


@dataclass
class Part:
    """One segment of a buffer that was created."""

    id: int
    title: str
    replicas: int
    acknowledged: dict[int, int] = field(default_factory=dict)  # by client: its last write that was answered
    attempted: dict[int, int] = field(default_factory=dict)
    may_go: bool = False  # somebody has asked to delete it, or to forget it
    lost: bool = False  # its only copy went with a host's memory
    # The store was put back since: what clients are told now may be of an older copy. What they were told must be kept.
    loose: bool = False

    def is_in(self, memory: Memory | None, *, counts: bool = False) -> bool:
        """Whether that memory has all that was acknowledged, and is a whole copy, or `counts` as one in the records."""
        if memory is None or (memory.whole is False and not counts):
            return False
        return all(memory.cells.get(client, 0) >= number for client, number in self.acknowledged.items())


class Truth:
    """All segments that clients were told of."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self._hosts = hosts
        self.parts: dict[int, Part] = {}
        self.primaries: dict[tuple[int, int], str] = {}  # by segment and epoch: the server that acknowledged a change
        self.lost_at = -1.0  # when a host lost its memory last
        self.gone: set[int] = set()  # segments whose only copy was lost before anybody was told of them

    def told(
        self, title: str, replicas: int, segment_ids: Iterable[int], since: float, *, put_back: bool = False
    ) -> None:
        """A buffer was created, or found; it was asked for since that moment, and the store was `put_back` then."""
        for number in segment_ids:
            if number not in self.parts:
                part = self.parts[number] = Part(number, title, replicas, loose=put_back)
                lost = number in self.gone or self.lost_at >= since
                part.lost = replicas == 1 and lost and not any(self.holders(part))

    def holders(self, part: Part, *, without: str = "") -> Iterator[str]:
        """Yield the hosts that have all that was acknowledged of a segment."""
        for name, host in self._hosts.items():
            if name != without and part.is_in(host.segments.get(part.id)):
                yield name

    def forget_order(self) -> None:
        """The store was put back: epochs come again, and an older copy may be in use for a while."""
        self.primaries.clear()
        for part in self.parts.values():
            part.loose = True
