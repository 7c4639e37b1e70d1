"""The claims of the published systems: each experiment has rows in docs/seeds.md, and what cannot run is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perf import seeds
from perf.netlab import LabError

PAGE = (Path(__file__).parents[3] / "docs/seeds.md").read_text()


def test_the_page_has_each_experiment_and_no_other() -> None:
    assert set(re.findall(r"`seeds ([a-z-]+)`", PAGE)) == set(seeds.SEEDS)


def test_rows_of_a_model_alone_are_marked() -> None:
    """Without a lab, threads or a link; the page marks them, too."""
    rows = [*seeds.overlap(4), *seeds.scaling()]
    assert {row.how for row in rows} == {seeds.MODELLED}
    assert {row.system for row in rows} == {"iPart", "Das et al."}
    told = seeds.table([("scaling", row) for row in rows])
    assert len(told.splitlines()) == 2 + len(rows)
    assert {line.count("|") for line in told.splitlines()} == {8}
    for name in ("overlap", "scaling"):
        lines = [line for line in PAGE.splitlines() if f"`seeds {name}`" in line and line.startswith("| ")]
        assert lines
        assert all("| modelled |" in line for line in lines)


def test_an_experiment_that_cannot_run_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others run, and its reason is told."""

    def cannot() -> list[seeds.Row]:
        raise LabError("needs root")

    row = seeds.Row("a system", "a claim", "2", "3.00", seeds.MEASURED)
    monkeypatch.setattr(seeds, "SEEDS", {"first": cannot, "second": lambda: [row]})
    monkeypatch.setattr("sys.argv", ["seeds"])
    assert seeds.main() == 1
    told = capsys.readouterr()
    assert "first: not run: needs root" in told.err
    assert "| a system | a claim | 2 | 3.00 | measured | `python -m perf.seeds second` |  |" in told.out
    monkeypatch.setattr("sys.argv", ["seeds", "second"])
    assert seeds.main() == 0
    monkeypatch.setattr("sys.argv", ["seeds", "third"])
    with pytest.raises(SystemExit):
        seeds.main()


def test_another_that_is_not_here_has_no_figure() -> None:
    assert seeds._ratio(2.0, 0.0) == seeds.NOT_HERE == seeds._ratio(0.0, 1.0)
    assert [seeds._ratio(above, 2.0) for above in (3.0, 100.0)] == ["1.5", "50"]
