"""A renamed folder, and segments that are taken up after a restore, copied all records once for each of their own.

With 10 000 buffers the coordinator's loop stood still for minutes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from smb.config.quotas import Quota
from smb.coordinator import bundles, quotas, state
from smb.coordinator.buffers import Buffers
from smb.coordinator.events import BufferRenamed, Event, Instant, Restarted, SaveBuffer, UnexplainedJudged
from smb.coordinator.lineage import Lineage
from smb.coordinator.records import BufferRecord, Held, SegmentRecord, ServerRecord
from smb.coordinator.steps import step

NOW, LATER = Instant(100.0, 1e9), Instant(110.0, 1e9 + 10)
SERVERS = ("a", "b")


def _state(count: int) -> state.State:
    """So many buffers with two copies each, as an old store has them: both servers have later ones."""
    records = [
        BufferRecord(
            f"team/run/b{number}", number, (8,), "float32", 32, 1, 4096, 4096,
            (SegmentRecord(1000 + number, "a", 32, 12288, "b", 2, group=1000 + number - number % 2),),
            0.0, True, replicas=2,
        )
        for number in range(2, 2 + count)
    ]  # fmt: skip
    servers = [ServerRecord(name, 1, "h:1", "h:2", "", "", 1 << 40, 0, 0.0) for name in SERVERS]
    limits = {"other": Quota(1 << 40, 1 << 20)}
    loaded = state.load(records, servers, [], 30.0, 0, limits, 0, Lineage.of("", ""), server_lease_s=6.0)
    loaded, _ = step(loaded, Restarted(7, None), NOW)
    held = {segment.id: Held(5, nbytes=12288) for record in records for segment in record.segments}
    return replace(
        loaded,
        server_leases=loaded.server_leases.grant_all(loaded.servers, LATER.monotonic),
        suspected=frozenset(),
        unexplained={"a": held, "b": dict(held)},
        missing={name: frozenset() for name in SERVERS},
    )


@pytest.mark.parametrize(
    "event",
    [BufferRenamed("team/run", "team/old", folder=True), BufferRenamed("team", "other", folder=True),
     UnexplainedJudged(frozenset(), None, frozenset())],
    ids=["a folder", "a folder to another namespace", "segments taken up"],
)  # fmt: skip
def test_all_records_are_copied_as_often_for_many_as_for_few(event: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    visits: Counter[str] = Counter()

    def counted(where: Any, name: str) -> None:
        made = getattr(where, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            visits[name] += 1
            return made(*args, **kwargs)

        monkeypatch.setattr(where, name, count)

    counted(Buffers, "changed")
    counted(Buffers, "values")
    counted(state.State, "where")
    counted(state.State, "contested")
    counted(quotas, "namespace_of")
    counted(bundles.Bundles, "__init__")

    def visited(count: int) -> Counter[str]:
        before = _state(count)
        visits.clear()
        _, effects = step(before, event, LATER)
        assert sum(isinstance(effect, SaveBuffer) for effect in effects) == count
        return visits.copy()

    few, many = visited(10), visited(100)
    for each in ("changed", "values", "where", "contested"):
        assert few[each] == many[each] > 0 or few[each] == many[each] == 0, each
    for each in ("namespace_of", "__init__"):  # once for each record, or for each bundle
        assert many[each] <= 10 * max(few[each], 1), each
