"""Rounds of returning servers: a seed repeats them, and they are what the harness can play."""

from __future__ import annotations

import random

import pytest

from tests.support.returning_plans import Plan, draw


@pytest.mark.parametrize("etcd", [False, True])
@pytest.mark.parametrize("servers", [2, 3])
def test_a_seed_repeats_a_plan(servers: int, etcd: bool) -> None:
    """Drawn twice it is the same one; the second victim is another server, and only an etcd has several leaders."""
    seen: set[str] = set()
    for number in range(400):
        plan = draw(random.Random(number), servers, etcd)
        assert plan == draw(random.Random(number), servers, etcd)
        assert plan.victim < servers
        assert plan.second != plan.victim
        assert plan.delayed_s == 0.0 or plan.delay
        assert etcd or plan.coordinator in ("", "away", "term")
        assert not etcd or not plan.full_s
        seen |= {f"server {plan.server}", f"coordinator {plan.coordinator}", f"delay {plan.delay}"}
    assert {"server lose", "server kill", "server old", "server stop", "delay late", "delay unheard"} <= seen


def test_a_plan_says_what_it_has() -> None:
    """Fields that hold their defaults are left out."""
    assert (
        str(Plan("away", away_s=2.0, server="lose", victim=1))
        == "coordinator='away', away_s=2.0, server='lose', victim=1"
    )
