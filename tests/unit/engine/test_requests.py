"""A call is one struct, filled once: Python's fields arrive in the engine's, and no function takes many one by one."""

import re
from pathlib import Path

import pytest

from smb.engine import Opcode, Request, memory_at
from smb.engine.calls import address_of, raw_request

CSRC = Path(__file__).resolve().parents[3] / "csrc"
PARAMETERS_MAX = 8


def test_each_field_arrives_where_it_belongs() -> None:
    """raw_request fills by position: a field that moves in csrc/smb/client.h moves here, too."""
    request = Request(Opcode.COMPARE_SWAP, 16, 8, memory_at(4096), memory_at(8192), 3, 0.5, 7, 9, 2, 1 << 40)
    raw = raw_request(request, 1234)
    assert (raw.opcode, raw.offset, raw.bytes) == (Opcode.COMPARE_SWAP, 16, 8)
    assert (address_of(raw.source), address_of(raw.sink)) == (4096, 8192)
    assert (raw.op, raw.scale, raw.argument, raw.expected) == (3, 0.5, 7, 9)
    assert (raw.wire, raw.token, raw.timeout_ms) == (2, 1 << 40, 1234)
    assert (raw.source_count, raw.count) == (0, 0)


def too_many(text: str) -> list[str]:
    """Return the functions with more parameters than a reader can match to arguments, a line each."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.finditer(r"^[a-z][\w *]*?\b(\w+)\(([^;{}=]*?)\)\s*[;{]", text, re.MULTILINE | re.DOTALL)
    counts = {
        name: 1 + re.sub(r"\([^()]*\)", "", parameters).count(",") for name, parameters in (f.groups() for f in found)
    }
    return [f"{name} has {count}" for name, count in counts.items() if count > PARAMETERS_MAX]


def test_no_function_has_more_than_eight_parameters() -> None:
    """A request is one struct, filled once; so is a place to connect to."""
    sources = sorted(path for path in CSRC.rglob("*.*") if path.suffix in {".c", ".h", ".inc"})
    assert len(sources) > 100
    assert {path.name: too_many(path.read_text()) for path in sources if too_many(path.read_text())} == {}


@pytest.mark.parametrize(
    "text",
    [
        "int f(int a, int b, int c, int d,\n      int e, int f, int g, int h, int i);\n",
        "static int f(int a, int b, int c, int d, int e, int f, int g, int h, int i)\n{\n    return 0;\n}\n",
        "struct s *f(int a, int b, int c, int d, int e, int f, int g, int (*h)(int, int), int i);\n",
    ],
)
def test_a_ninth_parameter_is_found(text: str) -> None:
    """Of declarations, definitions and functions that take a function; eight are allowed."""
    assert too_many(text) == ["f has 9"]
    assert too_many(text.replace(", int i", "")) == []
