"""What people read is in short sentences: of at most 25 words, or of parts of that length at a colon or semicolon."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS_MAX = 25
# Decisions stay as they were written. Tables, code, links' targets and what is between backticks do not count.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def long_parts(text: str) -> Iterator[str]:
    text = re.sub(r"^```.*?^```$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\|))", text):
        if block.startswith("    ") or block.lstrip().startswith(("#", "|", "!", "<")) or " · " in block:
            continue
        words = re.sub(r"`[^`]*`", "code", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)).split()
        for part in re.split(r"(?<=[.!?:;])\s+", " ".join(words)):
            if sum(any(map(str.isalnum, word)) for word in part.split()) > WORDS_MAX:
                yield part


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_are_short(page: Path) -> None:
    """A page says what it has to say in steps."""
    assert list(long_parts(page.read_text())) == []


def test_a_long_sentence_is_found() -> None:
    """And a short one, code, and a heading are not."""
    long = " ".join(["word"] * (WORDS_MAX + 1))
    assert list(long_parts(f"Short.\n\n{long}.\n\n    {long}\n\n# {long}\n")) == [f"{long}."]
    assert list(long_parts(f"Half of it; {' '.join(['word'] * WORDS_MAX)}.")) == []
