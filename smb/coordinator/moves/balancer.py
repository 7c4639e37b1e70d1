"""Gives servers their share of primaries again, by itself and slowly: after restarts and losses the primaries lie where
backups were promoted. Only roles switch here, which moves no data; copies move when an operator asks (smb rebalance).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import Instant
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.moves.move import Move
from smb.coordinator.moves.primaries import switches
from smb.coordinator.state import State
from smb.coordinator.traffic import Traffic

LOOK_S_MAX = 5.0
AGAIN_S = 60.0  # until roles that were balanced are looked at again, though no record has changed
AT_ONCE = 16  # switches that one look begins, as each makes clients of a segment ask for its new primary
SLACK = 0.25  # as in `switches`; large, so that traffic that varies does not move roles back and forth

_Runs = frozenset[tuple[str, int]]


class Balancer:
    def __init__(
        self,
        commit_log: CommitLog,
        copy_maker: CopyMaker,
        traffic: Traffic,
        in_thread: Callable[..., Awaitable[Any]],
        after_s: float,
    ) -> None:
        """`after_s`: for how long no server must have come or gone; 0: do nothing."""
        self._commit_log = commit_log
        self._copy_maker = copy_maker
        self._traffic = traffic
        self._in_thread = in_thread
        self._after_s = after_s
        self._runs: _Runs = frozenset()  # of the servers, at the last look
        self._calm_since = 0.0
        self._balanced: object = None  # the records that were found balanced, and when
        self._balanced_at = 0.0

    async def run(self) -> None:
        """Switch roles until cancelled."""
        while self._after_s:
            await asyncio.sleep(min(LOOK_S_MAX, self._after_s))
            await self.look()

    async def look(self) -> None:
        """Begin some switches, if servers have been there for a while and nothing is under way."""
        state, now = self._commit_log.state, self._commit_log.now()
        runs = frozenset(
            (each.name, each.instance_id) for each in state.servers.values() if state.heard(each.name, now)
        )
        if runs != self._runs:
            self._runs, self._calm_since = runs, now.monotonic
        again = state.buffers is not self._balanced or now.monotonic - self._balanced_at >= AGAIN_S
        if now.monotonic - self._calm_since < self._after_s or not again or not state.every_server_was_heard(now):
            return
        fixed = frozenset(self._copy_maker.unswitchable())
        moves = await self._in_thread(due, state, now, self._traffic.of_primaries(state), fixed)
        if moves:
            self._copy_maker.switch(moves)
        else:
            self._balanced, self._balanced_at = state.buffers, now.monotonic


def due(state: State, now: Instant, traffic: dict[int, float], fixed: frozenset[int] = frozenset()) -> list[Move]:
    """Return the switches to begin: none while a copy is missing or a server is being drained. `fixed`: bundles that
    keep their roles for now."""
    records = list(state.buffers.values())
    pool = state.pool(now)
    if pool.draining or any(record.degraded or not record.ready for record in records):
        return []
    return switches(records, pool, traffic, SLACK, fixed)[:AT_ONCE]
