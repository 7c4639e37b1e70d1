"""A segment that was dropped after a server had made its list, and before the coordinator took it, stayed listed there.
It counted as taken until the server happened to register again.
"""

from __future__ import annotations

import pytest

from memserver.registrant import Registrant
from smb.rpc import control_pb2 as pb
from tests.unit.memserver.test_registration import answered, empty, registrant


def _registered(dropped_meanwhile: bool, told_to_drop: bool) -> Registrant:
    segments = empty()
    lists = iter([[7, 8], [8], [8]])
    segments.list_for_coordinator.side_effect = lambda: ({}, next(lists))
    segments.ids.return_value = [8] if dropped_meanwhile or told_to_drop else [7, 8]
    ours = registrant(segments)
    answered(ours.turn(), pb.RegisterServerReply(lease_ms=3000, drop_segment_ids=[7] if told_to_drop else []))
    return ours


@pytest.mark.parametrize(
    ("dropped_meanwhile", "told_to_drop", "then"),
    [(False, False, "RenewServer"), (False, True, "RenewServer"), (True, False, "RegisterServer")],
)
def test_it_is_told_again(dropped_meanwhile: bool, told_to_drop: bool, then: str) -> None:
    """Once, where something was dropped that the coordinator has not told it to drop."""
    ours = _registered(dropped_meanwhile, told_to_drop)
    turn = ours.turn()
    assert next(turn).method == then
    if then == "RegisterServer":
        with pytest.raises(StopIteration):
            turn.send(pb.RegisterServerReply(lease_ms=3000))
        assert next(ours.turn()).method == "RenewServer"
