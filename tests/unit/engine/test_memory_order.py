"""docs/decisions/0016-memory-order.md knows every atomic word of the engine, and so which order it needs."""

from __future__ import annotations

import re

from tests.support.trees import ROOT

DECISION = ROOT / "docs" / "decisions" / "0016-memory-order.md"
DECLARED = re.compile(r"\b_Atomic\b([^;={}()]*);|\(\*_Atomic (\w+)\)")


def declared(source: str) -> set[str]:
    """Return the names of the atomic words that a file declares, not those of parameters and initialised pointers."""
    names = set()
    for line in re.sub(r"/\*.*?\*/", "", source, flags=re.S).splitlines():
        for several, alone in DECLARED.findall(re.sub(r"\[[^]]*\]", "", line)):
            names |= {alone} if alone else {re.findall(r"\w+", one)[-1] for one in several.split(",")}
    return names


def test_what_counts_as_an_atomic_word() -> None:
    """Several in one line, pointers, arrays, members of an inner struct; no parameters, no comments."""
    source = """
    static _Atomic int one; /* not _Atomic uint64_t this; */
    _Atomic uint64_t two, three;
    struct channel *_Atomic four; struct share *_Atomic *five;
    struct { _Alignas(16) _Atomic uint64_t six; _Atomic uint64_t seven; } of[COUNT];
    _Atomic uint64_t eight[32];
static int (*_Atomic nine)(void);
static uint64_t read_word(const _Atomic uint64_t *word)
int create(struct table table, const _Atomic bool *known, struct records **records);
    struct share *_Atomic *place = &shares[0];
"""
    assert declared(source) == {"one", "two", "three", "four", "five", "six", "seven", "eight", "nine"}


def test_every_atomic_word_has_its_line() -> None:
    """A name between backticks in the decision's tables."""
    known = {word for code in re.findall(r"`([^`]*)`", DECISION.read_text()) for word in re.findall(r"\w+", code)}
    files = [path for kind in ("*.c", "*.h", "*.inc") for path in sorted((ROOT / "csrc").rglob(kind))]
    words = {name: path.name for path in files for name in declared(path.read_text())}
    assert len(words) > 50
    missing = {name: file for name, file in words.items() if name not in known}
    assert not missing, f"which order each of these needs, and why, belongs into {DECISION.name}: {missing}"
