"""The simulator itself: it is deterministic, finds what is planted, and makes what it finds smaller."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from tests.simulator import plants
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
        assert f"SEED={small.plan.seed} " in command(small.plan)
        again = run(replace(small.plan))
        assert (again.finding, again.checksum) == (small.finding, small.checksum)
    assert run(small.plan).finding is None
