"""What the engine counts is exported, each under its own name; counts by name neither fall nor have too many names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from prometheus_client import CollectorRegistry

from memserver.engine_figures import Counters
from memserver.life import Life
from memserver.metrics import EngineMetrics
from memserver.usage_by_client import NamedShares, Names
from smb.daemon.metric_names import NAMED_MAX, OTHER

# The field's own number is found under this name. Those by transport, kind and status are integration tests' to see.
NUMBERS = {
    "deferred": "smb_server_deferred_requests",
    "deferred_total": "smb_server_chunk_waits_total",
    "repeated_total": "smb_server_repeated_requests_total",
    "replayed_total": "smb_server_replayed_requests_total",
    "backlog_bytes": "smb_server_send_backlog_bytes",
    "backlog_total": "smb_server_send_backlogs_total",
    "journal_slots": "smb_server_journal_slots",
    "journal_slots_max": "smb_server_journal_slots_max",
    "locks_granted": "smb_server_locks_granted_total",
    "lock_waits": "smb_server_lock_waits_total",
    "lock_timeouts": "smb_server_lock_timeouts_total",
    "barriers_broken": "smb_server_broken_barriers_total",
    "recovered_locks": "smb_server_recovered_locks_total",
    "segments": "smb_server_segments",
    "segment_bytes": "smb_server_segment_bytes",
}


class Stub:
    """An engine, and the segments, that say what they are told to."""

    def __init__(self) -> None:
        numbers = {name: 100 + i for i, name in enumerate(NUMBERS)}
        numbers |= {"locks_expired": 11, "locks_revoked": 12, "waits": 0}
        maps: dict[str, Any] = {f.name: {} for f in dataclasses.fields(Counters) if f.name not in numbers}
        self.found = Counters(**(maps | numbers))
        self.figures = self

    def counters(self) -> Counters:
        return self.found

    def latencies(self) -> dict[Any, Any]:
        return {}

    def segment_shares(self) -> dict[int, Any]:
        return {}

    session_shares = file_bytes = segment_shares

    def waits(self, most: int) -> tuple[list[Any], int]:
        return [], 0


def test_every_number_is_exported() -> None:
    stub = cast(Any, Stub())
    registry = CollectorRegistry()
    life = Life(connected=True, leases_lost=3, recovered_changes=4, torn_chunks=5)
    registry.register(EngineMetrics(stub, stub, 77, lambda: life, Names(), Names()))
    for field, name in NUMBERS.items():
        assert registry.get_sample_value(name) == getattr(stub.found, field), name
    assert registry.get_sample_value("smb_server_locks_lost_total", {"reason": "expired"}) == 11
    assert registry.get_sample_value("smb_server_locks_lost_total", {"reason": "session_ended"}) == 12
    for name, number in (
        ("capacity_bytes", 77), ("leases_lost_total", 3), ("recovered_changes", 4), ("torn_chunks", 5),
        ("coordinator_connected", 1),
    ):  # fmt: skip
        assert registry.get_sample_value(f"smb_server_{name}") == number


def share(value: int) -> Any:
    return {(transport, opcode): (value, value) for transport in range(3) for opcode in range(22)}


def most(found: Mapping[tuple[int, int], tuple[int, int]]) -> int:
    return max(max(values) for values in found.values())


def test_sums_by_name_never_fall() -> None:
    """Segments of one name add up; what a segment says is less than before counts as nothing; one that is not named
    yet is not shown, and then with all that it had."""
    shares = NamedShares()
    sums = shares.update({1: share(5), 2: share(7), 3: share(9)}, {1: "a", 2: "a"})
    assert {name: most(found) for name, found in sums.items()} == {"a": 12}
    sums = shares.update({1: share(4), 2: share(8), 3: share(10)}, {1: "a", 2: "a", 3: "b"})
    assert {name: most(found) for name, found in sums.items()} == {"a": 13, "b": 10}
    sums = shares.update({3: share(10)}, {3: "b"})
    assert sums.keys() == {"b"}


def test_names_are_bounded() -> None:
    """Past the bound all is "other", whose sum stays when they go; who goes makes room for who comes then."""
    shares = NamedShares()
    names = {i: f"n{i}" for i in range(NAMED_MAX + 2)}
    sums = shares.update({i: share(1) for i in names}, names)
    assert len(sums) == NAMED_MAX + 1
    assert most(sums[OTHER]) == 2
    names = {i: name for i, name in names.items() if 0 < i < NAMED_MAX} | {1000: "new"}
    sums = shares.update({i: share(1) for i in names}, names)
    assert "new" in sums
    assert "n0" not in sums
    assert most(sums[OTHER]) == 2
