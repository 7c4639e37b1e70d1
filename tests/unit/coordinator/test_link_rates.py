"""How fast servers send, as far as relays measured it."""

from __future__ import annotations

import pytest

from smb.coordinator.link_rates import Flow, sending_rates

WEIGHTS = {"source": 1.0, "a": 1.0, "b": 2.0}


def test_without_measured_rates_the_weights_decide() -> None:
    assert sending_rates(WEIGHTS, [], {}, {}) == WEIGHTS


def test_under_a_backlog_the_sum_is_the_rate_of_the_link() -> None:
    flows = [Flow("source", "a", 30.0, limited=True), Flow("source", "b", 20.0, limited=True)]
    flows += [Flow("a", "b", 10.0, limited=True)]
    rates = sending_rates(WEIGHTS, flows, {}, {})
    assert rates == {"source": 50.0, "a": 10.0, "b": 60.0}  # unmeasured: by weight, from those that were measured


def test_relays_that_have_not_measured_count_like_those_that_have() -> None:
    flows = [Flow("source", "a", 30.0, limited=True)]
    assert sending_rates(WEIGHTS, flows, {"source": {"a", "b"}}, {})["source"] == 60.0
    assert sending_rates(WEIGHTS, flows, {"source": {"a"}}, {})["source"] == 30.0


def test_without_a_backlog_a_feeder_is_believed_to_send_a_little_more() -> None:
    flows = [
        Flow("source", "a", 10.0, limited=True),
        Flow("a", "b", 40.0, limited=False),
        Flow("b", "a", 1.0, limited=False),
    ]
    rates = sending_rates(WEIGHTS, flows, {}, {})
    assert rates == pytest.approx({"source": 10.0, "a": 44.0, "b": 20.0})
    mixed = [Flow("a", "b", 40.0, limited=False), Flow("a", "c", 30.0, limited=True)]
    assert sending_rates({"a": 1.0}, mixed, {}, {}) == pytest.approx({"a": 77.0})


def test_a_rate_is_known_until_it_is_measured_under_a_backlog_again() -> None:
    known: dict[str, float] = {}
    sending_rates(WEIGHTS, [Flow("a", "b", 40.0, limited=True)], {}, known)
    little = [Flow("a", "b", 1.0, limited=False)]
    assert sending_rates(WEIGHTS, little, {}, known)["a"] == 40.0
    assert sending_rates(WEIGHTS, [Flow("a", "b", 30.0, limited=True)], {}, known)["a"] == 30.0
    more = [Flow("a", "b", 60.0, limited=False)]
    assert sending_rates(WEIGHTS, more, {}, known)["a"] == pytest.approx(66.0)
