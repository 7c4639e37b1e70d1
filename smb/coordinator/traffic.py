"""How much traffic each segment has had lately, as the servers of the primaries report it with their renewals.

In memory, and bounded: a server reports its 256 busiest segments, and what has had no traffic for long is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from smb.coordinator.state import State
from smb.rpc import control_pb2 as pb

HALF_LIFE_S = 60.0  # after which traffic counts half, so that a pause between two exchanges changes little
LEAST_BYTES = 1.0  # what is below it is forgotten


class Traffic:
    """Used in the coordinator's loop only."""

    def __init__(self) -> None:
        self._bytes: dict[str, dict[int, float]] = {}  # by server and segment, faded
        self._faded_at: dict[str, float] = {}

    def record(self, server: str, loads: Iterable[pb.BusyLoad], at_s: float) -> None:
        """Add what a server has reported; `at_s`: on the monotonic clock."""
        fading = 0.5 ** (max(0.0, at_s - self._faded_at.get(server, at_s)) / HALF_LIFE_S)
        self._faded_at[server] = at_s
        kept = {number: nbytes * fading for number, nbytes in self._bytes.get(server, {}).items()}
        for load in loads:
            kept[load.id] = kept.get(load.id, 0.0) + load.bytes
        self._bytes[server] = {number: nbytes for number, nbytes in kept.items() if nbytes >= LEAST_BYTES}

    def switched(self, segment_ids: Iterable[int], former: str, present: str) -> None:
        """Count what a former primary's server has reported for its successor: their roles have switched."""
        before = self._bytes.get(former, {})
        moved = {number: before.pop(number) for number in segment_ids if number in before}
        if moved:
            self._bytes[present] = self._bytes.get(present, {}) | moved
            self._faded_at.setdefault(present, self._faded_at[former])

    def of_primaries(self, state: State) -> dict[int, float]:
        """Return the faded bytes of each segment at its primary's server, and forget servers that are not known."""
        for gone in self._bytes.keys() - state.servers.keys():
            del self._bytes[gone], self._faded_at[gone]
        return {
            segment.id: nbytes
            for record in state.buffers.values()
            for segment in record.segments
            if (nbytes := self._bytes.get(segment.server, {}).get(segment.id, 0.0))
        }
