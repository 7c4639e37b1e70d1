"""Estimates the rates of links of servers and between zones, from what relays measured. Pure.

A relay measures how fast bytes came from each of its feeders. While a feeder has a backlog, the links in between are
the limit, and the sum over all flows on a link is its rate. Without a backlog the link could have carried more. It is
believed to carry a little more, so that a plan that needs more from it finds out.

A flow from one zone to another is on two links, and one of them is the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from smb.coordinator.mirrors.trees import TreeNode

_MORE = 1.1  # times what was measured without a backlog

Link = TypeVar("Link", bound=Hashable)
Edge = tuple[str, str]  # a feeder and a relay that it feeds


@dataclass(frozen=True, slots=True)
class Flow:
    """How fast bytes came to a relay from one of its feeders; `limited`: while the feeder had a backlog."""

    feeder: str
    relay: str
    bytes_per_s: float
    limited: bool


class LinkRates:
    """The rates that were measured under a backlog so far: of feeders, by name, and of pairs of zones."""

    def __init__(self) -> None:
        self._feeders: dict[str, float] = {}
        self._pairs: dict[tuple[str, str], float] = {}

    def estimate(
        self, weighted: Sequence[TreeNode], flows: Iterable[Flow], edges: Iterable[Edge]
    ) -> tuple[list[TreeNode], dict[tuple[str, str], float]]:
        """Return the nodes with their estimated rates, and the rates between their zones.

        `weighted` has the source first. Its rates are weights, by which unknown rates are estimated. An unknown pair of
        zones is believed to carry what a feeder sends on average. `edges` are those of the present plan: a relay that
        has not measured a feeder there counts like those that have.
        """
        zones = {node.name: node.zone for node in weighted}
        flows = [flow for flow in flows if {flow.feeder, flow.relay} <= zones.keys() and flow.bytes_per_s > 0.0]
        edges = [edge for edge in edges if zones.keys() >= set(edge)]
        between = _limited_between(weighted[0].name, zones, flows)
        own = {flow for flow in flows if flow.limited} - between
        least = _measure(flows, edges, lambda feeder, _: feeder, own, self._feeders)
        for name in self._feeders.keys() - zones.keys():
            del self._feeders[name]
        weights = {node.name: node.rate for node in weighted}
        of = self._feeders or least
        unit = sum(of.values()) / sum(weights[name] for name in of) if of else 1.0
        nodes = [
            TreeNode(name, max(self._feeders.get(name, unit * weight), least.get(name, 0.0)), zones[name])
            for name, weight in weights.items()
        ]
        mean = sum(node.rate for node in nodes) / len(nodes)
        least_pairs = _measure(flows, edges, lambda feeder, relay: (zones[feeder], zones[relay]), between, self._pairs)
        every = sorted({(a, b) for a in zones.values() for b in zones.values() if a != b})
        for pair in self._pairs.keys() - set(every):
            del self._pairs[pair]
        return nodes, {pair: max(self._pairs.get(pair, mean), least_pairs.get(pair, 0.0)) for pair in every}


def _limited_between(source: str, zones: Mapping[str, str], flows: Iterable[Flow]) -> set[Flow]:
    """Return the flows that the link between two zones limits, and not the feeder's own link.

    Flows that share the feeder's link are about equally fast, so that is not the limit of much slower ones. If all of
    them go to one other zone, the source's own link is believed to be the limit, and not that of a relay.
    """
    found: set[Flow] = set()
    by_feeder: dict[str, list[Flow]] = {}
    for flow in flows:
        if flow.limited:
            by_feeder.setdefault(flow.feeder, []).append(flow)
    for feeder, mine in by_feeder.items():
        fastest = max(flow.bytes_per_s for flow in mine)
        to = {zones[flow.relay] for flow in mine}
        for flow in mine:
            is_alone = feeder != source and len(to) == 1
            if zones[flow.relay] != zones[feeder] and (is_alone or 2 * flow.bytes_per_s < fastest):
                found.add(flow)
    return found


def _measure(
    flows: Iterable[Flow],
    edges: Iterable[Edge],
    link_of: Callable[[str, str], Link],
    limited: Collection[Flow],
    known: dict[Link, float],
) -> dict[Link, float]:
    """Put the rates of links that limit most of what they carry into `known`; return the least rates of the others."""
    by_link: dict[Link, list[Flow]] = {}
    for flow in flows:
        by_link.setdefault(link_of(flow.feeder, flow.relay), []).append(flow)
    planned: dict[Link, set[Edge]] = {}
    for edge in edges:
        planned.setdefault(link_of(*edge), set()).add(edge)
    least: dict[Link, float] = {}
    for link, mine in by_link.items():
        measured = sum(flow.bytes_per_s for flow in mine)
        silent = planned.get(link, set()) - {(flow.feeder, flow.relay) for flow in mine}
        total = measured * (1 + len(silent) / len(mine))
        if 2 * sum(flow.bytes_per_s for flow in mine if flow in limited) > measured:
            known[link] = total
        else:
            least[link] = total * _MORE
    return least
