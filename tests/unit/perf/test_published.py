"""Published figures beside the model, as perf/results/training-published.md states them."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import published

ROOT = Path(__file__).parents[3]


def test_the_page_has_what_the_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Row by row."""
    published.main()
    page = (ROOT / "perf/results/training-published.md").read_text()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 12
    assert [row for row in rows if row not in page] == []


def test_vgg_a_is_the_network() -> None:
    """132.9 million parameters less biases, 15.2 GFLOP forward for an image (two for each product)."""
    assert sum(nbytes for nbytes, _ in published.VGG_A) == pytest.approx(4 * 132.85e6, rel=1e-3)
    assert sum(work for _, work in published.VGG_A) == pytest.approx(15.2e9, rel=2e-3)


def test_the_most_that_overlap_gives() -> None:
    """Twice as fast, where both passes and both transfers take equally long and starting takes nothing."""
    faster, beside_layers = published.ipart(0.0)
    assert 0.95 < faster < 1.0
    assert beside_layers == pytest.approx(0.0, abs=1e-9)
