"""The simulator itself: it is deterministic, finds what is planted, and makes what it finds smaller."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.simulator import invariants, plants
from tests.simulator.loop import Loop
from tests.simulator.network import Network
from tests.simulator.shrink import command, shrink
from tests.simulator.world import Plan, run

RUNS = (
    "from tests.simulator.world import Plan, run\n"
    "for seed in range(5):\n"
    "    outcome = run(Plan.of(seed)); print(outcome.events, outcome.checksum, outcome.finding)"
)


def test_a_seed_decides_all() -> None:
    """The same runs in two processes whose texts have other hashes: each message and each decision is the same."""
    told = [
        subprocess.run(
            [sys.executable, "-c", RUNS], env={**os.environ, "PYTHONHASHSEED": number}, check=True, capture_output=True
        ).stdout
        for number in ("1", "2")
    ]
    assert told[0] == told[1]
    assert told[0].count(b"\n") == 5
    assert len(set(told[0].split(b"\n"))) == 6


def test_what_is_planted_is_found_and_made_smaller() -> None:
    """Within some runs; the small one finds the same, with fewer faults. Without the plant it finds nothing."""
    with plants.planted("unknown-dropped"):
        found = next(outcome for at in range(13, 100) if (outcome := run(Plan.of(at))).finding is not None)
        small = shrink(found, limit_s=20.0)
        assert found.finding is not None
        assert small.finding is not None
        assert small.finding.invariant == found.finding.invariant
        assert len(small.plan.steps) <= len(found.plan.steps)
        again = command(small.plan, "unknown-dropped")
        assert f"SEED={small.plan.seed} " in again
        assert '--plant unknown-dropped"' in again
        again = run(replace(small.plan))
        assert (again.finding, again.checksum) == (small.finding, small.checksum)
    assert run(small.plan).finding is None


def test_most_calls_that_break_lose_their_answers() -> None:
    """They did only if a second draw broke them, too: where all broke, no call had an effect."""
    network = Network(Loop(), Random(1), lambda *_: None)
    assert {network.breaks_at("/smb.v1.MemoryServer/TakeRoles") for _ in range(100)} == {""}
    network.breaks, network.breaks_of = 1.0, "CreateSegment"
    assert network.breaks_at("/smb.v1.MemoryServer/TakeRoles") == ""
    drawn = Counter(network.breaks_at("/smb.v1.MemoryServer/CreateSegment") for _ in range(1000))
    assert drawn.keys() == {"request", "answer"}
    assert 600 < drawn["answer"] < 900


def test_an_invariant_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a task of a memory server it ended the task, and the run said that the cluster does not start."""

    def breaks(*_: Any) -> str:
        raise ZeroDivisionError

    monkeypatch.setitem(invariants._AFTER, "commit", [breaks])
    found = run(Plan.of(1)).finding
    assert found is not None
    assert (found.invariant, "ZeroDivisionError" in found.text) == ("breaks", True)
