"""Published figures beside the model, as perf/results/training-published.md states them."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import published
from smb.tools.plan.model import CLIENT, OWN_LINK

ROOT = Path(__file__).parents[3]


def test_the_page_has_what_the_model_says() -> None:
    """Row by row."""
    page = (ROOT / "perf/results/training-published.md").read_text()
    rows = [line for line in published.tables().splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3 * len(published.FIGURES) + 2 + len(published.IPART_START_S)
    assert [row for row in rows if row not in page] == []


@pytest.mark.parametrize(
    ("layers", "parameters", "operations"),
    [(published.VGG_A, 132.86e6, 15.2e9), (published.OVERFEAT_FAST, 145.9e6, 5.6e9), (published.CD_DNN, 45.1e6, 90e6)],
)
def test_the_networks(layers: list[published.LayerCost], parameters: float, operations: float) -> None:
    """Their sizes as published: parameters, and operations of an image's forward pass, two for each product."""
    assert sum(nbytes for nbytes, _, _ in layers) == pytest.approx(4 * parameters, rel=2e-3)
    assert sum(work for _, work, _ in layers) == pytest.approx(operations, rel=1e-2)


def test_a_clients_limit_is_asked_for() -> None:
    """With a process as slow as asked, every data parallel row is bound by it or by the link."""
    slow = [each for each in published.scaling("1Gbit") if "1Gbit" in each.way and "mesh" not in each.way]
    assert len(slow) == len(published.FIGURES)
    assert {each.row.bound_by for each in slow} <= {CLIENT, OWN_LINK}
    assert {each.figure.network for each in slow if each.row.bound_by == CLIENT} >= {"VGG-A", "CD-DNN"}


def test_the_most_that_overlap_gives() -> None:
    """Twice as fast, where both passes and both transfers take equally long and starting takes nothing."""
    faster, beside_layers = published.ipart(0.0)
    assert 0.95 < faster < 1.0
    assert beside_layers == pytest.approx(0.0, abs=1e-9)
