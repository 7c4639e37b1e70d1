"""Makes a run that found something smaller: fewer faults, servers and clients, as long as it finds the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from tests.simulator.world import Outcome, Plan, run

LIMIT_S = 60.0


def shrink(found: Outcome, limit_s: float = LIMIT_S) -> Outcome:
    """Return the smallest run that was found within that time. Each try is a run of its own."""
    end = time.monotonic() + limit_s
    smaller = True
    while smaller:
        smaller = False
        for plan in _smaller(found.plan):
            if time.monotonic() > end:
                return found
            outcome = run(plan)
            if _is_same(outcome, found):
                found, smaller = outcome, True
                break
    return found


def _is_same(outcome: Outcome, found: Outcome) -> bool:
    if outcome.finding is None or found.finding is None:
        return False
    return outcome.finding.invariant == found.finding.invariant


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Yield smaller plans, the smallest first."""
    count = len(plan.steps)
    size = count // 2
    while size >= 1:
        for at in range(0, count, size):
            yield replace(plan, steps=plan.steps[:at] + plan.steps[at + size :])
        size //= 2
    if plan.clients > 1:
        yield replace(plan, clients=plan.clients - 1)
    if plan.servers > 2:
        yield replace(plan, servers=plan.servers - 1)


def command(plan: Plan, plant: str | None = None) -> str:
    """Return what runs it again, as a log, with the same planted fault."""
    drawn = Plan.of(plan.seed)
    kept = ",".join(str(at) for at, step in enumerate(drawn.steps) if step in plan.steps)
    return (
        f'make simulate SEED={plan.seed} ARGS="--trace --servers {plan.servers} --clients {plan.clients} '
        f'--keep {kept or "none"}{f" --plant {plant}" if plant else ""}"'
    )
