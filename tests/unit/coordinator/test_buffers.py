"""smb.coordinator.buffers: the indices say what a look at all records says, and very many records take little time."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from smb.coordinator.buffers import Buffers
from smb.coordinator.events import SaveBuffer, ServerDied, Ticked
from smb.coordinator.records import BufferRecord, SegmentRecord, ServerRecord
from smb.coordinator.state import State, load
from smb.coordinator.steps import step, ticks
from tests.support.decisions import Cluster, server

SERVERS = tuple(f"s{number}" for number in range(5))
# The short form compares counts alone; the long one also takes the time.
MANY = 100_000 if os.environ.get("SMB_LONG") else 2_000
LOAD_S_MAX = 10.0


def record(number: int, rng: random.Random) -> BufferRecord:
    one, other, third = rng.sample(SERVERS, 3)
    segment = SegmentRecord(
        1000 + number, one, 4096, 8192, rng.choice(("", other)), rng.randint(1, 3), rng.choice(("", "", third))
    )
    return BufferRecord(
        f"b{number}", number + 1, (1024,), "float32", 4096, 1, 4096, 4096, (segment,), 0.0, ready=True,
        replicas=rng.choice((1, 2)), mirror_of=rng.choice((0, 0, 1, 2)),
    )  # fmt: skip


def test_indices_follow_each_change() -> None:
    """Records come, change and go, some of them several at once; each answer is that of a look at all."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    buffers = Buffers()
    for _ in range(300):
        put = [record(rng.randrange(40), rng) for _ in range(rng.randint(0, 3))]
        put = list({each.key: each for each in put}.values())
        gone = rng.sample(sorted(buffers), min(len(buffers), rng.randint(0, 2)))
        gone = [key for key in gone if key not in {each.key for each in put}]
        before = dict(buffers)
        after = buffers.changed(put, gone)
        assert dict(buffers) == before
        buffers = after
        assert dict(buffers) == {k: r for k, r in before.items() if k not in gone} | {r.key: r for r in put}
        for name in SERVERS:
            there = {each.key for each in buffers.values() if name in each.servers}
            assert {each.key for each in buffers.at(name)} == there
            assert all(buffers[each.key] is each for each in buffers.at(name))
        assert set(buffers.servers()) == {name for each in buffers.values() for name in each.servers}
        made_anew = Buffers(buffers)
        assert vars(buffers._indices()) == vars(made_anew._indices())  # nothing is left of what has gone
        assert buffers.copies_wrong == any(each.copies_wrong for each in buffers.values())
        for number in (1, 2, 17):
            assert buffers.with_id(number) == next((each for each in buffers.values() if each.id == number), None)
            assert buffers.mirrors_of(number) == sorted(
                (each for each in buffers.values() if each.mirror_of == number), key=lambda each: each.key
            )


def many() -> tuple[list[BufferRecord], list[ServerRecord]]:
    """Buffers of two copies on five servers."""
    found = []
    for number in range(MANY):
        one, other = SERVERS[number % 5], SERVERS[(number + 1) % 5]
        segment = SegmentRecord(1_000_000 + number, one, 4096, 8192, other, 1)
        found.append(
            BufferRecord(
                f"b{number}", number + 1, (1024,), "float32", 4096, 1, 4096, 4096, (segment,), 0.0, ready=True,
                replicas=2,
            )
        )  # fmt: skip
    return found, [server(name, capacity_bytes=1 << 40) for name in SERVERS]


def test_very_many_records_are_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one by one, each with a copy of all others. In the long form 100 000 are read from their text in less than
    10 s; it takes more than 5 s, as the texts are made first.
    """
    records, servers = many()
    texts = [each.to_json() for each in records]
    monkeypatch.setattr(Buffers, "changed", None)
    begun = time.monotonic()
    state = load(map(BufferRecord.from_json, texts), servers)
    assert time.monotonic() - begun < LOAD_S_MAX
    assert len(state.buffers) == MANY
    assert sum(each.segments for each in state.allocated.values()) == 2 * MANY


def test_a_tick_judges_only_what_a_dead_server_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """None while all live; and when one is dead, its records change together, in one copy of all records."""
    records, servers = many()
    cluster = Cluster(load(records, servers))
    state = replace(cluster.state, server_leases=cluster.state.server_leases.grant_all(SERVERS, cluster.seconds))
    judged: list[str] = []
    fail_over = ticks.fail_over

    def counted(of: BufferRecord, *rest: Callable[[str], bool]) -> BufferRecord:
        judged.append(of.key)
        return fail_over(of, *rest)

    copies = 0
    changed = Buffers.changed

    def copying(self: Buffers, *given: object, **named: object) -> Buffers:
        nonlocal copies
        copies += 1
        return changed(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ticks, "fail_over", counted)
    monkeypatch.setattr(Buffers, "changed", copying)
    state = tick(state, cluster)[0]
    assert (judged, copies) == ([], 0)
    state, _ = step(state, ServerDied("s0", 1), cluster.now)
    state, saved = tick(state, cluster)
    assert len(judged) == saved == 2 * MANY // 5
    assert copies == 1
    assert state.allocation("s0").segments == 0


def tick(state: State, cluster: Cluster) -> tuple[State, int]:
    state, effects = step(state, Ticked(), cluster.now)
    return state, sum(isinstance(effect, SaveBuffer) for effect in effects)
