"""A save took weights of two rounds: it looked whether the round was over, and not whether its weights were being
replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb.train
from smb.train import BSP, saved
from smb.train import group as groups
from smb.train import member_table as t
from tests.conftest import Connect


def test_a_save_that_meets_a_closer_begins_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file that was written while a closer began to replace the weights is not taken."""
    worker = smb.train.join(connect(), "run", np.zeros(100, np.float32), BSP())
    worker.step()
    view, write, written = groups.view, saved._write, 0

    def mark(group: Any, built: int) -> None:
        word = group.table.get(0, t.ROUND)
        assert group.table.swap(0, t.ROUND, word, word & ~groups.BUILT | built) == word

    def view_whose_closer_ends(*asked: Any) -> Any:
        group = view(*asked)
        monkeypatch.setattr(group, "read_by", lambda _: mark(group, 0))
        return group

    def write_beside_a_closer(group: Any, *rest: Any) -> None:
        nonlocal written
        write(group, *rest)
        written += 1
        if written == 1:
            mark(group, groups.BUILT)

    monkeypatch.setattr(groups, "view", view_whose_closer_ends)
    monkeypatch.setattr(saved, "_write", write_beside_a_closer)
    assert smb.train.save(connect(), "run", tmp_path / "file") == 1
    assert written == 2
    worker.close()
