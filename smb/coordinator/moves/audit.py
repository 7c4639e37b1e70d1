"""An audit line for each move that a drain or a rebalance makes, with the id of the call that asked for it."""

from __future__ import annotations

import logging
from collections.abc import Collection

from smb.config.request_ids import request_of_call
from smb.coordinator.moves.wanted_copies import Wish
from smb.coordinator.state import State
from smb.daemon.log import AUDIT

_audit_log = logging.getLogger(AUDIT)


class MoveAudit:
    """Remembers who asked, by the id of the call; lost when this run ends, and then the lines have no id."""

    def __init__(self) -> None:
        self._drains: dict[str, str] = {}  # by server
        self._rebalance = ""

    def drain(self, server: str, *, undo: bool) -> None:
        """Take note that the call that runs now asked for a drain of this server, or ended it."""
        if undo:
            self._drains.pop(server, None)
        else:
            self._drains[server] = request_of_call()

    def rebalance(self) -> None:
        """Take note that the call that runs now asked for the moves that are made from now on."""
        self._rebalance = request_of_call()

    def moved(self, wish: Wish, target: str, state: State, asked: Collection[int]) -> None:
        """Write the line of a move that was stored. `asked`: the segments that a rebalance moves. Moves that the
        coordinator makes of itself have no line.
        """
        known = state.servers.get(wish.leaving)
        if not wish.switches and known is not None and known.draining:
            of, request = "drain", self._drains.get(wish.leaving, "")
        elif wish.segment.id in asked:
            of, request = "rebalance", self._rebalance
        else:
            return
        what = "primary" if wish.switches else "copy"
        why = f"{what} of segment {wish.segment.id:016x} from {wish.leaving} to {target}, for the {of}"
        _audit_log.info(
            'move "%s": ok (%s)', wish.record.name, why,
            extra={
                "action": "move", "target": wish.record.name, "result": "ok", "why": why, "request": request,
                "trace": "",
            },
        )  # fmt: skip
