"""Plans of trees and their versions: whatever mix of news relays have, no relay waits for itself."""

from __future__ import annotations

import itertools
import random

import pytest

from smb.coordinator.mirrors.plans import MirrorPlan, MirrorPlans
from smb.coordinator.mirrors.trees import TreeNode, plan
from smb.relay.arrived import Blocks
from smb.relay.plans import Plan, Plans

SOURCE = "source"
BLOCKS = Blocks(129, 1)


def test_what_a_relay_is_told_is_what_was_planned() -> None:
    numbers = random.Random(7)
    relays = [TreeNode(f"r{i}", numbers.uniform(0.1, 5), f"z{i % 3}") for i in range(9)]
    trees = plan(TreeNode(SOURCE, 1.0, "z0"), relays)
    names = {relay.name for relay in relays}
    for relay in relays:
        told = MirrorPlan(1, 0, 1, trees).parents_of(relay.name, SOURCE, names)
        assert told[-1][0] == pytest.approx(1.0)
        assert [end for end, _ in told] == sorted(end for end, _ in told)
        for parent in {parent for _, parent in told}:
            planned = sum(tree.share for tree in trees if tree.parents[relay.name] == parent)
            heard = sum(end - before for (before, _), (end, p) in itertools.pairwise(((0.0, ""), *told)) if p == parent)
            assert heard == pytest.approx(planned)


def parent_of(told: Plan, block: int) -> str:
    point = BLOCKS.point(block)
    return next((name for end, name in told.parents if point < end), SOURCE)


def test_no_mix_of_plans_has_a_circle_or_a_gap() -> None:
    """Relays hear at different times, skip what they hear, come, die and return. Then each one fills some version by
    what it heard at any time so far: from each relay the parents of each block lead to the source.
    """
    for seed in range(60):
        print("seed", seed)
        numbers = random.Random(seed)
        zones = numbers.choice((1, 1, 3))
        nodes = [TreeNode(f"r{i}", 1.0, f"z{numbers.randrange(zones)}" if zones > 1 else "") for i in range(8)]
        plans, published, now = MirrorPlans(0.0), 1, 0.0
        heard: dict[str, list[list[Plan]]] = {node.name: [[]] for node in nodes}
        last_plan = dict.fromkeys(heard, (0, 0))
        for _ in range(60):
            now += numbers.uniform(0.0, 2.0)
            published += numbers.choice((0, 0, 1, 1, 2, 7))
            alive = [node for node in nodes if numbers.random() < 0.85]
            for node in numbers.sample(nodes, 3):
                plans.hear(published - numbers.choice((0, 0, 1)), *last_plan[node.name], now)
            if numbers.random() < 0.1:  # the coordinator is restarted, and hears from all before it plans
                plans = MirrorPlans(now)
                for node in nodes:
                    plans.hear(published, *last_plan[node.name], now)
            if (not plans.plans or plans.is_in_force) and len(alive) > 1:
                measured = [TreeNode(node.name, numbers.uniform(0.7, 1.3), node.zone) for node in alive]
                plans.begin(plan(TreeNode(SOURCE, 1.0, "z0" if zones > 1 else ""), measured))
            for node in numbers.sample(nodes, 3):
                plans.extend()
                names = {each.name for each in alive}
                told = [
                    Plan(each.number, each.first_version, each.last_version, each.parents_of(node.name, SOURCE, names))
                    for each in plans.plans
                ]
                heard[node.name].append(told)
                if told:
                    last_plan[node.name] = (told[-1].number, told[-1].last_version)
        mixed = 0
        for version in numbers.sample(range(1, published + 1), min(published, 12)):
            used = {}
            for name, news in heard.items():
                told_since = Plans(SOURCE)
                begin = numbers.randrange(len(news))
                for told in news[begin : numbers.randrange(begin, len(news)) + 1]:
                    told_since.take(told)
                found = told_since.of(version)
                used[name] = found if found.first_version <= version <= found.last_version else Plan.direct(SOURCE)
            mixed += len({each.number for each in used.values()}) > 1
            for block in range(BLOCKS.count):
                for name in used:
                    seen, at = set(), name
                    while at != SOURCE:
                        assert at not in seen, (seed, version, block, used)
                        seen.add(at)
                        at = parent_of(used[at], block)
        assert mixed, "each of them knew the same"
