"""Text of others, such as a client's name, as it is shown to people."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text with characters escaped that could control a terminal or begin a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
