"""`smb top` says of a training what the page says: not that its server is gone where that is not so."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from smb.tools.cli.top_view import render

EMPTY: dict[str, Any] = {
    "now": 1000.0,
    "coordinator": {"address": "h:7070", "started": 900.0},
    "totals": {
        "servers": 1, "alive": 1, "capacity": 0, "used": 0, "buffers": 0, "clients": 0,
        "rates": {"operations": 0, "in": 0, "out": 0, "within": 0},
    },
    "history": {"operations": [], "in": [], "out": []},
    "left_out": {},
    "of_trainings": {"buffers": 0, "waits": 0},
    **{key: [] for key in ("problems", "servers", "buffers", "clients", "waits")},
}  # fmt: skip
ROW = {"name": "run", "workers": 2, "scheme": "bsp", "round": 7, "samples_per_s": 1.0, "staleness": 0, "refused": 0}


@pytest.mark.parametrize(
    ("state", "stage", "said"),
    [("lost", "lost", "memory lost"), ("unheard", "trains", "trains"), ("gone", "away", "server gone")],
)
def test_the_stage_of_a_training(state: str, stage: str, said: str) -> None:
    """Its memory was lost; its server was not heard of since the coordinator started; its server is gone."""
    shown = EMPTY | {"trainings": [ROW | {"state": state, "stage": stage, "size": 40}]}
    console = Console(width=120, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(*render(shown, "utf-8"), sep="\n")
    (row,) = [line for line in capture.get().splitlines() if line.startswith("run ")]
    assert row.removeprefix("run").partition("bsp")[0].strip() == said
