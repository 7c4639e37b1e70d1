"""How fast servers send and links between zones carry, as far as relays measured it."""

from __future__ import annotations

import pytest

from smb.coordinator.mirrors.link_rates import Edge, Flow, LinkRates
from smb.coordinator.mirrors.trees import TreeNode

NODES = (TreeNode("source", 1.0), TreeNode("a", 1.0), TreeNode("b", 2.0))
ZONED = (TreeNode("source", 1.0, "x"), TreeNode("a", 1.0, "x"), TreeNode("b", 1.0, "y"), TreeNode("c", 1.0, "z"))


def rates(known: LinkRates, *flows: Flow, edges: frozenset[Edge] = frozenset()) -> dict[str, float]:
    return {node.name: node.rate for node in known.estimate(NODES, flows, edges)[0]}


def slow(feeder: str, relay: str, rate: float) -> Flow:
    return Flow(feeder, relay, rate, limited=True)


def idle(feeder: str, relay: str, rate: float) -> Flow:
    return Flow(feeder, relay, rate, limited=False)


def test_without_measured_rates_the_weights_decide() -> None:
    assert rates(LinkRates()) == {"source": 1.0, "a": 1.0, "b": 2.0}


def test_under_a_backlog_the_sum_is_the_rate_of_the_link() -> None:
    found = rates(LinkRates(), slow("source", "a", 30.0), slow("source", "b", 20.0), slow("a", "b", 10.0))
    assert found == {"source": 50.0, "a": 10.0, "b": 60.0}  # unmeasured: by weight, from those that were measured


def test_relays_that_have_not_measured_count_like_those_that_have() -> None:
    flow, fed = slow("source", "a", 30.0), frozenset({("source", "a"), ("source", "b")})
    assert rates(LinkRates(), flow, edges=fed)["source"] == 60.0
    assert rates(LinkRates(), flow, edges=frozenset({("source", "a")}))["source"] == 30.0


def test_without_a_backlog_a_feeder_is_believed_to_send_a_little_more() -> None:
    found = rates(LinkRates(), slow("source", "a", 10.0), idle("a", "b", 40.0), idle("b", "a", 1.0))
    assert found == pytest.approx({"source": 10.0, "a": 44.0, "b": 20.0})
    assert rates(LinkRates(), idle("a", "b", 40.0), slow("a", "source", 30.0))["a"] == pytest.approx(77.0)


def test_a_rate_is_known_until_it_is_measured_under_a_backlog_again() -> None:
    known = LinkRates()
    rates(known, slow("a", "b", 40.0))
    assert rates(known, idle("a", "b", 1.0))["a"] == 40.0
    assert rates(known, slow("a", "b", 30.0))["a"] == 30.0
    assert rates(known, idle("a", "b", 60.0))["a"] == pytest.approx(66.0)
    known.estimate(NODES[:1], [], ())  # the relay is gone
    assert rates(known)["a"] == 1.0


def test_what_a_relay_measured_of_a_buffer_that_is_gone_counts_for_nothing() -> None:
    assert rates(LinkRates(), slow("gone", "a", 3.0), slow("a", "gone", 3.0)) == rates(LinkRates())


def test_a_slow_flow_between_zones_tells_of_the_link_between_them() -> None:
    flows = [slow("source", "b", 2.0), slow("source", "a", 30.0), slow("a", "b", 1.0), idle("b", "a", 5.0)]
    nodes, pairs = LinkRates().estimate(ZONED, flows, ())
    assert [node.rate for node in nodes] == [32.0, 32.0, 32.0, 32.0], "only the source's own link is known"
    assert pairs.pop(("x", "y")) == 3.0
    assert pairs.keys() == {("y", "x"), ("x", "z"), ("z", "x"), ("y", "z"), ("z", "y")}
    assert set(pairs.values()) == {32.0}


def test_flows_to_several_zones_that_are_equally_fast_share_the_feeders_link() -> None:
    nodes, pairs = LinkRates().estimate(ZONED, [slow("a", "b", 3.0), slow("a", "c", 4.0)], ())
    assert nodes[1].rate == 7.0
    assert set(pairs.values()) == {7.0}
    nodes, pairs = LinkRates().estimate(ZONED, [slow("source", "b", 3.0)], ())
    assert nodes[0].rate == 3.0
