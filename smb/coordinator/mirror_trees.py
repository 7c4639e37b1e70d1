"""Trees from a published buffer to its mirrors, each for a share of the bytes: who feeds whom. Pure.

Where the links out of hosts are what limits, N relays can be fed at no more than R = min(B0, (B0 + sum Bi) / N): the
source (B0) has to send every byte once, and every byte has to be sent N times by somebody. Trees of depth two reach it:
in tree i the source feeds relay i, and that one all others, for as many bytes as its link carries; what is left of the
source's link feeds everybody directly. This is Blink's packing of trees (Wang et al. 2020), for servers.

Over zones (sites) the same twice: between zones each is as one relay, and within a zone every byte comes in at one
relay, which feeds the others. So a byte crosses the way into a zone once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A server: how fast it sends, in whatever unit all are given, and its zone."""

    name: str
    rate: float
    zone: str = ""


@dataclass(frozen=True, slots=True)
class RelayTree:
    """For a share of the bytes: from whom each relay takes them. The shares of all trees are 1 together."""

    share: float
    parents: Mapping[str, str]


# Cuts of [0, 1): where each ends, and who brings those bytes in; None: the source feeds everybody.
_Cuts = tuple[tuple[float, str | None], ...]


def plan(source: TreeNode, relays: Sequence[TreeNode]) -> tuple[RelayTree, ...]:
    """Return the trees. Rates are more than 0, names differ."""
    zones: dict[str, list[TreeNode]] = {}
    for relay in relays:
        zones.setdefault(relay.zone, []).append(relay)
    near = zones.pop(source.zone, [])
    home = _cuts(_shares(source.rate, near))
    between = _cuts(_shares(source.rate, [TreeNode(zone, sum(r.rate for r in zones[zone])) for zone in zones]))
    # By one relay of each zone every byte comes in, by faster ones more of them.
    entries = {zone: _cuts({relay.name: relay.rate for relay in members}) for zone, members in zones.items()}
    ends = {end for end, _ in home}
    for low, high in pairwise((0.0, *(end for end, _ in between))):
        ends |= {low + (high - low) * end for cuts in entries.values() for end, _ in cuts} | {high}
    trees: list[RelayTree] = []
    for low, high in pairwise(sorted({0.0, *ends})):
        if high - low > 1e-9:
            middle = (low + high) / 2
            parents = _star(source.name, near, _at(home, middle))
            first, within = _at(between, middle), _within(between, middle)
            gates = {zone: str(_at(cuts, within)) for zone, cuts in entries.items()}
            for zone, members in zones.items():
                feeder = source.name if first is None or first == zone else gates[first]
                parents |= _star(feeder, members, gates[zone])
            trees.append(RelayTree(high - low, parents))
    return _joined(trees)


def parents_of(trees: Iterable[RelayTree], relay: str) -> tuple[tuple[float, str], ...]:
    """Return from whom the relay takes what: where each range of [0, 1) ends, and its parent there."""
    found: list[tuple[float, str]] = []
    end = 0.0
    for tree in trees:
        end += tree.share
        if found and found[-1][1] == tree.parents[relay]:
            found.pop()
        found.append((end, tree.parents[relay]))
    return tuple(found)


def _shares(rate: float, relays: Sequence[TreeNode]) -> dict[str | None, float]:
    """Return which share of the bytes each brings in, None: which all take directly."""
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
    """Join neighbours that are the same."""
    joined: list[RelayTree] = []
    for tree in trees:
        if joined and joined[-1].parents == tree.parents:
            tree = RelayTree(joined.pop().share + tree.share, tree.parents)
        joined.append(tree)
    return tuple(joined)
