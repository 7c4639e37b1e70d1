"""Tables of the documentation, for tests that hold them."""

from __future__ import annotations

from pathlib import Path

_DOCS = Path(__file__).parent.parent.parent / "docs"


def table_of(page: str, first: str) -> dict[str, list[str]]:
    """Return a table of docs/`page`, whose first column is headed `first`: each row's other cells by its first one."""
    rows: dict[str, list[str]] = {}
    inside = False
    for line in (_DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            if inside:
                break
        elif cells[0] == first:
            inside = True
        elif inside and not set(line) <= set("|- "):
            assert cells[0] not in rows, f"{page}: two rows are called {cells[0]!r}"
            rows[cells[0]] = cells[1:]
    assert rows, f"{page} has no table whose first column is {first!r}"
    return rows
