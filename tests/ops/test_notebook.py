"""docs/first-steps.ipynb: every cell runs in a real kernel, and shows what the page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import ROOT

nbformat = pytest.importorskip("nbformat", reason="not run: it needs Jupyter (tests/requirements.txt)")
nbclient = pytest.importorskip("nbclient", reason="not run: it needs Jupyter (tests/requirements.txt)")


def shown(notebook: Any) -> list[list[str]]:
    """What each cell of code shows: a table, which has addresses and ids, or its result's text."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        [
            "a table" if "text/html" in output.data else output.data["text/plain"]
            for output in cell.outputs
            if output.output_type == "execute_result"
        ]
        for cell in cells
    ]


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    page = nbformat.read(ROOT / "docs/first-steps.ipynb", as_version=4)
    expected = shown(page)
    nbclient.NotebookClient(
        page, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert shown(page) == expected
    assert ["True"] in expected
