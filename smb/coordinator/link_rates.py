"""Estimates how fast servers send, from what relays measured. Pure.

A relay measures how fast bytes came from each of its feeders. While a feeder has a backlog, the links in between are
the limit, and the sum over all that it feeds is the rate of its link. Without a backlog the feeder could have sent
more. It is believed to send a little more, so that a plan that needs more from it finds out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

_MORE = 1.1  # times what was measured without a backlog


@dataclass(frozen=True, slots=True)
class Flow:
    """How fast bytes came to a relay from one of its feeders; `limited`: while the feeder had a backlog."""

    feeder: str
    relay: str
    bytes_per_s: float
    limited: bool


def sending_rates(
    weights: Mapping[str, float],
    flows: Iterable[Flow],
    fed: Mapping[str, Collection[str]],
    known: dict[str, float],
) -> dict[str, float]:
    """Return the estimated sending rate of each feeder.

    `weights` are those of the feeders' servers, by which unknown rates are estimated. `fed` has the relays that each
    feeder feeds by the present plan: those that have not measured it count like those that have. `known` has the rates
    that were measured under a backlog so far, and gets the new ones.
    """
    for name in known.keys() - weights.keys():
        del known[name]
    least: dict[str, float] = {}
    by_feeder: dict[str, list[Flow]] = {}
    for flow in flows:
        if flow.bytes_per_s > 0.0:
            by_feeder.setdefault(flow.feeder, []).append(flow)
    for name in weights:
        mine = by_feeder.get(name, [])
        if mine:
            measured = sum(flow.bytes_per_s for flow in mine)
            limited = sum(flow.bytes_per_s for flow in mine if flow.limited)
            silent = len(set(fed.get(name, ())) - {flow.relay for flow in mine})
            total = measured * (1 + silent / len(mine))
            if 2 * limited > measured:
                known[name] = total
            else:
                least[name] = total * _MORE
    of = {name: known[name] for name in weights if name in known} or least
    unit = sum(of.values()) / sum(weights[name] for name in of) if of else 1.0
    return {name: max(known.get(name, unit * weight), least.get(name, 0.0)) for name, weight in weights.items()}
