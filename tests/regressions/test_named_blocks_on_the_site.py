"""Blocks of code with a name are blocks on the site, too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

markdown = pytest.importorskip("markdown", reason="docs/requirements.txt")
pytest.importorskip("mkdocs", reason="docs/requirements.txt")

ROOT = Path(__file__).parents[2]


def test_a_named_block_is_shown_as_a_block() -> None:
    """`sh set` and `python worker.py` begin a block of code, and the heading after them is a heading. Without the mend
    the block's text ran into the page, and the headings after it were part of it.
    """
    spec = importlib.util.spec_from_file_location("make_site", ROOT / "docs/make_site.py")
    assert spec
    assert spec.loader
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    page = "```sh set\necho one\n```\n\n```python worker.py\nprint(1)\n```\n\n## Next\n"
    text = site.on_page_markdown(page, page=SimpleNamespace(file=SimpleNamespace(src_uri="page.md")))
    shown = markdown.markdown(text, extensions=["pymdownx.highlight", "pymdownx.superfences", "toc"])
    assert "```" not in shown
    assert shown.count("<code>") == 2
    assert "worker.py" in shown
    assert '<h2 id="next">Next</h2>' in shown
