"""Who feeds whom: the planned trees are trees, and no others could feed faster."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from smb.coordinator.mirrors.trees import RelayTree, TreeNode, plan, rate_of

SOURCE = "source"


def bound(source: TreeNode, relays: Sequence[TreeNode]) -> float:
    """Return what no trees can exceed, by the links out of nodes."""
    return min(source.rate, (source.rate + sum(relay.rate for relay in relays)) / len(relays))


def spanning(names: tuple[str, ...]) -> list[dict[str, str]]:
    """Every tree from the source to those names."""
    found = []
    for chosen in itertools.product((SOURCE, *names), repeat=len(names)):
        parents = dict(zip(names, chosen, strict=True))
        if all(is_fed(parents, name) for name in names):
            found.append(parents)
    return found


def is_fed(parents: dict[str, str], name: str) -> bool:
    for _ in parents:
        if name == SOURCE:
            return True
        name = parents[name]
    return name == SOURCE


def drawn(seed: int, count: int, zones: int = 1) -> tuple[TreeNode, list[TreeNode]]:
    numbers = random.Random(seed)
    zone = "z0" if zones > 1 else ""
    source = TreeNode(SOURCE, numbers.choice((0.5, 1.0, 4.0, numbers.uniform(0.1, 10))), zone)
    relays = [
        TreeNode(
            f"r{i}", numbers.choice((1.0, numbers.uniform(0.05, 10))), f"z{numbers.randrange(zones)}" if zone else ""
        )
        for i in range(count)
    ]
    return source, relays


def for_seeds(count: int) -> Callable[[Callable[[int], None]], Callable[[], None]]:
    """Run a test with so many seeds, and print the one that fails. A test for each would be read, sent to a process and
    reported for longer than it runs.
    """

    def with_seeds(check: Callable[[int], None]) -> Callable[[], None]:
        def run() -> None:
            for seed in range(count):
                try:
                    check(seed)
                except BaseException:
                    print(f"seed {seed}")
                    raise

        run.__doc__ = check.__doc__
        return run

    return with_seeds


@for_seeds(200)
def test_a_plan_in_one_zone_reaches_the_bound_that_no_trees_exceed(seed: int) -> None:
    source, relays = drawn(seed, 1 + seed % 12)
    trees = plan(source, relays)
    assert sum(tree.share for tree in trees) == pytest.approx(1.0)
    for tree in trees:
        assert all(is_fed(dict(tree.parents), relay.name) for relay in relays)
    assert rate_of(trees, [source, *relays]) == pytest.approx(bound(source, relays))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_bound_holds_for_every_tree_there_is(count: int) -> None:
    """By duality: weights on the links under which every spanning tree costs 1 at least bound every packing."""
    names = tuple(f"r{i}" for i in range(count))
    every = spanning(names)
    assert len(every) == (count + 1) ** (count - 1)  # Cayley's formula: none is left out
    for parents in every:
        sent = list(parents.values())
        assert sent.count(SOURCE) >= 1  # weight 1 on the source's link: no more than B0
        assert len(sent) / count == 1  # weight 1/N on all links: no more than (B0 + sum Bi) / N


@for_seeds(20)
def test_no_mix_of_few_trees_is_faster(seed: int) -> None:
    """Brute force: every mix of trees with shares in eighths."""
    source, relays = drawn(seed, 2 if seed % 2 else 3)
    every = spanning(tuple(relay.name for relay in relays))
    parts = 8 if len(relays) == 2 else 3
    best = max(
        rate_of([RelayTree(1 / parts, parents) for parents in mix], [source, *relays])
        for mix in itertools.combinations_with_replacement(every, parts)
    )
    assert rate_of(plan(source, relays), [source, *relays]) >= best - 1e-9


@for_seeds(200)
def test_every_byte_comes_into_a_zone_once(seed: int) -> None:
    source, relays = drawn(seed, 2 + seed % 14, zones=1 + seed % 5)
    zones = {relay.name: relay.zone for relay in relays} | {SOURCE: source.zone}
    trees = plan(source, relays)
    assert sum(tree.share for tree in trees) == pytest.approx(1.0)
    for tree in trees:
        assert tree.parents.keys() == {relay.name for relay in relays}
        assert all(is_fed(dict(tree.parents), relay.name) for relay in relays)
        for zone in {relay.zone for relay in relays} - {source.zone}:
            ways_in = [name for name, parent in tree.parents.items() if zones[name] == zone != zones[parent]]
            assert len(ways_in) == 1


def test_equal_zones_leave_the_sources_zone_once() -> None:
    relays = [TreeNode(f"r{i}", 1.0, f"z{1 + i % 2}") for i in range(8)]
    trees = plan(TreeNode(SOURCE, 1.0, "z0"), relays)
    assert all(list(tree.parents.values()).count(SOURCE) == 1 for tree in trees)


@for_seeds(100)
def test_each_byte_leaves_the_source_once_if_relays_are_fast(seed: int) -> None:
    """Also if some relays are in the source's zone: they do not read it once more."""
    source, relays = drawn(seed, 2 + seed % 14, zones=1 + seed % 5)
    relays = [replace(relay, rate=relay.rate + source.rate * len(relays)) for relay in relays]
    for tree in plan(source, relays):
        assert list(tree.parents.values()).count(SOURCE) == 1


def test_slow_relays_beside_the_source_are_fed_by_it() -> None:
    relays = [*(TreeNode(f"near{i}", 1.0, "z0") for i in range(4)), TreeNode("far", 1.0, "z1")]
    source = TreeNode(SOURCE, 12.0, "z0")
    assert rate_of(plan(source, relays), [source, *relays]) > 2.0  # through each other it would be 4 / 3


def test_uplinks_of_one_two_and_four_bring_in_as_much_each() -> None:
    relays = [TreeNode("r0", 1.0), TreeNode("r1", 2.0), TreeNode("r2", 4.0)]
    source = TreeNode(SOURCE, 2.0)
    shares = {next(n for n, p in tree.parents.items() if p == SOURCE): tree.share for tree in plan(source, relays)}
    assert shares == pytest.approx({"r0": 1 / 7, "r1": 2 / 7, "r2": 4 / 7})
    assert rate_of(plan(source, relays), [source, *relays]) == pytest.approx(2.0)
