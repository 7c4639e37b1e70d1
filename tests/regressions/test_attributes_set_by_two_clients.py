"""Two clients set attributes of one file at once: one had read them before, and removed what the other one set."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from smb.files.attributes import Attributes
from smb.files.making import Maker
from smb.files.namespace import NameTree
from tests.conftest import Connect


def test_both_stay(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = NameTree(connect()), NameTree(connect())
    file = one.open("f", os.O_CREAT | os.O_WRONLY)
    file.flush()
    file.close()
    describe, meanwhile = Maker.describe, [lambda: other.describe("f", with_attribute("b"))]

    def late(self: Maker, *given: object, **options: bool) -> bool:
        if meanwhile:
            meanwhile.pop()()
        return describe(self, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Maker, "describe", late)
    one.describe("f", with_attribute("a"))
    for tree in (one, NameTree(connect())):
        assert tree.status("f").attributes.extended == {"a": b"1", "b": b"1"}


def with_attribute(name: str) -> Callable[[Attributes], Attributes]:
    def change(kept: Attributes) -> Attributes:
        return replace(kept, extended={**kept.extended, name: b"1"})

    return change
