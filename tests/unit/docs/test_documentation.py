"""The site of `make docs`: README.md, docs/ and the docstrings, where a warning is an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="docs/requirements.txt")
pytest.importorskip("torch", reason="PyTorch")

import smb
import smb.torch
import smb.train

ROOT = Path(__file__).parents[3]


def build(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *arguments]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, env=environment)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """All links and anchors lead somewhere; the first page is README.md; every public name is in the reference."""
    run = build(tmp_path)
    assert run.returncode == 0, (run.stdout + run.stderr)[-2000:]
    for module in (smb, smb.train, smb.torch):
        text = (tmp_path / f"reference/{module.__name__}.html").read_text()
        own = module.__name__
        # Of a function and a module of one name the page has the function by its full name.
        ids = {name: (f'id="{own}.{name}"', f'id="{own}.{name}.{name}"') for name in module.__all__}
        assert [name for name, either in ids.items() if not any(each in text for each in either)] == []
    commands = (tmp_path / "reference/cli.html").read_text()  # docs/make_cli.py
    assert 'id="smb-train-save"' in commands
    assert "--memory-dir" in commands
    first = (tmp_path / "index.html").read_text()
    assert 'href="repository/examples/stock.py.html"' in first
    assert (tmp_path / "images/overview.svg").is_file()
    assert (tmp_path / "repository/examples/stock.py.html").is_file()
    # Alerts link to their sections: docs/metrics.md, "Alerts".
    alerts = re.findall(r"alert: (\w+)", (ROOT / "deploy/prometheus/alerts.yml").read_text())
    sections = set(re.findall(r'<h3 id="(\w+)"', (tmp_path / "repair.html").read_text()))
    assert {name.lower() for name in alerts} <= sections
    # Sources, tests and results are named by their path, and have no pages of their own.
    assert "<code>perf/results/table.md</code>" in (tmp_path / "comparison.html").read_text()
    assert {path.name for path in (tmp_path / "repository").iterdir() if path.is_dir()} <= {"examples", "perf"}
    assert list((tmp_path / "repository").rglob("perf/**/*.html")) == []
    assert "make demo" in (tmp_path / "search/search_index.json").read_text()


@pytest.mark.parametrize("link", ["../README.md", "missing.md", "../examples/missing.py", "glossary.md#missing"])
def test_a_link_to_nowhere_is_an_error(tmp_path: Path, link: str) -> None:
    """To a page, to a file outside docs/, to a section; a link to what is there is none."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "make_site.py").write_text((ROOT / "docs/make_site.py").read_text())
    (tmp_path / "README.md").write_text("# First\n\n[good](docs/glossary.md#glossary)\n")
    (docs / "glossary.md").write_text(f"# Glossary\n\n[first](../README.md), [bad]({link})\n")
    settings = "site_name: test\nhooks: [docs/make_site.py]\nexclude_docs: '*.py'\nvalidation: {anchors: warn}\n"
    (tmp_path / "mkdocs.yml").write_text(settings)
    run = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    if link == "../README.md":
        assert run.returncode == 0, run.stderr
        return
    assert run.returncode != 0
    assert link.rpartition("/")[2] in run.stdout + run.stderr


def test_the_readme_is_short() -> None:
    """It has at most 130 lines; longer texts belong into docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
