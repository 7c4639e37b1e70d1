"""Trees over links of servers and links between zones: nearly as fast as any could be, and few."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import pytest

from smb.coordinator.mirrors.tree_packing import KEPT, Mix, arborescence, pack
from smb.coordinator.mirrors.trees import RelayTree, TreeNode, plan, rate_of
from tests.unit.coordinator.mirrors.test_mirror_trees import is_fed, spanning

SOURCE = "source"
Pairs = dict[tuple[str, str], float]


def linprog(goal: Any, **limits: Any) -> Any:
    """Solve a linear program. Every process of pytest reads this file, and one runs it: only that one imports scipy."""
    from scipy import optimize  # type: ignore[import-untyped]

    return optimize.linprog(goal, **limits)


def optimum(nodes: Sequence[TreeNode], pairs: Pairs) -> float:
    """Return the greatest rate, by another linear program: as Edmonds proved, the trees can carry as much to all relays
    as flows can carry to each single one, if the flows share what each edge has.
    """
    count = len(nodes)
    edges = [(u, v) for u in range(count) for v in range(1, count) if u != v]
    width, relays = len(edges), range(1, count)
    size = 1 + width * (1 + len(relays))  # the rate, the edges' shares of the links, a flow for each relay
    limits: list[float] = []
    rows: list[tuple[int, int, float]] = []  # row, column, value
    equal: list[tuple[int, int, float]] = []
    for u, node in enumerate(nodes):
        rows += [(len(limits), 1 + i, 1.0) for i, edge in enumerate(edges) if edge[0] == u]
        limits.append(node.rate)
    for pair, rate in pairs.items():
        crossing = (i for i, (u, v) in enumerate(edges) if (nodes[u].zone, nodes[v].zone) == pair)
        rows += [(len(limits), 1 + i, 1.0) for i in crossing]
        limits.append(rate)
    for relay in relays:
        base = 1 + width * relay
        for i in range(width):
            rows += [(len(limits), base + i, 1.0), (len(limits), 1 + i, -1.0)]
            limits.append(0.0)
        for node_index in relays:
            row = (relay - 1) * len(relays) + node_index - 1
            ends = [(i, (v == node_index) - (u == node_index)) for i, (u, v) in enumerate(edges)]
            equal += [(row, base + i, float(sign)) for i, sign in ends if sign]
            equal += [(row, 0, -1.0)] * (node_index == relay)
    goal = np.zeros(size)
    goal[0] = -1
    balance = np.zeros(len(relays) ** 2)
    found = linprog(goal, A_ub=sparse(rows, size), b_ub=limits, A_eq=sparse(equal, size), b_eq=balance)
    assert found.status == 0, found.message
    return float(-found.fun)


def sparse(entries: Sequence[tuple[int, int, float]], width: int) -> Any:
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    row, column, value = zip(*entries, strict=True)
    return csr_array((value, (row, column)), shape=(max(row) + 1, width))


def network(seed: int) -> tuple[list[TreeNode], Pairs]:
    """Return two to seven relays in two to four zones, with unequal links of hosts, between zones, or both."""
    numbers = random.Random(seed)

    def drawn(low: float, high: float) -> float:
        return math.exp(numbers.uniform(math.log(low), math.log(high)))

    zones = numbers.randint(2, 4)
    relays = numbers.randint(zones, 7)
    hosts = seed % 2 == 0
    nodes = [TreeNode(SOURCE, drawn(0.3, 3) if hosts else 20.0, "z0")]
    nodes += [TreeNode(f"r{i}", drawn(0.3, 3) if hosts else 20.0, f"z{(i + 1) % zones}") for i in range(relays)]
    pairs = {(f"z{a}", f"z{b}"): drawn(0.1, 3) for a in range(zones) for b in range(zones) if a != b}
    return nodes, pairs


def check(trees: Sequence[RelayTree], relays: Sequence[TreeNode]) -> None:
    assert sum(tree.share for tree in trees) == pytest.approx(1.0)
    for tree in trees:
        assert tree.share > 0
        assert tree.parents.keys() == {relay.name for relay in relays}
        assert all(is_fed(dict(tree.parents), relay.name) for relay in relays)


def test_packed_trees_reach_the_optimum_on_random_networks() -> None:
    parts, before, counts = [], [], []
    for seed in range(200):
        nodes, pairs = network(seed)
        trees = pack(nodes[0], nodes[1:], pairs)
        check(trees, nodes[1:])
        best = optimum(nodes, pairs)
        parts.append(rate_of(trees, nodes, pairs) / best)
        before.append(rate_of(plan(nodes[0], nodes[1:]), nodes, pairs) / best)
        counts.append(len(trees))
        assert parts[-1] < 1 + 1e-6, seed
    assert median(before) < 0.8, "these networks need no packing"
    assert median(parts) >= 0.97, sorted(parts)[:10]
    assert min(parts) >= KEPT - 1e-6, sorted(parts)[:10]
    assert median(counts) <= 8, counts


def test_where_links_between_zones_are_no_limit_the_simple_trees_are_kept() -> None:
    for seed in range(40):
        numbers = random.Random(seed)
        nodes = [TreeNode(f"n{i}", numbers.uniform(0.5, 2), "z") for i in range(2 + seed % 9)]
        assert pack(nodes[0], nodes[1:], {}) == plan(nodes[0], nodes[1:])
    nodes = [TreeNode(SOURCE, 1.0, "a"), *(TreeNode(f"r{i}", 5.0, "ab"[i % 2]) for i in range(8))]
    assert pack(nodes[0], nodes[1:], {("a", "b"): 9.0, ("b", "a"): 9.0}) == plan(nodes[0], nodes[1:])


def test_a_slow_link_between_zones_is_gone_round() -> None:
    nodes = [TreeNode(SOURCE, 4.0, "a"), TreeNode("b", 4.0, "b"), TreeNode("c", 4.0, "c")]
    pairs = {(x, y): 4.0 for x in "abc" for y in "abc" if x != y} | {("a", "c"): 0.1}
    trees = pack(nodes[0], nodes[1:], pairs)
    assert rate_of(trees, nodes, pairs) >= KEPT * 4.0
    assert trees[0].parents == {"b": SOURCE, "c": "b"}


def test_beyond_its_limits_the_simple_trees_are_taken() -> None:
    nodes = [TreeNode(f"n{i}", 1.0, "abc"[i % 3]) for i in range(66)]
    slow = {("a", "c"): 0.1}
    assert pack(nodes[0], nodes[1:], slow) == plan(nodes[0], nodes[1:])
    assert pack(nodes[0], nodes[1:-1], slow) != plan(nodes[0], nodes[1:-1])
    zones = [TreeNode(f"n{i}", 1.0, f"z{i}") for i in range(18)]
    pairs = {(a.zone, b.zone): 0.1 for a in zones for b in zones if a is not b}
    assert pack(zones[0], zones[1:], pairs) == plan(zones[0], zones[1:])


def test_the_cheapest_tree_is_the_cheapest_of_all() -> None:
    for seed in range(50):
        print("seed", seed)
        numbers = np.random.default_rng(seed)
        names = ("r0", "r1", "r2", "r3")[: 1 + seed % 4]
        index = {SOURCE: 0} | {name: i for i, name in enumerate(names, 1)}
        costs = numbers.choice([0.0, 1.0, numbers.random()], (len(index), len(index)))
        every = [sum(costs[index[parent], index[name]] for name, parent in tree.items()) for tree in spanning(names)]
        parents = arborescence(costs)
        assert is_fed({name: [SOURCE, *names][parents[i]] for i, name in enumerate(names, 1)}, names[-1])
        assert sum(costs[parents[i], i] for i in range(1, len(index))) == pytest.approx(min(every))


def test_the_mix_is_the_optimum_of_its_linear_program() -> None:
    for seed in range(50):
        print("seed", seed)
        numbers = np.random.default_rng(seed)
        links, columns = int(numbers.integers(2, 12)), int(numbers.integers(1, 20))
        loads = numbers.integers(0, 4, (links, columns)).astype(float)
        loads[int(numbers.integers(links))] += 1
        rates = numbers.choice([1.0, 2.0, numbers.random() + 0.1], links)
        mix = Mix(rates)
        for column in loads.T:
            mix.add(column)
            rate, prices = mix.solve()
        found = linprog(-np.ones(columns), A_ub=loads, b_ub=rates)
        assert rate == pytest.approx(-found.fun)
        assert float(prices @ rates) == pytest.approx(rate)
        amounts = mix.amounts()
        assert sum(amounts.values()) == pytest.approx(rate)
        assert (loads[:, list(amounts)] @ np.array(list(amounts.values())) <= rates + 1e-6).all()
