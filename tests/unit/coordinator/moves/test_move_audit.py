"""moves.audit: moves that an operator asked for leave a line with the request's id, and no others do."""

from __future__ import annotations

import logging

import pytest

from smb.config import request_ids
from smb.coordinator.events import BackupsLost, ServerDrained
from tests.unit.coordinator.moves.test_switches import Rig

REQUEST = "5fc54254651c1bc7"


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "audit")
    monkeypatch.setattr(logging.getLogger("audit"), "propagate", True)
    return caplog


def audited(lines: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """The target, the reason and the request of each line."""
    found = [each for each in lines.records if each.name == "audit"]
    assert all((each.action, each.result) == ("move", "ok") for each in found)  # type: ignore[attr-defined]
    return [(each.target, each.why, each.request) for each in found]  # type: ignore[attr-defined]


def asked() -> None:
    """A call with that id runs from here on."""
    request_ids.begin([(request_ids.REQUEST, REQUEST)])


def test_each_move_of_a_drain_has_a_line(lines: pytest.LogCaptureFixture) -> None:
    """A lost copy that is made anew has none. After a change of the leader a line has no id."""
    rig = Rig()
    first, _ = rig.create_buffer("w"), rig.create_buffer("v")
    lost = rig.state.buffers["v"].segments[0]
    rig.cluster.do(BackupsLost("a", frozenset({lost.id})))
    rig.look()
    assert not audited(lines)
    asked()
    rig.cluster.do(ServerDrained(first.target))
    rig.maker.audit.drain(first.target, undo=False)
    request_ids.end()
    rig.look()
    to = rig.copied[-1]
    why = f"copy of segment {first.segment_id:016x} from {first.target} to {to}, for the drain"
    assert ("w", why, REQUEST) in audited(lines)


def test_each_move_of_a_rebalance_has_a_line(lines: pytest.LogCaptureFixture) -> None:
    """A switch of roles that the coordinator makes of itself has none."""
    rig = Rig()
    first, second = rig.create_buffer(), rig.create_buffer("v")
    rig.maker.switch([second])
    rig.look()
    assert not audited(lines)
    asked()
    rig.maker.audit.rebalance()
    request_ids.end()
    rig.maker.move([first])
    rig.look()
    why = f"primary of segment {first.segment_id:016x} from a to {first.target}, for the rebalance"
    assert audited(lines) == [("w", why, REQUEST)]
