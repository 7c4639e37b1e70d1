"""Trees from a published buffer to its mirrors over links of servers and links between zones. Pure.

trees.plan knows the links of servers only. Here each tree also loads the link from one zone to another with each
byte that crosses it, and the trees are mixed so that all relays get the bytes as fast as the links allow: a linear
program with a variable for each tree, the packing of arborescences of Edmonds. Its optimum is found by column
generation: the program over some trees gives each link a price, and the tree that is cheapest at these prices joins
them, until no tree is cheap enough to make the mix faster. Few trees mean few connections, so only as many are kept as
KEPT of the rate takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smb.coordinator.mirrors.trees import RelayTree, TreeNode, ZonePairs, plan, rate_of

# Beyond these limits trees.plan decides: with 64 relays in 4 zones this takes up to 0.25 s, with 8 zones 2 s.
RELAYS_MAX = 64
LINKS_MAX = 100
KEPT = 0.95  # of the greatest rate
_ROUNDS_MAX = 400
_EXACT = 1e-6

Vector = np.ndarray[Any, np.dtype[np.float64]]


def pack(source: TreeNode, relays: Sequence[TreeNode], pairs: ZonePairs) -> tuple[RelayTree, ...]:
    """Return the trees: those of trees.plan if they reach KEPT of the greatest rate.

    `pairs` has the rates of links between zones; those that are missing are no limit. All rates must be above 0, and
    all names distinct.
    """
    nodes = [source, *relays]
    simple = plan(source, relays)
    zones = {node.zone for node in nodes}
    links = {pair: rate for pair, rate in pairs.items() if zones.issuperset(pair)}
    if not 1 < len(relays) <= RELAYS_MAX or not links or len(nodes) + len(links) > LINKS_MAX:
        return simple
    found = _Columns(nodes, links)
    for tree in simple:
        found.add(tree.parents)
    wanted = rate_of(simple, nodes, links) / KEPT
    for _ in range(_ROUNDS_MAX):
        rate, prices = found.mix.solve()
        parents, cost = found.cheapest(prices)
        # By duality no mix is faster than this.
        if rate / cost <= wanted:
            return simple
        if cost >= 1 - _EXACT:
            break
        found.add(parents)
    return found.few()


class _Columns:
    """The trees of the linear program, and the load of each on each link: those of the nodes, then those of pairs."""

    def __init__(self, nodes: Sequence[TreeNode], pairs: ZonePairs) -> None:
        self._nodes = nodes
        self._pairs = {pair: len(nodes) + index for index, pair in enumerate(pairs)}
        self._rates = np.array([*(node.rate for node in nodes), *pairs.values()], np.float64)
        self._index = {node.name: index for index, node in enumerate(nodes)}
        self._trees: list[Mapping[str, str]] = []
        self._loads: list[Vector] = []
        # The link between the zones of two nodes, as an index into the prices; -1: none.
        self._between = np.array(
            [[self._pairs.get((a.zone, b.zone), -1) for b in nodes] for a in nodes],
        )
        # Among trees of one price, those that cross fewer links between zones.
        crosses = np.array([[a.zone != b.zone for b in nodes] for a in nodes])
        self._extra = crosses * (1e-7 / float(self._rates.mean()))
        self.mix = Mix(self._rates)

    def add(self, parents: Mapping[str, str]) -> None:
        load = np.zeros(len(self._rates))
        for name, parent in parents.items():
            child, feeder = self._index[name], self._index[parent]
            load[feeder] += 1
            if self._between[feeder, child] >= 0:
                load[self._between[feeder, child]] += 1
        self._trees.append(parents)
        self._loads.append(load)
        self.mix.add(load)

    def cheapest(self, prices: Vector) -> tuple[dict[str, str], float]:
        """Return the tree with the lowest price, and that price."""
        count = len(self._nodes)
        costs = prices[:count, None] + np.append(prices, 0.0)[self._between]
        parents = arborescence(costs + self._extra)
        cost = sum(float(costs[parents[child], child]) for child in range(1, count))
        names = [node.name for node in self._nodes]
        return {names[child]: names[parents[child]] for child in range(1, count)}, max(cost, _EXACT)

    def few(self) -> tuple[RelayTree, ...]:
        """Return the fewest of the trees with the greatest shares that reach KEPT of the rate."""
        rate, _ = self.mix.solve()
        amounts = self.mix.amounts()
        order = sorted((index for index in amounts if amounts[index] > _EXACT * rate), key=lambda i: -amounts[i])
        low, high, best = 1, len(order), amounts
        while low < high:
            middle = (low + high) // 2
            mix = Mix(self._rates)
            for index in order[:middle]:
                mix.add(self._loads[index])
            if mix.solve()[0] >= KEPT * rate:
                high = middle
                best = {order[index]: amount for index, amount in mix.amounts().items()}
            else:
                low = middle + 1
        total = sum(best.values())
        return tuple(RelayTree(best[i] / total, self._trees[i]) for i in order[:high] if best.get(i, 0.0) > 0.0)


class Mix:
    """The linear program: as much as possible of all columns together, within the links' rates. Revised simplex."""

    def __init__(self, rates: Vector) -> None:
        self._count = len(rates)
        self._rates = rates
        self._inverse = np.eye(self._count)  # of the basis
        self._basis = list(range(-self._count, 0))  # columns; below 0: a link's unused rate
        self._columns = np.empty((self._count, 0))

    def add(self, load: Vector) -> None:
        self._columns = np.column_stack([self._columns, load])

    def solve(self) -> tuple[float, Vector]:
        """Return the greatest sum, and what a little more of each link's rate would add to it."""
        turns = 0
        while True:
            profit = np.array([1.0 if column >= 0 else 0.0 for column in self._basis])
            prices: Vector = profit @ self._inverse
            gains = np.concatenate([-prices, 1 - prices @ self._columns])
            gains[[column + self._count for column in self._basis]] = 0.0
            # The first column instead of the best one cannot go round in circles (Bland).
            enters = int(np.argmax(gains > _EXACT / 10)) if turns > 10 * self._count else int(np.argmax(gains))
            if gains[enters] <= _EXACT / 10:
                return float(profit @ self._inverse @ self._rates), np.maximum(prices, 0.0)
            self._pivot(enters - self._count)
            turns += 1

    def amounts(self) -> dict[int, float]:
        """Return how much of each column the last solution has."""
        found = self._inverse @ self._rates
        return {column: max(0.0, float(x)) for column, x in zip(self._basis, found, strict=True) if column >= 0}

    def _pivot(self, enters: int) -> None:
        column = self._columns[:, enters] if enters >= 0 else np.eye(self._count)[enters + self._count]
        change = self._inverse @ column
        left = np.maximum(self._inverse @ self._rates, 0.0)
        ratios = np.where(change > 1e-9, left / np.where(change > 1e-9, change, 1.0), np.inf)
        least = ratios.min()
        ties = [row for row in range(self._count) if ratios[row] <= least * (1 + 1e-12)]
        row = min(ties, key=lambda each: self._basis[each])
        self._inverse[row] /= change[row]
        others = np.arange(self._count) != row
        self._inverse[others] -= np.outer(change[others], self._inverse[row])
        self._basis[row] = enters


def arborescence(costs: Vector) -> list[int]:
    """Return each node's parent in the cheapest tree from node 0 (Chu-Liu, Edmonds); costs[u, v] is that of v below u.
    The entry of node 0 has no meaning.
    """
    count = len(costs)
    costs = costs.copy()
    np.fill_diagonal(costs, np.inf)
    costs[:, 0] = np.inf
    parents = [0, *(int(parent) for parent in np.argmin(costs[:, 1:], axis=0))]
    circle = _circle(parents)
    if not circle:
        return parents
    # The circle becomes one node. Who enters it at v takes the place of v's parent in it.
    rest = [node for node in range(count) if node not in circle]
    inside = np.array(circle)
    saved = costs[[parents[node] for node in circle], circle]
    smaller = np.full((len(rest) + 1, len(rest) + 1), np.inf)
    smaller[:-1, :-1] = costs[np.ix_(rest, rest)]
    entering = costs[np.ix_(rest, circle)] - saved
    smaller[:-1, -1] = entering.min(axis=1)
    leaving = costs[np.ix_(circle, rest)]
    smaller[-1, :-1] = leaving.min(axis=0)
    above = arborescence(smaller)
    found = list(parents)
    for index, node in enumerate(rest):
        parent = above[index]
        found[node] = rest[parent] if parent < len(rest) else int(inside[int(leaving[:, index].argmin())])
    entrance = int(inside[int(entering[above[-1]].argmin())])
    found[entrance] = rest[above[-1]]
    return found


def _circle(parents: Sequence[int]) -> list[int]:
    """Return the nodes of a circle; empty if all lead to node 0."""
    known = {0}
    for start in range(1, len(parents)):
        path: list[int] = []
        node = start
        while node not in known:
            known.add(node)
            path.append(node)
            node = parents[node]
        if node in path:
            return path[path.index(node) :]
    return []
