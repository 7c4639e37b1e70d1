"""What a module takes from another one it takes from its face: public names, not private attributes."""

from __future__ import annotations

import ast

from tests.support.walls import reach_ins, sources

REACH_INS_MAX = 31  # only ever lowered

BOX = """
class Box:
    def __init__(self):
        self._lid = 1

    def _open(self):
        return self._lid

    def like(self, other: Box):
        return other._lid
"""
READER = """
class Reader:
    def __init__(self, box):
        self._box = box
        self._lid = box.lid

    def read(self, box: Box, other):
        return self._box._open() + box._lid + other._lid + self._box._of_another_package + getattr(box, "_open")
"""


def test_reach_ins_grow_fewer() -> None:
    """A private attribute belongs to its module: smb/spi.py has what others need of a client and a buffer."""
    found = reach_ins(sources())
    assert len(found) <= REACH_INS_MAX, "\n".join(map(str, found))


def test_a_reach_in_is_found() -> None:
    """By a call, by a parameter's class, by name; not of the same class, nor what none of our classes has."""
    found = reach_ins({"box.py": ast.parse(BOX), "reader.py": ast.parse(READER)})
    assert {(each.path, each.text) for each in found} == {
        ("reader.py", "self._box._open"),
        ("reader.py", "box._lid"),
        ("reader.py", "getattr(box, '_open')"),
    }
