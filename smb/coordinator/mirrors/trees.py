"""Trees from a published buffer to its mirrors, each for a share of the bytes: which relay reads from which server.
Pure.

These trees are for links of servers alone; tree_packing.py also considers links between zones.

If the outgoing links of hosts are the limit, N relays can be fed at no more than R = min(B0, (B0 + sum Bi) / N),
because the source (B0) has to send each byte once, and each byte has to be sent N times in total. Trees of depth two
reach R: in tree i the source feeds relay i, which feeds all other relays, with as many bytes as its link carries. The
rest of the source's link feeds all relays directly. This is Blink's packing of trees (Wang et al. 2020), applied to
servers.

With zones (sites) the same is done at two levels: between zones each zone is like one relay, also the source's own
zone, and within a zone each byte arrives at one relay, which feeds the others. So each byte enters a zone once, and
leaves the source once if relays are fast enough. If the relays in the source's zone are slow, the source feeds them
directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A server: its sending rate, in the same unit for all servers, and its zone."""

    name: str
    rate: float
    zone: str = ""


@dataclass(frozen=True, slots=True)
class RelayTree:
    """The parent of each relay, for a share of the bytes. The shares of all trees sum to 1."""

    share: float
    parents: Mapping[str, str]


# Rates of links from one zone to another, in the unit of the nodes' rates. Pairs that are missing are no limit.
ZonePairs = Mapping[tuple[str, str], float]
NO_PAIRS: ZonePairs = MappingProxyType({})

# Cuts of [0, 1): the end of each range and the relay through which it arrives; None: the source feeds all relays.
_Cuts = tuple[tuple[float, str | None], ...]


def plan(source: TreeNode, relays: Sequence[TreeNode]) -> tuple[RelayTree, ...]:
    """Return the trees. All rates must be above 0, and all names distinct."""
    zones: dict[str, list[TreeNode]] = {}
    for relay in relays:
        zones.setdefault(relay.zone, []).append(relay)
    near = zones.get(source.zone, [])
    direct = _shares(source.rate, near)
    if len(near) == len(relays):
        return _trees(source, zones, _cuts({source.zone: 1.0}), {source.zone: _cuts(direct)})
    between = _cuts(_shares(source.rate, [TreeNode(zone, sum(r.rate for r in zones[zone])) for zone in zones]))
    # Each byte enters a zone through one relay; faster relays take more of the bytes.
    entries = {zone: _cuts({relay.name: relay.rate for relay in members}) for zone, members in zones.items()}
    found = _trees(source, zones, between, entries)
    if len(near) > 1 and None in direct:
        nodes = [source, *relays]
        other = _trees(source, zones, between, entries | {source.zone: _cuts(direct)})
        found = max(found, other, key=lambda trees: rate_of(trees, nodes))
    return found


def _trees(
    source: TreeNode, zones: Mapping[str, Sequence[TreeNode]], between: _Cuts, entries: Mapping[str, _Cuts]
) -> tuple[RelayTree, ...]:
    """Return the trees, by the zone in which each byte arrives first and the relay through which it enters a zone."""
    ends = {0.0}
    for low, high in pairwise((0.0, *(end for end, _ in between))):
        ends |= {low + (high - low) * end for cuts in entries.values() for end, _ in cuts} | {high}
    trees: list[RelayTree] = []
    for low, high in pairwise(sorted(ends)):
        if high - low > 1e-9:
            middle = (low + high) / 2
            first, within = _at(between, middle), _within(between, middle)
            gates = {zone: _at(cuts, within) for zone, cuts in entries.items()}
            parents: dict[str, str] = {}
            for zone, members in zones.items():
                # The gate is None only in the source's own zone.
                is_direct = first is None or first == zone or gates[zone] is None
                feeder = source.name if is_direct else gates[str(first)] or source.name
                parents |= _star(feeder, members, gates[zone])
            trees.append(RelayTree(high - low, parents))
    return _joined(trees)


def rate_of(trees: Iterable[RelayTree], nodes: Iterable[TreeNode], pairs: ZonePairs = NO_PAIRS) -> float:
    """Return how fast these trees bring the bytes to all relays, in the unit of the nodes' rates."""
    zones = {node.name: node.zone for node in nodes}
    sent: dict[str, float] = {}
    crossed: dict[tuple[str, str], float] = {}
    for tree in trees:
        for name, parent in tree.parents.items():
            sent[parent] = sent.get(parent, 0.0) + tree.share
            pair = (zones[parent], zones[name])
            crossed[pair] = crossed.get(pair, 0.0) + tree.share
    limits = [node.rate / sent[node.name] for node in nodes if node.name in sent]
    return min(*limits, *(pairs[pair] / share for pair, share in crossed.items() if pair in pairs), inf)


def _shares(rate: float, relays: Sequence[TreeNode]) -> dict[str | None, float]:
    """Return the share of the bytes that arrives through each relay; None: the share that all read from the source."""
    count, most = len(relays), sum(relay.rate for relay in relays)
    if count < 2:
        return {None: 1.0}
    if most >= rate * (count - 1):  # the source's own link is the limit
        return {relay.name: relay.rate for relay in relays}
    shares: dict[str | None, float] = {relay.name: relay.rate / (count - 1) for relay in relays}
    shares[None] = (rate - sum(shares.values())) / count
    return shares


def _cuts(shares: Mapping[str, float] | Mapping[str | None, float]) -> _Cuts:
    whole, end, cuts = sum(shares.values()), 0.0, []
    for name, share in shares.items():
        end += share / whole
        cuts.append((end, name))
    return (*cuts[:-1], (1.0, cuts[-1][1]))


def _at(cuts: _Cuts, point: float) -> str | None:
    return next(name for end, name in cuts if point < end)


def _within(cuts: _Cuts, point: float) -> float:
    """Return how far into its range a point is, from 0 to 1."""
    low = max((end for end, _ in cuts if end <= point), default=0.0)
    high = min(end for end, _ in cuts if point < end)
    return (point - low) / (high - low)


def _star(feeder: str, members: Sequence[TreeNode], gate: str | None) -> dict[str, str]:
    return {m.name: feeder if gate is None or m.name == gate else gate for m in members}


def _joined(trees: Sequence[RelayTree]) -> tuple[RelayTree, ...]:
    """Join neighbouring ranges with the same tree."""
    joined: list[RelayTree] = []
    for tree in trees:
        if joined and joined[-1].parents == tree.parents:
            tree = RelayTree(joined.pop().share + tree.share, tree.parents)
        joined.append(tree)
    return tuple(joined)
