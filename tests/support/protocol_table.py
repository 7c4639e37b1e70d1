"""Reads csrc/protocol.toml, and writes the tables of docs/protocol.md from it: `make protocol-page`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TABLE: dict[str, Any] = tomllib.loads((ROOT / "csrc" / "protocol.toml").read_text())
PAGE = ROOT / "docs" / "protocol.md"


def numbers(kind: str) -> dict[str, int]:
    """Return the numbers of one kind ("opcode", "status", ...) by their names."""
    return {row["name"]: row["number"] for row in TABLE[kind]}


def page(text: str) -> str:
    """Return the page with each of its tables as it is made now. A line `<!-- table NAME -->` begins one."""
    tables = _tables()

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{tables.pop(match[2])}\n\n<!-- end -->"

    text = re.sub(r"(<!-- table (\w+) -->)\n.*?<!-- end -->", replaced, text, flags=re.S)
    assert not tables, f"the page has lost the marks of {', '.join(tables)}"
    return text


def _tables() -> dict[str, str]:
    flags, opcodes = TABLE["flag"], TABLE["opcode"]
    statuses = [row for row in TABLE["status"] if not row.get("local")]
    ops = [[row["name"], row["number"], row["formula"]] for row in TABLE["op"]]
    data = [row for row in opcodes if not row.get("waits") and not row.get("of_servers")]
    waits = [row for row in opcodes if row.get("waits")]
    return {
        "fields": _table(
            ("offset>", "bytes>", "field", "in a request", "in a reply"),
            ([row[key] for key in ("offset", "bytes", "name", "request", "reply")] for row in TABLE["field"]),
        ),
        "flags": _table(("bits>", "flag", "meaning"), ([_bits(row), _code(row), row["meaning"]] for row in flags)),
        "statuses": _table(
            ("number>", "status", "meaning"), ([row["number"], _code(row), row["meaning"]] for row in statuses)
        ),
        "dtypes": _table(
            ("dtype", "number>", "bytes>", "arithmetic"),
            (
                [row["name"], row["number"], row["bytes"], "no" if row.get("storage") else "yes"]
                for row in TABLE["dtype"]
            ),
        ),
        "ops": _table(("op", "number>", "new value"), ops),
        "wires": _table(
            ("encoding", "number>", "allowed with", "payload"),
            ([row[key] for key in ("name", "number", "opcodes", "layout")] for row in TABLE["wire"]),
        ),
        "opcodes": _table(
            ("opcode>", "name", "payload of the request", "argument", "reply if `OK`"),
            ([row["number"], row["name"], _payload(row), row["argument"], row["reply"]] for row in data),
        ),
        "waits": _table(
            ("opcode>", "name", "argument", "words", "results if `OK`, or another status"),
            ([row["number"], row["name"], row["argument"], row["text"], row["reply"]] for row in waits),
        ),
        "rules": _table(
            ("rule", "number>", "state", "step"),
            ([row[key] for key in ("name", "number", "state", "formula")] for row in TABLE["rule"]),
        ),
    }


def _table(columns: tuple[str, ...], rows: Iterable[list[Any]]) -> str:
    """Return a table in Markdown; the columns whose names end in ">" hold numbers."""
    lines = [
        [name.rstrip(">") for name in columns],
        ["---:" if name.endswith(">") else "---" for name in columns],
        *rows,
    ]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _code(row: dict[str, Any]) -> str:
    return f"`{row['name']}`"


def _bits(row: dict[str, Any]) -> str:
    first, count = row["bit"], row.get("bits", 1)
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


def _payload(row: dict[str, Any]) -> str:
    """Return the column: what is said of it, or what follows from the number."""
    payload = row.get("text") or {"elements": "the range's elements", 0: "none"}[row["payload"]]
    more = [f"dtype {', '.join(row['dtypes'])}"] if "dtypes" in row else []
    more += ["one element"] if row.get("element") else []
    more += ["no range"] if not row["range"] else []
    return "; ".join([payload, *more])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
