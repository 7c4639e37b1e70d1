"""Pages, docstrings and comments have short sentences with a subject.

A sentence, or a part of one at a colon or semicolon, has at most 25 words. None begins with What or Who unless it asks:
the noun stands there, and a condition begins with If or When.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS_MAX = 25
OPENING = re.compile(r"(?:What|Who|Whoever|Whatever|Whose)\b(?!:| is harmed:)[^?]*$")
# Decisions stay as they were written. Tables, code, links' targets and what is between backticks do not count.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
GENERATED = "_pb2"
CODE = [
    path
    for folder in ("csrc", "smb", "memserver", "perf", "tests/support", "tests/soak")
    for path in sorted((ROOT / folder).rglob("*.*"))
    if path.suffix in {".c", ".h", ".inc", ".py"} and GENERATED not in path.name
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


def without_subject(text: str) -> Iterator[str]:
    text = re.sub(r"^```.*?^```$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\|))", text):
        words = re.sub(r"^(?:[-*] |\d+\. )", "", " ".join(block.split()))
        yield from (each for each in re.split(r"(?<=[.!?])\s+(?=[A-Z])", words) if OPENING.match(each))


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def comments(path: Path) -> Iterator[str]:
    """Lines of a comment that follow each other are one text."""
    text = path.read_text()
    if path.suffix != ".py":
        for found in re.findall(r"/\*(.*?)\*/", text, re.DOTALL):
            yield re.sub(r"\n\s*\* ?", "\n", found).strip()
        return
    for block in re.findall(r"(?:^ *# .*\n)+", text, re.MULTILINE):
        yield re.sub(r"^ *# ", "", block, flags=re.MULTILINE)
    yield from re.findall(r"  # (.*)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_are_short(page: Path) -> None:
    """A page says what it has to say in steps."""
    assert list(long_parts(page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_of_pages_have_a_subject(page: Path) -> None:
    """Not: What is sent twice counts once. But: A request that is sent twice counts once."""
    assert list(without_subject(page.read_text())) == []


def test_docstrings_are_short() -> None:
    """In what users and readers of the library see first."""
    modules = [
        path for path in CODE if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in ("smb", "memserver")
    ]
    assert len(modules) > 150
    found = {str(path.relative_to(ROOT)): [*map(" ".join, map(long_parts, docstrings(path)))] for path in modules}
    assert {name: [part for part in parts if part] for name, parts in found.items() if any(parts)} == {}


def test_sentences_of_code_have_a_subject() -> None:
    """In docstrings and comments."""
    assert len(CODE) > 300
    found = {}
    for path in CODE:
        texts = [*comments(path), *(docstrings(path) if path.suffix == ".py" else [])]
        if bad := [sentence for text in texts for sentence in without_subject(text)]:
            found[str(path.relative_to(ROOT))] = bad
    assert found == {}


def test_a_sentence_without_a_subject_is_found() -> None:
    """A question, a label and a word in the middle are none."""
    assert list(without_subject("Fine. What is sent counts.")) == ["What is sent counts."]
    assert list(without_subject("- Whoever asks is refused, at\n  once. Then")) == ["Whoever asks is refused, at once."]
    assert list(without_subject("What: a server is down. What now? Say what it is.")) == []


def test_comments_of_both_languages_are_read(tmp_path: Path) -> None:
    """Over all their lines."""
    (tmp_path / "a.c").write_text("int a; /* One.\n        * Two. */\n")
    assert list(comments(tmp_path / "a.c")) == ["One.\nTwo."]
    (tmp_path / "a.py").write_text('"""Zero."""\n# One.\n# Two.\na = 1  # three\n')
    assert list(comments(tmp_path / "a.py")) == ["One.\nTwo.\n", "three"]
    assert list(docstrings(tmp_path / "a.py")) == ["Zero."]


def test_a_long_sentence_is_found() -> None:
    """And a short one, code, and a heading are not."""
    long = " ".join(["word"] * (WORDS_MAX + 1))
    assert list(long_parts(f"Short.\n\n{long}.\n\n    {long}\n\n# {long}\n")) == [f"{long}."]
    assert list(long_parts(f"Half of it; {' '.join(['word'] * WORDS_MAX)}.")) == []
